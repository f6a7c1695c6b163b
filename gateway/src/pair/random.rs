//! Any candidate, each as likely. *Pure.*

use rand::RngCore;

use super::{Ask, Candidate, Policy, below};
use crate::config::PairConfig;

#[derive(Debug)]
pub struct Random;

impl Random {
    pub fn new(_: &PairConfig) -> Self {
        Random
    }
}

impl Policy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn choose(&self, _: &Ask, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize {
        below(candidates.len(), dice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::tests::{ask, dice, idle};

    #[test]
    fn all_are_as_likely() {
        let (workers, mut dice) = (idle(4), dice());
        let mut counts = [0; 4];
        for _ in 0..4000 {
            counts[Random.choose(&ask(), &workers, &mut dice)] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
