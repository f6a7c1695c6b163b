//! What exchanges count: prompts, their first bytes, and what went wrong with their legs.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounter, IntCounterVec};

use super::{Registrar, SECONDS};
use crate::error::{Blame, Failure, Side};
use crate::request::Endpoint;

pub struct ExchangeMetrics {
    requests: IntCounterVec,
    ttft: HistogramVec,
    worker_errors: IntCounterVec,
    worker_retries: IntCounterVec,
    retries_exhausted: IntCounterVec,
    retry_backoff: HistogramVec,
    timeouts: IntCounterVec,
    pub stale_connections: IntCounter,
    pub clients_gone: IntCounter,
    pub late_prefill_failures: IntCounter,
}

impl ExchangeMetrics {
    pub(super) fn new(registrar: &Registrar) -> Result<Self, prometheus::Error> {
        Ok(ExchangeMetrics {
            requests: registrar.counters(
                "smg_router_requests_total",
                "Requests with a prompt",
                &["router_type", "backend_type", "endpoint", "streaming"],
            )?,
            ttft: registrar.histograms(
                "smg_router_ttft_seconds",
                "Arrival to first byte of a streamed answer",
                &["endpoint"],
                &SECONDS,
            )?,
            worker_errors: registrar.counters(
                "smg_worker_errors_total",
                "Failed legs",
                &["worker_type", "error_type"],
            )?,
            worker_retries: registrar.counters("smg_worker_retries_total", "Further pairs tried", &["endpoint"])?,
            retries_exhausted: registrar.counters(
                "smg_worker_retries_exhausted_total",
                "Requests that failed though they might have been tried again, since tries or budget were spent",
                &["endpoint"],
            )?,
            retry_backoff: registrar.histograms(
                "smg_worker_retry_backoff_seconds",
                "Pauses before further pairs",
                &[],
                &SECONDS,
            )?,
            timeouts: registrar.counters("tandem_gateway_timeouts_total", "Deadlines that passed", &["deadline"])?,
            stale_connections: registrar.counter(
                "tandem_gateway_stale_connections_total",
                "Requests sent again since their reused connection was dead",
            )?,
            clients_gone: registrar
                .counter("tandem_gateway_clients_gone_total", "Clients that left before their answer's end")?,
            late_prefill_failures: registrar.counter(
                "tandem_gateway_late_prefill_failures_total",
                "Prefill legs that failed after decode had committed",
            )?,
        })
    }

    pub fn routed(&self, endpoint: Endpoint, split: bool, streaming: bool) {
        let backend = if split { "pd" } else { "regular" };
        let streaming = if streaming { "true" } else { "false" };
        self.requests.with_label_values(&["http", backend, endpoint.name(), streaming]).inc();
    }

    pub fn first_byte(&self, endpoint: Endpoint, seconds: f64) {
        self.ttft.with_label_values(&[endpoint.name()]).observe(seconds);
    }

    /// A client's mistake is no worker's error; 429 says that the worker is full.
    pub fn leg_failed(&self, side: Side, failure: &Failure) {
        if failure.blame == Blame::Client && failure.status != 429 {
            return;
        }
        self.worker_errors.with_label_values(&[side.name(), failure.code]).inc();
    }

    /// `deadline`: one of a fixed set of names.
    pub fn timed_out(&self, deadline: &'static str) {
        self.timeouts.with_label_values(&[deadline]).inc();
    }

    pub fn gave_up(&self, endpoint: Endpoint) {
        self.retries_exhausted.with_label_values(&[endpoint.name()]).inc();
    }

    pub fn paused(&self, pause: Duration) {
        self.retry_backoff.with_label_values(&[] as &[&str]).observe(pause.as_secs_f64());
    }

    pub fn retried(&self, endpoint: Endpoint) {
        self.worker_retries.with_label_values(&[endpoint.name()]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use crate::metrics::tests::shown;
    use bytes::Bytes;

    #[test]
    fn a_clients_mistake_is_no_workers_error() {
        let metrics = Metrics::new().unwrap();
        for status in [400, 404, 413, 429, 503] {
            metrics.exchange.leg_failed(Side::Decode, &Failure::refused(Side::Decode, status, Bytes::new(), None));
        }
        let text = shown(&metrics);
        let line = "smg_worker_errors_total{error_type=\"decode_refused\",worker_type=\"decode\"} 2";
        assert!(text.contains(line), "{text}");
    }
}
