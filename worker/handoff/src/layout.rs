//! Where a token's K and V lie in a pool: `[page][kv head][layer][K|V][token][dim]`. *Pure.*
//!
//! A page is one contiguous range of a rank's pool, and so is each KV head of a page: workers with different TP
//! exchange whole head ranges of a page. With more ranks than KV heads, heads are replicated over ranks.

use std::ops::Range;

/// The shape of a worker's KV pools. Everything but `tp` and `pages` must be equal on both sides of a handoff.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PoolShape {
    pub layers: u32,
    /// KV heads of the whole model.
    pub kv_heads: u32,
    /// Elements per head and token.
    pub head_dim: u32,
    /// Tokens per page.
    pub page_size: u32,
    /// Bytes per element: 2 or 4.
    pub element_bytes: u32,
    /// Tensor-parallel ranks, each with a pool of its own.
    pub tp: u32,
    /// Pages in each rank's pool; a page number means the same tokens on every rank.
    pub pages: u32,
}

impl PoolShape {
    /// The KV heads that `rank` holds, as indices into the whole model's heads.
    pub fn heads_of_rank(&self, rank: u32) -> Range<u32> {
        assert!(rank < self.tp, "rank {rank} of {}", self.tp);
        if self.tp >= self.kv_heads {
            let head = rank * self.kv_heads / self.tp;
            head..head + 1
        } else {
            let per_rank = self.kv_heads / self.tp;
            rank * per_rank..(rank + 1) * per_rank
        }
    }

    pub fn heads_per_rank(&self) -> u32 {
        (self.kv_heads / self.tp).max(1)
    }

    /// Bytes of one KV head of one page: all layers, K and V, all tokens.
    pub fn head_bytes(&self) -> usize {
        self.layers as usize * 2 * self.plane_bytes()
    }

    /// Bytes of K (or V) of one head, layer and page: `[token][dim]`.
    pub fn plane_bytes(&self) -> usize {
        self.page_size as usize * self.head_dim as usize * self.element_bytes as usize
    }

    /// Bytes of one page in one rank's pool.
    pub fn page_bytes(&self) -> usize {
        self.heads_per_rank() as usize * self.head_bytes()
    }

    /// Bytes of one rank's pool.
    pub fn pool_bytes(&self) -> usize {
        self.pages as usize * self.page_bytes()
    }

    /// Offset in a rank's pool of `[page][local_head][layer][kv]`, where `kv` is 0 for K and 1 for V.
    pub fn plane_offset(&self, page: u32, local_head: u32, layer: u32, kv: u32) -> usize {
        page as usize * self.page_bytes()
            + local_head as usize * self.head_bytes()
            + (layer as usize * 2 + kv as usize) * self.plane_bytes()
    }

    /// Pages that `tokens` tokens need.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size as usize)
    }

    /// Bytes of KV cache per token over all heads, counted once.
    pub fn bytes_per_token(&self) -> usize {
        self.kv_heads as usize * self.layers as usize * 2 * (self.head_dim * self.element_bytes) as usize
    }
}
