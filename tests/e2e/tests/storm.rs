//! Two thousand requests over two prefill and two decode workers while clients leave, workers die and stop, and the
//! network between them misbehaves. Every answer is the oracle's, every other end is an error with a name, each comes in
//! bounded time, and when the storm is over every page of every pool is free again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use tandem_e2e::faults::{Aim, ClientLeaves, Fault, HEARTBEATS, OVER_SHM, OVER_TCP, strike};
use tandem_e2e::fleet::MODEL;
use tandem_e2e::loads::Loads;
use tandem_e2e::oracle::{self, Oracle, Verdict};
use tandem_e2e::{Client, Fleet, FleetOptions, corpus};
use tokio::task::JoinSet;

const SEED: u64 = 0x57a7_0e31;
const REQUESTS: usize = 2000;
const REQUESTS_SHM: usize = 1000;
const QUESTIONS: usize = 150;
/// Clients at once.
const IN_FLIGHT: usize = 24;
/// Of a hundred clients so many mean to leave; those that have their answer before do not count as left.
const LEAVERS_PERCENT: u32 = 50;
/// Of a hundred requests so many are left by their clients, at least.
const LEFT_PERCENT_MIN: usize = 28;
/// Small pools, so that requests wait for pages.
const POOLS: &str = "--threads 1 --max-total-tokens 8192";
const DEADLINES: &str = "--bootstrap-timeout-ms 5000 --waiting-timeout-ms 5000";
const PROBES: &str = "--health-check-interval-secs 0.2 --health-check-timeout-secs 0.4";
/// From a request to its outcome, whatever happens.
const OUTCOME_LIMIT: Duration = Duration::from_secs(15);
const REST_LIMIT: Duration = Duration::from_secs(20);
/// Between two faults.
const CALM_MS: std::ops::Range<u64> = 10..120;
/// While a stalled or slow line lasts.
const BAD_LINE_MS: std::ops::Range<u64> = 50..500;

/// What the clients saw.
#[derive(Default)]
struct Seen {
    right: usize,
    left: usize,
    failed: BTreeMap<String, usize>,
    wrong: Vec<String>,
    broken: Vec<String>,
    slowest: Duration,
}

impl Seen {
    fn add(&mut self, other: Seen) {
        self.right += other.right;
        self.left += other.left;
        self.wrong.extend(other.wrong);
        self.broken.extend(other.broken);
        self.slowest = self.slowest.max(other.slowest);
        other.failed.into_iter().for_each(|(code, count)| *self.failed.entry(code).or_default() += count);
    }

    fn failed(&self) -> usize {
        self.failed.values().sum()
    }

    fn total(&self) -> usize {
        self.right + self.left + self.failed() + self.wrong.len() + self.broken.len()
    }
}

/// Requests that are put one after the other by many clients.
struct Crowd {
    url: String,
    oracle: Arc<Oracle>,
    requests: usize,
    next: AtomicUsize,
    /// Microseconds that an answer takes, as a moving mean: how long patience must be to end at any moment.
    usual_us: AtomicU64,
}

impl Crowd {
    /// One client puts requests until all are put.
    async fn client(self: Arc<Self>) -> Seen {
        let client = Client::new(&self.url);
        let mut seen = Seen::default();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.requests {
                return seen;
            }
            self.one(&client, number, &mut seen).await;
        }
    }

    async fn one(&self, client: &Client, number: usize, seen: &mut Seen) {
        let mut rng = StdRng::seed_from_u64(SEED ^ number as u64);
        let at = rng.random_range(0..self.oracle.questions.len());
        let usual = self.usual_us.load(Ordering::Relaxed);
        let leaves = rng.random_ratio(LEAVERS_PERCENT, 100);
        let patience = if leaves { Duration::from_micros(rng.random_range(0..=usual)) } else { OUTCOME_LIMIT };
        let began = Instant::now();
        let question = &self.oracle.questions[at];
        let Ok(got) = tokio::time::timeout(patience, oracle::put(client, question)).await else {
            if leaves {
                seen.left += 1;
            } else {
                seen.broken.push(format!("no outcome within {OUTCOME_LIMIT:?}: {question:?}"));
            }
            return;
        };
        let took = began.elapsed();
        seen.slowest = seen.slowest.max(took);
        self.usual_us.store((usual * 15 + took.as_micros() as u64) / 16, Ordering::Relaxed);
        match self.oracle.judge(at, &got) {
            Verdict::Right => seen.right += 1,
            Verdict::Failed(code) => *seen.failed.entry(code).or_default() += 1,
            Verdict::Wrong(difference) => seen.wrong.push(format!("{difference} of {question:?}")),
            Verdict::Broken(why) => seen.broken.push(format!("{why} for {question:?}")),
        }
    }
}

/// Puts all requests while `faults` strike, and counts both.
async fn storm(
    fleet: &mut Fleet,
    oracle: Arc<Oracle>,
    requests: usize,
    faults: &[Fault],
) -> (Seen, BTreeMap<Fault, usize>) {
    let crowd = Arc::new(Crowd {
        url: fleet.url(),
        oracle,
        requests,
        next: AtomicUsize::new(0),
        usual_us: AtomicU64::new(100_000),
    });
    let mut clients = JoinSet::new();
    for _ in 0..IN_FLIGHT {
        clients.spawn(Arc::clone(&crowd).client());
    }
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut struck = BTreeMap::new();
    // Every fault once, before any comes again.
    let mut deck = Vec::new();
    while crowd.next.load(Ordering::Relaxed) < requests {
        tokio::time::sleep(Duration::from_millis(rng.random_range(CALM_MS))).await;
        if deck.is_empty() {
            deck = faults.to_vec();
            deck.shuffle(&mut rng);
        }
        let fault = deck.pop().expect("a full deck");
        let aim = Aim::at(fleet, rng.random_range(0..2), rng.random_range(0..2));
        let bad_line = tokio::time::sleep(Duration::from_millis(rng.random_range(BAD_LINE_MS)));
        strike(fleet, aim, fault, bad_line).await;
        *struck.entry(fault).or_default() += 1;
    }
    let mut seen = Seen::default();
    clients.join_all().await.into_iter().for_each(|of_one| seen.add(of_one));
    (seen, struck)
}

/// Waits until all workers are at rest, and says how many pages are missing then.
async fn leaked_pages(fleet: &Fleet) -> u64 {
    fleet.until_at_rest(REST_LIMIT).await;
    let mut leaked = 0;
    for worker in &fleet.workers {
        let loads: Loads = worker.loads().await;
        leaked += loads.number("pages/total") - loads.number("pages/free");
    }
    leaked
}

/// Prints the counts, and fails on what must not be.
async fn judge(
    name: &str,
    fleet: &Fleet,
    began: Instant,
    seen: &Seen,
    struck: &BTreeMap<Fault, usize>,
    requests: usize,
) {
    let leaked = leaked_pages(fleet).await;
    let count = |faults: &[Fault]| faults.iter().filter_map(|fault| struck.get(fault)).sum::<usize>();
    use tandem_e2e::faults::*;
    println!(
        "{name}: requests {}, answered {}, aborted {}, failed {} {:?}, kills {}, stops {}, cuts {}, stalls {}, slow lines {}, \
         mismatches {}, broken {}, leaked pages {leaked}; slowest outcome {:.1?}, {:.1?} in all",
        seen.total(),
        seen.right,
        seen.left,
        seen.failed(),
        seen.failed,
        count(&[KillPrefill, KillDecode]),
        count(&[PausePrefill, PauseDecode, StopPrefill, StopDecode]),
        count(&[CutControl, CutData]),
        count(&[StallControlToPrefill, StallControlToDecode, StallData]),
        count(&[DelayControl, DelayData]),
        seen.wrong.len(),
        seen.broken.len(),
        seen.slowest,
        began.elapsed(),
    );
    assert_eq!(seen.total(), requests, "each request has one end");
    assert!(seen.wrong.is_empty(), "not the oracle's answers: {:#?}", seen.wrong);
    assert!(seen.broken.is_empty(), "ends that tell nothing: {:#?}", seen.broken);
    assert_eq!(leaked, 0);
    assert!(seen.left * 100 >= requests * LEFT_PERCENT_MIN, "too few clients left: {} of {requests}", seen.left);
    assert!(seen.right * 2 > requests - seen.left, "the storm let too few answers through: {}", seen.right);
}

/// Two pairs with checksums.
fn options(backend: &str) -> FleetOptions {
    FleetOptions::pd(2, 2)
        .worker_args(&format!("{POOLS} {backend} {HEARTBEATS} {DEADLINES}"))
        .decode_args("--enable-kv-checksum")
        .gateway_args(PROBES)
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_two_thousand_requests_in_a_storm() {
    let questions = corpus::questions(SEED, QUESTIONS, MODEL);
    let oracle = Oracle::ask("storm-oracle", questions, "").await;
    let mut fleet = Fleet::start("storm", options(OVER_TCP).proxied()).await;
    let began = Instant::now();
    let faults: Vec<Fault> = Fault::ALL.into_iter().filter(|fault| *fault != ClientLeaves).collect();
    let (seen, struck) = storm(&mut fleet, oracle, REQUESTS, &faults).await;
    judge("storm", &fleet, began, &seen, &struck, REQUESTS).await;
}

/// Shared memory has no lines to cut: workers die and stop.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_a_storm_over_shared_memory() {
    let questions = corpus::questions(SEED ^ 1, QUESTIONS, MODEL);
    let oracle = Oracle::ask("storm-shm-oracle", questions, "").await;
    let mut fleet = Fleet::start("storm-shm", options(OVER_SHM)).await;
    let began = Instant::now();
    let faults: Vec<Fault> =
        Fault::ALL.into_iter().filter(|fault| !fault.is_of_network() && *fault != ClientLeaves).collect();
    let (seen, struck) = storm(&mut fleet, oracle, REQUESTS_SHM, &faults).await;
    judge("storm over shm", &fleet, began, &seen, &struck, REQUESTS_SHM).await;
}
