//! Asking workers how they do: health from `GET /health`, the role from `/server_info` whenever a worker came up, the load
//! from `/v1/loads`; `/get_server_info` and `/get_load` are asked where those do not exist. Findings go into the fleet.
//!
//! By default a worker that answers nothing counts as silent 12.5 s later at most: 2 s to the next look, 1 s for a load, and
//! three looks of 3 s with 250 ms in between. Health is answered beside the engine, so a busy worker answers.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use async_trait::async_trait;
use http::Method;
use pingora::server::ShutdownWatch;
use pingora::services::background::BackgroundService;
use serde_json::Value;

use crate::config::{Config, Role};
use crate::error::{Side, StartError};
use crate::fleet::{Fleet, Health, Worker};

/// A question of an operator that is passed on.
pub const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// A look at a worker that a request waits for; a load, since it must not hold up the next look.
const QUICK_TIMEOUT: Duration = Duration::from_secs(1);
/// Workers that are not healthy, or did not answer last time, are asked this many times as often.
const HASTE: u32 = 8;

/// Asks the workers of one fleet.
pub struct Prober {
    fleet: Arc<Fleet>,
    client: reqwest::Client,
    interval: Duration,
    timeout: Duration,
    api_key: Option<String>,
}

impl Prober {
    pub fn new(fleet: Arc<Fleet>, config: &Config) -> Result<Self, StartError> {
        let client = reqwest::Client::builder()
            .timeout(ASK_TIMEOUT)
            .connect_timeout(config.deadlines.connect)
            .pool_max_idle_per_host(0)
            .no_proxy()
            .build()?;
        let (interval, timeout) = (config.fleet.probe_interval, config.fleet.probe_timeout);
        Ok(Prober { fleet, client, interval, timeout, api_key: config.security.api_key.clone() })
    }

    /// Asks a side's workers that are not healthy, now, since a request finds nobody there. Bounded by a second. A silent
    /// worker would take that second for nothing, and the look at it that is always under way sees its first answer.
    pub async fn look_again(&self, side: Side) {
        let unwell = self.fleet.side(side).filter(|w| !w.is_healthy() && !matches!(w.health(), Health::Silent(_)));
        let checks: Vec<_> = unwell.map(|worker| self.check(worker)).collect();
        let _ = tokio::time::timeout(QUICK_TIMEOUT, futures_util::future::join_all(checks)).await;
    }

    async fn watch(&self, worker: &Worker) {
        loop {
            self.check(worker).await;
            let pause = if worker.answers() { self.interval } else { self.interval / HASTE };
            tokio::time::sleep(pause).await;
        }
    }

    /// One look at one worker.
    async fn check(&self, worker: &Worker) {
        match self.ask(Method::GET, worker, "/health").timeout(self.timeout).send().await {
            Ok(answer) if answer.status().is_success() => {}
            Ok(answer) => {
                worker.introduced.store(false, Relaxed);
                return worker
                    .note_probe(Health::NotReady(format!("GET /health answered {}", answer.status().as_u16())));
            }
            Err(error) if error.is_timeout() => {
                let why = format!("GET /health was not answered within {} ms", self.timeout.as_millis());
                return worker.note_missed(&why);
            }
            Err(error) if error.is_connect() => return worker.note_unreachable("nobody listens there"),
            Err(error) => return worker.note_missed(&format!("GET /health failed: {}", error.without_url())),
        }
        if !worker.introduced.load(Relaxed)
            && let Some(info) = self.json(worker, &["/server_info", "/get_server_info"], self.timeout).await
        {
            if let Some(why) = learn(worker, &info) {
                return worker.note_probe(Health::WrongRole(why));
            }
            worker.introduced.store(true, Relaxed);
        }
        worker.note_probe(Health::Healthy);
        let loads = self.json(worker, &["/v1/loads", "/get_load"], QUICK_TIMEOUT).await;
        worker.note_load(loads.as_ref().and_then(reported_tokens));
    }

    /// A request to one worker, with the key where one is set.
    pub fn ask(&self, method: Method, worker: &Worker, path: &str) -> reqwest::RequestBuilder {
        let request = self.client.request(method, format!("{}{path}", worker.url()));
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// The first of the paths that answers with JSON, each within `limit`.
    pub async fn json(&self, worker: &Worker, paths: &[&str], limit: Duration) -> Option<Value> {
        for path in paths {
            let answer = self.ask(Method::GET, worker, path).timeout(limit).send().await.ok()?;
            if answer.status().is_success() {
                return answer.json().await.ok();
            }
        }
        None
    }
}

/// Takes what a worker says of itself; returns why it cannot serve where it was configured.
fn learn(worker: &Worker, info: &Value) -> Option<String> {
    if let Some(port) = info["disaggregation_bootstrap_port"].as_u64().and_then(|p| u16::try_from(p).ok()) {
        worker.note_bootstrap_port(port);
    }
    let expected = match worker.spec.role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Plain => "null",
    };
    match info["disaggregation_mode"].as_str() {
        Some(mode) if mode != expected => {
            let word = worker.spec.role.worker_type();
            Some(format!("it is configured as a {word} worker, but runs with --disaggregation-mode {mode}"))
        }
        _ => None,
    }
}

/// Tokens held by a worker, over its data-parallel ranks: `/v1/loads` says `loads[].num_total_tokens`, `/get_load` a list
/// of objects with `num_tokens`. `None` where neither is there; a negative number is no load.
pub fn reported_tokens(loads: &Value) -> Option<u64> {
    let entries = loads["loads"].as_array().or(loads.as_array())?;
    let of = |entry: &Value| entry["num_total_tokens"].as_u64().or(entry["num_tokens"].as_u64());
    entries.iter().map(of).sum()
}

/// The prober as a service of the server.
pub struct ProbeService(pub Arc<Prober>);

#[async_trait]
impl BackgroundService for ProbeService {
    async fn start(&self, mut shutdown: ShutdownWatch) {
        let fleet = self.0.fleet.clone();
        let watches = futures_util::future::join_all(fleet.workers.iter().map(|worker| self.0.watch(worker)));
        tokio::select! {
            _ = watches => {}
            _ = shutdown.wait_for(|down| *down) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn loads_of_both_schemas() {
        assert_eq!(reported_tokens(&json!({"loads": [{"num_total_tokens": 5}, {"num_total_tokens": 7}]})), Some(12));
        assert_eq!(reported_tokens(&json!([{"num_tokens": 3}])), Some(3));
        assert_eq!(reported_tokens(&json!([{"num_tokens": -1}])), None);
        assert_eq!(reported_tokens(&json!({"load": 1})), None);
    }
}
