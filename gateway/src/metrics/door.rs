//! What the door counts: requests as they come, answers as they end.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge};

use super::{Registrar, SECONDS};
use crate::config::Class;

pub struct DoorMetrics {
    requests: IntCounterVec,
    responses: IntCounterVec,
    duration: HistogramVec,
    /// As of the last look at it.
    connections: IntGauge,
    running: IntGauge,
    waiting: IntGauge,
    rate_limits: IntCounterVec,
    queue_wait: HistogramVec,
    key_requests: IntCounterVec,
    pub connections_refused: IntCounter,
    pub access_lines_lost: IntCounter,
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
            running: registrar.gauge("tandem_gateway_requests_running", "Requests that have a place to run")?,
            waiting: registrar.gauge("tandem_gateway_requests_queued", "Requests that wait for a place to run")?,
            rate_limits: registrar.counters(
                "smg_http_rate_limit_total",
                "Requests with a prompt that got a place to run, and that did not",
                &["result"],
            )?,
            queue_wait: registrar.histograms(
                "tandem_gateway_queue_wait_seconds",
                "Wait for a place to run",
                &["class"],
                &SECONDS,
            )?,
            key_requests: registrar.counters(
                "tandem_gateway_key_requests_total",
                "Answers by the name of the key that asked",
                &["key", "result"],
            )?,
            connections_refused: registrar
                .counter("tandem_gateway_connections_refused_total", "Client connections beyond --max-connections")?,
            access_lines_lost: registrar
                .counter("tandem_gateway_access_log_lost_total", "Lines of the access log that found its queue full")?,
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

    /// Connections and requests as they are now.
    pub fn look_at(&self, connections: usize, running: usize, waiting: usize) {
        self.connections.set(connections as i64);
        self.running.set(running as i64);
        self.waiting.set(waiting as i64);
    }

    pub fn admitted(&self, class: Class, wait: Duration, allowed: bool) {
        let class = match class {
            Class::Low => "low",
            Class::Normal => "normal",
            Class::High => "high",
        };
        self.queue_wait.with_label_values(&[class]).observe(wait.as_secs_f64());
        if allowed {
            self.rate_limits.with_label_values(&["allowed"]).inc();
        } else {
            self.shed();
        }
    }

    /// A request with a prompt was sent away, since there are too many.
    pub fn shed(&self) {
        self.rate_limits.with_label_values(&["rejected"]).inc();
    }

    /// `key` is a configured name.
    pub fn answered_key(&self, key: &str, status: u16) {
        let result = match status {
            429 => "limited",
            499 => "client_gone",
            400..=498 => "client_error",
            500.. => "error",
            _ => "ok",
        };
        self.key_requests.with_label_values(&[key, result]).inc();
    }

    /// `code` is one of the few that refuse a head.
    pub fn head_refused(&self, code: &'static str) {
        self.heads_refused.with_label_values(&[code]).inc();
    }
}
