//! The pages of one worker, each with a canary while nobody owns it.
//!
//! A page that is handed out or given back is filled anew. A write that lands in a page after it was given back is seen
//! at the next look: the canary is not what it was.

use std::{collections::BTreeSet, sync::Arc};

use tandem_fabric::{memory::PoolMemory, probe};
use tandem_handoff::layout::PoolShape;

use crate::{Failure, pattern::mix};

pub struct Pages {
    shape: PoolShape,
    pools: Vec<Arc<PoolMemory>>,
    free: BTreeSet<u32>,
    /// No canaries: for measurements, which they would disturb.
    blind: bool,
}

impl Pages {
    pub fn new(shape: PoolShape, pools: Vec<Arc<PoolMemory>>) -> Self {
        let mut pages = Self { shape, pools, free: BTreeSet::new(), blind: false };
        pages.give_back((0..shape.pages).collect());
        pages
    }

    /// From now on nothing is filled and nothing is looked at.
    pub fn blind(&mut self) {
        self.blind = true;
    }

    pub fn is_blind(&self) -> bool {
        self.blind
    }

    /// `None`, and nothing taken, when fewer are free.
    ///
    /// # Errors
    /// When something was written into a free page.
    pub fn take(&mut self, count: usize) -> Result<Option<Vec<u32>>, Failure> {
        if self.free.len() < count {
            return Ok(None);
        }
        let taken: Vec<u32> = self.free.iter().take(count).copied().collect();
        for &page in &taken {
            self.look(page)?;
            self.free.remove(&page);
            self.fill(page, OWNED);
        }
        Ok(Some(taken))
    }

    pub fn give_back(&mut self, pages: Vec<u32>) {
        for page in pages {
            self.fill(page, FREE);
            assert!(self.free.insert(page), "H1: page {page} is given back twice");
        }
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn is_full(&self) -> bool {
        self.free.len() == self.shape.pages as usize
    }

    /// # Errors
    /// When something was written into a free page (H2).
    pub fn check(&self) -> Result<(), Failure> {
        self.free.iter().try_for_each(|&page| self.look(page))
    }

    fn look(&self, page: u32) -> Result<(), Failure> {
        if self.blind {
            return Ok(());
        }
        let at = page as usize * self.shape.page_bytes();
        for (rank, pool) in self.pools.iter().enumerate() {
            if let Some(byte) = probe::differs(pool, at, self.shape.page_bytes(), |index| canary(page, index, FREE)) {
                return Err(Failure::new(format!("H2: byte {byte} of free page {page} was written on rank {rank}")));
            }
        }
        Ok(())
    }

    fn fill(&self, page: u32, kind: u64) {
        if self.blind {
            return;
        }
        let at = page as usize * self.shape.page_bytes();
        for pool in &self.pools {
            probe::fill(pool, at, self.shape.page_bytes(), |index| canary(page, index, kind));
        }
    }
}

const FREE: u64 = 0xdddd_dddd_dddd_dddd;
const OWNED: u64 = 0xaaaa_aaaa_aaaa_aaaa;

fn canary(page: u32, index: usize, kind: u64) -> u64 {
    kind ^ mix(u64::from(page) << 32 | index as u64)
}
