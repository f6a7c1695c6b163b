//! Counters and gauges, under sglang_router's names where it has them. Label values come from fixed sets and from the
//! configured workers, never from clients.

use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::error::{Blame, Failure, Side};
use crate::fleet::Fleet;
use crate::request::Endpoint;

const SECONDS: [f64; 20] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0,
    240.0,
];

pub struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    responses: IntCounterVec,
    duration: HistogramVec,
    router_requests: IntCounterVec,
    ttft: HistogramVec,
    worker_errors: IntCounterVec,
    worker_selection: IntCounterVec,
    worker_retries: IntCounterVec,
    worker_health: IntGaugeVec,
    worker_requests: IntGaugeVec,
    pub clients_gone: IntCounter,
    pub late_prefill_failures: IntCounter,
}

impl Metrics {
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, prometheus::Error> {
            let made = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let single = |name: &str, help: &str| -> Result<IntCounter, prometheus::Error> {
            let made = IntCounter::new(name, help)?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let gauge = |name: &str, help: &str| -> Result<IntGaugeVec, prometheus::Error> {
            let made = IntGaugeVec::new(Opts::new(name, help), &["worker"])?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let histogram = |name: &str, help: &str, labels: &[&str]| -> Result<HistogramVec, prometheus::Error> {
            let made = HistogramVec::new(HistogramOpts::new(name, help).buckets(SECONDS.to_vec()), labels)?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        Ok(Metrics {
            requests: counter("smg_http_requests_total", "Requests, at arrival", &["method", "path"])?,
            responses: counter("smg_http_responses_total", "Answers", &["status_code", "error_code"])?,
            duration: histogram("smg_http_request_duration_seconds", "Arrival to end", &["method", "path"])?,
            router_requests: counter(
                "smg_router_requests_total",
                "Requests with a prompt",
                &["router_type", "backend_type", "endpoint", "streaming"],
            )?,
            ttft: histogram("smg_router_ttft_seconds", "Arrival to first byte of a streamed answer", &["endpoint"])?,
            worker_errors: counter("smg_worker_errors_total", "Failed legs", &["worker_type", "error_type"])?,
            worker_selection: counter("smg_worker_selection_total", "Picks", &["worker_type", "policy"])?,
            worker_retries: counter("smg_worker_retries_total", "Further pairs tried", &["endpoint"])?,
            worker_health: gauge("smg_worker_health", "1 is healthy")?,
            worker_requests: gauge("smg_worker_requests_active", "Legs that have not ended")?,
            clients_gone: single("tandem_gateway_clients_gone_total", "Clients that left before their answer's end")?,
            late_prefill_failures: single(
                "tandem_gateway_late_prefill_failures_total",
                "Prefill legs that failed after decode had committed",
            )?,
            registry,
        })
    }

    pub fn arrived(&self, method: &'static str, path: &'static str) {
        self.requests.with_label_values(&[method, path]).inc();
    }

    pub fn answered(&self, method: &'static str, path: &'static str, status: u16, code: &str, seconds: f64) {
        self.responses.with_label_values(&[status.to_string().as_str(), code]).inc();
        self.duration.with_label_values(&[method, path]).observe(seconds);
    }

    pub fn routed(&self, endpoint: Endpoint, split: bool, streaming: bool) {
        let backend = if split { "pd" } else { "regular" };
        let streaming = if streaming { "true" } else { "false" };
        self.router_requests.with_label_values(&["http", backend, endpoint.name(), streaming]).inc();
    }

    pub fn first_byte(&self, endpoint: Endpoint, seconds: f64) {
        self.ttft.with_label_values(&[endpoint.name()]).observe(seconds);
    }

    pub fn picked(&self, fleet: &Fleet, side: Side) {
        self.worker_selection.with_label_values(&[side.name(), fleet.policy(side).name()]).inc();
    }

    /// A client's mistake is no worker's error; 429 says that the worker is full.
    pub fn leg_failed(&self, side: Side, failure: &Failure) {
        if failure.blame == Blame::Client && failure.status != 429 {
            return;
        }
        self.worker_errors.with_label_values(&[side.name(), failure.code]).inc();
    }

    pub fn retried(&self, endpoint: Endpoint) {
        self.worker_retries.with_label_values(&[endpoint.name()]).inc();
    }

    /// The text format, with the fleet as it is now.
    pub fn render(&self, fleet: &Fleet) -> Result<Vec<u8>, prometheus::Error> {
        for worker in &fleet.workers {
            self.worker_health.with_label_values(&[worker.url()]).set(worker.is_healthy().into());
            self.worker_requests.with_label_values(&[worker.url()]).set(worker.legs().into());
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;
    use bytes::Bytes;

    #[test]
    fn a_clients_mistake_is_no_workers_error() {
        let metrics = Metrics::new().unwrap();
        for status in [400, 404, 413, 429, 503] {
            metrics.leg_failed(Side::Decode, &Failure::refused(Side::Decode, status, Bytes::new(), None));
        }
        let text = metrics.render(&Fleet::new(&config("--worker-urls http://w:1").unwrap())).unwrap();
        let text = String::from_utf8(text).unwrap();
        let line = "smg_worker_errors_total{error_type=\"decode_refused\",worker_type=\"decode\"} 2";
        assert!(text.contains(line), "{text}");
    }
}
