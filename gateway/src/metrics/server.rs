//! What the process counts of itself: settings read again, sockets handed over.

use prometheus::IntCounterVec;

use super::Registrar;

pub struct ServerMetrics {
    handovers: IntCounterVec,
}

impl ServerMetrics {
    pub(super) fn new(registrar: &Registrar) -> Result<Self, prometheus::Error> {
        Ok(ServerMetrics {
            handovers: registrar.counters(
                "tandem_gateway_handovers_total",
                "New processes that asked for the sockets, by what came of it",
                &["result"],
            )?,
        })
    }

    pub fn handed_over(&self) {
        self.handovers.with_label_values(&["handed_over"]).inc();
    }

    pub fn handover_failed(&self) {
        self.handovers.with_label_values(&["failed"]).inc();
    }
}
