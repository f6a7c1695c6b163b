//! What is counted of workers: picks, health, and legs that run.

use prometheus::{IntCounterVec, IntGaugeVec};

use super::Registrar;
use crate::error::Side;
use crate::fleet::Fleet;

pub struct FleetMetrics {
    selection: IntCounterVec,
    health: IntGaugeVec,
    requests: IntGaugeVec,
}

impl FleetMetrics {
    pub(super) fn new(registrar: &Registrar) -> Result<Self, prometheus::Error> {
        Ok(FleetMetrics {
            selection: registrar.counters("smg_worker_selection_total", "Picks", &["worker_type", "policy"])?,
            health: registrar.gauges("smg_worker_health", "1 is healthy", &["worker"])?,
            requests: registrar.gauges("smg_worker_requests_active", "Legs that have not ended", &["worker"])?,
        })
    }

    pub fn picked(&self, fleet: &Fleet, side: Side) {
        self.selection.with_label_values(&[side.name(), fleet.policy(side).name()]).inc();
    }

    /// Sets the gauges to what the fleet is now.
    pub(super) fn look_at(&self, fleet: &Fleet) {
        for worker in &fleet.workers {
            self.health.with_label_values(&[worker.url()]).set(worker.is_healthy().into());
            self.requests.with_label_values(&[worker.url()]).set(worker.legs().into());
        }
    }
}
