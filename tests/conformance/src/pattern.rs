//! The oracle: what every word of a prompt's KV cache is, as a function of the prompt alone. Pure.

use std::sync::Arc;

use tandem_fabric::{memory::PoolMemory, probe};
use tandem_handoff::{layout::PoolShape, wire::prompt_hash};

/// A prompt, and the seed of its KV cache.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub tokens: Vec<u32>,
    seed: u64,
}

impl Prompt {
    /// `tokens` tokens that no prompt of another `number` shares.
    pub fn new(number: u64, tokens: usize) -> Self {
        let tokens: Vec<u32> = (0..tokens as u64).map(|at| mix(number ^ (at << 32)) as u32).collect();
        let seed = prompt_hash(&tokens) as u64;
        Self { tokens, seed }
    }

    /// A word of the prompt's page `page`: of `head`, counted over the whole model.
    fn word(&self, page: usize, head: u32, index: usize) -> u64 {
        mix(self.seed ^ ((page as u64) << 40) ^ (u64::from(head) << 32) ^ index as u64)
    }

    /// Computes page `page` of the prompt into `slot` of a worker's pools.
    pub fn compute(&self, pools: &[Arc<PoolMemory>], shape: &PoolShape, page: usize, slot: u32) {
        each_head(shape, |rank, local, head| {
            let at = shape.head_offset(slot, local);
            probe::fill(&pools[rank as usize], at, shape.head_bytes(), |index| self.word(page, head, index));
        });
    }

    /// Says where `slot` of a worker's pools is not page `page` of the prompt.
    pub fn differs(&self, pools: &[Arc<PoolMemory>], shape: &PoolShape, page: usize, slot: u32) -> Option<String> {
        let mut found = None;
        each_head(shape, |rank, local, head| {
            let at = shape.head_offset(slot, local);
            let word = |index| self.word(page, head, index);
            if let Some(byte) = probe::differs(&pools[rank as usize], at, shape.head_bytes(), word) {
                found.get_or_insert(format!(
                    "page {page} of the prompt (page {slot} of the pool), head {head} on rank {rank}, byte {byte}"
                ));
            }
        });
        found
    }
}

/// Calls `act` with rank, head slot and head, for each head of each rank.
fn each_head(shape: &PoolShape, mut act: impl FnMut(u32, u32, u32)) {
    for rank in 0..shape.tp {
        for (local, head) in shape.heads_of_rank(rank).enumerate() {
            act(rank, local as u32, head);
        }
    }
}

/// A bijective scramble (the finalizer of SplitMix64).
pub fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
