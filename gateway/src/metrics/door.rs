//! What the door counts: requests as they come, answers as they end.

use prometheus::{HistogramVec, IntCounterVec};

use super::{Registrar, SECONDS};

pub struct DoorMetrics {
    requests: IntCounterVec,
    responses: IntCounterVec,
    duration: HistogramVec,
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
        })
    }

    pub fn arrived(&self, method: &'static str, path: &'static str) {
        self.requests.with_label_values(&[method, path]).inc();
    }

    pub fn answered(&self, method: &'static str, path: &'static str, status: u16, code: &str, seconds: f64) {
        self.responses.with_label_values(&[status.to_string().as_str(), code]).inc();
        self.duration.with_label_values(&[method, path]).observe(seconds);
    }
}
