//! A gate for log lines that strangers can cause: one passes per interval, and says how many it stands for. *Pure.*

use std::time::{Duration, Instant};

pub(super) struct RateGate {
    interval: Duration,
    /// Closed until then.
    next: Option<Instant>,
    held_back: u64,
}

impl RateGate {
    pub fn new(interval: Duration) -> Self {
        Self { interval, next: None, held_back: 0 }
    }

    /// Whether an event at `now` may be told, and then how many before it were not.
    pub fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.next.is_some_and(|next| now < next) {
            self.held_back += 1;
            return None;
        }
        self.next = Some(now + self.interval);
        Some(std::mem::take(&mut self.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_per_interval_passes_and_says_how_many_were_held_back() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut gate = RateGate::new(Duration::from_secs(10));
        assert_eq!(gate.pass(at(0)), Some(0));
        let told = (1..10_000).filter(|ms| gate.pass(at(*ms)).is_some()).count();
        assert_eq!(told, 0);
        assert_eq!(gate.pass(at(10_000)), Some(9_999));
        assert_eq!(gate.pass(at(10_001)), None);
        assert_eq!(gate.pass(at(60_000)), Some(1));
    }
}
