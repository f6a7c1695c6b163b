//! Anything may die at any step: the client gets an error in bounded time, every surviving pool is full again, and the
//! next request works as soon as the worker is back on its port.

use std::time::Duration;

use serde_json::{Value, json};
use tandem_e2e::client::{Events, error_message};
use tandem_e2e::fleet::MODEL;
use tandem_e2e::loads::Loads;
use tandem_e2e::wait::{self, within};
use tandem_e2e::{Answer, Client, Fleet, FleetOptions, Outcome, Role};
use tokio::task::JoinSet;

/// From a death to the client's knowledge of it.
const ERROR_LIMIT: Duration = Duration::from_secs(10);
/// From a death to a full pool: a lost connection is noticed at once, so this is generous.
const REST_LIMIT: Duration = Duration::from_secs(20);
const LONG_PROMPT_TOKENS: usize = 1900;
/// Long prompts at once: one is too fast to be caught in the middle.
const LONG_PROMPTS: usize = 16;
/// Ten chunks of the first prompt.
const CHUNKS_TOKENS: u64 = 160;
/// One page per step.
const SLOW_PREFILL: &str = "--chunked-prefill-size 16 --threads 1";

fn long_prompt(index: usize, stream: bool) -> Value {
    let ids: Vec<usize> = (0..LONG_PROMPT_TOKENS).map(|at| 3 + (at * 7 + index * 31) % 500).collect();
    json!({"model": MODEL, "prompt": ids, "max_tokens": 4, "temperature": 0, "stream": stream})
}

fn long_answer() -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "Tell me all of it."}], "temperature": 0,
        "max_tokens": 1800, "ignore_eos": true, "stream": true})
}

fn short() -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8})
}

async fn start(test: &str) -> Fleet {
    Fleet::start(
        test,
        FleetOptions::pd(1, 1).prefill_args(SLOW_PREFILL).decode_args("--threads 1 --enable-kv-checksum"),
    )
    .await
}

/// Long prompts on their way, half of them streamed.
fn send_long_prompts(client: &Client) -> JoinSet<Result<Answer, String>> {
    let mut tasks = JoinSet::new();
    for index in 0..LONG_PROMPTS {
        let client = client.clone();
        tasks.spawn(async move { client.post("/v1/completions", &long_prompt(index, index % 2 == 0)).await });
    }
    tasks
}

/// Waits until P has computed, and thus sent, some chunks of prompts that are not finished.
async fn until_mid_prefill(fleet: &mut Fleet, computed_tokens: u64) {
    let client = fleet.first(Role::Prefill).client();
    wait::until("prefill to be under way", ERROR_LIMIT, || async {
        let loads = Loads::read(&client).await?;
        let (running, computed) = (loads.running(), loads.number("num_used_tokens"));
        if computed >= computed_tokens { Ok(()) } else { Err(format!("{running} run, {computed} tokens computed")) }
    })
    .await;
}

async fn all_outcomes(mut tasks: JoinSet<Result<Answer, String>>) -> Vec<Outcome> {
    within("the end of all requests", ERROR_LIMIT, async {
        let mut outcomes = Vec::new();
        while let Some(answer) = tasks.join_next().await {
            outcomes.push(match answer.expect("a request does not panic") {
                Ok(answer) => answer.outcome(),
                Err(error) => Outcome::Broken(error),
            });
        }
        outcomes
    })
    .await
}

/// Each request was served or refused aloud, and the death was felt.
fn assert_told(outcomes: &[Outcome]) {
    let broken: Vec<_> = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Broken(_))).collect();
    assert!(broken.is_empty(), "clients were left without a reason: {broken:?}");
    let errors = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Error(_))).count();
    assert!(errors > 0, "nobody noticed: {outcomes:?}");
    println!("{errors} of {} clients were told, such as: {:?}", outcomes.len(), outcomes.last());
}

async fn assert_served(client: &Client) {
    let answer = within("a short answer", ERROR_LIMIT, client.post("/v1/chat/completions", &short())).await;
    let answer = answer.expect("the gateway answers");
    assert_eq!(answer.outcome(), Outcome::Served, "{}: {}", answer.status, answer.text());
}

/// While a worker is away, a request is refused aloud and soon.
async fn assert_refused(client: &Client) {
    let answer = within("a refusal", ERROR_LIMIT, client.post("/v1/chat/completions", &short())).await;
    let answer = answer.expect("the gateway answers");
    assert!(
        matches!(answer.outcome(), Outcome::Error(_)) && answer.status >= 500,
        "{}: {}",
        answer.status,
        answer.text()
    );
}

/// A stream whose answer is under way.
async fn begin_stream(client: &Client) -> Events {
    let mut events = client.stream("/v1/chat/completions", &long_answer()).await.expect("the gateway answers");
    assert_eq!(events.status, 200);
    for _ in 0..3 {
        let event = within("the next event", ERROR_LIMIT, events.next()).await;
        assert!(event.as_ref().is_ok_and(|event| event.as_deref().is_some_and(|event| event != "[DONE]")), "{event:?}");
    }
    events
}

/// Reads on to the end: an error event must come.
async fn assert_error_event(mut events: Events) {
    let error = within("an error event", ERROR_LIMIT, async {
        loop {
            match events.next().await {
                Ok(Some(event)) => match error_message(&event) {
                    Some(message) => return message,
                    None => assert_ne!(event, "[DONE]", "the stream ended as if all were well"),
                },
                end => panic!("the stream ended without an error event: {end:?}"),
            }
        }
    })
    .await;
    println!("the client reads: {error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_prefill_killed_in_mid_prefill() {
    let mut fleet = start("kill-p").await;
    let client = fleet.client();
    let requests = send_long_prompts(&client);
    until_mid_prefill(&mut fleet, CHUNKS_TOKENS).await;
    fleet.first(Role::Prefill).kill();
    assert_told(&all_outcomes(requests).await);
    fleet.until_at_rest(REST_LIMIT).await;
    assert_refused(&client).await;
    fleet.revive(Role::Prefill).await;
    assert_served(&client).await;
    fleet.until_at_rest(REST_LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_decode_killed_in_mid_prefill() {
    let mut fleet = start("kill-d-early").await;
    let client = fleet.client();
    let requests = send_long_prompts(&client);
    until_mid_prefill(&mut fleet, CHUNKS_TOKENS).await;
    fleet.first(Role::Decode).kill();
    assert_told(&all_outcomes(requests).await);
    fleet.until_at_rest(REST_LIMIT).await;
    fleet.revive(Role::Decode).await;
    assert_served(&client).await;
    fleet.until_at_rest(REST_LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_decode_killed_in_mid_stream() {
    let mut fleet = start("kill-d").await;
    let client = fleet.client();
    let streams = [begin_stream(&client).await, begin_stream(&client).await];
    fleet.first(Role::Decode).kill();
    for events in streams {
        assert_error_event(events).await;
    }
    fleet.until_at_rest(REST_LIMIT).await;
    assert_refused(&client).await;
    fleet.revive(Role::Decode).await;
    assert_served(&client).await;
    fleet.until_at_rest(REST_LIMIT).await;
}

/// The prefill worker is no longer needed once the answer streams.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_prefill_killed_in_mid_stream_harms_no_answer() {
    let mut fleet = start("kill-p-late").await;
    let client = fleet.client();
    let mut events = begin_stream(&client).await;
    fleet.first(Role::Prefill).kill();
    let mut last = None;
    while let Some(event) = within("the next event", ERROR_LIMIT, events.next()).await.expect("a sound stream") {
        assert_eq!(error_message(&event), None);
        last = Some(event);
    }
    assert_eq!(last.as_deref(), Some("[DONE]"));
    fleet.until_at_rest(REST_LIMIT).await;
    fleet.revive(Role::Prefill).await;
    assert_served(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_clients_killed_in_both_phases() {
    let mut fleet = start("kill-client").await;
    let client = fleet.client();
    let mut requests = send_long_prompts(&client);
    until_mid_prefill(&mut fleet, CHUNKS_TOKENS).await;
    requests.abort_all();
    while requests.join_next().await.is_some() {}
    fleet.until_at_rest(REST_LIMIT).await;
    assert_served(&client).await;

    let mut streams = Vec::new();
    for _ in 0..8 {
        streams.push(begin_stream(&client).await);
    }
    let running = fleet.first(Role::Decode).loads().await.running();
    assert!(running > 0, "the answers ended before their clients left");
    drop(streams);
    fleet.until_at_rest(REST_LIMIT).await;
    assert_served(&client).await;
}

/// A real client process, ended by `kill -9` in the middle of its stream.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_client_process_killed_in_mid_stream() {
    let mut fleet = start("kill-curl").await;
    let url = format!("{}/v1/chat/completions", fleet.url());
    let body = long_answer().to_string();
    let mut command = std::process::Command::new("curl");
    command.args(["--no-buffer", "--silent", "--header", "content-type: application/json", "--data", &body, &url]);
    let mut curl = tandem_e2e::process::Process::spawn("curl", &mut command, fleet.logs());
    wait::until("the first text", ERROR_LIMIT, || async {
        if curl.log().contains("data: ") { Ok(()) } else { Err(curl.log()) }
    })
    .await;
    assert!(fleet.first(Role::Decode).loads().await.running() > 0, "the answer ended too soon");
    curl.kill();
    fleet.until_at_rest(REST_LIMIT).await;
    assert_served(&fleet.client()).await;
}

/// The same deaths at many moments: after each, the survivors are at rest and the fleet serves again.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_survives_deaths_at_many_moments() {
    let mut fleet = start("kill-many").await;
    let client = fleet.client();
    for round in 0..12 {
        let role = [Role::Prefill, Role::Decode][round % 2];
        let requests = send_long_prompts(&client);
        until_mid_prefill(&mut fleet, 16 + 149 * round as u64).await;
        fleet.first(role).kill();
        let outcomes = all_outcomes(requests).await;
        let broken: Vec<_> = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Broken(_))).collect();
        assert!(broken.is_empty(), "round {round}, {role:?}: {broken:?}");
        fleet.until_at_rest(REST_LIMIT).await;
        fleet.revive(role).await;
        assert_served(&client).await;
    }
}
