//! The KV pools as the backend sees them: where a head's tokens lie, over all ranks.
//!
//! Pages named in a step belong to the step's sequences (H1) until the step ends (H10); the engine sees to that. Within
//! a step each (page, head, token) is written by one task, and read only after all writes of that layer have ended.
#![allow(unsafe_code)]

use std::{io, sync::Arc};

use tandem_fabric::memory::PoolMemory;
use tandem_handoff::layout::PoolShape;

/// K or V, in the order of the layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plane {
    K = 0,
    V = 1,
}

pub struct KvPools {
    shape: PoolShape,
    memories: Vec<Arc<PoolMemory>>,
    /// For each KV head of the model every `(rank, local head)` that holds it; reads go to the first.
    homes: Vec<Vec<(u32, u32)>>,
}

impl KvPools {
    /// `shared` pools can be mapped by other processes of this host, where the system has such memory.
    pub fn new(shape: PoolShape, shared: bool) -> io::Result<Self> {
        let make = if shared { PoolMemory::shared_if_possible } else { PoolMemory::new };
        let memories = (0..shape.tp).map(|_| make(shape.pool_bytes()).map(Arc::new)).collect::<io::Result<_>>()?;
        let mut homes = vec![Vec::new(); shape.kv_heads as usize];
        for rank in 0..shape.tp {
            for (local, head) in shape.heads_of_rank(rank).enumerate() {
                homes[head as usize].push((rank, local as u32));
            }
        }
        Ok(Self { shape, memories, homes })
    }

    pub fn shape(&self) -> &PoolShape {
        &self.shape
    }

    pub fn memories(&self) -> &[Arc<PoolMemory>] {
        &self.memories
    }

    /// Where `[token][dim]` of one plane begins, for reading.
    ///
    /// # Panics
    /// If page, head or layer lie outside the pool.
    pub fn plane(&self, page: u32, head: usize, layer: usize, plane: Plane) -> *const u8 {
        self.at(self.homes[head][0], page, layer, plane)
    }

    /// As [`Self::plane`], once for each rank that holds the head, for writing.
    pub fn replicas(&self, page: u32, head: usize, layer: usize, plane: Plane) -> impl Iterator<Item = *mut u8> {
        self.homes[head].iter().map(move |home| self.at(*home, page, layer, plane))
    }

    fn at(&self, (rank, local): (u32, u32), page: u32, layer: usize, plane: Plane) -> *mut u8 {
        assert!(page < self.shape.pages && layer < self.shape.layers as usize, "page {page} of {}", self.shape.pages);
        let offset = self.shape.plane_offset(page, local, layer as u32, plane as u32);
        self.memories[rank as usize].as_ptr().wrapping_add(offset)
    }

    /// Zeroes the tokens of a page from `from_token` on: all heads, layers and ranks.
    pub fn zero_tail(&mut self, page: u32, from_token: u32) {
        let used = self.shape.plane_bytes() / self.shape.page_size as usize * from_token as usize;
        let unused = self.shape.plane_bytes().saturating_sub(used);
        for head in 0..self.shape.kv_heads as usize {
            for layer in 0..self.shape.layers as usize {
                for plane in [Plane::K, Plane::V] {
                    for start in self.replicas(page, head, layer, plane) {
                        // SAFETY: `used + unused` is one plane at most, which lies in the pool; the caller owns the
                        // page, and `&mut self` excludes a step.
                        unsafe { start.add(used.min(self.shape.plane_bytes())).write_bytes(0, unused) };
                    }
                }
            }
        }
    }
}
