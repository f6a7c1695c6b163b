//! Whether a request is tried again, and after which pause. *Pure* but for the shared budget's counter: chance comes in.
//!
//! | what failed, before any byte of an answer | tried again |
//! |---|---|
//! | a reused connection was dead, no byte of a response | once, at once, on fresh connections |
//! | a worker broke off, fell silent, or answered like 502, 503, 504 | with another pair, after a pause, within the budget |
//! | the client's own mistakes, 429, deadlines | never |

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use crate::config::Retries;
use crate::error::{Failure, Retry};

/// What one further try costs, in hundredths: as much as a hundred requests of one percent bring in.
const TRY: u32 = 100;
/// The budget of a gateway that has been quiet.
const BUDGET_MAX: u32 = 10 * TRY;

/// The tries that all requests share: each request brings in its percents, each further try takes a whole one, so that
/// a fleet in trouble gets little more load than it had.
#[derive(Debug)]
pub struct Budget(AtomicU32);

impl Default for Budget {
    fn default() -> Self {
        Budget(AtomicU32::new(BUDGET_MAX))
    }
}

impl Budget {
    /// A request arrived.
    pub fn earn(&self, percent: u32) {
        // A full budget is the usual state, and costs no write to shared memory.
        if self.0.load(Relaxed) < BUDGET_MAX {
            let _ = self.0.fetch_update(Relaxed, Relaxed, |had| Some((had + percent).min(BUDGET_MAX)));
        }
    }

    fn spend(&self) -> bool {
        self.0.fetch_update(Relaxed, Relaxed, |had| had.checked_sub(TRY)).is_ok()
    }
}

/// How often one request was tried.
#[derive(Clone, Copy, Default, Debug)]
pub struct Tries {
    /// Further pairs so far.
    pub further: u32,
    resent: bool,
}

/// How the next try goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Again {
    pub pause: Duration,
    /// No connection from the pool.
    pub fresh: bool,
}

impl Tries {
    /// `None`: the failure is the request's outcome. `dice` is from 0 to 1.
    pub fn again(&mut self, settings: &Retries, budget: &Budget, failure: &Failure, dice: f64) -> Option<Again> {
        let stale = failure.retry == Retry::StaleConnection;
        if stale && !self.resent {
            self.resent = true;
            return Some(Again { pause: Duration::ZERO, fresh: true });
        }
        let allowed = failure.retry != Retry::Never && settings.resend && self.further < settings.max;
        if !allowed || !budget.spend() {
            return None;
        }
        self.further += 1;
        Some(Again { pause: pause(settings, self.further, dice), fresh: stale })
    }
}

/// The pause before the `nth` further try, counted from 1.
fn pause(settings: &Retries, nth: u32, dice: f64) -> Duration {
    let grown = settings.initial_backoff.as_secs_f64() * settings.multiplier.powi(nth.min(1000) as i32 - 1);
    let bounded = grown.min(settings.max_backoff.as_secs_f64());
    Duration::from_secs_f64(bounded * (1.0 + settings.jitter * (2.0 * dice - 1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;
    use crate::error::Side;
    use bytes::Bytes;

    fn settings(flags: &str) -> Retries {
        config(&format!("--worker-urls http://x:1 {flags}")).unwrap().retries
    }

    fn refused(status: u16) -> Failure {
        Failure::refused(Side::Decode, status, Bytes::new(), None)
    }

    #[test]
    fn pauses_grow_to_their_bound_and_jitter() {
        let settings = settings("--retry-max-backoff-ms 100");
        let millis = |nth, dice| pause(&settings, nth, dice).as_millis();
        assert_eq!([1, 2, 3, 4].map(|nth| millis(nth, 0.5)), [50, 75, 100, 100]);
        assert_eq!([0.0, 1.0].map(|dice| millis(1, dice)), [40, 60]);
        assert_eq!(millis(u32::MAX, 0.5), 100);
    }

    #[test]
    fn only_a_workers_trouble_is_tried_again() {
        let (settings, budget) = (settings(""), Budget::default());
        for (status, again) in [(400, false), (413, false), (422, false), (429, false), (500, false), (501, false)]
            .into_iter()
            .chain([(502, true), (503, true), (504, true)])
        {
            let tried = Tries::default().again(&settings, &budget, &refused(status), 0.5);
            assert_eq!(tried.is_some(), again, "{status}");
        }
        let silent = Failure::silent(Side::Prefill, "w", "no answer");
        assert!(Tries::default().again(&settings, &budget, &silent, 0.5).is_some());
    }

    #[test]
    fn tries_end_at_the_maximum_and_a_resend_is_free_once() {
        let (settings, budget) = (settings("--retry-max-retries 2"), Budget::default());
        let stale = Failure::transport(Side::Decode, "w", "closed", true);
        let mut tries = Tries::default();
        let resend = tries.again(&settings, &budget, &stale, 0.5).unwrap();
        assert_eq!(resend, Again { pause: Duration::ZERO, fresh: true });
        for expected in [true, true, false] {
            assert_eq!(tries.again(&settings, &budget, &stale, 0.5).is_some(), expected);
        }
        assert_eq!(budget.0.load(Relaxed), BUDGET_MAX - 2 * TRY);
    }

    #[test]
    fn without_retries_only_the_free_resend_is_left() {
        let (settings, budget) = (settings("--disable-retries"), Budget::default());
        assert!(Tries::default().again(&settings, &budget, &refused(503), 0.5).is_none());
        let stale = Failure::transport(Side::Decode, "w", "closed", true);
        assert!(Tries::default().again(&settings, &budget, &stale, 0.5).is_some());
    }

    #[test]
    fn a_fleet_in_trouble_gets_at_most_a_tenth_more() {
        let (settings, budget) = (settings(""), Budget::default());
        let mut further = 0;
        for _ in 0..1000 {
            budget.earn(settings.budget_percent);
            let mut tries = Tries::default();
            while tries.again(&settings, &budget, &refused(503), 0.5).is_some() {
                further += 1;
            }
        }
        assert!((100..=110).contains(&further), "{further}");
    }
}
