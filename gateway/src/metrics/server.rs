//! What the process counts of itself: settings read again, sockets handed over.

use prometheus::{IntCounterVec, IntGauge};

use super::Registrar;

pub struct ServerMetrics {
    handovers: IntCounterVec,
    reloads: IntCounterVec,
    generation: IntGauge,
}

impl ServerMetrics {
    pub(super) fn new(registrar: &Registrar) -> Result<Self, prometheus::Error> {
        Ok(ServerMetrics {
            handovers: registrar.counters(
                "tandem_gateway_handovers_total",
                "New processes that asked for the sockets, by what came of it",
                &["result"],
            )?,
            reloads: registrar.counters(
                "tandem_gateway_config_reloads_total",
                "Settings read again, by whether they were taken",
                &["result"],
            )?,
            generation: registrar
                .gauge("tandem_gateway_config_generation", "How often settings were taken since the start")?,
        })
    }

    pub fn reloaded(&self) {
        self.reloads.with_label_values(&["taken"]).inc();
        self.generation.inc();
    }

    pub fn reload_failed(&self) {
        self.reloads.with_label_values(&["failed"]).inc();
    }

    pub fn handed_over(&self) {
        self.handovers.with_label_values(&["handed_over"]).inc();
    }

    pub fn handover_failed(&self) {
        self.handovers.with_label_values(&["failed"]).inc();
    }
}
