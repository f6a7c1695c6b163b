//! Bytes that change on their way: without checksums the answers are wrong, and the oracle sees it; with
//! `--enable-kv-checksum` every such handoff fails by name, and no wrong answer leaves the fleet.

use tandem_e2e::corpus::{self, Endpoint, Feature, Question};
use tandem_e2e::faults::{Aim, OVER_TCP};
use tandem_e2e::fleet::MODEL;
use tandem_e2e::oracle::{self, Oracle, Verdict};
use tandem_e2e::{Fleet, FleetOptions};

const QUESTIONS: usize = 20;

/// Greedy ones: a changed history changes the answer.
fn questions() -> Vec<Question> {
    let all = corpus::questions(0xfa15, 600, MODEL).into_iter();
    let fit = |question: &Question| question.feature == Feature::Greedy && question.endpoint == Endpoint::Completions;
    all.filter(fit).take(QUESTIONS).collect()
}

/// What a pair says whose pages are falsified on their way.
async fn verdicts(test: &str, oracle: &Oracle, decode_args: &str) -> Vec<Verdict> {
    let options = FleetOptions::pd(1, 1).proxied().worker_args(OVER_TCP).decode_args(decode_args);
    let fleet = Fleet::start(test, options).await;
    fleet.workers[Aim::at(&fleet, 0, 0).prefill].proxy().falsify();
    let client = fleet.client();
    let mut verdicts = Vec::new();
    for (at, question) in oracle.questions.iter().enumerate() {
        let got = oracle::put(&client, question).await;
        verdicts.push(oracle.judge(at, &got));
    }
    verdicts
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_a_falsified_page_is_seen_by_the_oracle_and_stopped_by_checksums() {
    let oracle = Oracle::ask("falsified-oracle", questions(), "").await;
    let unchecked = verdicts("falsified-unchecked", &oracle, "").await;
    let wrong = unchecked.iter().filter(|verdict| matches!(verdict, Verdict::Wrong(_))).count();
    println!("without checksums {wrong} of {} answers are wrong", unchecked.len());
    assert!(wrong * 4 > unchecked.len(), "falsified pages hardly show: {unchecked:?}");

    let checked = verdicts("falsified-checked", &oracle, "--enable-kv-checksum").await;
    let failed = checked.iter().filter(|verdict| matches!(verdict, Verdict::Failed(_))).count();
    assert_eq!(failed, checked.len(), "each handoff fails by name: {checked:?}");
}
