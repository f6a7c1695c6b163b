//! A bounded map that forgets what was not used for longest. It is two generations: what is used is in the young one; when
//! that is full it becomes the old one, and what was old is forgotten. So nothing is scanned and no list is kept, and an
//! entry survives at least half the map's capacity of newer ones. *Pure.*

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Keys are hashes already.
#[derive(Default)]
pub struct Taken(u64);

impl Hasher for Taken {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64")
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type Generation<V> = HashMap<u64, V, BuildHasherDefault<Taken>>;

/// From hashes to small values.
#[derive(Debug)]
pub struct Recent<V> {
    young: Generation<V>,
    old: Generation<V>,
    /// Entries of one generation.
    max: usize,
}

impl<V: Copy> Recent<V> {
    /// At most `bytes_max` bytes in tables, but room for 7 entries in any case.
    pub fn new(bytes_max: usize) -> Self {
        // A table has a power of two of buckets, each an entry and a byte, and fills at most 7 of 8.
        let bucket = size_of::<(u64, V)>() + 1;
        let buckets = (bytes_max / 2 / bucket).max(8);
        let buckets = 1usize << buckets.ilog2();
        Recent { young: Generation::default(), old: Generation::default(), max: buckets / 8 * 7 }
    }

    pub fn get(&self, key: u64) -> Option<&V> {
        self.young.get(&key).or_else(|| self.old.get(&key))
    }

    /// The entry, which is used by that: it, too, is young now. `forgotten` gets what had to be forgotten for it.
    pub fn touch(&mut self, key: u64, forgotten: impl FnMut(V)) -> Option<&mut V> {
        if !self.young.contains_key(&key) {
            let value = self.old.remove(&key)?;
            self.insert(key, value, forgotten);
        }
        self.young.get_mut(&key)
    }

    pub fn remove(&mut self, key: u64) -> Option<V> {
        self.young.remove(&key).or_else(|| self.old.remove(&key))
    }

    /// Puts an entry in whose key is not there. `forgotten` gets what had to be forgotten for it.
    pub fn insert(&mut self, key: u64, value: V, forgotten: impl FnMut(V)) {
        if self.young.len() >= self.max {
            self.age(forgotten);
        }
        self.young.insert(key, value);
    }

    /// The young become the old; `forgotten` gets what was old.
    pub fn age(&mut self, mut forgotten: impl FnMut(V)) {
        self.old.drain().for_each(|(_, value)| forgotten(value));
        std::mem::swap(&mut self.young, &mut self.old);
    }

    /// Keeps what `keep` says, having changed it if it likes.
    pub fn retain(&mut self, mut keep: impl FnMut(&mut V) -> bool) {
        self.young.retain(|_, value| keep(value));
        self.old.retain(|_, value| keep(value));
    }

    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_used_stays_and_the_rest_goes() {
        let mut recent = Recent::new(0);
        let mut forgotten = Vec::new();
        for key in 0..1000u64 {
            recent.insert(key, key, |v| forgotten.push(v));
            assert!(recent.touch(0, |v| forgotten.push(v)).is_some(), "used with each new one");
        }
        assert!(recent.get(999).is_some() && recent.get(500).is_none());
        assert!(recent.len() <= 14 && forgotten.len() + recent.len() == 1000);
    }

    #[test]
    fn tables_stay_within_their_bytes() {
        for bytes_max in [10_000, 100_000, 1_000_000] {
            let mut recent = Recent::new(bytes_max);
            for key in 0..100_000u64 {
                recent.insert(key.wrapping_mul(0x9e37_79b9_7f4a_7c15), [key; 6], |_| {});
            }
            let buckets = |g: &Generation<[u64; 6]>| (g.capacity() * 8 / 7).next_power_of_two() * (8 + 48 + 1);
            let bytes = buckets(&recent.young) + buckets(&recent.old);
            assert!(bytes <= bytes_max && bytes * 4 > bytes_max, "{bytes} of {bytes_max}");
        }
    }

    proptest! {
        #[test]
        fn nothing_is_there_twice_or_lost_uncounted(keys in proptest::collection::vec(0..60u64, 1..400)) {
            let mut recent = Recent::new(0);
            let (mut inserted, mut forgotten) = (0, 0);
            for key in keys {
                if recent.touch(key, |_| forgotten += 1).is_none() {
                    recent.insert(key, key, |_| forgotten += 1);
                    inserted += 1;
                }
                prop_assert_eq!(recent.get(key), Some(&key));
                prop_assert_eq!(recent.len() + forgotten, inserted);
            }
        }
    }
}
