//! Checksums of KV pages as they lie in a worker's pools: computed by P, compared by D before it publishes.

use std::sync::Arc;

use tandem_fabric::memory::PoolMemory;
use tandem_handoff::{checksum::Corrupt, layout::PoolShape};

/// Reads pages where they lie. Separate from [`Checksums`] so that a simulated pool can stand behind it.
pub trait PageSums: Send {
    /// The checksum of the head in `slot` of `page` in the pool of `rank`. The caller sees to it that nobody writes to the
    /// page meanwhile (H1, H10).
    fn sum(&self, rank: u32, page: u32, slot: u32) -> u32;
}

/// The checksums of a pool of a known shape.
pub struct Checksums {
    shape: PoolShape,
    pages: Box<dyn PageSums>,
}

impl Checksums {
    pub fn over(shape: PoolShape, pages: Box<dyn PageSums>) -> Self {
        Self { shape, pages }
    }

    /// Of pools in this process's memory, one per rank.
    pub fn of_memory(shape: PoolShape, memories: Vec<Arc<PoolMemory>>) -> Self {
        Self::over(shape, Box::new(InMemory { shape, memories }))
    }

    /// `[page][kv head of the whole model]`; of a replicated head, the copy that is pushed.
    pub fn of(&self, pages: &[u32]) -> Vec<u32> {
        let holders: Vec<(u32, u32)> = (0..self.shape.kv_heads).map(|head| self.shape.holder(head)).collect();
        let of_page = |&page: &u32| holders.iter().map(move |&(rank, slot)| self.pages.sum(rank, page, slot));
        pages.iter().flat_map(of_page).collect()
    }

    /// Compares each copy of each head of `pages` with `expected`, which is ordered as by [`Checksums::of`]. `held` pages
    /// of the prompt come before them.
    ///
    /// # Errors
    /// The first page and head that differ.
    pub fn compare(&self, pages: &[u32], held: usize, expected: &[u32]) -> Result<(), Corrupt> {
        let heads = self.shape.kv_heads as usize;
        assert_eq!(expected.len(), pages.len() * heads, "the machine counted the checksums");
        for (at, (&page, expected)) in pages.iter().zip(expected.chunks_exact(heads)).enumerate() {
            for rank in 0..self.shape.tp {
                for (slot, head) in self.shape.heads_of_rank(rank).enumerate() {
                    if self.pages.sum(rank, page, slot as u32) != expected[head as usize] {
                        return Err(Corrupt { prompt_page: held + at, page, head, rank });
                    }
                }
            }
        }
        Ok(())
    }
}

struct InMemory {
    shape: PoolShape,
    memories: Vec<Arc<PoolMemory>>,
}

impl PageSums for InMemory {
    fn sum(&self, rank: u32, page: u32, slot: u32) -> u32 {
        self.memories[rank as usize].checksum(self.shape.head_offset(page, slot), self.shape.head_bytes())
    }
}
