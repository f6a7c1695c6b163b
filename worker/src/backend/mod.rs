//! What the engine asks of a device: one step over slices of sequences, and the tail of a page zeroed.
//!
//! The engine passes page tables and owns the pages; a backend touches only pages that a slice names.
pub mod cpu;

use std::sync::Arc;

use tandem_fabric::memory::PoolMemory;

pub use tandem_cpu::{LogitRows, Slice};

/// A device that holds the model and the KV pool.
pub trait Backend: Send {
    /// Computes `slices`, writes their K and V into their pages, and puts the wanted logits `[rows, vocab]` into
    /// `logits` in the order of the slices. On return no write to the pages is in progress (H10).
    ///
    /// # Errors
    /// The step's pages hold anything then; the backend itself stays usable.
    fn step(&mut self, slices: &[Slice<'_>], logits: &mut Vec<f32>) -> Result<(), BackendError>;

    /// Zeroes the K and V of the tokens `from_token ..` of a page, for all layers, heads and ranks.
    fn zero_tail(&mut self, page: u32, from_token: u32);

    /// Length of a row of logits.
    fn vocab(&self) -> usize;

    /// The KV pools, one per tensor-parallel rank.
    fn memory(&self) -> &[Arc<PoolMemory>];

    /// Build, math mode and instruction set: two workers with the same id compute the same bits.
    fn numerics_id(&self) -> String;
}

/// A step failed: a fault of the device or of this worker, never of the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BackendError(pub String);
