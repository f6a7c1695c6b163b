//! Two candidates at random, the less loaded of them: nearly as even as always taking the least loaded, without every gateway
//! rushing at the same worker when a load report is old. *Pure.*

use rand::RngCore;

use super::{Ask, Candidate, Policy, below};
use crate::config::PairConfig;

#[derive(Debug)]
pub struct PowerOfTwo;

impl PowerOfTwo {
    pub fn new(_: &PairConfig) -> Self {
        PowerOfTwo
    }
}

impl Policy for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power_of_two"
    }

    fn choose(&self, _: &Ask, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize {
        let first = below(candidates.len(), dice);
        if candidates.len() == 1 {
            return first;
        }
        let second = (first + 1 + below(candidates.len() - 1, dice)) % candidates.len();
        if candidates[second].load.is_less(candidates[first].load) { second } else { first }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::tests::{ask, dice, legs, tokens, workers};

    #[test]
    fn of_two_always_the_less_loaded() {
        let (workers, mut dice) = (workers([tokens(1_000_000), tokens(0)]), dice());
        assert!((0..100).all(|_| PowerOfTwo.choose(&ask(), &workers, &mut dice) == 1));
    }

    #[test]
    fn by_legs_where_a_worker_reports_nothing() {
        let (workers, mut dice) = (workers([legs(5), tokens(1_000_000)]), dice());
        assert!((0..100).all(|_| PowerOfTwo.choose(&ask(), &workers, &mut dice) == 1));
    }

    #[test]
    fn the_busiest_is_never_chosen_and_ties_are_even() {
        let (workers, mut dice) = (workers([tokens(0), tokens(9), tokens(0), tokens(0)]), dice());
        let mut counts = [0; 4];
        for _ in 0..3000 {
            counts[PowerOfTwo.choose(&ask(), &workers, &mut dice)] += 1;
        }
        assert_eq!(counts[1], 0);
        assert!([0, 2, 3].iter().all(|&i| (850..1150).contains(&counts[i])), "{counts:?}");
    }
}
