//! What is counted of policies: which of their branches they took, and what they remember. As for workers, each look writes
//! what the fleet's policies know. Names and labels are the policies' own, never a client's.

use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGauge, Opts};
use std::collections::BTreeMap;

use crate::config::Role;
use crate::fleet::Fleet;

/// All series of the policies in use, each over all pools and sides.
pub(super) fn families(fleet: &Fleet) -> Result<Vec<MetricFamily>, prometheus::Error> {
    let snapshot = fleet.snapshot();
    let mut counters: BTreeMap<&str, IntCounterVec> = BTreeMap::new();
    let mut gauges: BTreeMap<&str, IntGauge> = BTreeMap::new();
    let sides = snapshot.pools().iter().flat_map(|pool| Role::ALL.map(|role| pool.policy(role)));
    for policy in sides {
        let name = policy.name();
        for (branch, count) in policy.branches() {
            if !counters.contains_key(name) {
                let opts = Opts::new(format!("smg_{name}_policy_branch_total"), "How choices came about");
                counters.insert(name, IntCounterVec::new(opts, &["branch"])?);
            }
            counters[name].with_label_values(&[branch]).inc_by(count);
        }
        if let Some(entries) = policy.entries() {
            if !gauges.contains_key(name) {
                let opts = Opts::new(format!("smg_{name}_policy_cache_entries"), "Keys or blocks remembered");
                gauges.insert(name, IntGauge::with_opts(opts)?);
            }
            gauges[name].add(i64::try_from(entries).unwrap_or(i64::MAX));
        }
    }
    let counters = counters.values().flat_map(Collector::collect);
    Ok(counters.chain(gauges.values().flat_map(Collector::collect)).collect())
}
