//! The worker that holds the longest beginning of the conversation, unless it is too busy for that to pay. *Pure.*
//!
//! A worker is eligible while it is near the least loaded (`--balance-abs-threshold`, `--balance-rel-threshold`); of those
//! who are, the one that holds the longest beginning gets the request, if that is more than `--cache-threshold` of the
//! text. Whoever is busier than that is passed over, and nobody else: the prefixes of the others still count. Where nobody
//! holds enough, the least loaded of all gets the request. Ties are decided by the dice.
//!
//! A beginning with many different continuations is nobody's own conversation but a system prompt. It is soon held
//! everywhere and cheap beside a queue, so that for it only workers within one request of the least loaded are preferred:
//! otherwise all users of one application would meet at one worker.

use rand::RngCore;

use super::prefixes::{Block, Prefixes, blocks};
use super::{Ask, Balance, Branches, Candidate, Least, Policy, WorkerId};
use crate::config::PairConfig;

/// Continuations from which on a beginning is shared, and not forks of one conversation.
const SHARED_BRANCHES: u8 = 8;
const SHARED_BALANCE: Balance = Balance { abs: 1, rel: 1.0 };
/// Different holders looked for among the candidates, per request.
const SEARCHES_MAX: usize = 16;

/// How a choice came about.
const BRANCHES: [&str; 4] = ["no_text", "miss", "hit", "hit_shared"];

#[derive(Debug)]
pub struct CacheAware {
    prefixes: Prefixes,
    threshold: f64,
    balance: Balance,
    branches: Branches<4>,
}

impl CacheAware {
    pub fn new(config: &PairConfig) -> Self {
        CacheAware {
            prefixes: Prefixes::new(config.memory_bytes_max),
            threshold: config.cache_threshold,
            balance: config.balance,
            branches: Branches::new(BRANCHES),
        }
    }

    /// Who holds enough of the text, and whether it is a shared beginning.
    fn holder(
        &self,
        blocks: &[Block],
        text_bytes: usize,
        candidates: &[Candidate],
        least: &Least,
        dice: &mut dyn RngCore,
    ) -> Option<(usize, bool)> {
        let mut found = Places::default();
        let mut shared = false;
        let enough = |block: &&Block| block.end as f64 > self.threshold * text_bytes as f64;
        for block in blocks.iter().rev().take_while(enough) {
            let Some(known) = self.prefixes.get(*block) else { continue };
            // What is before a shared beginning is shared as well.
            shared |= known.branches() >= SHARED_BRANCHES;
            let balance = if shared { SHARED_BALANCE } else { self.balance };
            let places = known.holders().iter().filter_map(|holder| found.place(*holder, candidates));
            let eligible: Vec<usize> = places.filter(|place| least.is_near(candidates[*place].load, balance)).collect();
            if let Some(place) = least.first_of(candidates, eligible.iter().copied(), dice) {
                return Some((place, shared));
            }
        }
        None
    }
}

impl Policy for CacheAware {
    fn name(&self) -> &'static str {
        "cache_aware"
    }

    fn reads_text(&self) -> bool {
        true
    }

    fn choose(&self, ask: &Ask, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize {
        let least = Least::of(candidates);
        let blocks = ask.text.map(|text| blocks(text.as_bytes())).unwrap_or_default();
        let text_bytes = ask.text.map_or(0, str::len);
        let (chosen, branch) = match self.holder(&blocks, text_bytes, candidates, &least, dice) {
            Some((place, shared)) => (place, if shared { 3 } else { 2 }),
            None => (least.first(candidates, dice), usize::from(!blocks.is_empty())),
        };
        self.branches.count(branch);
        self.prefixes.give(&blocks, candidates[chosen].id);
        chosen
    }

    fn forget(&self, worker: WorkerId) {
        self.prefixes.forget(worker);
    }

    fn branches(&self) -> Vec<(&'static str, u64)> {
        self.branches.counts()
    }

    fn entries(&self) -> Option<usize> {
        Some(self.prefixes.len())
    }
}

/// Where holders are among the candidates. Neighbouring blocks have the same holders, who are looked for once.
#[derive(Default)]
struct Places {
    known: Vec<(WorkerId, Option<usize>)>,
}

impl Places {
    fn place(&mut self, worker: WorkerId, candidates: &[Candidate]) -> Option<usize> {
        if let Some((_, place)) = self.known.iter().find(|(id, _)| *id == worker) {
            return *place;
        }
        if self.known.len() == SEARCHES_MAX {
            return None;
        }
        let place = candidates.iter().position(|c| c.id == worker);
        self.known.push((worker, place));
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::tests::{ask, dice, idle, legs, pair_config, workers};

    fn policy() -> CacheAware {
        CacheAware::new(&pair_config(""))
    }

    fn says(text: &str) -> Ask<'_> {
        Ask { text: Some(text), prompt_bytes: text.len(), ..ask() }
    }

    fn words(seed: u32, bytes: usize) -> String {
        (0..).map(|i| format!("{seed}.{i} ")).take(bytes).collect::<String>()[..bytes].to_owned()
    }

    #[test]
    fn a_conversation_that_grows_stays_with_its_worker() {
        let (policy, workers, mut dice) = (policy(), idle(8), dice());
        for user in 0..20 {
            let mut text = words(user, 900);
            let first = policy.choose(&says(&text), &workers, &mut dice);
            for turn in 1..6 {
                text += &words(1000 * user + turn, 700);
                assert_eq!(policy.choose(&says(&text), &workers, &mut dice), first);
            }
        }
    }

    #[test]
    fn f31_a_miss_goes_to_the_least_loaded_not_to_the_smallest_index() {
        let (policy, mut dice) = (policy(), dice());
        for n in 0..50 {
            policy.choose(&says(&words(n, 2000)), &workers([legs(9), legs(0)]), &mut dice);
        }
        let now = workers([legs(100), legs(0)]);
        assert_eq!(policy.choose(&says(&words(77, 2000)), &now, &mut dice), 1, "the first one's index is empty");
    }

    #[test]
    fn f34_in_imbalance_the_near_least_loaded_that_holds_the_prefix_is_preferred() {
        let mut dice = dice();
        let text = words(1, 4000);
        let imbalanced = workers([legs(300), legs(3), legs(0)]);
        for _ in 0..20 {
            let policy = policy();
            for holder in &imbalanced[..2] {
                policy.prefixes.give(&blocks(text.as_bytes()), holder.id);
            }
            assert_eq!(policy.choose(&says(&text), &imbalanced, &mut dice), 1);
        }
    }

    #[test]
    fn a_holder_that_is_too_busy_is_passed_over() {
        let (policy, mut dice) = (policy(), dice());
        let text = words(1, 4000);
        assert_eq!(policy.choose(&says(&text), &workers([legs(0), legs(1)]), &mut dice), 0);
        assert_eq!(policy.choose(&says(&text), &workers([legs(64), legs(0)]), &mut dice), 0);
        assert_eq!(policy.choose(&says(&text), &workers([legs(65), legs(0)]), &mut dice), 1);
    }

    #[test]
    fn f35_users_of_one_system_prompt_spread_and_long_histories_stick() {
        let (policy, mut dice) = (policy(), dice());
        let system = words(0, 6000);
        let mut counts = [0; 4];
        let mut texts = Vec::new();
        for user in 1..=80 {
            let text = format!("{system}{}", words(user, 400));
            let now = workers(counts.map(legs));
            let chosen = policy.choose(&says(&text), &now, &mut dice);
            counts[chosen] += 1;
            texts.push((text, chosen));
        }
        assert!(counts.iter().all(|count| (15..=26).contains(count)), "{counts:?}");
        let workers = idle(4);
        for (user, (text, first)) in texts.iter().enumerate() {
            let text = format!("{text}{}", words(user as u32, 600));
            assert_eq!(policy.choose(&says(&text), &workers, &mut dice), *first);
        }
    }

    #[test]
    fn too_small_a_share_is_no_hit() {
        let (policy, mut dice) = (policy(), dice());
        let beginning = words(0, 640);
        policy.choose(&says(&beginning), &workers([legs(0), legs(1)]), &mut dice);
        let of = |bytes| format!("{beginning}{}", words(5, bytes));
        let busier = workers([legs(1), legs(0)]);
        assert_eq!(policy.choose(&says(&of(1400)), &busier, &mut dice), 0, "640 of 2040");
        assert_eq!(policy.choose(&says(&of(9000)[..2240]), &workers([legs(2), legs(0)]), &mut dice), 0);
        let policy = self::policy();
        policy.choose(&says(&beginning), &workers([legs(0), legs(1)]), &mut dice);
        assert_eq!(policy.choose(&says(&of(1600)), &busier, &mut dice), 1, "640 of 2240");
    }

    #[test]
    fn ghosts_leave_with_their_worker() {
        let (policy, mut dice) = (policy(), dice());
        for n in 0..30 {
            policy.choose(&says(&words(n, 1000)), &idle(1), &mut dice);
        }
        assert!(policy.entries() > Some(0));
        policy.forget(idle(1)[0].id);
        assert_eq!(policy.entries(), Some(0));
    }

    #[test]
    fn without_a_text_it_is_least_load() {
        let (policy, mut dice) = (policy(), dice());
        assert_eq!(policy.choose(&ask(), &workers([legs(1), legs(0)]), &mut dice), 1);
        assert_eq!(policy.choose(&says("short"), &workers([legs(1), legs(0)]), &mut dice), 1);
        assert_eq!(policy.branches(), [("no_text", 2), ("miss", 0), ("hit", 0), ("hit_shared", 0)]);
    }
}
