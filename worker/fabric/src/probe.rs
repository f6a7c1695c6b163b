//! Pool bytes for those who check a fabric: tests and benchmarks fill pages with known words and find what differs.
//!
//! Every access is one relaxed atomic word, so that a probe may look at a page while a fabric writes it and sees, word
//! by word, the old value or the new one. Who may write which page is decided by page ownership, as everywhere.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory::PoolMemory;

/// Bytes of one word.
pub const WORD_BYTES: usize = 8;

/// Sets `bytes` bytes from `at` on; `word` says the value of each, by its index in the range.
pub fn fill(memory: &PoolMemory, at: usize, bytes: usize, word: impl Fn(usize) -> u64) {
    for (index, slot) in words(memory, at, bytes).iter().enumerate() {
        slot.store(word(index), Ordering::Relaxed);
    }
}

/// The first byte, counted from `at`, of a word that is not what `word` says; `None` when all are.
pub fn differs(memory: &PoolMemory, at: usize, bytes: usize, word: impl Fn(usize) -> u64) -> Option<usize> {
    let wrong = |(index, slot): (usize, &AtomicU64)| slot.load(Ordering::Relaxed) != word(index);
    words(memory, at, bytes).iter().enumerate().position(wrong).map(|index| index * WORD_BYTES)
}

fn words(memory: &PoolMemory, at: usize, bytes: usize) -> &[AtomicU64] {
    assert!(at.is_multiple_of(WORD_BYTES) && bytes.is_multiple_of(WORD_BYTES), "a range of whole words");
    assert!(at.checked_add(bytes).is_some_and(|end| end <= memory.len()), "the range lies in the pool");
    // SAFETY: the range lies in the mapping (asserted), which lives as long as the borrow and starts on a page
    // boundary, so that each word is aligned. All accesses through the slice are atomic; a fabric that writes a page
    // which its attempt does not own is the very fault that a probe is there to see.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().add(at).cast::<AtomicU64>(), bytes / WORD_BYTES) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_word_is_found() {
        let memory = PoolMemory::new(4096).expect("memory");
        fill(&memory, 64, 128, |index| index as u64);
        assert_eq!(differs(&memory, 64, 128, |index| index as u64), None);
        fill(&memory, 96, 8, |_| 99);
        assert_eq!(differs(&memory, 64, 128, |index| index as u64), Some(32));
        assert_eq!(differs(&memory, 0, 64, |_| 0), None);
    }
}
