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
        let first = rank * self.kv_heads / self.tp;
        let end = (rank + 1) * self.kv_heads / self.tp;
        first..end.max(first + 1)
    }

    /// The lowest rank that holds `head` of the whole model, and the slot that the head has in that rank's pages.
    pub fn holder(&self, head: u32) -> (u32, u32) {
        let rank = (0..self.tp).find(|&rank| self.heads_of_rank(rank).contains(&head));
        let rank = rank.expect("the ranks of a worker hold every head");
        (rank, head - self.heads_of_rank(rank).start)
    }

    /// Head slots of a page in each rank's pool. Where TP does not divide the heads, some ranks leave one unused.
    pub fn heads_per_rank(&self) -> u32 {
        self.kv_heads.div_ceil(self.tp)
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

    /// Offset in a rank's pool of `[page][local_head]`, where a run of heads of that page begins.
    pub fn head_offset(&self, page: u32, local_head: u32) -> usize {
        self.plane_offset(page, local_head, 0, 0)
    }

    /// Bytes of KV cache per token over all heads, counted once.
    pub fn bytes_per_token(&self) -> usize {
        self.kv_heads as usize * self.layers as usize * 2 * (self.head_dim * self.element_bytes) as usize
    }
}

/// One contiguous range of a page that moves from one P rank to one D rank, the same for every page: a run of heads
/// with all their layers, or some layers of one head.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Route {
    pub prefill_rank: u32,
    pub decode_rank: u32,
    /// First head slot in the prefill rank's page.
    pub prefill_head: u32,
    /// First head slot in the decode rank's page.
    pub decode_head: u32,
    pub heads: u32,
    /// First layer of the range, and how many; fewer than all only where `heads` is 1.
    pub layer: u32,
    pub layers: u32,
}

impl Route {
    /// Offset in the prefill rank's pool of the range in `page`.
    pub fn source_offset(&self, prefill: &PoolShape, page: u32) -> usize {
        prefill.plane_offset(page, self.prefill_head, self.layer, 0)
    }

    /// Offset in the decode rank's pool of the range in `page`.
    pub fn target_offset(&self, decode: &PoolShape, page: u32) -> usize {
        decode.plane_offset(page, self.decode_head, self.layer, 0)
    }
}

/// How the pages of one P map onto those of one D. Both sides compute it from both shapes, so a piece is named on the
/// wire by its index alone.
///
/// Each head that a D rank holds comes from the lowest P rank that holds it, once per D rank; neighbouring heads from
/// the same P rank move as one piece, unless the layers move in groups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    routes: Vec<Route>,
    layer_bytes: usize,
}

impl Mapping {
    /// All layers of a head run together. The shapes must agree in everything but `tp` and `pages` (Hello compares them).
    pub fn new(prefill: &PoolShape, decode: &PoolShape) -> Self {
        Self::grouped(prefill, decode, prefill.layers)
    }

    /// As [`Mapping::new`], with at most `layers_per_group` layers of a head in one piece. Where that is fewer than all,
    /// each head moves by itself, since only then is a piece contiguous.
    pub fn grouped(prefill: &PoolShape, decode: &PoolShape, layers_per_group: u32) -> Self {
        assert!(layers_per_group > 0, "a group has layers");
        let runs = head_runs(prefill, decode);
        let layer_bytes = 2 * prefill.plane_bytes();
        let layers = prefill.layers;
        if layers_per_group >= layers {
            return Self { routes: runs, layer_bytes };
        }
        let heads = runs.iter().flat_map(|run| {
            (0..run.heads).map(move |head| Route {
                prefill_head: run.prefill_head + head,
                decode_head: run.decode_head + head,
                heads: 1,
                ..*run
            })
        });
        let groups = heads.flat_map(|head| {
            (0..layers).step_by(layers_per_group as usize).map(move |layer| Route {
                layer,
                layers: layers_per_group.min(layers - layer),
                ..head
            })
        });
        Self { routes: groups.collect(), layer_bytes }
    }

    pub fn routes(&self) -> &[Route] {
        &self.routes
    }

    /// Pieces that `pages` pages move as.
    pub fn pieces(&self, pages: usize) -> usize {
        pages * self.routes.len()
    }

    /// The index of the piece that moves page `page` of the set by route `route`.
    pub fn piece(&self, page: usize, route: usize) -> usize {
        page * self.routes.len() + route
    }

    /// Page of the set, and route, of a piece.
    pub fn split(&self, piece: usize) -> (usize, &Route) {
        (piece / self.routes.len(), &self.routes[piece % self.routes.len()])
    }

    /// Bytes of one piece of `route`.
    pub fn bytes(&self, route: &Route) -> usize {
        route.heads as usize * route.layers as usize * self.layer_bytes
    }
}

/// The head runs of a mapping, each with all layers, by D rank and then by head.
fn head_runs(prefill: &PoolShape, decode: &PoolShape) -> Vec<Route> {
    assert_eq!(prefill.kv_heads, decode.kv_heads, "Hello compared the KV heads");
    assert_eq!(prefill.head_bytes(), decode.head_bytes(), "Hello compared the page layout");
    let mut runs: Vec<Route> = Vec::new();
    for decode_rank in 0..decode.tp {
        let held = decode.heads_of_rank(decode_rank);
        for head in held.clone() {
            let (prefill_rank, prefill_head) = prefill.holder(head);
            match runs.last_mut() {
                Some(last) if last.decode_rank == decode_rank && last.prefill_rank == prefill_rank => last.heads += 1,
                _ => runs.push(Route {
                    prefill_rank,
                    decode_rank,
                    prefill_head,
                    decode_head: head - held.start,
                    heads: 1,
                    layer: 0,
                    layers: prefill.layers,
                }),
            }
        }
    }
    runs
}

/// The pieces of one attempt that have landed: a set, not a count.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PieceSet {
    words: Vec<u64>,
    pieces: usize,
    landed: usize,
}

impl PieceSet {
    pub fn new(pieces: usize) -> Self {
        Self { words: vec![0; pieces.div_ceil(64)], pieces, landed: 0 }
    }

    pub fn contains(&self, piece: usize) -> bool {
        piece < self.pieces && self.words[piece / 64] & (1 << (piece % 64)) != 0
    }

    /// False when the piece is outside the set or in it already.
    pub fn insert(&mut self, piece: usize) -> bool {
        if piece >= self.pieces || self.contains(piece) {
            return false;
        }
        self.words[piece / 64] |= 1 << (piece % 64);
        self.landed += 1;
        true
    }

    /// The first piece that has not landed.
    pub fn missing(&self) -> Option<usize> {
        (0..self.pieces).find(|&piece| !self.contains(piece))
    }

    pub fn is_full(&self) -> bool {
        self.landed == self.pieces
    }

    pub fn landed(&self) -> usize {
        self.landed
    }

    /// How many pieces make the set full.
    pub fn size(&self) -> usize {
        self.pieces
    }
}

#[cfg(test)]
mod tests;
