//! Which workers hold the beginning of which conversation: a text is cut into blocks, and a block's key is the hash of the
//! text up to its end. Whoever was given a text holds all its blocks. Bounded in bytes, shared by all threads. *Pure.*
//!
//! Why a table of chained hashes and not a radix tree of characters: a text costs one pass of xxh3 and a few dozen
//! look-ups, however many texts and workers are known; an entry has a fixed size, so that the bound is one of bytes; it
//! has no neighbours, so that there are no long locks and no rebalancing, and what was not used is forgotten without a
//! scan. The price is the granularity of a block, which is at most 64 bytes or a thirty-second of the text before it.

use std::sync::Mutex;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::WorkerId;
use super::recent::Recent;

/// Blocks at a text's beginning.
const BLOCK_BYTES_MIN: usize = 64;
/// Later blocks are this part of what is before them, rounded down to a power of two.
const BLOCK_SHARE: usize = 32;
/// Workers that one block remembers; those who were given it last.
const HOLDERS_MAX: usize = 5;
const SHARDS_MAX: usize = 64;
const SHARD_BYTES_MIN: usize = 64 << 10;

/// The end of a block within its text.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    key: u64,
    pub end: usize,
}

/// The whole blocks of a text; where they end depends on nothing but the position.
pub fn blocks(text: &[u8]) -> Vec<Block> {
    let mut blocks = Vec::with_capacity(2 * BLOCK_SHARE);
    let mut last = Block { key: 0, end: 0 };
    loop {
        let share = last.end / BLOCK_SHARE;
        let bytes = if share < 2 * BLOCK_BYTES_MIN { BLOCK_BYTES_MIN } else { 1 << share.ilog2() };
        let Some(block) = text.get(last.end..last.end + bytes) else { return blocks };
        last = Block { key: xxh3_64_with_seed(block, last.key), end: last.end + bytes };
        blocks.push(last);
    }
}

/// What is known of a block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    /// Those who were given it, the last one first.
    holders: [WorkerId; HOLDERS_MAX],
    count: u8,
    /// Texts that went on behind it in a new way, but for the first; stays at the highest number.
    branches: u8,
}

impl Known {
    pub fn holders(&self) -> &[WorkerId] {
        &self.holders[..self.count.into()]
    }

    pub fn branches(&self) -> u8 {
        self.branches
    }

    fn give_to(&mut self, worker: WorkerId) {
        let place = self.holders().iter().position(|h| *h == worker).unwrap_or_else(|| {
            self.count = (self.count + 1).min(HOLDERS_MAX as u8);
            usize::from(self.count) - 1
        });
        self.holders.copy_within(..place, 1);
        self.holders[0] = worker;
    }

    /// Whether anyone is left.
    fn take_from(&mut self, worker: WorkerId) -> bool {
        if let Some(place) = self.holders().iter().position(|h| *h == worker) {
            self.holders.copy_within(place + 1.., place);
            self.count -= 1;
        }
        self.count > 0
    }
}

/// The table. A block's shard is locked for a look-up and no longer.
#[derive(Debug)]
pub struct Prefixes {
    shards: Vec<Mutex<Recent<Known>>>,
}

impl Prefixes {
    pub fn new(bytes_max: usize) -> Self {
        let count = 1 << (bytes_max / SHARD_BYTES_MIN).clamp(1, SHARDS_MAX).ilog2();
        Prefixes { shards: (0..count).map(|_| Mutex::new(Recent::new(bytes_max / count))).collect() }
    }

    fn shard(&self, block: Block) -> std::sync::MutexGuard<'_, Recent<Known>> {
        // A table uses a key's lowest and highest bits.
        let index = (block.key >> 32) as usize % self.shards.len();
        self.shards[index].lock().expect("no panic under this lock")
    }

    pub fn get(&self, block: Block) -> Option<Known> {
        self.shard(block).get(block.key).copied()
    }

    /// The worker is given a text.
    pub fn give(&self, blocks: &[Block], worker: WorkerId) {
        let mut first_new = None;
        for (i, block) in blocks.iter().enumerate() {
            let mut shard = self.shard(*block);
            match shard.touch(block.key, |_| {}) {
                Some(known) => known.give_to(worker),
                None => {
                    first_new.get_or_insert(i);
                    let mut known = Known::default();
                    known.give_to(worker);
                    shard.insert(block.key, known, |_| {});
                }
            }
        }
        if let Some(before) = first_new.and_then(|i| i.checked_sub(1)).map(|i| blocks[i])
            && let Some(known) = self.shard(before).touch(before.key, |_| {})
        {
            known.branches = known.branches.saturating_add(1);
        }
    }

    pub fn forget(&self, worker: WorkerId) {
        for shard in &self.shards {
            shard.lock().expect("no panic under this lock").retain(|known| known.take_from(worker));
        }
    }

    /// Blocks known.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().expect("no panic under this lock").len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> WorkerId {
        WorkerId::of(&n.to_string())
    }

    #[test]
    fn equal_beginnings_have_equal_blocks_and_nothing_else_has() {
        let (a, b) = ("x".repeat(100_000), format!("{}y{}", "x".repeat(50_000), "x".repeat(49_999)));
        let (a, b) = (blocks(a.as_bytes()), blocks(b.as_bytes()));
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(&b) {
            assert_eq!(a.key == b.key, a.end <= 50_000, "at {}", a.end);
        }
    }

    #[test]
    fn blocks_are_few_and_leave_little_out() {
        for (bytes, most) in [(63, 0), (64, 1), (1 << 10, 16), (64 << 10, 192), (1 << 20, 320), (16 << 20, 448)] {
            let blocks = blocks(&vec![b'x'; bytes]);
            assert!(blocks.len() <= most, "{bytes}: {}", blocks.len());
            let end = blocks.last().map_or(0, |b| b.end);
            assert!(bytes - end < 64.max(bytes / 16), "{bytes}: {end}");
        }
    }

    #[test]
    fn the_last_holders_are_remembered_once_each() {
        let prefixes = Prefixes::new(1 << 20);
        let text = blocks(&[b'x'; 64]);
        for n in [1, 2, 3, 2, 4, 5, 6, 7] {
            prefixes.give(&text, id(n));
        }
        assert_eq!(prefixes.get(text[0]).unwrap().holders(), [7, 6, 5, 4, 2].map(id));
        prefixes.forget(id(5));
        assert_eq!(prefixes.get(text[0]).unwrap().holders(), [7, 6, 4, 2].map(id));
        for n in [7, 6, 4, 2] {
            prefixes.forget(id(n));
        }
        assert_eq!(prefixes.len(), 0, "a block without holders is no block");
    }

    #[test]
    fn branches_are_other_texts_behind_the_same_beginning() {
        let prefixes = Prefixes::new(1 << 20);
        let beginning = "s".repeat(128);
        let say = |n: u32, turns: usize| blocks(format!("{beginning}{}", format!("{n:64}").repeat(turns)).as_bytes());
        for turns in 1..5 {
            prefixes.give(&say(1, turns), id(1));
        }
        assert_eq!(prefixes.get(say(1, 1)[1]).unwrap().branches(), 0, "one conversation that grows");
        for n in 2..5 {
            prefixes.give(&say(n, 1), id(1));
        }
        assert_eq!(prefixes.get(say(1, 1)[1]).unwrap().branches(), 3);
        assert_eq!(prefixes.get(say(1, 1)[0]).unwrap().branches(), 0);
    }

    #[test]
    fn many_texts_stay_within_the_bound_and_the_newest_are_known() {
        let prefixes = Prefixes::new(256 << 10);
        let text = |n: u32| blocks(format!("{n:640}").as_bytes());
        for n in 0..100_000 {
            prefixes.give(&text(n), id(n % 9));
        }
        let most = (256 << 10) / (size_of::<(u64, Known)>() + 1);
        assert!(prefixes.len() <= most && prefixes.len() > most / 4, "{} of {most}", prefixes.len());
        assert!(text(99_999).iter().all(|block| prefixes.get(*block).is_some()));
        assert!(prefixes.get(text(0)[9]).is_none());
    }
}
