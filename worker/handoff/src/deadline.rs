//! Deadlines as data: which key is due when. *Pure.*

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::Time;

/// One deadline per key. Memory is bounded by the number of keys that are set.
#[derive(Debug)]
pub struct Deadlines<K> {
    due: BTreeSet<(Time, K)>,
    of: BTreeMap<K, Time>,
}

impl<K: Ord + Copy> Default for Deadlines<K> {
    fn default() -> Self {
        Self { due: BTreeSet::new(), of: BTreeMap::new() }
    }
}

impl<K: Ord + Copy> Deadlines<K> {
    /// Sets or moves the deadline of `key`.
    pub fn set(&mut self, key: K, at: Time) {
        self.clear(key);
        self.due.insert((at, key));
        self.of.insert(key, at);
    }

    pub fn clear(&mut self, key: K) {
        if let Some(at) = self.of.remove(&key) {
            self.due.remove(&(at, key));
        }
    }

    /// Takes the earliest deadline that has passed.
    pub fn pop(&mut self, now: Time) -> Option<K> {
        let &(at, key) = self.due.first()?;
        if at > now {
            return None;
        }
        self.clear(key);
        Some(key)
    }

    pub fn next(&self) -> Time {
        self.due.first().map_or(Time::NEVER, |&(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_due_in_order_of_time_and_a_moved_one_once() {
        let mut deadlines = Deadlines::default();
        deadlines.set('a', Time(30));
        deadlines.set('b', Time(20));
        deadlines.set('a', Time(10));
        deadlines.set('c', Time(5));
        deadlines.clear('c');
        assert_eq!(deadlines.next(), Time(10));
        assert_eq!(deadlines.pop(Time(9)), None);
        assert_eq!(deadlines.pop(Time(40)), Some('a'));
        assert_eq!(deadlines.pop(Time(40)), Some('b'));
        assert_eq!(deadlines.pop(Time(40)), None);
        assert_eq!(deadlines.next(), Time::NEVER);
    }
}
