//! H9: 300 requests of mixed kinds get the same answers from a split pair, two split pairs and one unsplit worker, bit
//! for bit apart from ids, times and `cached_tokens`, whatever else runs beside them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tandem_e2e::checkpoint::golden;
use tandem_e2e::compare::{first_difference, normalise};
use tandem_e2e::corpus::{self, Feature, Question};
use tandem_e2e::fleet::MODEL;
use tandem_e2e::{Answer, Client, Fleet, FleetOptions};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const SEED: u64 = 0x7a9d_e301;
const QUESTIONS: usize = 300;
/// Requests in flight: enough that steps mix prompts of many lengths with decoding.
const IN_FLIGHT: usize = 24;
/// Clients at once that will leave before their answer is whole.
const LEAVERS: usize = 8;
const AT_REST_LIMIT: Duration = Duration::from_secs(10);

/// The answers of one fleet in the order of the questions.
async fn ask(client: &Client, questions: &[Question]) -> Vec<Answer> {
    let permits = Arc::new(Semaphore::new(IN_FLIGHT));
    let mut tasks = JoinSet::new();
    for question in questions.iter().cloned() {
        let (client, permits) = (client.clone(), permits.clone());
        tasks.spawn(async move {
            let _permit = permits.acquire_owned().await.expect("the semaphore stays open");
            let answer = client.post(question.endpoint.path(), &question.body).await;
            (question.index, answer.unwrap_or_else(|error| panic!("{question:?}: {error}")))
        });
    }
    let answers: BTreeMap<usize, Answer> = tasks.join_all().await.into_iter().collect();
    answers.into_values().collect()
}

/// Long requests whose clients leave after a drawn time, for as long as this is polled.
async fn leave_again_and_again(client: Client) {
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut leavers = JoinSet::new();
    loop {
        let prompt: Vec<u32> = (0..rng.random_range(1..1500)).map(|_| rng.random_range(3..512)).collect();
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 400, "ignore_eos": true, "stream": true});
        let (client, patience) = (client.clone(), Duration::from_micros(rng.random_range(0..60_000)));
        leavers.spawn(async move {
            // Most run out of patience; the others may end as they like.
            let _ = tokio::time::timeout(patience, client.post("/v1/completions", &body)).await;
        });
        while leavers.len() >= LEAVERS {
            leavers.join_next().await;
        }
    }
}

async fn answers_of(test: &str, options: FleetOptions, questions: &[Question]) -> Vec<Answer> {
    answers_beside(test, options, questions, async |_| std::future::pending().await).await
}

/// The answers that a fleet gives while `others` go on.
async fn answers_beside(
    test: &str,
    options: FleetOptions,
    questions: &[Question],
    others: impl AsyncFnOnce(Client),
) -> Vec<Answer> {
    let start = Instant::now();
    let fleet = Fleet::start(test, options).await;
    let client = Client::pooled(fleet.url());
    let answers = tokio::select! {
        answers = ask(&client, questions) => answers,
        () = others(fleet.client()) => unreachable!("others go on until all questions are answered"),
    };
    fleet.until_at_rest(AT_REST_LIMIT).await;
    println!("{test}: {} answers in {:.1?}", answers.len(), start.elapsed());
    answers
}

/// Compares with the unsplit worker's answers and shows the first few that differ.
fn assert_same(fleet: &str, questions: &[Question], expected: &[Answer], answers: &[Answer]) {
    let mut different = Vec::new();
    for ((question, expected), answer) in questions.iter().zip(expected).zip(answers) {
        let verdict = match (normalise(expected), normalise(answer)) {
            (Ok(expected), Ok(answer)) => first_difference(&expected, &answer),
            (expected, answer) => Some(format!("{expected:?} or {answer:?}")),
        };
        different.extend(verdict.map(|difference| format!("{question:?}\n  {difference}")));
    }
    let shown = different.iter().take(4).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(different.is_empty(), "{fleet}: {} of {} answers differ:\n{shown}", different.len(), questions.len());
}

/// The corpus is worth its name only if its features happened.
fn assert_covered(questions: &[Question], answers: &[Answer]) {
    for (question, answer) in questions.iter().zip(answers) {
        assert_eq!(answer.status, 200, "{question:?}: {}", answer.text());
    }
    let count = |feature: Feature, mark: &str| {
        let of_feature = questions.iter().zip(answers).filter(|(question, _)| question.feature == feature);
        of_feature.filter(|(_, answer)| answer.text().replace(' ', "").contains(mark)).count()
    };
    let stopped = count(Feature::StopStrings, "\"matched_stop\":\"") + count(Feature::StopStrings, "\"matched\":\"");
    assert!(stopped >= 15, "only {stopped} answers ended at a stop string");
    let by_token = count(Feature::StopTokens, "\"matched_stop\":") + count(Feature::StopTokens, "\"matched\":");
    assert!(by_token >= 5, "only {by_token} answers ended at a stop token");
    assert!(count(Feature::OneToken, "length") >= 25, "one token alone must end by length");
    assert!(count(Feature::IgnoreEos, "length") >= 25, "ignore_eos must go on to the length");
    let distinct: std::collections::BTreeSet<&[u8]> = answers.iter().map(|answer| answer.body.as_slice()).collect();
    assert!(distinct.len() > QUESTIONS * 9 / 10, "the answers hardly differ among themselves");
    for (question, answer) in
        questions.iter().zip(answers).filter(|(question, _)| question.feature == Feature::EosFirst)
    {
        let text = answer.text().replace(' ', "");
        assert!(text.contains("\"stop\""), "{question:?}: EOS as the first token must end the answer: {text}");
    }
}

fn assert_usage_of_one_token(questions: &[Question], answers: &[Answer]) {
    let whole = questions.iter().zip(answers).filter(|(question, _)| !question.stream);
    for (question, answer) in whole.filter(|(question, _)| question.feature == Feature::OneToken) {
        let body = answer.json();
        let tokens = body.pointer("/usage/completion_tokens").or(body.pointer("/meta_info/completion_tokens"));
        assert_eq!(tokens.and_then(Value::as_u64), Some(1), "{question:?}: {body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_split_and_unsplit_answers_are_the_same() {
    let questions = corpus::questions(SEED, QUESTIONS, MODEL);
    let plain = answers_of("h9-plain", FleetOptions::plain(), &questions).await;
    assert_covered(&questions, &plain);
    assert_usage_of_one_token(&questions, &plain);
    let one = FleetOptions::pd(1, 1).prefill_args("--chunked-prefill-size 64");
    assert_same("1p1d", &questions, &plain, &answers_of("h9-1p1d", one, &questions).await);
    let two = FleetOptions::pd(2, 2).worker_args("--threads 1 --enable-kv-checksum");
    assert_same("2p2d", &questions, &plain, &answers_of("h9-2p2d", two, &questions).await);
}

/// A pool so small that sequences are preempted and computed again, and ranks that differ on the two sides.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_preemption_and_ranks_change_no_answer() {
    let questions = corpus::questions(SEED ^ 1, 90, MODEL);
    let model = golden("qwen3-qknorm").display().to_string();
    let plain = answers_of("h9-wide", FleetOptions::plain().model(&model), &questions).await;
    let narrow = FleetOptions::plain().model(&model).worker_args("--max-total-tokens 2048 --chunked-prefill-size 32");
    assert_same("a narrow pool", &questions, &plain, &answers_of("h9-narrow", narrow, &questions).await);
    let ranks = FleetOptions::pd(1, 1)
        .model(&model)
        .prefill_args("--tp-size 2")
        .decode_args("--max-total-tokens 2048 --num-reserved-decode-tokens 16 --enable-kv-checksum");
    assert_same("tp 2 to 1", &questions, &plain, &answers_of("h9-ranks", ranks, &questions).await);
    let copies = FleetOptions::pd(1, 1)
        .model(&model)
        .prefill_args("--tp-size 2")
        .decode_args("--tp-size 4 --enable-kv-checksum");
    assert_same("tp 2 to 4", &questions, &plain, &answers_of("h9-copies", copies, &questions).await);
}

/// Aborts at every step while pages change hands: none may land in the pages of another request.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_leaving_clients_change_no_answer() {
    let questions = corpus::questions(SEED ^ 2, 180, MODEL);
    let plain = answers_of("h9-calm", FleetOptions::plain(), &questions).await;
    let pools = FleetOptions::pd(1, 1)
        .prefill_args("--chunked-prefill-size 32 --max-total-tokens 8192")
        .decode_args("--max-total-tokens 4096 --num-reserved-decode-tokens 16 --enable-kv-checksum");
    let answers = answers_beside("h9-churn", pools, &questions, leave_again_and_again).await;
    assert_same("leaving clients", &questions, &plain, &answers);
}

/// The default model in the default arithmetic: quantised weights, KV in f16, a vocabulary of 49,152.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_split_changes_no_answer_of_a_quantised_model() {
    let questions = corpus::questions(SEED ^ 4, 30, MODEL);
    let plain = answers_of("h9-smollm2-plain", FleetOptions::plain().model("smollm2"), &questions).await;
    let refused = plain.iter().filter(|answer| answer.status != 200).count();
    assert_eq!(refused, 0, "the questions suit the model");
    let pair = FleetOptions::pd(1, 1).model("smollm2").prefill_args("--chunked-prefill-size 96");
    assert_same("1p1d", &questions, &plain, &answers_of("h9-smollm2-1p1d", pair, &questions).await);
}

/// The comparison has teeth: other arithmetic is seen.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_another_arithmetic_is_seen() {
    let questions = corpus::questions(SEED ^ 3, 60, MODEL);
    let fast = answers_of("h9-fast", FleetOptions::plain().worker_args("--cpu-math fast"), &questions).await;
    let exact = answers_of("h9-exact", FleetOptions::plain().worker_args("--cpu-math exact"), &questions).await;
    let same = fast.iter().zip(&exact).filter(|(fast, exact)| {
        matches!((normalise(fast), normalise(exact)), (Ok(fast), Ok(exact)) if first_difference(&fast, &exact).is_none())
    });
    assert!(same.count() < questions.len(), "two arithmetics gave the same logprobs to the last bit");
}
