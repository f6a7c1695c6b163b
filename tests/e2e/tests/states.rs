//! Every fault at every state: a fresh request is brought into a state of the handoff, and when a worker announces that
//! it entered it, a fault strikes. The client gets the oracle's answer or an error, in bounded time; afterwards the same
//! fleet answers rightly, and every pool is full again.
//!
//! Some states last for less than a message between processes takes (`verifying`, and `draining` over TCP): there a fault
//! strikes just after. The simulator strikes within `draining`. Within `verifying`, which begins and ends in one turn of the
//! decode worker's engine, neither can: worker/handoff/src/pair/verify.rs does, on the machines alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use tandem_e2e::announce::{Announcements, LOG_LEVEL};
use tandem_e2e::corpus::{Endpoint, Feature, Question};
use tandem_e2e::faults::{Aim, ClientLeaves, Fault, HEARTBEATS, OVER_TCP, strike};
use tandem_e2e::fleet::MODEL;
use tandem_e2e::oracle::{self, Oracle, Verdict};
use tandem_e2e::proxy::{Line, Way};
use tandem_e2e::wait::within;
use tandem_e2e::{Answer, Client, Fleet, FleetOptions, Role};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// Strikes for each pair of a state and a fault.
const ROUNDS: usize = 2;
/// Fleets at once: most of a strike is waiting.
const LANES: usize = 4;
/// One page per step, so that a long prompt takes a while.
const SLOW: &str = "--threads 1 --chunked-prefill-size 16";
/// So that whatever a fault leaves waiting ends soon.
const DEADLINES: &str = "--bootstrap-timeout-ms 2000 --waiting-timeout-ms 2000";
const PROBES: &str = "--health-check-interval-secs 0.2 --health-check-timeout-secs 0.3";
/// From a request to its outcome, whatever happens.
const OUTCOME_LIMIT: Duration = Duration::from_secs(8);
const ANNOUNCE_LIMIT: Duration = Duration::from_secs(3);
/// From a strike to a fleet that serves, with full pools.
const RECOVERY_LIMIT: Duration = Duration::from_secs(15);
/// A request may pass a state by: once in a while a fault is noticed before the request meets it.
const TRIES: usize = 3;

/// A state of the handoff, on the side that announces it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Moment {
    PrefillWaiting,
    PrefillOpen,
    PrefillPushed,
    PrefillDraining,
    PrefillQuarantined,
    PrefillSuccess,
    DecodeDialling,
    DecodeOffered,
    DecodeVerifying,
    DecodeDraining,
    DecodeQuarantined,
    DecodeSuccess,
}

use Moment::*;

impl Moment {
    const ALL: [Moment; 12] = [
        PrefillWaiting,
        PrefillOpen,
        PrefillPushed,
        PrefillDraining,
        PrefillQuarantined,
        PrefillSuccess,
        DecodeDialling,
        DecodeOffered,
        DecodeVerifying,
        DecodeDraining,
        DecodeQuarantined,
        DecodeSuccess,
    ];

    fn place(self) -> (Role, &'static str) {
        match self {
            PrefillWaiting => (Role::Prefill, "waiting"),
            PrefillOpen => (Role::Prefill, "open"),
            PrefillPushed => (Role::Prefill, "pushed"),
            PrefillDraining => (Role::Prefill, "draining"),
            PrefillQuarantined => (Role::Prefill, "quarantined"),
            PrefillSuccess => (Role::Prefill, "success"),
            DecodeDialling => (Role::Decode, "dialling"),
            DecodeOffered => (Role::Decode, "offered"),
            DecodeVerifying => (Role::Decode, "verifying"),
            DecodeDraining => (Role::Decode, "draining"),
            DecodeQuarantined => (Role::Decode, "quarantined"),
            DecodeSuccess => (Role::Decode, "success"),
        }
    }

    /// The state in which the client leaves, so that the attempt drains.
    fn left_in(self) -> Option<&'static str> {
        match self {
            PrefillDraining => Some("pushed"),
            DecodeDraining => Some("offered"),
            _ => None,
        }
    }
}

/// Why a fault cannot meet a state here.
fn impossible(moment: Moment, fault: Fault) -> Option<&'static str> {
    match (moment, fault) {
        (PrefillQuarantined | DecodeQuarantined, _) => {
            Some("over TCP quiet is proven at once: P's kernel has copied, D's reader gives its borrow back")
        }
        (PrefillDraining | DecodeDraining, ClientLeaves) => Some("the attempt drains because its client has left"),
        _ => None,
    }
}

/// How a strike ended for the client.
#[derive(Default)]
struct Cell {
    right: usize,
    failed: Vec<String>,
    left: usize,
}

impl Cell {
    fn count(&self) -> usize {
        self.right + self.failed.len() + self.left
    }
}

type Table = Arc<Mutex<BTreeMap<(Moment, Fault), Cell>>>;

/// Places of the questions; the streamed one comes after the whole one.
const LONG_PROMPT: usize = 0;
const LONG_ANSWER: usize = 2;
const SHORT: usize = 4;

fn questions() -> Vec<Question> {
    let long_prompt: Vec<usize> = (0..1900).map(|at| 3 + (at * 7) % 500).collect();
    let question = |index, prompt: &[usize], tokens: usize, stream| Question {
        index,
        endpoint: Endpoint::Completions,
        feature: Feature::Greedy,
        stream,
        body: json!({"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
            "stream": stream}),
    };
    vec![
        question(LONG_PROMPT, &long_prompt, 8, false),
        question(LONG_PROMPT + 1, &long_prompt, 8, true),
        question(LONG_ANSWER, &long_prompt[..40], 1000, false),
        question(LONG_ANSWER + 1, &long_prompt[..40], 1000, true),
        question(SHORT, &long_prompt[..20], 1, false),
    ]
}

/// One fleet, which gets one strike after the other.
struct Lane {
    fleet: Fleet,
    client: Client,
    oracle: Arc<Oracle>,
    aim: Aim,
    strikes: usize,
}

/// A client's request on its way, and a look at whether it has its outcome.
struct Asked {
    at: usize,
    since: Instant,
    answer: JoinHandle<Result<Answer, String>>,
    ended: watch::Receiver<bool>,
}

impl Lane {
    async fn start(number: usize, oracle: Arc<Oracle>) -> Self {
        let options = FleetOptions::pd(1, 1)
            .proxied()
            .worker_args(&format!("{SLOW} {OVER_TCP} {HEARTBEATS} {DEADLINES} {LOG_LEVEL}"))
            .decode_args("--enable-kv-checksum")
            .gateway_args(PROBES);
        let fleet = Fleet::start(&format!("states-{number}"), options).await;
        let aim = Aim::at(&fleet, 0, 0);
        Self { client: fleet.client(), fleet, oracle, aim, strikes: 0 }
    }

    fn ask(&self, at: usize) -> Asked {
        let (client, oracle) = (self.client.clone(), Arc::clone(&self.oracle));
        let (end, ended) = watch::channel(false);
        let answer = tokio::spawn(async move {
            let answer = oracle::put(&client, &oracle.questions[at]).await;
            let _ = end.send(true);
            answer
        });
        Asked { at, since: Instant::now(), answer, ended }
    }

    /// Brings a fresh request into the state.
    async fn bring(&self, moment: Moment) -> Result<Asked, String> {
        let (role, state) = moment.place();
        let place = if role == Role::Prefill { self.aim.prefill } else { self.aim.decode };
        let mut said = Announcements::from_now(&self.fleet.log_of(&self.fleet.workers[place]));
        let proxy = self.fleet.workers[self.aim.prefill].proxy();
        match moment {
            PrefillWaiting => proxy.stall(Line::Control, Way::ToPrefill),
            PrefillPushed | PrefillDraining => {
                self.reconnect().await?;
                said.read();
                proxy.stall(Line::Data, Way::ToDecode);
            }
            DecodeDraining => proxy.stall(Line::Data, Way::ToDecode),
            DecodeDialling => {
                proxy.hold_new();
                proxy.cut(Line::Control);
                said.until_line("the control channel to a prefill worker ended", ANNOUNCE_LIMIT).await?;
            }
            _ => {}
        }
        let question = if matches!(moment, PrefillSuccess | DecodeSuccess) { LONG_ANSWER } else { LONG_PROMPT };
        let asked = self.ask(question + self.strikes % 2);
        if let Some(before) = moment.left_in() {
            said.until(before, ANNOUNCE_LIMIT).await?;
            asked.answer.abort();
        }
        said.until(state, ANNOUNCE_LIMIT).await?;
        Ok(asked)
    }

    /// New connections: the kernel gives an old one a buffer of megabytes, in which a whole prompt's pages vanish.
    async fn reconnect(&self) -> Result<(), String> {
        let prefill = &self.fleet.workers[self.aim.prefill];
        let mut said = Announcements::from_now(&self.fleet.log_of(prefill));
        prefill.proxy().cut(Line::Control);
        said.until_line("the control channel to a decode worker ended", ANNOUNCE_LIMIT).await?;
        self.until_right(SHORT).await;
        Ok(())
    }

    async fn strike(&mut self, moment: Moment, fault: Fault, table: &Table) -> Duration {
        self.strikes += 1;
        let mut tries = 0;
        let mut asked = loop {
            self.recover().await;
            match self.bring(moment).await {
                Ok(asked) => break asked,
                Err(_) if tries + 1 < TRIES => tries += 1,
                Err(why) => panic!("{moment:?} for {fault}: {why}"),
            }
        };
        if fault == ClientLeaves {
            asked.answer.abort();
        }
        let mut ended = asked.ended.clone();
        let outcome = async move {
            // An error means that the client has left.
            let _ = ended.wait_for(|ended| *ended).await;
        };
        within("a strike", RECOVERY_LIMIT, strike(&mut self.fleet, self.aim, fault, outcome)).await;
        let got = within("an outcome", OUTCOME_LIMIT, &mut asked.answer).await;
        let took = asked.since.elapsed();
        let mut table = table.lock().expect("no lane panics while it holds the table");
        let cell = table.entry((moment, fault)).or_default();
        match got {
            Err(left) if left.is_cancelled() => cell.left += 1,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            Ok(got) => match self.oracle.judge(asked.at, &got) {
                Verdict::Right => cell.right += 1,
                Verdict::Failed(code) if fault.is_harmless() => {
                    panic!("{moment:?}, {fault} is no reason for {code}: {got:?}");
                }
                Verdict::Failed(code) => cell.failed.push(code),
                wrong => panic!("{moment:?}, {fault}: {wrong:?}"),
            },
        }
        took
    }

    /// The fleet is at rest with full pools and answers rightly.
    async fn recover(&self) {
        self.fleet.workers[self.aim.prefill].proxy().clear();
        self.until_right(LONG_PROMPT).await;
        self.fleet.until_at_rest(RECOVERY_LIMIT).await;
    }

    async fn until_right(&self, at: usize) {
        let since = Instant::now();
        loop {
            let got = within("an outcome", OUTCOME_LIMIT, oracle::put(&self.client, &self.oracle.questions[at])).await;
            match self.oracle.judge(at, &got) {
                Verdict::Right => return,
                Verdict::Failed(code) => assert!(since.elapsed() < RECOVERY_LIMIT, "no recovery: {code}"),
                wrong => panic!("after a strike: {wrong:?}"),
            }
        }
    }
}

/// The table, a letter per cell: r(ight answer), e(rror), l(eft), and . for what cannot be.
fn print(table: &BTreeMap<(Moment, Fault), Cell>) {
    let header: String = Fault::ALL.iter().map(|fault| format!("{fault:>11}")).collect();
    println!("{:<20}{header}", "");
    for moment in Moment::ALL {
        let cell = |fault: &Fault| match table.get(&(moment, *fault)) {
            Some(cell) if cell.right > 0 => format!("{}r", cell.count()),
            Some(cell) if cell.left > 0 => format!("{}l", cell.count()),
            Some(cell) => format!("{}e", cell.count()),
            None => ".".to_owned(),
        };
        let cells: String = Fault::ALL.iter().map(|fault| format!("{:>11}", cell(fault))).collect();
        println!("{:<20}{cells}", format!("{moment:?}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_every_fault_at_every_state() {
    let began = Instant::now();
    let oracle = Oracle::ask("states-oracle", questions(), "--threads 1").await;
    let table: Table = Arc::default();
    let pairs = Fault::ALL.into_iter().flat_map(|fault| Moment::ALL.into_iter().map(move |moment| (moment, fault)));
    let possible: Vec<_> = pairs.filter(|&(moment, fault)| impossible(moment, fault).is_none()).collect();
    let queue: VecDeque<_> = possible.repeat(ROUNDS).into();
    let queue = Arc::new(Mutex::new(queue));
    let mut lanes = JoinSet::new();
    for number in 0..LANES {
        let (oracle, queue, table) = (Arc::clone(&oracle), Arc::clone(&queue), Arc::clone(&table));
        lanes.spawn(async move {
            let mut lane = Lane::start(number, oracle).await;
            let mut slowest = Duration::ZERO;
            loop {
                let next = queue.lock().expect("no lane panics while it holds the queue").pop_front();
                let Some((moment, fault)) = next else { break };
                slowest = slowest.max(lane.strike(moment, fault, &table).await);
            }
            lane.recover().await;
            slowest
        });
    }
    let slowest = lanes.join_all().await.into_iter().max().unwrap_or_default();

    let table = table.lock().expect("every lane has ended");
    print(&table);
    let mut codes: BTreeMap<&str, usize> = BTreeMap::new();
    table.values().flat_map(|cell| &cell.failed).for_each(|code| *codes.entry(code).or_default() += 1);
    let sum = |of: fn(&Cell) -> usize| table.values().map(of).sum::<usize>();
    println!(
        "{} strikes in {:.1?}: {} right answers, {} errors {codes:?}, {} clients left; slowest outcome {slowest:.1?}",
        sum(Cell::count),
        began.elapsed(),
        sum(|cell| cell.right),
        sum(|cell| cell.failed.len()),
        sum(|cell| cell.left),
    );
    let empty: Vec<_> = possible.iter().filter(|pair| table.get(pair).is_none_or(|cell| cell.count() == 0)).collect();
    assert!(empty.is_empty(), "no strike for {empty:?}");
}
