//! Pages that nobody can prove quiet: a decode worker that maps the prefill worker's pool is stopped in mid-transfer, so that
//! P cannot know whether it still reads. P keeps the pages, and over the limit it turns red, refuses, ends what runs, and
//! exits with a status of its own. Its end makes everything well again.

use std::time::Duration;

use serde_json::{Value, json};
use tandem_e2e::faults::{Aim, HEARTBEATS, OVER_SHM};
use tandem_e2e::fleet::MODEL;
use tandem_e2e::wait::{self, within};
use tandem_e2e::{Client, Fleet, FleetOptions, Outcome};
use tokio::task::JoinSet;

/// Pages that may be in quarantine.
const LIMIT: &str = "--quarantine-pages-max 2";
/// Prompts of several hundred steps: some run whenever the limit is passed.
const SLOW: &str = "--threads 1 --chunked-prefill-size 16";
const PROBES: &str = "--health-check-interval-secs 0.2 --health-check-timeout-secs 0.3";
/// Clients that ask again and again.
const CLIENTS: usize = 12;
/// From the stop to the exit: heartbeats, the drain deadline of 5 s, the end of running requests.
const EXIT_LIMIT: Duration = Duration::from_secs(20);
const OUTCOME_LIMIT: Duration = Duration::from_secs(20);
/// The exit status of a worker whose quarantine is over the limit.
const STATUS: i32 = 3;

fn long_prompt(index: usize) -> Value {
    let ids: Vec<usize> = (0..1900).map(|at| 3 + (at * 7 + index * 31) % 500).collect();
    json!({"model": MODEL, "prompt": ids, "max_tokens": 2, "temperature": 0})
}

/// Asks until told to end; says how each request ended.
fn clients(client: &Client) -> JoinSet<Vec<Outcome>> {
    let mut tasks = JoinSet::new();
    for index in 0..CLIENTS {
        let client = client.clone();
        tasks.spawn(async move {
            let mut outcomes = Vec::new();
            loop {
                let answer =
                    within("an outcome", OUTCOME_LIMIT, client.post("/v1/completions", &long_prompt(index))).await;
                let outcome = answer.map_or_else(Outcome::Broken, |answer| answer.outcome());
                let refused = matches!(outcome, Outcome::Error(_));
                outcomes.push(outcome);
                // A fleet without a prefill worker stays so until the test starts it again.
                if refused && outcomes.len() > 1 && matches!(outcomes[outcomes.len() - 2], Outcome::Error(_)) {
                    return outcomes;
                }
            }
        });
    }
    tasks
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_a_quarantine_over_its_limit_ends_the_worker() {
    let options = FleetOptions::pd(1, 2)
        .worker_args(&format!("{OVER_SHM} {SLOW} {HEARTBEATS}"))
        .prefill_args(LIMIT)
        .gateway_args(PROBES);
    let mut fleet = Fleet::start("quarantine", options).await;
    let aim = Aim::at(&fleet, 0, 0);
    let prefill = fleet.workers[aim.prefill].client();
    let requests = clients(&fleet.client());
    wait::until("both decode workers to be in use", OUTCOME_LIMIT, || async {
        for worker in fleet.workers.iter().filter(|worker| worker.role == tandem_e2e::Role::Decode) {
            let queue = worker.loads().await.number("disaggregation/decode_transfer_queue_reqs");
            if queue == 0 {
                return Err(format!("{} waits for no pages", worker.name));
            }
        }
        Ok(())
    })
    .await;
    fleet.workers[aim.decode].signal("STOP");

    let red = wait::until("/health to turn red", EXIT_LIMIT, || async {
        let answer = prefill.get("/health").await?;
        if answer.status == 503 { Ok(answer.text()) } else { Err(format!("{}: {}", answer.status, answer.text())) }
    })
    .await;
    assert!(red.contains("quarantined") && red.contains(LIMIT), "{red}");
    let process = fleet.workers[aim.prefill].process();
    let status = process.wait(EXIT_LIMIT);
    assert_eq!(status.code(), Some(STATUS), "{}", process.log_tail());
    let told = process.log().lines().filter(|line| line.contains("ERROR") && line.contains("quarantined")).count();
    assert_eq!(told, 1, "one line says why");

    let outcomes: Vec<Outcome> = within("all outcomes", OUTCOME_LIMIT, requests.join_all()).await.concat();
    let broken: Vec<_> = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Broken(_))).collect();
    assert!(broken.is_empty(), "{broken:?}");

    fleet.workers[aim.decode].signal("CONT");
    fleet.revive_at(aim.prefill).await;
    wait::until("an answer", OUTCOME_LIMIT, || async {
        let answer = fleet.client().post("/v1/completions", &long_prompt(0)).await?;
        if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
    })
    .await;
    fleet.until_at_rest(OUTCOME_LIMIT).await;
}
