//! A peer's gateway in front of our workers: sglang-router 0.3.2 with `--pd-disaggregation`. Its answers are those of an
//! unsplit worker; only its own known habits are let through.

use std::time::Duration;

use serde_json::Value;
use tandem_compat::Router;
use tandem_e2e::compare::{first_difference, normalise};
use tandem_e2e::corpus::{self, Endpoint, Feature, Question};
use tandem_e2e::fleet::MODEL;
use tandem_e2e::{Answer, Client, Fleet, FleetOptions};

const REST_LIMIT: Duration = Duration::from_secs(10);

/// Requests that this router can carry: it mints one room per prompt but none per sample of completions and /generate,
/// refuses completions whose prompt is token ids, and drops what it does not know of /generate's sampling parameters.
fn questions() -> Vec<Question> {
    let carried = |question: &Question| match question.endpoint {
        Endpoint::Chat => true,
        Endpoint::Completions => question.feature != Feature::ThreeSamples && question.body["prompt"].is_string(),
        Endpoint::Generate => {
            let known = question.body["sampling_params"].get("logit_bias").is_none();
            question.feature != Feature::ThreeSamples && known
        }
    };
    corpus::questions(0x51a9, 180, MODEL).into_iter().filter(carried).collect()
}

async fn ask(client: &Client, question: &Question) -> Answer {
    let answer = client.post(question.endpoint.path(), &question.body).await;
    answer.unwrap_or_else(|error| panic!("{question:?}: {error}"))
}

/// The router drops the content type when it merges logprobs, and puts P's prompt logprobs in front of D's.
fn without_router_habits(answer: &Answer) -> Result<Value, String> {
    let mut value = normalise(answer)?;
    value["content_type"] = Value::Null;
    for list in ["input_token_logprobs", "input_top_logprobs"] {
        if let Some(meta) = value.pointer_mut("/body/meta_info").and_then(Value::as_object_mut) {
            meta.remove(list);
        }
    }
    Ok(value)
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_sglang_router_serves_from_our_workers() {
    let questions = questions();
    let plain = Fleet::start("router-plain", FleetOptions::plain()).await;
    let split = Fleet::start("router-split", FleetOptions::pd(1, 1).without_gateway()).await;
    let router = Router::start(&split).await;
    let mut different = Vec::new();
    for question in &questions {
        let expected = ask(&plain.client(), question).await;
        let answer = ask(&router.client, question).await;
        let verdict = match (without_router_habits(&expected), without_router_habits(&answer)) {
            (Ok(expected), Ok(answer)) => first_difference(&expected, &answer),
            (expected, answer) => Some(format!("{expected:?} or {answer:?}")),
        };
        different.extend(verdict.map(|difference| format!("{question:?}\n  {difference}")));
    }
    let shown = different.iter().take(5).map(String::as_str).collect::<Vec<_>>().join("\n");
    println!("{} questions, {} different answers", questions.len(), different.len());
    assert!(different.is_empty(), "{} of {} answers differ:\n{shown}", different.len(), questions.len());
    split.until_at_rest(REST_LIMIT).await;
}
