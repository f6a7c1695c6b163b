//! Questions whose only right answers are known, namely those of an unsplit worker, and the judgement on what a client got.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::client::{Answer, Client, Outcome};
use crate::compare::{first_difference, normalise};
use crate::corpus::Question;
use crate::fleet::{Fleet, FleetOptions};

/// Questions that the unsplit worker gets at once.
const IN_FLIGHT: usize = 16;

/// What a client's end of a request is worth.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The oracle's answer.
    Right,
    /// An answer, but another one: where it differs first.
    Wrong(String),
    /// A status or an event with an error object; its code.
    Failed(String),
    /// An end that tells the client nothing, such as an empty success.
    Broken(String),
}

/// Questions and their answers.
pub struct Oracle {
    pub questions: Vec<Question>,
    answers: Vec<Value>,
}

impl Oracle {
    /// Asks an unsplit worker with these arguments, which then ends. `test` names its logs.
    ///
    /// # Panics
    /// When it does not answer them all.
    pub async fn ask(test: &str, questions: Vec<Question>, worker_args: &str) -> Arc<Self> {
        let fleet = Fleet::start(test, FleetOptions::plain().worker_args(worker_args)).await;
        let client = Client::pooled(fleet.url());
        let permits = Arc::new(Semaphore::new(IN_FLIGHT));
        let mut tasks = JoinSet::new();
        for (at, question) in questions.iter().cloned().enumerate() {
            let (client, permits) = (client.clone(), Arc::clone(&permits));
            tasks.spawn(async move {
                let _permit = permits.acquire_owned().await.expect("the semaphore stays open");
                let answer = put(&client, &question).await.unwrap_or_else(|error| panic!("{question:?}: {error}"));
                assert_eq!(answer.status, 200, "{question:?}: {}", answer.text());
                (at, normalise(&answer).unwrap_or_else(|error| panic!("{question:?}: {error}")))
            });
        }
        let answers: BTreeMap<usize, Value> = tasks.join_all().await.into_iter().collect();
        Arc::new(Self { questions, answers: answers.into_values().collect() })
    }

    /// What a client that asked the question at `at` has got.
    pub fn judge(&self, at: usize, got: &Result<Answer, String>) -> Verdict {
        let answer = match got {
            Ok(answer) => answer,
            Err(error) => return Verdict::Broken(format!("no answer: {error}")),
        };
        match answer.outcome() {
            Outcome::Broken(why) => Verdict::Broken(why),
            Outcome::Error(message) => Verdict::Failed(code(answer).unwrap_or(message)),
            Outcome::Served => match normalise(answer) {
                Err(why) => Verdict::Broken(why),
                Ok(got) => first_difference(&self.answers[at], &got).map_or(Verdict::Right, Verdict::Wrong),
            },
        }
    }
}

/// Puts the question to a server.
///
/// # Errors
/// As [`Client::post`].
pub async fn put(client: &Client, question: &Question) -> Result<Answer, String> {
    client.post(question.endpoint.path(), &question.body).await
}

/// `error.code` of an answer, or of the event that ends its stream.
fn code(answer: &Answer) -> Option<String> {
    let of = |text: &str| {
        let value: Value = serde_json::from_str(text).ok()?;
        value.pointer("/error/code")?.as_str().map(str::to_owned)
    };
    of(&answer.text()).or_else(|| answer.events().ok()?.iter().find_map(|event| of(event)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::corpus;

    fn answer(status: u16, content_type: &str, body: String) -> Result<Answer, String> {
        Ok(Answer { status, content_type: content_type.into(), body: body.into_bytes(), broken: None })
    }

    fn json_answer(status: u16, body: &Value) -> Result<Answer, String> {
        answer(status, "application/json", body.to_string())
    }

    #[test]
    fn a_wrong_token_a_bare_status_and_an_empty_success_are_found() {
        let sound = json!({"id": "a", "choices": [{"index": 0, "text": "no", "finish_reason": "stop"}]});
        let mut wrong = sound.clone();
        wrong["choices"][0]["text"] = json!("on");
        let error = json!({"error": {"message": "m", "type": "t", "param": null, "code": "decode_silent"}});
        let expected = normalise(json_answer(200, &sound).as_ref().unwrap()).unwrap();
        let oracle = Oracle { questions: corpus::questions(1, 1, "m"), answers: vec![expected] };
        let judge = |got| oracle.judge(0, &got);

        assert_eq!(judge(json_answer(200, &sound)), Verdict::Right);
        assert_eq!(judge(json_answer(200, &wrong)), Verdict::Wrong("/body/choices/0/text: \"no\" or \"on\"".into()));
        assert_eq!(judge(json_answer(502, &error)), Verdict::Failed("decode_silent".into()));
        let event = answer(200, "text/event-stream", format!("data: {error}\n\ndata: [DONE]\n\n"));
        assert_eq!(judge(event), Verdict::Failed("decode_silent".into()));
        for broken in [answer(502, "text/plain", "oops".into()), answer(200, "text/event-stream", String::new())] {
            assert!(matches!(judge(broken), Verdict::Broken(_)));
        }
        assert!(matches!(judge(Err("reset".into())), Verdict::Broken(_)));
    }
}
