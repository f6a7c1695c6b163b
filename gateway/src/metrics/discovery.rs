//! What discovery counts. The label `source` has one value per kind of source.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec};

use super::{Registrar, SECONDS};

pub struct DiscoveryMetrics {
    registrations: IntCounterVec,
    deregistrations: IntCounterVec,
    sync_duration: HistogramVec,
    discovered: IntGaugeVec,
    in_sync: IntGaugeVec,
}

impl DiscoveryMetrics {
    pub(super) fn new(registrar: &Registrar) -> Result<Self, prometheus::Error> {
        Ok(DiscoveryMetrics {
            registrations: registrar.counters(
                "smg_discovery_registrations_total",
                "Workers that a source came to name, and looks at a source that failed",
                &["source", "result"],
            )?,
            deregistrations: registrar.counters(
                "smg_discovery_deregistrations_total",
                "Workers that a source no longer names",
                &["source", "reason"],
            )?,
            sync_duration: registrar.histograms(
                "smg_discovery_sync_duration_seconds",
                "Asking a source for its whole list",
                &["source"],
                &SECONDS,
            )?,
            discovered: registrar.gauges(
                "smg_discovery_workers_discovered",
                "Workers that a source names now",
                &["source"],
            )?,
            in_sync: registrar.gauges(
                "tandem_gateway_discovery_in_sync",
                "1 while the last look at a source succeeded; 0 while its workers are those of an earlier look",
                &["source"],
            )?,
        })
    }

    pub fn discovered(&self, source: &str, workers: usize) {
        self.discovered.with_label_values(&[source]).set(i64::try_from(workers).unwrap_or(i64::MAX));
    }

    pub fn synced(&self, source: &str, took: Duration) {
        self.sync_duration.with_label_values(&[source]).observe(took.as_secs_f64());
        self.in_sync.with_label_values(&[source]).set(1);
    }

    pub fn failed(&self, source: &str) {
        self.registrations.with_label_values(&[source, "failed"]).inc();
        self.in_sync.with_label_values(&[source]).set(0);
    }

    pub fn joined(&self, source: &str) {
        self.registrations.with_label_values(&[source, "success"]).inc();
    }

    pub fn left(&self, source: &str) {
        self.deregistrations.with_label_values(&[source, "removed"]).inc();
    }

    #[cfg(test)]
    pub fn counts(&self, source: &str) -> (u64, bool) {
        let failures = self.registrations.with_label_values(&[source, "failed"]).get();
        (failures, self.in_sync.with_label_values(&[source]).get() == 1)
    }
}
