//! Requests with the same key go to the same worker, the same one in each gateway and after each restart. *Pure.*
//!
//! Rendezvous hashing: each worker's score is a hash of key and worker, and the highest wins. When a worker joins or leaves,
//! the keys that it wins or had are all that move; there is no ring to keep, and its cost is that of looking at the loads.
//!
//! The load is bounded: a worker with more legs than `--consistent-hashing-load-factor` times the mean is passed over, so
//! that a hot key overflows to its next worker, which again is the same for all. Without a key the least loaded is taken.

use rand::RngCore;
use xxhash_rust::xxh3::xxh3_64;

use super::{Ask, Branches, Candidate, Least, Policy};
use crate::config::PairConfig;

/// Legs that a worker may have in any case: the mean of a few says nothing.
const LEGS_FREE: u32 = 8;
/// How a choice came about.
const BRANCHES: [&str; 3] = ["no_routing_key", "routing_key_hit", "load_balance_walk"];

#[derive(Debug)]
pub struct ConsistentHashing {
    load_factor: f64,
    branches: Branches<3>,
}

impl ConsistentHashing {
    pub fn new(config: &PairConfig) -> Self {
        ConsistentHashing { load_factor: config.hashing_load_factor, branches: Branches::new(BRANCHES) }
    }
}

/// Both are hashes; the finaliser of splitmix64 makes one of them.
fn score(key: u64, candidate: &Candidate) -> u64 {
    let mut hash = key ^ candidate.id.hash();
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

impl Policy for ConsistentHashing {
    fn name(&self) -> &'static str {
        "consistent_hashing"
    }

    fn reads_key(&self) -> bool {
        true
    }

    fn choose(&self, ask: &Ask, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize {
        let Some(key) = ask.key else {
            self.branches.count(0);
            return Least::of(candidates).first(candidates, dice);
        };
        let key = xxh3_64(key.as_bytes());
        let legs: f64 = candidates.iter().map(|c| f64::from(c.load.legs)).sum();
        let most = self.load_factor * (legs + 1.0) / candidates.len() as f64;
        let may = |c: &Candidate| c.load.legs < LEGS_FREE || f64::from(c.load.legs) < most;
        // The first of the pair is the winner of all, the second of those who may: the mean bounds somebody's legs.
        let (mut winner, mut chosen) = ((0, 0), None);
        for (i, candidate) in candidates.iter().enumerate() {
            let this = (score(key, candidate), i);
            winner = winner.max(this);
            if may(candidate) {
                chosen = chosen.max(Some(this));
            }
        }
        let (_, place) = chosen.unwrap_or(winner);
        self.branches.count(if place == winner.1 { 1 } else { 2 });
        place
    }

    fn branches(&self) -> Vec<(&'static str, u64)> {
        self.branches.counts()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::tests::{ask, dice, idle, legs, pair_config, workers};

    fn policy() -> ConsistentHashing {
        ConsistentHashing::new(&pair_config(""))
    }

    fn of(policy: &ConsistentHashing, key: usize, workers: &[Candidate]) -> usize {
        policy.choose(&Ask { key: Some(&format!("session-{key}")), ..ask() }, workers, &mut dice())
    }

    #[test]
    fn keys_stay_and_spread() {
        let workers = idle(8);
        let mut counts = [0; 8];
        for key in 0..8000 {
            let first = of(&policy(), key, &workers);
            assert_eq!(of(&policy(), key, &workers), first, "another gateway says the same");
            counts[first] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn only_the_keys_of_the_worker_that_joined_or_left_move() {
        let (policy, nine) = (policy(), idle(9));
        for gone in 0..9 {
            let mut eight = nine.clone();
            eight.remove(gone);
            let mut moved = 0;
            for key in 0..1000 {
                let before = of(&policy, key, &nine);
                let after = of(&policy, key, &eight);
                if before == gone {
                    moved += 1;
                } else {
                    assert_eq!(eight[after].id, nine[before].id);
                }
            }
            assert!((60..170).contains(&moved), "{moved} of 1000 keys");
        }
    }

    #[test]
    fn a_hot_key_overflows_to_the_same_next_worker() {
        let policy = policy();
        let mut loads = [0; 4];
        let first = of(&policy, 1, &idle(4));
        loads[first] = 40;
        let next = of(&policy, 1, &workers(loads.map(legs)));
        assert_ne!(next, first);
        assert_eq!(of(&policy, 1, &workers(loads.map(legs))), next);
        loads = [30; 4];
        loads[first] = 37;
        assert_eq!(of(&policy, 1, &workers(loads.map(legs))), first, "not more than 1.25 of the mean");
        loads = [0; 4];
        loads[first] = 7;
        assert_eq!(of(&policy, 1, &workers(loads.map(legs))), first, "few legs say nothing");
        assert_eq!(policy.branches(), [("no_routing_key", 0), ("routing_key_hit", 3), ("load_balance_walk", 2)]);
    }

    #[test]
    fn one_hot_key_alone_is_bounded_by_the_mean() {
        let policy = policy();
        let mut loads = [0; 4];
        for _ in 0..400 {
            loads[of(&policy, 7, &workers(loads.map(legs)))] += 1;
        }
        assert!(loads.iter().all(|load| *load <= 126), "{loads:?}");
    }

    #[test]
    fn without_a_key_the_least_loaded() {
        assert_eq!(policy().choose(&ask(), &workers([legs(1), legs(0)]), &mut dice()), 1);
    }
}
