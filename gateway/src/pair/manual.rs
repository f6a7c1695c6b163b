//! A key stays with the worker that it was first given, also when workers join: stickier than hashing, at the price of a
//! memory of keys, which is bounded and this gateway's own. *Pure.*
//!
//! A key has up to two seats: while the first worker may not serve, another takes its place, and the key returns when the
//! first is back. New keys are given by `--assignment-mode`. A key that was not used for `--max-idle-secs` is new again.
//! Without a key the worker is chosen as for a new one, and not remembered.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rand::RngCore;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::recent::Recent;
use super::{Ask, Branches, Candidate, Least, Policy, WorkerId, below};
use crate::config::PairConfig;

/// How new keys are given to workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum AssignmentMode {
    /// To any of them.
    #[default]
    Random,
    /// To the least loaded.
    MinLoad,
    /// To the one with the fewest keys.
    MinGroup,
}

/// How a choice came about.
const BRANCHES: [&str; 4] = ["no_routing_id", "occupied_hit", "occupied_miss", "vacant"];

#[derive(Debug)]
pub struct Manual {
    mode: AssignmentMode,
    idle_max: Duration,
    keys: Mutex<Keys>,
    branches: Branches<4>,
}

#[derive(Debug)]
struct Keys {
    seats: Recent<Seats>,
    /// Keys whose first seat is with this worker.
    groups: HashMap<WorkerId, usize>,
    /// When the idle ones leave next.
    age_at: Option<Instant>,
}

/// Where a key belongs.
#[derive(Clone, Copy, Debug)]
struct Seats {
    first: WorkerId,
    second: Option<WorkerId>,
    used: Instant,
}

impl Manual {
    pub fn new(config: &PairConfig) -> Self {
        let keys = Keys { seats: Recent::new(config.memory_bytes_max), groups: HashMap::new(), age_at: None };
        Manual {
            mode: config.assignment_mode,
            idle_max: config.idle_max,
            keys: Mutex::new(keys),
            branches: Branches::new(BRANCHES),
        }
    }

    /// For a key without a seat.
    fn assign(&self, groups: &HashMap<WorkerId, usize>, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize {
        match self.mode {
            AssignmentMode::Random => below(candidates.len(), dice),
            AssignmentMode::MinLoad => Least::of(candidates).first(candidates, dice),
            AssignmentMode::MinGroup => {
                let sizes: Vec<_> = candidates.iter().map(|c| groups.get(&c.id).copied().unwrap_or(0)).collect();
                let least = sizes.iter().min().copied().unwrap_or(0);
                let tied: Vec<_> = (0..sizes.len()).filter(|i| sizes[*i] == least).collect();
                tied[below(tied.len(), dice)]
            }
        }
    }

    fn seat(&self, key: &str, now: Instant, candidates: &[Candidate], dice: &mut dyn RngCore) -> (usize, usize) {
        let key = xxh3_64(key.as_bytes());
        let place = |worker: WorkerId| candidates.iter().position(|c| c.id == worker);
        let mut keys = self.keys.lock().expect("no panic under this lock");
        let Keys { seats, groups, age_at } = &mut *keys;
        if now >= *age_at.get_or_insert(now + self.idle_max) {
            seats.age(|old| leave(groups, old.first));
            *age_at = Some(now + self.idle_max);
        }
        let known = seats.touch(key, |old| leave(groups, old.first)).filter(|s| now - s.used <= self.idle_max);
        if let Some(known) = known {
            known.used = now;
            if let Some(place) = place(known.first).or_else(|| known.second.and_then(place)) {
                return (place, 1);
            }
            let chosen = self.assign(groups, candidates, dice);
            known.second = Some(candidates[chosen].id);
            return (chosen, 2);
        }
        let chosen = self.assign(groups, candidates, dice);
        let first = candidates[chosen].id;
        if let Some(idle) = seats.remove(key) {
            leave(groups, idle.first);
        }
        *groups.entry(first).or_default() += 1;
        seats.insert(key, Seats { first, second: None, used: now }, |old| leave(groups, old.first));
        (chosen, 3)
    }
}

/// A group is as large as its keys are many, and without keys it is none.
fn leave(groups: &mut HashMap<WorkerId, usize>, worker: WorkerId) {
    if let Some(size) = groups.get_mut(&worker) {
        *size -= 1;
        if *size == 0 {
            groups.remove(&worker);
        }
    }
}

impl Policy for Manual {
    fn name(&self) -> &'static str {
        "manual"
    }

    fn reads_key(&self) -> bool {
        true
    }

    fn choose(&self, ask: &Ask, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize {
        let (place, branch) = match ask.key {
            Some(key) => self.seat(key, ask.now, candidates, dice),
            None => (self.assign(&self.keys.lock().expect("no panic under this lock").groups, candidates, dice), 0),
        };
        self.branches.count(branch);
        place
    }

    /// Its keys belong to whoever stood in for it, if anyone did.
    fn forget(&self, worker: WorkerId) {
        let mut keys = self.keys.lock().expect("no panic under this lock");
        let Keys { seats, groups, .. } = &mut *keys;
        groups.remove(&worker);
        seats.retain(|seat| {
            if seat.second == Some(worker) {
                seat.second = None;
            }
            if seat.first != worker {
                return true;
            }
            let Some(second) = seat.second.take() else { return false };
            seat.first = second;
            *groups.entry(second).or_default() += 1;
            true
        });
    }

    fn branches(&self) -> Vec<(&'static str, u64)> {
        self.branches.counts()
    }

    fn entries(&self) -> Option<usize> {
        Some(self.keys.lock().expect("no panic under this lock").seats.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::tests::{ask, dice, idle, legs, pair_config, workers};
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    fn policy(mode: &str) -> Manual {
        Manual::new(&pair_config(&format!("--assignment-mode {mode}")))
    }

    fn of(policy: &Manual, key: u32, now: Instant, workers: &[Candidate], dice: &mut dyn RngCore) -> usize {
        policy.choose(&Ask { key: Some(&key.to_string()), now, ..ask() }, workers, dice)
    }

    #[test]
    fn keys_stay_when_workers_join() {
        let (policy, mut dice, now) = (policy("random"), dice(), Instant::now());
        let before: Vec<_> = (0..500).map(|key| of(&policy, key, now, &idle(4), &mut dice)).collect();
        let after: Vec<_> = (0..500).map(|key| of(&policy, key, now, &idle(9), &mut dice)).collect();
        assert_eq!(before, after);
        assert!((0..4).all(|worker| before.iter().filter(|w| **w == worker).count() > 90));
        assert_eq!(policy.branches()[1..], [("occupied_hit", 500), ("occupied_miss", 0), ("vacant", 500)]);
    }

    #[test]
    fn a_key_returns_when_its_worker_is_back() {
        let (policy, mut dice, now, all) = (policy("random"), dice(), Instant::now(), idle(5));
        for key in 0..50 {
            let first = of(&policy, key, now, &all, &mut dice);
            let mut others = all.clone();
            others.remove(first);
            let second = others[of(&policy, key, now, &others, &mut dice)].id;
            assert_eq!(others[of(&policy, key, now, &others, &mut dice)].id, second);
            assert_eq!(of(&policy, key, now, &all, &mut dice), first);
        }
    }

    #[test]
    fn new_keys_by_load_and_by_group() {
        let (mut dice, now) = (dice(), Instant::now());
        let by_load = policy("min_load");
        assert!((0..50).all(|key| of(&by_load, key, now, &workers([legs(2), legs(1)]), &mut dice) == 1));
        let by_group = policy("min_group");
        let mut counts = [0; 4];
        (0..400).for_each(|key| counts[of(&by_group, key, now, &idle(4), &mut dice)] += 1);
        assert_eq!(counts, [100; 4]);
    }

    #[test]
    fn an_idle_key_is_new_again_and_leaves() {
        let (policy, mut dice, start) = (policy("min_load"), dice(), Instant::now());
        let hours = |h: u64| start + Duration::from_secs(3600 * h);
        for key in 0..100 {
            of(&policy, key, hours(0), &workers([legs(0), legs(1)]), &mut dice);
        }
        let now_other = workers([legs(1), legs(0)]);
        assert_eq!(of(&policy, 1, hours(3), &now_other, &mut dice), 0);
        assert_eq!(of(&policy, 2, hours(5), &now_other, &mut dice), 1);
        assert_eq!(of(&policy, 1, hours(6), &now_other, &mut dice), 0);
        of(&policy, 3, hours(10), &now_other, &mut dice);
        of(&policy, 3, hours(15), &now_other, &mut dice);
        assert_eq!(policy.entries(), Some(1), "the others were not used for twice the time");
    }

    #[test]
    fn keys_are_bounded() {
        let policy = Manual::new(&pair_config("--max-tree-size 65536 --assignment-mode min_group"));
        let (mut dice, now, all) = (dice(), Instant::now(), idle(3));
        (0..100_000).for_each(|key| _ = of(&policy, key, now, &all, &mut dice));
        let most = 65536 / size_of::<(u64, Seats)>();
        assert!(policy.entries().unwrap() <= most);
        let groups: usize = policy.keys.lock().unwrap().groups.values().sum();
        assert_eq!(Some(groups), policy.entries());
    }

    proptest! {
        #[test]
        fn groups_count_the_keys_whatever_happens(steps in proptest::collection::vec((0..40u32, 0..5usize, 0..9u8), 1..300)) {
            let policy = Manual::new(&pair_config("--max-tree-size 65536 --assignment-mode min_group --max-idle-secs 20"));
            let (mut dice, mut now, all) = (dice(), Instant::now(), idle(5));
            for (key, worker, what) in steps {
                match what {
                    0 => policy.forget(all[worker].id),
                    1 => now += Duration::from_secs(key.into()),
                    _ => {
                        let mut some = all.clone();
                        some.remove(worker);
                        let chosen = of(&policy, key, now, &some, &mut dice);
                        prop_assert!(chosen < some.len());
                    }
                }
                let keys = policy.keys.lock().unwrap();
                prop_assert_eq!(keys.groups.values().sum::<usize>(), keys.seats.len());
                prop_assert!(keys.groups.values().all(|size| *size > 0));
            }
        }
    }
}
