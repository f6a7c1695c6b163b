//! Which worker gets a leg: the policies, each a pure choice among candidates. Adding one is a variant, its name, and its
//! function. *Pure*: loads, the turn and the random number come in.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Policy {
    Random,
    RoundRobin,
    /// Two at random, the less loaded of them.
    PowerOfTwo,
}

impl Policy {
    pub fn name(self) -> &'static str {
        match self {
            Policy::Random => "random",
            Policy::RoundRobin => "round_robin",
            Policy::PowerOfTwo => "power_of_two",
        }
    }
}

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
    fn is_less(self, other: Load) -> bool {
        match (self.tokens, other.tokens) {
            (Some(a), Some(b)) => (a, self.legs) < (b, other.legs),
            _ => self.legs < other.legs,
        }
    }
}

/// The index of the chosen candidate; `None` when there is none. `turn` counts the choices of this side, `dice` is random.
pub fn choose(policy: Policy, loads: &[Load], turn: u64, dice: u64) -> Option<usize> {
    let count = loads.len() as u64;
    match (count, policy) {
        (0, _) => None,
        (1, _) => Some(0),
        (_, Policy::Random) => Some((dice % count) as usize),
        (_, Policy::RoundRobin) => Some((turn % count) as usize),
        (_, Policy::PowerOfTwo) => {
            let first = dice % count;
            let second = (first + 1 + (dice >> 32) % (count - 1)) % count;
            let (first, second) = (first as usize, second as usize);
            Some(if loads[second].is_less(loads[first]) { second } else { first })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(t: u64) -> Load {
        Load { tokens: Some(t), legs: 0 }
    }

    #[test]
    fn nothing_to_choose_from() {
        assert_eq!(choose(Policy::Random, &[], 0, 9), None);
    }

    #[test]
    fn round_robin_takes_turns() {
        let loads = [tokens(0); 3];
        let picks: Vec<_> = (0..6).map(|turn| choose(Policy::RoundRobin, &loads, turn, 0).unwrap()).collect();
        assert_eq!(picks, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn power_of_two_of_two_always_takes_the_less_loaded() {
        for dice in [0, 1, u64::MAX, 1 << 40, 12345678901234567] {
            assert_eq!(choose(Policy::PowerOfTwo, &[tokens(1_000_000), tokens(0)], 0, dice), Some(1));
        }
    }

    #[test]
    fn power_of_two_falls_back_to_legs_where_a_worker_reports_nothing() {
        let busy = Load { tokens: None, legs: 5 };
        let idle = Load { tokens: Some(1_000_000), legs: 0 };
        assert_eq!(choose(Policy::PowerOfTwo, &[busy, idle], 0, 0), Some(1));
    }

    #[test]
    fn random_reaches_all() {
        let loads = [tokens(0); 4];
        let seen: std::collections::HashSet<_> = (0..40).map(|d| choose(Policy::Random, &loads, 0, d)).collect();
        assert_eq!(seen.len(), 4);
    }
}
