//! How a worker does, whatever its sources say of it now: health, breaker, connections, legs, and what its open legs must
//! know. Shared by all snapshots' values of the worker.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use xxhash_rust::xxh3::xxh3_128;

use crate::fleet::breaker::{Admission, Breaker, Rules, State, Trial};
use crate::fleet::health::{Health, Standing, Thresholds, Vitals};
use crate::fleet::worker::Outcome;
use crate::leg::Idle;
use crate::pair::WorkerId;

/// Why open legs of a worker end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// It answers nothing.
    Silent,
    /// It was removed and had its time.
    Removed,
}

/// How a worker does, over all snapshots.
#[derive(Debug)]
pub struct Live {
    pub id: WorkerId,
    pub uuid: String,
    pub url: String,
    /// Connections that wait for their next request.
    pub idle: Idle,
    /// Asked once after each time the worker came up, since a new process may have a new role.
    pub(super) introduced: AtomicBool,
    /// It was met in the role it is configured with, so that another one later is a change and not a mistake.
    pub(super) agreed: AtomicBool,
    vitals: Mutex<Vitals>,
    /// The vitals' health, for picks.
    standing: AtomicU8,
    /// Probes are unanswered, so that bytes are news.
    missing: AtomicBool,
    breaker: Option<Mutex<Breaker>>,
    /// The breaker is not closed.
    tripped: AtomicBool,
    outcomes: [AtomicU64; 3],
    transitions: [[AtomicU64; 3]; 3],
    legs: AtomicU32,
    /// As `draining`, for picks.
    closing: AtomicBool,
    draining: watch::Sender<bool>,
    idle_again: Notify,
    /// What its open legs watch.
    cut: watch::Sender<Option<Cut>>,
}

impl Live {
    pub(super) fn new(url: &str, thresholds: Thresholds, breaker: Option<Rules>) -> Self {
        Live {
            id: WorkerId::of(url),
            uuid: uuid_of(url),
            url: url.to_owned(),
            idle: Idle::default(),
            introduced: AtomicBool::new(false),
            agreed: AtomicBool::new(false),
            vitals: Mutex::new(Vitals::new(thresholds)),
            standing: AtomicU8::new(Standing::MaybeBack as u8),
            missing: AtomicBool::new(false),
            breaker: breaker.map(|rules| Mutex::new(Breaker::new(rules, Instant::now()))),
            tripped: AtomicBool::new(false),
            outcomes: Default::default(),
            transitions: Default::default(),
            legs: AtomicU32::new(0),
            closing: AtomicBool::new(false),
            draining: watch::Sender::new(false),
            idle_again: Notify::new(),
            cut: watch::Sender::new(None),
        }
    }

    pub(super) fn health(&self) -> Health {
        self.vitals().health().clone()
    }

    fn vitals(&self) -> MutexGuard<'_, Vitals> {
        self.vitals.lock().expect("no panic under this lock")
    }

    pub fn standing(&self) -> Standing {
        match self.standing.load(Relaxed) {
            0 => Standing::Healthy,
            1 => Standing::MaybeBack,
            _ => Standing::Unfit,
        }
    }

    /// Changes the vitals and tells who must know.
    fn change<T>(&self, change: impl FnOnce(&mut Vitals) -> T) -> T {
        let mut vitals = self.vitals();
        let before = vitals.health().clone();
        let result = change(&mut vitals);
        self.missing.store(vitals.misses() > 0, Relaxed);
        let health = vitals.health();
        if *health != before {
            match health {
                Health::Healthy => tracing::info!(worker = self.url, "worker is healthy"),
                other => tracing::warn!(worker = self.url, reason = other.reason(), "worker is not healthy"),
            }
            self.standing.store(health.standing() as u8, Relaxed);
            let silent = matches!(health, Health::Silent(_));
            self.cut.send_if_modified(|cut| match (&cut, silent) {
                (Some(Cut::Removed), _) => false,
                _ => std::mem::replace(cut, silent.then_some(Cut::Silent)).is_some() != silent,
            });
        }
        result
    }

    /// Probes it steadily answered so far.
    pub(super) fn answers(&self) -> bool {
        self.standing() == Standing::Healthy && !self.missing.load(Relaxed)
    }

    /// A leg brought bytes: whoever sends them is not silent.
    pub fn note_alive(&self) {
        if self.missing.load(Relaxed) {
            self.change(Vitals::alive);
        }
    }

    /// A connection succeeded.
    pub fn note_connected(&self) {
        if self.standing() == Standing::MaybeBack {
            self.change(Vitals::connected);
        }
    }

    /// Nobody listens there. Its connections are gone, and a new process will introduce itself anew.
    pub fn note_unreachable(&self, why: &str) {
        self.introduced.store(false, Relaxed);
        self.idle.clear();
        self.change(|vitals| vitals.unreachable(why));
    }

    /// A probe got no answer in time. At the limit the connections are given up, and the worker introduces itself anew
    /// when it answers again, since it may be another process by then.
    pub(super) fn note_missed(&self, why: &str) {
        if self.change(|vitals| vitals.missed(why)) {
            self.introduced.store(false, Relaxed);
            self.idle.clear();
        }
    }

    pub(super) fn note_answered(&self) {
        self.change(Vitals::answered);
    }

    /// It says itself that it must not be used.
    pub(super) fn note_declined(&self, health: Health) {
        self.introduced.store(false, Relaxed);
        self.change(|vitals| vitals.declined(health));
    }

    pub fn is_draining(&self) -> bool {
        self.closing.load(SeqCst)
    }

    /// New legs are welcome, as far as health and breaker tell.
    pub(super) fn admits(&self) -> bool {
        !self.is_draining() && (!self.tripped.load(Relaxed) || self.breaker_of(|b| b.admits(Instant::now()), true))
    }

    /// `None` is no; a trial where the breaker tries the worker.
    pub(super) fn admit(&self) -> Option<Option<Trial>> {
        if !self.tripped.load(Relaxed) {
            return Some(None);
        }
        match self.with_breaker(|breaker| breaker.admit(Instant::now())) {
            Admission::Free => Some(None),
            Admission::Trial(trial) => Some(Some(trial)),
            Admission::Refused => None,
        }
    }

    pub(super) fn record(&self, outcome: Outcome, trial: Option<Trial>) {
        self.outcomes[outcome as usize].fetch_add(1, Relaxed);
        let good = match outcome {
            Outcome::Good => true,
            Outcome::Failed => false,
            Outcome::Neutral => return,
        };
        self.with_breaker(|breaker| {
            breaker.record(Instant::now(), good, trial, rand::random());
            Admission::Free
        });
    }

    /// Asks or changes the breaker, and counts and tells its transitions.
    fn with_breaker(&self, change: impl FnOnce(&mut Breaker) -> Admission) -> Admission {
        let Some(breaker) = &self.breaker else { return Admission::Free };
        let mut breaker = breaker.lock().expect("no panic under this lock");
        let before = breaker.state();
        let admission = change(&mut breaker);
        let after = breaker.state();
        if before != after {
            self.transitions[before as usize][after as usize].fetch_add(1, Relaxed);
            self.tripped.store(after != State::Closed, Relaxed);
            let (from, to) = (before.name(), after.name());
            let secs = breaker.opens_in(Instant::now()).as_secs_f64();
            match after {
                State::Open => tracing::warn!(worker = self.url, from, secs, "its legs fail: circuit breaker opens"),
                State::HalfOpen | State::Closed => tracing::info!(worker = self.url, from, to, "circuit breaker"),
            }
        }
        admission
    }

    fn breaker_of<T>(&self, ask: impl FnOnce(&Breaker) -> T, without: T) -> T {
        match &self.breaker {
            Some(breaker) => ask(&breaker.lock().expect("no panic under this lock")),
            None => without,
        }
    }

    pub fn breaker_state(&self) -> State {
        self.breaker_of(Breaker::state, State::Closed)
    }

    pub fn failures_in_a_row(&self) -> u32 {
        self.breaker_of(Breaker::failures_in_a_row, 0)
    }

    /// How long the breaker lets no leg through.
    pub(super) fn opens_in(&self) -> Duration {
        self.breaker_of(|breaker| breaker.opens_in(Instant::now()), Duration::ZERO)
    }

    pub fn outcomes(&self, outcome: Outcome) -> u64 {
        self.outcomes[outcome as usize].load(Relaxed)
    }

    pub fn transitions(&self, from: State, to: State) -> u64 {
        self.transitions[from as usize][to as usize].load(Relaxed)
    }

    /// Why it gets no leg, in words.
    pub(super) fn reason(&self) -> String {
        if self.is_draining() {
            return "it was removed and drains".into();
        }
        let health = self.health();
        match self.breaker_state() {
            State::Closed => health.reason().to_owned(),
            _ if health.standing() == Standing::Unfit => health.reason().to_owned(),
            State::Open => "its circuit breaker is open, since its legs failed".into(),
            State::HalfOpen => "its circuit breaker is half open, and its trial runs".into(),
        }
    }

    /// No new legs, or new ones again.
    pub(super) fn drain(&self, draining: bool) {
        self.closing.store(draining, SeqCst);
        if !draining {
            self.cut.send_if_modified(|cut| cut.take_if(|cut| *cut == Cut::Removed).is_some());
        }
        self.draining.send_if_modified(|now| std::mem::replace(now, draining) != draining);
    }

    /// Returns once `draining` is as wanted.
    pub(super) async fn until_draining(&self, wanted: bool) {
        // The sender is this worker's, so that waiting cannot fail.
        let _ = self.draining.subscribe().wait_for(|draining| *draining == wanted).await;
    }

    /// Returns once no leg is left, while it drains.
    pub(super) async fn until_idle(&self) {
        loop {
            let changed = self.idle_again.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.legs.load(SeqCst) == 0 {
                return;
            }
            changed.await;
        }
    }

    /// Counts one more leg.
    pub(super) fn begin_leg(&self) {
        self.legs.fetch_add(1, SeqCst);
    }

    /// A leg has ended; `trial` is what the breaker gave it.
    pub(super) fn end_leg(&self, trial: Option<Trial>) {
        if let (Some(trial), Some(breaker)) = (trial, &self.breaker) {
            breaker.lock().expect("no panic under this lock").give_back(trial);
        }
        if self.legs.fetch_sub(1, SeqCst) == 1 && self.is_draining() {
            self.idle_again.notify_waiters();
        }
    }

    /// Returns once its open legs must end, at once if they must.
    pub(super) async fn until_cut(&self) -> Cut {
        // The sender is this worker's, so that waiting cannot fail.
        let cut = self.cut.subscribe().wait_for(Option::is_some).await.map_or(None, |cut| *cut);
        cut.unwrap_or(Cut::Removed)
    }

    pub(super) fn legs(&self) -> u32 {
        self.legs.load(SeqCst)
    }

    /// It was removed and had its time: its open legs end now.
    pub(super) fn cut_removed(&self) {
        self.cut.send_replace(Some(Cut::Removed));
    }

    /// The next introduction must be in the role it is configured with.
    pub(super) fn meet_again(&self) {
        self.introduced.store(false, Relaxed);
        self.agreed.store(false, Relaxed);
    }
}

/// Derived from the URL, in the form of a UUID (version 8).
fn uuid_of(url: &str) -> String {
    let hash = xxh3_128(url.as_bytes());
    let hex = format!("{:032x}", hash & !(0xf << 76) & !(0x3 << 62) | (0x8 << 76) | (0x2 << 62));
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
