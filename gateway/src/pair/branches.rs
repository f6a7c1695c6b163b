//! How often a policy took which of its branches, for metrics. *Pure.*

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Debug)]
pub struct Branches<const N: usize> {
    names: [&'static str; N],
    counts: [AtomicU64; N],
}

impl<const N: usize> Branches<N> {
    pub fn new(names: [&'static str; N]) -> Self {
        Branches { names, counts: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// `branch`: its place among the names.
    pub fn count(&self, branch: usize) {
        self.counts[branch].fetch_add(1, Relaxed);
    }

    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        self.names.iter().copied().zip(self.counts.iter().map(|count| count.load(Relaxed))).collect()
    }
}
