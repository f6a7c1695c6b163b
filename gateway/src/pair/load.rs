//! How busy a worker is, and what that means beside the others. *Pure.*

use rand::RngCore;

use super::{Candidate, below};

/// A request counted in tokens, where a limit in requests meets loads in tokens.
const TOKENS_PER_REQUEST: u64 = 1024;

/// How busy a worker is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Tokens as the worker reported them last plus an estimate of what was sent to it since; `None` if it reports none.
    pub tokens: Option<u64>,
    /// Legs of this gateway that have not ended.
    pub legs: u32,
}

impl Load {
    /// By tokens where both report them, else by legs.
    pub fn is_less(self, other: Load) -> bool {
        match (self.tokens, other.tokens) {
            (Some(a), Some(b)) => (a, self.legs) < (b, other.legs),
            _ => self.legs < other.legs,
        }
    }
}

/// How far above the least loaded a worker may be before it counts as busier than the others: by both of these.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Balance {
    /// In requests.
    pub abs: u64,
    /// A factor.
    pub rel: f64,
}

impl Balance {
    fn allows(self, load: u64, least: u64, unit: u64) -> bool {
        load.saturating_sub(least) <= self.abs.saturating_mul(unit) || load as f64 <= self.rel * least as f64
    }
}

/// The least of what any of the candidates has.
#[derive(Clone, Copy, Debug)]
pub struct Least {
    /// `None` where not all report tokens: then nobody is compared by them.
    tokens: Option<u64>,
    legs: u32,
}

impl Least {
    pub fn of(candidates: &[Candidate]) -> Self {
        let first = candidates.first().map_or(Load::default(), |first| first.load);
        let both = |a: Option<u64>, b: Option<u64>| Some(a?.min(b?));
        candidates.iter().fold(Least { tokens: first.tokens, legs: first.legs }, |least, c| Least {
            tokens: both(least.tokens, c.load.tokens),
            legs: least.legs.min(c.load.legs),
        })
    }

    /// By legs and by tokens it is not busier than `balance` allows.
    pub fn is_near(&self, load: Load, balance: Balance) -> bool {
        let by_legs = balance.allows(load.legs.into(), self.legs.into(), 1);
        let by_tokens = match (load.tokens, self.tokens) {
            (Some(tokens), Some(least)) => balance.allows(tokens, least, TOKENS_PER_REQUEST),
            _ => true,
        };
        by_legs && by_tokens
    }

    /// What loads are ordered by.
    fn rank(&self, load: Load) -> (u64, u32) {
        match self.tokens {
            Some(_) => (load.tokens.unwrap_or(0), load.legs),
            None => (load.legs.into(), 0),
        }
    }

    /// The index of the least loaded of `among` (indices), one of them by the dice where several are; `None` of nobody.
    pub fn first_of(
        &self,
        candidates: &[Candidate],
        among: impl Iterator<Item = usize> + Clone,
        dice: &mut dyn RngCore,
    ) -> Option<usize> {
        let rank = |i: &usize| self.rank(candidates[*i].load);
        let least = among.clone().map(|i| rank(&i)).min()?;
        let mut tied = among.filter(|i| rank(i) == least);
        let ties = tied.clone().count();
        tied.nth(if ties > 1 { below(ties, dice) } else { 0 })
    }

    /// The same of all.
    pub fn first(&self, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize {
        self.first_of(candidates, 0..candidates.len(), dice).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::tests::{dice, legs, tokens, workers};

    #[test]
    fn busier_by_both_limits_only() {
        let balance = Balance { abs: 64, rel: 1.5 };
        let least = Least::of(&workers([legs(100), legs(200)]));
        for (load, near) in [(100, true), (150, true), (164, true), (165, false)] {
            assert_eq!(least.is_near(legs(load), balance), near, "{load}");
        }
        let least = Least::of(&workers([legs(0), legs(200)]));
        assert!(least.is_near(legs(64), balance) && !least.is_near(legs(65), balance));
        let least = Least::of(&workers([tokens(1000), tokens(200_000)]));
        assert!(least.is_near(tokens(66_000), balance) && !least.is_near(tokens(67_000), balance));
    }

    #[test]
    fn tokens_count_only_where_all_report_them() {
        let mixed = workers([tokens(1_000_000), legs(3)]);
        let least = Least::of(&mixed);
        assert_eq!(least.first(&mixed, &mut dice()), 0);
        assert!(least.is_near(mixed[0].load, Balance { abs: 1, rel: 1.0 }));
    }

    #[test]
    fn nobody_is_the_first_of_nobody() {
        let some = workers([legs(0)]);
        assert_eq!(Least::of(&some).first_of(&some, 0..0, &mut dice()), None);
    }
}
