//! What is counted of workers: who they are, how they do, what was picked, and what their breakers do. Nothing is kept here:
//! each look writes what the fleet knows, so that a worker that is gone has no series.

use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGaugeVec, Opts};

use crate::config::Role;
use crate::fleet::{Fleet, Outcome, Snapshot, State, Worker};

/// All series of a fleet as it is now.
pub(super) fn families(fleet: &Fleet) -> Result<Vec<MetricFamily>, prometheus::Error> {
    let snapshot = fleet.snapshot();
    let mut out = Vec::new();
    gauges(&snapshot, &mut out)?;
    pools(&snapshot, &mut out)?;
    breakers(&snapshot, &mut out)?;
    checks(fleet, &mut out)?;
    Ok(out)
}

fn counters(name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
    IntCounterVec::new(Opts::new(name, help), labels)
}

/// One gauge per worker.
fn gauges(snapshot: &Snapshot, out: &mut Vec<MetricFamily>) -> Result<(), prometheus::Error> {
    type Measure = fn(&Worker) -> i64;
    let all: [(&str, &str, Measure); 6] = [
        ("smg_worker_health", "1 is healthy", |w| w.is_healthy().into()),
        ("smg_worker_requests_active", "Legs that have not ended", |w| w.legs().into()),
        ("smg_worker_cb_state", "Circuit breaker: 0 closed, 1 open, 2 half open", |w| w.live().breaker_state() as i64),
        ("smg_worker_cb_consecutive_failures", "Failed legs in a row", |w| w.live().failures_in_a_row().into()),
        ("tandem_gateway_worker_draining", "1 is removed, with legs that have not ended", |w| w.is_draining().into()),
        ("tandem_gateway_worker_load_tokens", "Reported tokens and what was sent since; -1 is no report", |w| {
            w.load().tokens.map_or(-1, |tokens| i64::try_from(tokens).unwrap_or(i64::MAX))
        }),
    ];
    for (name, help, measure) in all {
        let family = IntGaugeVec::new(Opts::new(name, help), &["worker"])?;
        for worker in &snapshot.workers {
            family.with_label_values(&[worker.url()]).set(measure(worker));
        }
        out.extend(family.collect());
    }
    Ok(())
}

/// Sizes and picks of pools. Models are those that workers name.
fn pools(snapshot: &Snapshot, out: &mut Vec<MetricFamily>) -> Result<(), prometheus::Error> {
    let labels = ["worker_type", "connection_mode", "model"];
    let sizes = IntGaugeVec::new(Opts::new("smg_worker_pool_size", "Workers of a model"), &labels)?;
    let picks =
        counters("smg_worker_selection_total", "Picks", &["worker_type", "connection_mode", "model", "policy"])?;
    for pool in snapshot.pools() {
        for role in Role::ALL {
            let kind = role.worker_type();
            sizes.with_label_values(&[kind, "http", &pool.name]).set(pool.workers(role).len() as i64);
            let policy = pool.policy(role).name();
            picks.with_label_values(&[kind, "http", &pool.name, policy]).inc_by(pool.picks(role));
        }
    }
    out.extend(sizes.collect());
    out.extend(picks.collect());
    Ok(())
}

fn breakers(snapshot: &Snapshot, out: &mut Vec<MetricFamily>) -> Result<(), prometheus::Error> {
    let outcomes = counters("smg_worker_cb_outcomes_total", "Ends of legs", &["worker", "outcome"])?;
    let labels = ["worker", "from", "to"];
    let transitions = counters("smg_worker_cb_transitions_total", "Changes of circuit breakers", &labels)?;
    for worker in &snapshot.workers {
        for outcome in Outcome::ALL {
            outcomes.with_label_values(&[worker.url(), outcome.name()]).inc_by(worker.live().outcomes(outcome));
        }
        let pairs = State::ALL.into_iter().flat_map(|from| State::ALL.map(|to| (from, to)));
        for (from, to) in pairs {
            let count = worker.live().transitions(from, to);
            if count > 0 {
                transitions.with_label_values(&[worker.url(), from.name(), to.name()]).inc_by(count);
            }
        }
    }
    out.extend(outcomes.collect());
    out.extend(transitions.collect());
    Ok(())
}

fn checks(fleet: &Fleet, out: &mut Vec<MetricFamily>) -> Result<(), prometheus::Error> {
    let checks = counters("smg_worker_health_checks_total", "Health checks", &["worker_type", "result"])?;
    for role in Role::ALL {
        for (result, passed) in [("success", true), ("failure", false)] {
            checks.with_label_values(&[role.worker_type(), result]).inc_by(fleet.checks(role, passed));
        }
    }
    out.extend(checks.collect());
    Ok(())
}
