//! One zeroed allocation (huge pages where the system gives them) for all packed weights of a model.

use std::{io, sync::Arc};

use tandem_fabric::memory::PoolMemory;

/// Regions begin at multiples of a cache line.
const ALIGN: usize = 64;

pub struct Arena {
    memory: Arc<PoolMemory>,
    used: usize,
}

/// Bytes of an arena that belong to this value alone.
pub struct Region {
    memory: Arc<PoolMemory>,
    offset: usize,
    len: usize,
}

impl Arena {
    /// Room for regions of these sizes.
    pub fn new(sizes: impl IntoIterator<Item = usize>) -> io::Result<Self> {
        let bytes = sizes.into_iter().map(|size| size.next_multiple_of(ALIGN)).sum();
        Ok(Self { memory: Arc::new(PoolMemory::new(bytes)?), used: 0 })
    }

    /// # Panics
    /// If the arena was made for less.
    pub fn take(&mut self, len: usize) -> Region {
        let offset = self.used;
        self.used += len.next_multiple_of(ALIGN);
        assert!(self.used <= self.memory.len(), "the arena was made for {} bytes", self.memory.len());
        Region { memory: self.memory.clone(), offset, len }
    }
}

impl Region {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies in the mapping, which lives as long as `memory`, is zeroed or written, and is this
        // region's alone.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(self.offset), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` is the only way to the range.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(self.offset), self.len) }
    }
}
