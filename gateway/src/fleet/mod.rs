//! The workers: who they are, how they do, how busy they are, and picking one. Sources (flags, REST, discovery) say who
//! belongs to the fleet, probes and real traffic say how each does. Requests hold a snapshot; picking one takes no lock.

mod breaker;
mod health;
mod learn;
mod live;
mod load;
mod pool;
pub mod probe;
mod registry;
mod worker;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::watch;

pub use breaker::{Rules, State};
pub use health::{Health, Thresholds};
pub use learn::Facts;
pub use live::Live;
pub use pool::{NoWorker, Pool, Snapshot, role_of};
pub use registry::{Change, Source};
pub use worker::{Outcome, Picked, Rank, Worker};

use crate::config::{Config, FleetConfig, PairConfig, Role, WorkerSpec};
use crate::pair::WorkerId;
use registry::Registry;

/// All workers.
#[derive(Debug)]
pub struct Fleet {
    current: ArcSwap<Snapshot>,
    registry: Mutex<Registry>,
    /// Counts the snapshots.
    changed: watch::Sender<u64>,
    config: FleetConfig,
    pair: PairConfig,
    /// Health checks by role, failed and passed.
    checks: [[AtomicU64; 2]; 3],
    /// Open legs of a removed worker may go on for this long.
    drain: Duration,
}

impl Fleet {
    pub fn new(config: &Config) -> Self {
        let fleet = Fleet {
            current: ArcSwap::default(),
            registry: Mutex::default(),
            changed: watch::Sender::new(0),
            checks: Default::default(),
            drain: config.fleet.drain.unwrap_or(config.deadlines.whole),
            config: config.fleet.clone(),
            pair: config.pair.clone(),
        };
        fleet.update(Source::Flags, config.fleet.workers.clone());
        fleet
    }

    /// The fleet as it is now.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// All workers that one source knows now; those that no source names any more drain.
    pub fn update(&self, source: Source, workers: Vec<WorkerSpec>) {
        self.edit(|registry| registry.name(source, workers));
    }

    /// An operator adds a worker.
    pub fn add(&self, worker: WorkerSpec) {
        self.edit(|registry| registry.add(worker));
    }

    /// An operator removes a worker, whichever source named it.
    pub fn remove(&self, url: &str) {
        self.edit(|registry| registry.remove(url));
    }

    /// An operator changes what is configured about a worker.
    pub fn change(&self, url: &str, change: Change) {
        self.edit(|registry| registry.change(url, change));
    }

    /// What the fleet knows of a worker now; `None` where it is gone.
    fn worker(&self, live: &Arc<Live>) -> Option<Arc<Worker>> {
        self.current.load().workers.iter().find(|worker| Arc::ptr_eq(&worker.live, live)).cloned()
    }

    fn count_check(&self, role: Role, passed: bool) {
        self.checks[role as usize][usize::from(passed)].fetch_add(1, Relaxed);
    }

    /// Health checks of workers of this role that passed, or failed.
    pub fn checks(&self, role: Role, passed: bool) -> u64 {
        self.checks[role as usize][usize::from(passed)].load(Relaxed)
    }

    fn learn(&self, id: WorkerId, facts: Facts) {
        let mut registry = self.lock();
        if registry.learn(id, facts) {
            self.publish(&mut registry);
        }
    }

    /// Forgets workers that have drained.
    fn sweep(&self) {
        self.edit(|_| {});
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registry> {
        self.registry.lock().expect("no panic under this lock")
    }

    fn edit(&self, edit: impl FnOnce(&mut Registry)) {
        let mut registry = self.lock();
        edit(&mut registry);
        self.publish(&mut registry);
    }

    fn publish(&self, registry: &mut Registry) {
        let before = self.current.load_full();
        let after = Arc::new(registry.snapshot(&self.config, &self.pair, &before));
        self.current.store(after.clone());
        pool::forget_gone(&before, &after);
        for worker in &after.workers {
            let known = before.workers.iter().any(|w| w.id() == worker.id());
            if !known {
                let role = worker.spec.role.worker_type();
                tracing::debug!(worker = worker.url(), role, "worker joins the fleet");
            }
        }
        self.changed.send_modify(|count| *count += 1);
    }
}

#[cfg(test)]
mod tests;
