//! Asks workers and bootstrap ports, and sends a small prompt through a pair. Every question has a limit, and so many run
//! at a time.
//!
//! Whether a decode worker reaches a bootstrap port, only it can tell. It is not asked to connect somewhere, which would
//! make it a port scanner for whoever reaches it; it is given a prompt of one token together with the prefill worker, as
//! the gateway does all the time. That tries the port, the handshake with its comparison of layouts, and the pages' way.

use std::time::{Duration, SystemTime};

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use tandem_gateway::{Role, Secret};

use super::targets::Target;

const AT_A_TIME: usize = 16;

/// An answer, as far as anyone here cares.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub status: u16,
    pub json: Value,
    pub text: String,
    /// The answering clock minus ours.
    pub clock_ahead_secs: Option<i64>,
}

/// What one worker said.
#[derive(Clone, Debug)]
pub struct Worker {
    pub target: Target,
    /// `GET /health`.
    pub health: Result<Answer, String>,
    /// `GET /ready`, where there is one.
    pub ready: Option<Answer>,
    /// `GET /server_info`; null where there is none.
    pub info: Value,
    /// The first name of `GET /v1/models`.
    pub model: Option<String>,
    /// `GET /health` at a prefill worker's bootstrap port, asked from here.
    pub bootstrap: Option<Result<(), String>>,
}

impl Worker {
    /// The port that decode workers are sent to: as configured, else as the worker says.
    pub fn bootstrap_port(&self) -> Option<u16> {
        self.target.bootstrap_port.or(self.stated_bootstrap_port())
    }

    pub fn stated_bootstrap_port(&self) -> Option<u16> {
        self.info["disaggregation_bootstrap_port"].as_u64().and_then(|port| u16::try_from(port).ok()).filter(|p| *p > 0)
    }
}

/// How a prompt through a pair went: its milliseconds, or what each side said.
#[derive(Clone, Debug)]
pub struct Trial {
    pub outcome: Result<u128, String>,
}

pub struct Asker {
    client: reqwest::Client,
    timeout: Duration,
    api_key: Option<String>,
}

impl Asker {
    /// `client` trusts and shows what the gateway does; `api_key` is for workers without one of their own.
    pub fn new(
        client: reqwest::ClientBuilder,
        timeout: Duration,
        api_key: Option<&Secret>,
    ) -> Result<Self, reqwest::Error> {
        let client = client.timeout(timeout).no_proxy().build()?;
        Ok(Asker { client, timeout, api_key: api_key.map(|key| key.reveal().to_owned()) })
    }

    /// # Errors
    /// What kept an answer from coming.
    pub async fn get(&self, url: &str, key: Option<&str>) -> Result<Answer, String> {
        self.answer(self.client.get(url), key).await
    }

    async fn answer(&self, request: reqwest::RequestBuilder, key: Option<&str>) -> Result<Answer, String> {
        let request = match key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        let answer = request.send().await.map_err(|error| self.explain(error))?;
        let status = answer.status().as_u16();
        let date = answer.headers().get("date").and_then(|date| date.to_str().ok());
        let clock_ahead_secs = date.and_then(|date| ahead(date, SystemTime::now()));
        let text = answer.text().await.map_err(|error| self.explain(error))?;
        Ok(Answer { status, json: serde_json::from_str(&text).unwrap_or_default(), text, clock_ahead_secs })
    }

    fn explain(&self, error: reqwest::Error) -> String {
        if error.is_timeout() {
            return format!("no answer within {} s", self.timeout.as_secs());
        }
        let error = error.without_url();
        let mut deepest: &dyn std::error::Error = &error;
        while let Some(cause) = deepest.source() {
            deepest = cause;
        }
        deepest.to_string()
    }

    fn key_of(&self, target: &Target) -> Option<String> {
        target.api_key.clone().or(self.api_key.clone())
    }

    pub async fn all(&self, targets: Vec<Target>) -> Vec<Worker> {
        stream::iter(targets).map(|target| self.worker(target)).buffered(AT_A_TIME).collect().await
    }

    async fn worker(&self, target: Target) -> Worker {
        let key = self.key_of(&target);
        let path = |path: &str| format!("{}{path}", target.url);
        let health = self.get(&path("/health"), key.as_deref()).await;
        let mut worker =
            Worker { target: target.clone(), health, ready: None, info: Value::Null, model: None, bootstrap: None };
        if worker.health.is_ok() {
            worker.ready = self.get(&path("/ready"), key.as_deref()).await.ok().filter(|ready| ready.status != 404);
            for info in ["/server_info", "/get_server_info"] {
                match self.get(&path(info), key.as_deref()).await {
                    Ok(answer) if answer.status == 200 => worker.info = answer.json,
                    _ => continue,
                }
                break;
            }
            let models = self.get(&path("/v1/models"), key.as_deref()).await.unwrap_or_default();
            worker.model = models.json["data"][0]["id"].as_str().map(str::to_owned);
        }
        if let (Role::Prefill, Some(port)) = (target.role, worker.bootstrap_port()) {
            let answer = self.get(&format!("http://{}:{port}/health", target.host), None).await;
            worker.bootstrap = Some(match answer {
                Ok(answer) if answer.status == 200 => Ok(()),
                Ok(answer) => Err(format!("it answers GET /health with {}, as no bootstrap port does", answer.status)),
                Err(why) => Err(why),
            });
        }
        worker
    }

    /// One prompt through each pair, in the pairs' order; `None` where it makes no sense to try.
    pub async fn trials(&self, workers: &[Worker], pairs: &[(usize, usize)]) -> Vec<Option<Trial>> {
        let trials = pairs.iter().map(|&(p, d)| self.trial(&workers[p], &workers[d]));
        stream::iter(trials).buffered(AT_A_TIME).collect().await
    }

    async fn trial(&self, prefill: &Worker, decode: &Worker) -> Option<Trial> {
        let split = |worker: &Worker, mode: &str| worker.info["disaggregation_mode"] == mode;
        let port = prefill.bootstrap_port()?;
        if !split(prefill, "prefill") || !split(decode, "decode") {
            return None;
        }
        let room = rand::random::<u64>() >> 1;
        let body = json!({
            "input_ids": [1], "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": true},
            "bootstrap_host": prefill.target.host, "bootstrap_port": port, "bootstrap_room": room,
        });
        let begun = std::time::Instant::now();
        let leg = |worker: &Worker| {
            let request = self.client.post(format!("{}/generate", worker.target.url)).json(&body);
            let key = self.key_of(&worker.target);
            async move { said(self.answer(request, key.as_deref()).await) }
        };
        let (of_prefill, of_decode) = tokio::join!(leg(prefill), leg(decode));
        let complaints = [("prefill", of_prefill), ("decode", of_decode)];
        let complaints: Vec<_> = complaints
            .into_iter()
            .filter_map(|(side, said)| Some(format!("the {side} worker: {}", said.err()?)))
            .collect();
        let outcome = if complaints.is_empty() { Ok(begun.elapsed().as_millis()) } else { Err(complaints.join("; ")) };
        Some(Trial { outcome })
    }
}

/// A leg of a trial is well when it answers 200 and no abort.
fn said(answer: Result<Answer, String>) -> Result<(), String> {
    let answer = answer?;
    let reason = &answer.json["meta_info"]["finish_reason"];
    if answer.status == 200 && reason["type"] != "abort" {
        return Ok(());
    }
    let message = [&answer.json["error"]["message"], &answer.json["detail"], &reason["message"]];
    let message = message.into_iter().find_map(|m| m.as_str()).unwrap_or(&answer.text);
    Err(format!("{} {}", answer.status, message.chars().take(500).collect::<String>()))
}

/// How far the clock behind an HTTP date is ahead of `now`, in seconds.
fn ahead(date: &str, now: SystemTime) -> Option<i64> {
    let theirs = chrono::DateTime::parse_from_rfc2822(date).ok()?.timestamp();
    let ours = now.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs();
    Some(theirs - i64::try_from(ours).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_http_date_tells_the_other_clock() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(ahead("Sun, 06 Nov 1994 08:49:37 GMT", now), Some(0));
        assert_eq!(ahead("Sun, 06 Nov 1994 08:50:37 GMT", now), Some(60));
        assert_eq!(ahead("yesterday", now), None);
    }

    #[test]
    fn what_a_leg_says() {
        let answer =
            |status, json: Value| said(Ok(Answer { status, text: json.to_string(), json, ..Answer::default() }));
        assert!(answer(200, json!({"meta_info": {"finish_reason": {"type": "length"}}})).is_ok());
        let aborted = answer(200, json!({"meta_info": {"finish_reason": {"type": "abort", "message": "why"}}}));
        assert_eq!(aborted.unwrap_err(), "200 why");
        assert_eq!(answer(500, json!({"error": {"message": "no"}})).unwrap_err(), "500 no");
    }
}
