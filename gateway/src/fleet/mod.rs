//! The workers: where they are, how they do, how busy they are, and picking one. Facts come from probes and from real
//! traffic; a pick is a policy's choice among those that may serve.

pub mod probe;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::sync::watch;

use crate::config::{Config, Role, WorkerSpec};
use crate::error::Side;
use crate::leg::Idle;
use crate::pair::{Ask, Candidate, Load, Policy, WorkerId};

/// Probes in a row without an answer, and no byte of a leg in between, before a worker counts as silent. Slow is not dead.
const MISSES_MAX: u32 = 3;
/// A rough size of a token in a request's body, for what was sent since the last report.
const BODY_BYTES_PER_TOKEN: u64 = 4;

/// How a worker does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Health {
    /// Not reached yet.
    Unknown,
    Healthy,
    /// It could not be reached; tried only where nobody healthy is left, so that it serves again as soon as it is back.
    Suspect(String),
    /// It may be there, but answers nothing (stopped, swapping, behind a broken network): its open legs fail, and it is not
    /// used until a probe is answered. That it can be connected to proves nothing, since the kernel does that for it.
    Silent(String),
    /// It is there and says that it is not ready.
    NotReady(String),
    /// Its role is not the one it was configured with; it is never used.
    WrongRole(String),
}

impl Health {
    /// Why it is not used.
    pub fn reason(&self) -> &str {
        match self {
            Health::Unknown => "not reached yet",
            Health::Healthy => "healthy",
            Health::Suspect(why) | Health::Silent(why) | Health::NotReady(why) | Health::WrongRole(why) => why,
        }
    }
}

/// One worker, for as long as it is configured.
#[derive(Debug)]
pub struct Worker {
    /// Who it is, for policies.
    id: WorkerId,
    pub spec: WorkerSpec,
    /// `host:port`, for the Host header.
    pub authority: String,
    /// Connections that wait for their next request.
    pub idle: Idle,
    /// Asked once after each time the worker came up, since a new process may have a new role.
    pub introduced: AtomicBool,
    health: Mutex<Health>,
    misses: AtomicU32,
    /// What its open legs watch.
    silent: watch::Sender<bool>,
    /// Learnt from the worker where it was not configured; 0 is unknown.
    learnt_bootstrap_port: AtomicU32,
    /// The last report; negative is none.
    reported_tokens: AtomicI64,
    sent_bytes_since: AtomicU64,
    legs: AtomicU32,
}

impl Worker {
    fn new(spec: WorkerSpec) -> Self {
        Worker {
            id: WorkerId::of(&spec.url),
            authority: format!("{}:{}", spec.host, spec.port),
            spec,
            idle: Idle::default(),
            introduced: AtomicBool::new(false),
            health: Mutex::new(Health::Unknown),
            misses: AtomicU32::new(0),
            silent: watch::Sender::new(false),
            learnt_bootstrap_port: AtomicU32::new(0),
            reported_tokens: AtomicI64::new(-1),
            sent_bytes_since: AtomicU64::new(0),
            legs: AtomicU32::new(0),
        }
    }

    pub fn url(&self) -> &str {
        &self.spec.url
    }

    pub fn health(&self) -> Health {
        self.health.lock().expect("no panic under this lock").clone()
    }

    pub fn is_healthy(&self) -> bool {
        *self.health.lock().expect("no panic under this lock") == Health::Healthy
    }

    fn set_health(&self, new: Health) {
        let mut health = self.health.lock().expect("no panic under this lock");
        if *health != new {
            match &new {
                Health::Healthy => tracing::info!(worker = self.url(), "worker is healthy"),
                other => tracing::warn!(worker = self.url(), reason = other.reason(), "worker is not healthy"),
            }
            self.silent.send_replace(matches!(new, Health::Silent(_)));
            *health = new;
        }
    }

    /// Returns once the worker is silent, at once if it is.
    pub async fn until_silent(&self) {
        // The sender is this worker's, so that waiting cannot fail.
        let _ = self.silent.subscribe().wait_for(|silent| *silent).await;
    }

    /// Probes it steadily answered so far.
    pub fn answers(&self) -> bool {
        self.is_healthy() && self.misses.load(Relaxed) == 0
    }

    /// A leg brought bytes: whoever sends them is not silent.
    pub fn note_alive(&self) {
        if self.misses.load(Relaxed) > 0 {
            self.misses.store(0, Relaxed);
        }
    }

    /// A connection succeeded: somebody listens. What a probe found out (silence, not ready, a wrong role) stays the probe's
    /// to change.
    pub fn note_connected(&self) {
        if matches!(self.health(), Health::Suspect(_) | Health::Unknown) {
            self.set_health(Health::Healthy);
        }
    }

    /// Nobody listens there. Its connections are gone, and a new process will introduce itself anew.
    pub fn note_unreachable(&self, why: &str) {
        self.introduced.store(false, Relaxed);
        self.idle.clear();
        self.set_health(Health::Suspect(why.to_owned()));
    }

    /// A probe got no answer in time. At the limit the connections are given up, and the worker introduces itself anew
    /// when it answers again, since it may be another process by then.
    pub fn note_missed(&self, why: &str) {
        if self.misses.fetch_add(1, Relaxed) + 1 >= MISSES_MAX {
            self.introduced.store(false, Relaxed);
            self.idle.clear();
            self.set_health(Health::Silent(format!("{why}, {MISSES_MAX} times in a row")));
        }
    }

    pub fn note_probe(&self, health: Health) {
        self.misses.store(0, Relaxed);
        self.set_health(health);
    }

    pub fn note_load(&self, tokens: Option<u64>) {
        self.sent_bytes_since.store(0, Relaxed);
        self.reported_tokens.store(tokens.map_or(-1, |t| t.min(i64::MAX as u64) as i64), Relaxed);
    }

    pub fn note_bootstrap_port(&self, port: u16) {
        self.learnt_bootstrap_port.store(port.into(), Relaxed);
    }

    pub fn bootstrap_port(&self) -> Option<u16> {
        let learnt = self.learnt_bootstrap_port.load(Relaxed) as u16;
        self.spec.bootstrap_port.or((learnt > 0).then_some(learnt))
    }

    pub fn legs(&self) -> u32 {
        self.legs.load(Relaxed)
    }

    pub fn load(&self) -> Load {
        let sent = self.sent_bytes_since.load(Relaxed) / BODY_BYTES_PER_TOKEN;
        let reported = u64::try_from(self.reported_tokens.load(Relaxed)).ok();
        Load { tokens: reported.map(|r| r.saturating_add(sent)), legs: self.legs() }
    }

    /// Counts a leg until the guard is dropped, which is when the leg really ended.
    pub fn begin_leg(self: &Arc<Self>, body_bytes: usize) -> LegGuard {
        self.sent_bytes_since.fetch_add(body_bytes as u64, Relaxed);
        self.legs.fetch_add(1, Relaxed);
        LegGuard(self.clone())
    }
}

/// One leg at a worker.
#[derive(Debug)]
pub struct LegGuard(Arc<Worker>);

impl LegGuard {
    pub fn worker(&self) -> &Arc<Worker> {
        &self.0
    }
}

impl Drop for LegGuard {
    fn drop(&mut self) {
        self.0.legs.fetch_sub(1, Relaxed);
    }
}

/// All workers and how to pick among them.
#[derive(Debug)]
pub struct Fleet {
    pub workers: Vec<Arc<Worker>>,
    /// Requests need one worker of each side.
    pub split: bool,
    prefill_policy: Arc<dyn Policy>,
    decode_policy: Arc<dyn Policy>,
}

impl Fleet {
    pub fn new(config: &Config) -> Self {
        Fleet {
            workers: config.fleet.workers.iter().cloned().map(|spec| Arc::new(Worker::new(spec))).collect(),
            split: config.fleet.split,
            prefill_policy: config.pair.prefill_policy.build(),
            decode_policy: config.pair.decode_policy.build(),
        }
    }

    /// The workers that can take this side's leg; plain workers take the decode leg.
    pub fn side(&self, side: Side) -> impl Iterator<Item = &Arc<Worker>> {
        self.workers.iter().filter(move |w| (w.spec.role == Role::Prefill) == (side == Side::Prefill))
    }

    pub fn policy(&self, side: Side) -> &dyn Policy {
        match side {
            Side::Prefill => &*self.prefill_policy,
            Side::Decode => &*self.decode_policy,
        }
    }

    /// What operators call this side.
    pub fn side_name(&self, side: Side) -> &'static str {
        match (side, self.split) {
            (Side::Prefill, _) => "prefill",
            (Side::Decode, true) => "decode",
            (Side::Decode, false) => "plain",
        }
    }

    /// A worker for this side: a healthy one by the policy, else one that may be back. `Err` says why there is none.
    pub fn pick(&self, side: Side, excluded: &[Arc<Worker>]) -> Result<Arc<Worker>, String> {
        let may = |w: &&Arc<Worker>| !excluded.iter().any(|e| Arc::ptr_eq(e, w));
        let healthy: Vec<_> = self.side(side).filter(may).filter(|w| w.is_healthy()).collect();
        let candidates = match healthy.is_empty() {
            false => healthy,
            true => {
                let maybe_back = |w: &&Arc<Worker>| matches!(w.health(), Health::Suspect(_) | Health::Unknown);
                self.side(side).filter(may).filter(maybe_back).collect()
            }
        };
        if candidates.is_empty() {
            return Err(self.reasons(side));
        }
        let asked: Vec<_> = candidates.iter().map(|w| Candidate { id: w.id, load: w.load() }).collect();
        let ask = Ask { text: None, prompt_bytes: 0, key: None, now: Instant::now() };
        let chosen = self.policy(side).choose(&ask, &asked, &mut rand::rng());
        Ok(candidates[chosen].clone())
    }

    /// Why each of a side's workers is as it is, for clients: once for all of which it holds.
    pub fn reasons_without_addresses(&self, side: Side) -> String {
        let reasons: BTreeSet<_> = self.side(side).map(|w| w.health().reason().to_owned()).collect();
        reasons.into_iter().collect::<Vec<_>>().join("; ")
    }

    /// The same for the log.
    pub fn reasons(&self, side: Side) -> String {
        let reasons: Vec<_> = self.side(side).map(|w| format!("{}: {}", w.url(), w.health().reason())).collect();
        reasons.join("; ")
    }

    /// Each side has a healthy worker.
    pub fn is_ready(&self) -> bool {
        let has = |side| self.side(side).any(|w| w.is_healthy());
        has(Side::Decode) && (!self.split || has(Side::Prefill))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;
    use futures_util::FutureExt;

    fn fleet() -> Fleet {
        let line = "--prefill http://p:1 --prefill http://q:1 --decode http://d:1 --policy round_robin";
        Fleet::new(&config(line).unwrap())
    }

    #[test]
    fn healthy_first_then_those_that_may_be_back() {
        let fleet = fleet();
        assert!(!fleet.is_ready());
        assert_eq!(fleet.pick(Side::Decode, &[]).unwrap().url(), "http://d:1");
        fleet.workers[1].note_probe(Health::Healthy);
        for _ in 0..4 {
            assert_eq!(fleet.pick(Side::Prefill, &[]).unwrap().url(), "http://q:1");
        }
        let excluded = [fleet.workers[1].clone()];
        assert_eq!(fleet.pick(Side::Prefill, &excluded).unwrap().url(), "http://p:1");
        fleet.workers[2].note_probe(Health::NotReady("starting".into()));
        assert!(fleet.pick(Side::Decode, &[]).unwrap_err().contains("starting"));
        fleet.workers[2].note_probe(Health::Healthy);
        assert!(fleet.is_ready());
    }

    #[test]
    fn a_connection_clears_a_suspicion_but_not_a_wrong_role() {
        let fleet = fleet();
        let worker = &fleet.workers[0];
        worker.note_unreachable("refused");
        worker.note_connected();
        assert!(worker.is_healthy());
        worker.note_probe(Health::WrongRole("it is a decode worker".into()));
        worker.note_connected();
        assert!(!worker.is_healthy());
    }

    #[test]
    fn one_missed_probe_is_not_death() {
        let fleet = fleet();
        let worker = &fleet.workers[0];
        worker.note_probe(Health::Healthy);
        worker.note_missed("slow");
        worker.note_missed("slow");
        assert!(worker.is_healthy() && !worker.answers());
        worker.note_alive();
        worker.note_missed("slow");
        worker.note_missed("slow");
        assert!(worker.is_healthy(), "it sent bytes in between");
        worker.note_missed("slow");
        assert!(!worker.is_healthy());
    }

    #[test]
    fn silence_is_not_broken_by_a_connection_but_by_an_answer() {
        let fleet = fleet();
        let worker = &fleet.workers[2];
        worker.note_probe(Health::Healthy);
        for _ in 0..MISSES_MAX {
            assert!(worker.until_silent().now_or_never().is_none());
            worker.note_connected();
            worker.note_missed("no answer");
        }
        worker.note_connected();
        assert!(worker.until_silent().now_or_never().is_some(), "legs that begin now are told, too");
        assert!(fleet.pick(Side::Decode, &[]).unwrap_err().contains("no answer, 3 times in a row"));
        worker.note_probe(Health::Healthy);
        assert!(worker.until_silent().now_or_never().is_none());
        assert!(fleet.pick(Side::Decode, &[]).is_ok());
    }

    #[test]
    fn load_counts_what_was_sent_since_and_legs_end_by_drop() {
        let fleet = fleet();
        let worker = &fleet.workers[0];
        worker.note_load(Some(100));
        let leg = worker.begin_leg(40);
        assert_eq!(worker.load(), Load { tokens: Some(110), legs: 1 });
        drop(leg);
        worker.note_load(None);
        assert_eq!(worker.load(), Load { tokens: None, legs: 0 });
    }
}
