//! Counters and gauges, under sglang_router's names where it has them: one file per room that counts, and here what all of
//! them need. Label values come from fixed sets and from the configured workers, never from clients.

mod discovery;
pub mod door;
mod exchange;
mod fleet;
mod pair;
mod server;

use std::sync::Arc;

use prometheus::core::Collector;
use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::fleet::Fleet;
pub use discovery::DiscoveryMetrics;
use door::DoorMetrics;
use exchange::ExchangeMetrics;
use server::ServerMetrics;

pub struct Metrics {
    registry: Registry,
    pub discovery: Arc<DiscoveryMetrics>,
    pub door: DoorMetrics,
    pub exchange: ExchangeMetrics,
    pub server: ServerMetrics,
}

impl Metrics {
    pub fn new() -> Result<Self, prometheus::Error> {
        let registrar = Registrar(Registry::new());
        Ok(Metrics {
            discovery: Arc::new(DiscoveryMetrics::new(&registrar)?),
            door: DoorMetrics::new(&registrar)?,
            exchange: ExchangeMetrics::new(&registrar)?,
            server: ServerMetrics::new(&registrar)?,
            registry: registrar.0,
        })
    }

    /// The text format, with the fleet as it is now.
    pub fn render(&self, fleet: &Fleet) -> Result<Vec<u8>, prometheus::Error> {
        let mut families = self.registry.gather();
        // A family without series is none.
        let looked_at = fleet::families(fleet)?.into_iter().chain(pair::families(fleet)?);
        families.extend(looked_at.filter(|family| !family.get_metric().is_empty()));
        let mut text = Vec::new();
        TextEncoder::new().encode(&families, &mut text)?;
        Ok(text)
    }
}

/// Makes metrics and enters each into the one registry, which refuses a name that is taken.
struct Registrar(Registry);

impl Registrar {
    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        self.entered(IntCounter::new(name, help)?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
        self.entered(IntCounterVec::new(Opts::new(name, help), labels)?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
        self.entered(IntGaugeVec::new(Opts::new(name, help), labels)?)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        self.entered(IntGauge::new(name, help)?)
    }

    /// `buckets`: their upper ends, as of [`SECONDS`].
    fn histograms(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        buckets: &[f64],
    ) -> Result<HistogramVec, prometheus::Error> {
        self.entered(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels)?)
    }

    fn entered<M: Collector + Clone + 'static>(&self, metric: M) -> Result<M, prometheus::Error> {
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }
}

/// Buckets for whole requests and first tokens.
const SECONDS: [f64; 20] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0,
    240.0,
];

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::config::tests::config;

    /// What `/metrics` shows over a fleet of one plain worker.
    pub fn shown(metrics: &Metrics) -> String {
        let fleet = Fleet::new(&config("--worker-urls http://w:1").unwrap());
        String::from_utf8(metrics.render(&fleet).unwrap()).unwrap()
    }
}
