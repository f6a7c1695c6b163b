//! What the door counts: requests as they come, answers as they end.

use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge};

use super::{Registrar, SECONDS};

pub struct DoorMetrics {
    requests: IntCounterVec,
    responses: IntCounterVec,
    duration: HistogramVec,
    /// As of the last look at it.
    pub connections: IntGauge,
    pub connections_refused: IntCounter,
    heads_refused: IntCounterVec,
}

impl DoorMetrics {
    pub(super) fn new(registrar: &Registrar) -> Result<Self, prometheus::Error> {
        let method_and_path = &["method", "path"];
        Ok(DoorMetrics {
            requests: registrar.counters("smg_http_requests_total", "Requests, at arrival", method_and_path)?,
            responses: registrar.counters("smg_http_responses_total", "Answers", &["status_code", "error_code"])?,
            duration: registrar.histograms(
                "smg_http_request_duration_seconds",
                "Arrival to end",
                method_and_path,
                &SECONDS,
            )?,
            connections: registrar.gauge("smg_http_connections_active", "Client connections that are open")?,
            connections_refused: registrar
                .counter("tandem_gateway_connections_refused_total", "Client connections beyond --max-connections")?,
            heads_refused: registrar.counters(
                "tandem_gateway_heads_refused_total",
                "Request heads that were malformed, ambiguous, too large or too slow",
                &["error_code"],
            )?,
        })
    }

    pub fn arrived(&self, method: &'static str, path: &'static str) {
        self.requests.with_label_values(&[method, path]).inc();
    }

    pub fn answered(&self, method: &'static str, path: &'static str, status: u16, code: &str, seconds: f64) {
        self.responses.with_label_values(&[status.to_string().as_str(), code]).inc();
        self.duration.with_label_values(&[method, path]).observe(seconds);
    }

    /// `code` is one of the few that refuse a head.
    pub fn head_refused(&self, code: &'static str) {
        self.heads_refused.with_label_values(&[code]).inc();
    }
}
