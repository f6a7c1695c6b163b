//! One candidate after the other. *Pure.*

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rand::RngCore;

use super::{Ask, Candidate, Policy};
use crate::config::PairConfig;

#[derive(Debug, Default)]
pub struct RoundRobin {
    turn: AtomicUsize,
}

impl RoundRobin {
    pub fn new(_: &PairConfig) -> Self {
        RoundRobin::default()
    }
}

impl Policy for RoundRobin {
    fn name(&self) -> &'static str {
        "round_robin"
    }

    fn choose(&self, _: &Ask, candidates: &[Candidate], _: &mut dyn RngCore) -> usize {
        self.turn.fetch_add(1, Relaxed) % candidates.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::tests::{ask, dice, idle};

    #[test]
    fn takes_turns() {
        let (policy, workers) = (RoundRobin::default(), idle(3));
        let picks: Vec<_> = (0..6).map(|_| policy.choose(&ask(), &workers, &mut dice())).collect();
        assert_eq!(picks, [0, 1, 2, 0, 1, 2]);
    }
}
