//! The least loaded candidate; of several, any. Loads are tokens where all report them, else this gateway's legs. *Pure.*

use rand::RngCore;

use super::{Ask, Candidate, Least, Policy};
use crate::config::PairConfig;

#[derive(Debug)]
pub struct LeastLoad;

impl LeastLoad {
    pub fn new(_: &PairConfig) -> Self {
        LeastLoad
    }
}

impl Policy for LeastLoad {
    fn name(&self) -> &'static str {
        "least_load"
    }

    fn choose(&self, _: &Ask, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize {
        Least::of(candidates).first(candidates, dice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::tests::{ask, dice, legs, tokens, workers};

    #[test]
    fn the_least_loaded_and_ties_are_even() {
        let mut dice = dice();
        let mut counts = [0; 4];
        let tied = workers([legs(1), legs(0), legs(0), legs(0)]);
        for _ in 0..3000 {
            counts[LeastLoad.choose(&ask(), &tied, &mut dice)] += 1;
        }
        assert_eq!(counts[0], 0);
        assert!(counts[1..].iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn by_tokens_where_all_report_them_else_by_legs() {
        let of = |loads: [_; 2]| LeastLoad.choose(&ask(), &workers(loads), &mut dice());
        assert_eq!(of([tokens(1_000_000), tokens(0)]), 1);
        assert_eq!(of([tokens(0), legs(1)]), 0);
        assert_eq!(of([legs(1), tokens(1_000_000)]), 1);
    }
}
