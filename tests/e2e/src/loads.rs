//! What a worker says about itself in `GET /v1/loads`.

use std::time::Duration;

use serde_json::Value;

use crate::client::Client;
use crate::wait;

/// What a worker at rest has none of.
const MUST_BE_ZERO: [&str; 10] = [
    "num_running_reqs",
    "num_waiting_reqs",
    "pages/used",
    "pages/draining",
    "pages/quarantined",
    "disaggregation/prefill_bootstrap_queue_reqs",
    "disaggregation/prefill_inflight_queue_reqs",
    "disaggregation/decode_prealloc_queue_reqs",
    "disaggregation/decode_transfer_queue_reqs",
    "disaggregation/decode_retracted_queue_reqs",
];

/// One look at a worker.
#[derive(Clone, Debug)]
pub struct Loads(Value);

impl Loads {
    /// # Errors
    /// No answer, or not in the documented shape.
    pub async fn read(client: &Client) -> Result<Self, String> {
        let answer = client.get("/v1/loads").await?;
        let body: Value =
            serde_json::from_slice(&answer.body).map_err(|error| format!("{error}: {}", answer.text()))?;
        match body["loads"].get(0) {
            Some(rank) => Ok(Self(rank.clone())),
            None => Err(format!("no loads in {body}")),
        }
    }

    /// A number by its path, such as `disaggregation/prefill_inflight_queue_reqs`.
    ///
    /// # Panics
    /// When it is absent: a renamed field must not read as an idle worker.
    pub fn number(&self, path: &str) -> u64 {
        self.0.pointer(&format!("/{path}")).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path} in {}", self.0))
    }

    pub fn running(&self) -> u64 {
        self.number("num_running_reqs")
    }

    pub fn waiting(&self) -> u64 {
        self.number("num_waiting_reqs")
    }

    /// Nothing runs or waits, and every page of the pool is free.
    ///
    /// # Errors
    /// What is not at rest.
    pub fn at_rest(&self) -> Result<(), String> {
        let busy: Vec<_> = MUST_BE_ZERO.into_iter().filter(|path| self.number(path) != 0).collect();
        let full = self.number("pages/free") == self.number("pages/total");
        if busy.is_empty() && full { Ok(()) } else { Err(format!("{busy:?} in {}", self.0)) }
    }
}

/// Waits until the worker behind `client` is at rest with a full pool.
pub async fn until_at_rest(name: &str, client: &Client, limit: Duration) {
    wait::until(&format!("{name} to be at rest"), limit, || async { Loads::read(client).await?.at_rest() }).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn loads(used: u64, running: u64, quarantined: u64, inflight: u64) -> Loads {
        let pages = json!({"total": 10, "free": 10 - used - quarantined, "used": used, "draining": 0,
            "quarantined": quarantined});
        let queues = json!({"prefill_bootstrap_queue_reqs": 0, "prefill_inflight_queue_reqs": inflight,
            "decode_prealloc_queue_reqs": 0, "decode_transfer_queue_reqs": 0, "decode_retracted_queue_reqs": 0});
        Loads(json!({"num_running_reqs": running, "num_waiting_reqs": 0, "pages": pages, "disaggregation": queues}))
    }

    #[test]
    fn rest_means_an_empty_queue_and_a_full_pool() {
        assert!(loads(0, 0, 0, 0).at_rest().is_ok());
        for busy in [loads(1, 0, 0, 0), loads(0, 1, 0, 0), loads(0, 0, 1, 0), loads(0, 0, 0, 1)] {
            assert!(busy.at_rest().is_err(), "{busy:?}");
        }
    }

    #[test]
    #[should_panic(expected = "no pages/used")]
    fn a_missing_field_is_no_rest() {
        let _ = Loads(json!({"num_running_reqs": 0, "num_waiting_reqs": 0})).at_rest();
    }
}
