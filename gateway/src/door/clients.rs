//! How many client connections are open, and whether one more may be. *Pure* but for its counter.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Connections beyond the cap that are told so at the same time; further ones are closed without a word.
const TOLD_MAX: usize = 64;

/// Counts the connections of one gateway.
#[derive(Clone, Debug, Default)]
pub struct Clients(Arc<AtomicUsize>);

/// One client connection, counted until it is dropped.
#[derive(Debug)]
pub struct Entry {
    open: Arc<AtomicUsize>,
    /// Within the cap; others hear that there are too many.
    pub admitted: bool,
}

impl Clients {
    /// Counts a connection; `None` where there are so many that not even a refusal is given.
    pub fn enter(&self, max: usize) -> Option<Entry> {
        let entry = Entry { admitted: self.0.fetch_add(1, Relaxed) < max, open: self.0.clone() };
        (entry.admitted || self.open() <= max.saturating_add(TOLD_MAX)).then_some(entry)
    }

    pub fn open(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_beyond_the_cap_are_told_and_all_places_come_back() {
        let clients = Clients::default();
        let entries: Vec<_> = (0..200).map(|_| clients.enter(2)).collect();
        let admitted = entries.iter().flatten().filter(|e| e.admitted).count();
        assert_eq!((admitted, entries.iter().flatten().count()), (2, 2 + TOLD_MAX));
        drop(entries);
        assert_eq!(clients.open(), 0);
        assert!(clients.enter(2).unwrap().admitted);
    }
}
