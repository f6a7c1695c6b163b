//! A worker's circuit breaker: after failures in a row, or when half of what ended within a window failed, the worker gets
//! no legs for a moment; then it gets exactly one, whose end decides. *Pure*: time and jitter come in.
//!
//! ```text
//!            failures in a row, or half of a window's ends
//!   Closed ────────────────────────────────────────────────▶ Open ◀───────────┐
//!     ▲                                                        │ its time is   │ a trial failed:
//!     │                                                        ▼ over          │ twice the time
//!     └────────────────── trials went well ────────────────── HalfOpen ────────┘
//! ```
//! Only a trial's end counts while half open, and nothing counts while open: legs that began before say nothing new. One
//! that opens again soon after it closed goes on with the longer time.

use std::time::{Duration, Instant};

const BUCKETS: usize = 10;
/// The rate is judged from this many times the failures in a row that would open by themselves.
const RATE_ENDS_PER_THRESHOLD: u32 = 2;
/// A waiting time is spread by this share to both sides, so that gateways do not try in step.
const JITTER: f64 = 0.2;

/// When to open, and for how long.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rules {
    pub failures_in_a_row: u32,
    /// Trials in a row that must go well.
    pub trials: u32,
    pub open_first: Duration,
    pub open_max: Duration,
    pub window: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Closed,
    Open,
    HalfOpen,
}

impl State {
    pub const ALL: [State; 3] = [State::Closed, State::Open, State::HalfOpen];

    pub fn name(self) -> &'static str {
        match self {
            State::Closed => "closed",
            State::Open => "open",
            State::HalfOpen => "half_open",
        }
    }
}

/// Entitles one leg to be the trial of a half open breaker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trial(u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    Free,
    Trial(Trial),
    Refused,
}

#[derive(Clone, Debug)]
enum Phase {
    Closed {
        /// When it last closed, and how long it had been told to wait.
        closed: Option<(Instant, Duration)>,
    },
    Open {
        until: Instant,
        wait: Duration,
    },
    HalfOpen {
        running: Option<Trial>,
        good: u32,
        wait: Duration,
    },
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Breaker {
    rules: Rules,
    phase: Phase,
    in_a_row: u32,
    trials_begun: u64,
    window: Window,
}

impl Breaker {
    pub fn new(rules: Rules, now: Instant) -> Self {
        Breaker {
            rules,
            phase: Phase::Closed { closed: None },
            in_a_row: 0,
            trials_begun: 0,
            window: Window::new(rules.window, now),
        }
    }

    pub fn state(&self) -> State {
        match self.phase {
            Phase::Closed { .. } => State::Closed,
            Phase::Open { .. } => State::Open,
            Phase::HalfOpen { .. } => State::HalfOpen,
        }
    }

    pub fn failures_in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// How long no leg is let through.
    pub fn opens_in(&self, now: Instant) -> Duration {
        match self.phase {
            Phase::Open { until, .. } => until.saturating_duration_since(now),
            _ => Duration::ZERO,
        }
    }

    /// Whether [`Breaker::admit`] would let a leg through.
    pub fn admits(&self, now: Instant) -> bool {
        match self.phase {
            Phase::Closed { .. } => true,
            Phase::Open { until, .. } => now >= until,
            Phase::HalfOpen { running, .. } => running.is_none(),
        }
    }

    /// Lets a leg through, as a trial where the breaker is not closed.
    pub fn admit(&mut self, now: Instant) -> Admission {
        let (good, wait) = match self.phase {
            Phase::Closed { .. } => return Admission::Free,
            Phase::Open { until, wait } if now >= until => (0, wait),
            Phase::HalfOpen { running: None, good, wait } => (good, wait),
            Phase::Open { .. } | Phase::HalfOpen { .. } => return Admission::Refused,
        };
        self.trials_begun += 1;
        let trial = Trial(self.trials_begun);
        self.phase = Phase::HalfOpen { running: Some(trial), good, wait };
        Admission::Trial(trial)
    }

    /// A trial's leg ended without a word: another one may try.
    pub fn give_back(&mut self, trial: Trial) {
        if let Phase::HalfOpen { running, .. } = &mut self.phase
            && *running == Some(trial)
        {
            *running = None;
        }
    }

    /// A leg did well (`good`) or failed. `jitter` is in [0, 1).
    pub fn record(&mut self, now: Instant, good: bool, trial: Option<Trial>, jitter: f64) {
        match self.phase {
            Phase::Closed { closed } => {
                self.window.count(now, good);
                self.in_a_row = if good { 0 } else { self.in_a_row + 1 };
                if !good && self.is_too_much() {
                    let soon = |(at, _): &(Instant, Duration)| now.duration_since(*at) < self.rules.window;
                    let wait = closed.filter(soon).map_or(self.rules.open_first, |(_, wait)| wait * 2);
                    self.open(now, wait, jitter);
                }
            }
            Phase::HalfOpen { running, good: so_far, wait } if running.is_some() && running == trial => match good {
                false => self.open(now, wait * 2, jitter),
                true if so_far + 1 >= self.rules.trials => {
                    self.in_a_row = 0;
                    self.window = Window::new(self.rules.window, now);
                    self.phase = Phase::Closed { closed: Some((now, wait)) };
                }
                true => self.phase = Phase::HalfOpen { running: None, good: so_far + 1, wait },
            },
            Phase::Open { .. } | Phase::HalfOpen { .. } => {}
        }
    }

    fn is_too_much(&self) -> bool {
        let (good, failed) = self.window.totals();
        let enough = good + failed >= self.rules.failures_in_a_row.saturating_mul(RATE_ENDS_PER_THRESHOLD);
        self.in_a_row >= self.rules.failures_in_a_row || (enough && failed >= good)
    }

    fn open(&mut self, now: Instant, wait: Duration, jitter: f64) {
        let wait = wait.min(self.rules.open_max);
        let spread = wait.mul_f64(1.0 - JITTER + 2.0 * JITTER * jitter);
        self.phase = Phase::Open { until: now + spread, wait };
    }
}

/// Ends within a sliding window, in buckets of a tenth of it.
#[derive(Clone, Debug)]
struct Window {
    bucket: Duration,
    began: Instant,
    /// The bucket that `began` and the present bucket are apart.
    present: u128,
    counts: [(u32, u32); BUCKETS],
}

impl Window {
    fn new(length: Duration, now: Instant) -> Self {
        let bucket = (length / BUCKETS as u32).max(Duration::from_millis(1));
        Window { bucket, began: now, present: 0, counts: [(0, 0); BUCKETS] }
    }

    fn count(&mut self, now: Instant, good: bool) {
        let at = now.saturating_duration_since(self.began).as_nanos() / self.bucket.as_nanos();
        let passed = at.saturating_sub(self.present).min(BUCKETS as u128);
        for step in 1..=passed {
            self.counts[((self.present + step) % BUCKETS as u128) as usize] = (0, 0);
        }
        self.present = self.present.max(at);
        let counts = &mut self.counts[(self.present % BUCKETS as u128) as usize];
        match good {
            true => counts.0 = counts.0.saturating_add(1),
            false => counts.1 = counts.1.saturating_add(1),
        }
    }

    fn totals(&self) -> (u32, u32) {
        self.counts.iter().fold((0, 0), |(g, f), (good, failed)| (g.saturating_add(*good), f.saturating_add(*failed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIDDLE: f64 = 0.5;

    fn rules() -> Rules {
        Rules {
            failures_in_a_row: 3,
            trials: 1,
            open_first: Duration::from_secs(1),
            open_max: Duration::from_secs(4),
            window: Duration::from_secs(10),
        }
    }

    struct Clock(Instant);

    impl Clock {
        fn after(&mut self, millis: u64) -> Instant {
            self.0 += Duration::from_millis(millis);
            self.0
        }
    }

    fn opened() -> (Breaker, Clock) {
        let mut clock = Clock(Instant::now());
        let mut breaker = Breaker::new(rules(), clock.0);
        for _ in 0..3 {
            breaker.record(clock.after(1), false, None, MIDDLE);
        }
        assert_eq!(breaker.state(), State::Open);
        (breaker, clock)
    }

    fn trial(breaker: &mut Breaker, now: Instant) -> Trial {
        match breaker.admit(now) {
            Admission::Trial(trial) => trial,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn failures_in_a_row_open_and_a_good_end_starts_the_count_over() {
        let mut clock = Clock(Instant::now());
        let mut breaker = Breaker::new(rules(), clock.0);
        for good in [true, true, true, true, true, false, false, true, false, false] {
            breaker.record(clock.after(1), good, None, MIDDLE);
            assert_eq!((breaker.state(), breaker.admit(clock.0)), (State::Closed, Admission::Free));
        }
        breaker.record(clock.after(1), false, None, MIDDLE);
        assert_eq!((breaker.state(), breaker.admit(clock.0)), (State::Open, Admission::Refused));
    }

    #[test]
    fn half_of_a_windows_ends_open_and_old_ends_are_forgotten() {
        let mut clock = Clock(Instant::now());
        let mut breaker = Breaker::new(rules(), clock.0);
        for good in [true, false, true, false, true] {
            breaker.record(clock.after(1), good, None, MIDDLE);
        }
        let mut later = breaker.clone();
        breaker.record(clock.after(1), false, None, MIDDLE);
        assert_eq!(breaker.state(), State::Open, "3 of 6 failed");
        later.record(clock.after(11_000), false, None, MIDDLE);
        assert_eq!(later.state(), State::Closed, "1 of 1 in this window");
    }

    #[test]
    fn exactly_one_trial_runs_and_its_end_decides() {
        let (mut breaker, mut clock) = opened();
        assert!(!breaker.admits(clock.after(900)));
        assert!(breaker.admits(clock.after(200)));
        let first = trial(&mut breaker, clock.0);
        assert_eq!((breaker.state(), breaker.admit(clock.0)), (State::HalfOpen, Admission::Refused));
        breaker.record(clock.0, true, None, MIDDLE);
        assert_eq!(breaker.state(), State::HalfOpen, "an older leg's end is no trial's");
        breaker.record(clock.0, true, Some(first), MIDDLE);
        assert_eq!((breaker.state(), breaker.admit(clock.0)), (State::Closed, Admission::Free));
    }

    #[test]
    fn a_trial_without_a_word_makes_room_for_the_next() {
        let (mut breaker, mut clock) = opened();
        let first = trial(&mut breaker, clock.after(1100));
        breaker.give_back(first);
        let second = trial(&mut breaker, clock.0);
        assert_ne!(first, second);
        breaker.record(clock.0, false, Some(first), MIDDLE);
        breaker.give_back(first);
        assert_eq!(
            (breaker.state(), breaker.admits(clock.0)),
            (State::HalfOpen, false),
            "the first is not the trial now"
        );
    }

    #[test]
    fn failed_trials_double_the_time_up_to_its_bound() {
        let (mut breaker, mut clock) = opened();
        for expected in [1000, 2000, 4000, 4000] {
            assert_eq!(breaker.opens_in(clock.0).as_millis(), expected);
            let trial = trial(&mut breaker, clock.after(expected as u64));
            breaker.record(clock.0, false, Some(trial), MIDDLE);
        }
    }

    #[test]
    fn one_that_opens_again_soon_goes_on_with_the_longer_time() {
        let (mut breaker, mut clock) = opened();
        let first = trial(&mut breaker, clock.after(1000));
        breaker.record(clock.0, true, Some(first), MIDDLE);
        let mut calm = breaker.clone();
        for _ in 0..3 {
            breaker.record(clock.after(1), false, None, MIDDLE);
        }
        assert_eq!(breaker.opens_in(clock.0).as_millis(), 2000);
        clock.after(20_000);
        for _ in 0..3 {
            calm.record(clock.0, false, None, MIDDLE);
        }
        assert_eq!(calm.opens_in(clock.0).as_millis(), 1000);
    }

    #[test]
    fn several_trials_may_be_wanted_and_jitter_stays_in_its_share() {
        let mut clock = Clock(Instant::now());
        let mut breaker = Breaker::new(Rules { trials: 2, failures_in_a_row: 1, ..rules() }, clock.0);
        breaker.record(clock.0, false, None, 0.0);
        assert_eq!(breaker.opens_in(clock.0).as_millis(), 800);
        for expected in [State::HalfOpen, State::Closed] {
            let trial = trial(&mut breaker, clock.after(1000));
            breaker.record(clock.0, true, Some(trial), MIDDLE);
            assert_eq!(breaker.state(), expected);
        }
        breaker.record(clock.0, false, None, 0.999_999);
        assert!(breaker.opens_in(clock.0) <= Duration::from_millis(2400));
    }
}
