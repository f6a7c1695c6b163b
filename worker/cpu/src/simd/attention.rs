//! Attention over the paged pool.
//!
//! Keys are cut at fixed positions into spans of [`SPAN`]; a span's softmax and weighted sum are computed by
//! themselves and merged into the row's total in span order. So a row's bits depend on its own position only, whether
//! its spans were computed by one task or by many (H9). Within a span a score sums the head's elements in order, and a
//! value sums its keys in order. Masked keys are left out, never multiplied by zero: their memory may hold anything.

use std::sync::Mutex;

use half::f16;

use self::{
    span::Span,
    total::{Finish, Merge},
};
use super::{Isa, LANES};
use crate::{kv::KvPools, threads::Team};

mod span;
mod store;
mod total;

pub use store::write_token;

/// Keys whose softmax is computed together.
pub const SPAN: usize = 256;
/// Keys that are unpacked together, so that they stay in a first-level cache.
const GROUP: usize = 64;
/// Query rows (positions × heads of a KV head) of a tile, if one position has fewer.
const TILE_ROWS: usize = 96;

/// One sequence's part of a step: rows `first_row..first_row + len` at positions `start..`.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    pub first_row: usize,
    pub len: usize,
    pub start: usize,
    /// Cover `start + len` tokens.
    pub pages: &'a [u32],
}

#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Heads {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Elements of a row `[q heads | k heads | v heads]`.
    pub fn qkv_cols(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Elements of a partial result of one query row: the weighted sum, the maximum, the sum of weights.
    fn partial_len(&self) -> usize {
        self.padded_dim() + LANES
    }
}

/// Consecutive positions of one sequence whose attention is one task per KV head.
#[derive(Clone, Copy, Debug)]
struct Tile {
    sequence: usize,
    /// Offset in the sequence's rows.
    first: usize,
    rows: usize,
    /// Where its partial results begin, in rows of all KV heads and spans, if its spans are tasks of their own.
    partials: usize,
}

/// How a step's attention is cut into tasks; the same for every layer. Made anew per step, its buffers are kept.
#[derive(Default)]
pub struct Plan {
    tiles: Vec<Tile>,
    /// `(tile, span)`, if each span is a task; else empty.
    spans: Vec<(usize, usize)>,
    partials: Vec<f32>,
    scratch: Vec<Mutex<Scratch>>,
}

#[derive(Default)]
struct Scratch {
    /// `[dim][GROUP]`
    keys: Vec<f32>,
    /// `[GROUP][padded dim]`
    values: Vec<f32>,
    /// `[tile rows][SPAN]`
    scores: Vec<f32>,
    /// `[tile rows][partial]`
    partial: Vec<f32>,
    total: Vec<f32>,
}

impl Plan {
    pub fn prepare(&mut self, heads: Heads, sequences: &[Sequence<'_>], threads: usize) {
        let positions = (TILE_ROWS / heads.group()).max(1);
        self.tiles.clear();
        self.spans.clear();
        for (sequence, s) in sequences.iter().enumerate() {
            for first in (0..s.len).step_by(positions) {
                self.tiles.push(Tile { sequence, first, rows: positions.min(s.len - first), partials: 0 });
            }
        }
        let spans_of = |tile: &Tile| (sequences[tile.sequence].start + tile.first + tile.rows).div_ceil(SPAN);
        let mut rows = 0;
        if self.tiles.len() * heads.kv_heads < 4 * threads && self.tiles.iter().any(|tile| spans_of(tile) > 1) {
            for (index, tile) in self.tiles.iter_mut().enumerate() {
                tile.partials = rows;
                let spans = spans_of(tile);
                rows += tile.rows * heads.heads * spans;
                self.spans.extend((0..spans).map(|span| (index, span)));
            }
        }
        self.partials.resize(rows * heads.partial_len(), 0.0);
        self.scratch.resize_with(threads, Default::default);
        let tile_rows = positions * heads.group();
        for scratch in &mut self.scratch {
            let scratch = scratch.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
            scratch.keys.resize(heads.head_dim * GROUP, 0.0);
            scratch.values.resize(heads.padded_dim() * GROUP, 0.0);
            scratch.scores.resize(tile_rows * SPAN, 0.0);
            scratch.partial.resize(tile_rows * heads.partial_len(), 0.0);
            scratch.total.resize(tile_rows * heads.partial_len(), 0.0);
        }
    }
}

/// Everything that the tasks of one layer's attention share.
pub struct Attention<'a> {
    pub isa: Isa,
    pub kv: &'a KvPools,
    pub layer: usize,
    pub heads: Heads,
    pub sequences: &'a [Sequence<'a>],
    /// `[rows][q heads | k heads | v heads]`; q is rotated and scaled.
    pub qkv: &'a [f32],
}

/// A buffer that tasks write in disjoint parts.
struct Shared(*mut f32);
// SAFETY: each task writes the part that belongs to its tile and head; `Attention::run` holds the buffer mutably
// until all tasks have ended.
unsafe impl Sync for Shared {}

impl Attention<'_> {
    /// Writes `[rows, heads * head_dim]`. The keys and values of all rows are in the pool already.
    ///
    /// # Panics
    /// If shapes do not agree, or a sequence's pages do not cover it.
    pub fn run(&self, team: &Team, plan: &mut Plan, out: &mut [f32]) {
        let rows: usize = self.sequences.iter().map(|s| s.len).sum();
        assert_eq!(out.len(), rows * self.heads.heads * self.heads.head_dim, "an output of {rows} rows");
        assert_eq!(self.qkv.len(), rows * self.heads.qkv_cols(), "q, k and v of {rows} rows");
        let kv_heads = self.heads.kv_heads;
        let out = Shared(out.as_mut_ptr());
        let out = &out;
        let Plan { tiles, spans, partials, scratch } = plan;
        let (tiles, spans, scratch) = (&*tiles, &*spans, &*scratch);
        if spans.is_empty() {
            team.run(tiles.len() * kv_heads, &|task, thread| {
                let mut scratch = scratch[thread].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                self.whole_tile(tiles[task / kv_heads], task % kv_heads, &mut scratch, out);
            });
            return;
        }
        let partials = &Shared(partials.as_mut_ptr());
        team.run(spans.len() * kv_heads, &|task, thread| {
            let (tile, span) = spans[task / kv_heads];
            let (tile, head) = (tiles[tile], task % kv_heads);
            let mut scratch = scratch[thread].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            // SAFETY: `Plan::prepare` made room for this tile, head and span, and no other task has the same.
            let partial = unsafe { partials.0.add(self.partial_offset(tile, head, span)) };
            self.span(tile, head, span, &mut scratch, partial);
        });
        team.run(tiles.len() * kv_heads, &|task, thread| {
            let (tile, head) = (tiles[task / kv_heads], task % kv_heads);
            let mut scratch = scratch[thread].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            for span in 0..self.spans(tile) {
                // SAFETY: as above; all spans have been written.
                let partial = unsafe { partials.0.add(self.partial_offset(tile, head, span)) };
                self.merge(tile, span, partial, &mut scratch.total);
            }
            self.finish(tile, head, &scratch.total, out);
        });
    }

    fn spans(&self, tile: Tile) -> usize {
        self.end(tile).div_ceil(SPAN)
    }

    /// Keys that the tile's last row sees.
    fn end(&self, tile: Tile) -> usize {
        self.sequences[tile.sequence].start + tile.first + tile.rows
    }

    fn partial_offset(&self, tile: Tile, head: usize, span: usize) -> usize {
        let rows = tile.rows * self.heads.group();
        (tile.partials + (head * self.spans(tile) + span) * rows) * self.heads.partial_len()
    }

    fn whole_tile(&self, tile: Tile, head: usize, scratch: &mut Scratch, out: &Shared) {
        for span in 0..self.spans(tile) {
            let partial = scratch.partial.as_mut_ptr();
            self.span(tile, head, span, scratch, partial);
            self.merge(tile, span, partial, &mut scratch.total);
        }
        self.finish(tile, head, &scratch.total, out);
    }

    /// `partial` has room for the tile's rows.
    fn span(&self, tile: Tile, head: usize, span: usize, scratch: &mut Scratch, partial: *mut f32) {
        match self.kv.shape().element_bytes {
            2 => {
                self.isa.run(Span::<f16> { at: self, tile, head, span, scratch, partial, element: Default::default() })
            }
            _ => {
                self.isa.run(Span::<f32> { at: self, tile, head, span, scratch, partial, element: Default::default() })
            }
        }
    }

    fn merge(&self, tile: Tile, span: usize, partial: *const f32, total: &mut [f32]) {
        self.isa.run(Merge { at: self, tile, span, partial, total })
    }

    fn finish(&self, tile: Tile, head: usize, total: &[f32], out: &Shared) {
        self.isa.run(Finish { at: self, tile, head, total, out })
    }

    /// How many keys of a span query row `row` of a tile sees.
    fn valid(&self, tile: Tile, span: usize, row: usize) -> usize {
        let seen = self.sequences[tile.sequence].start + tile.first + row / self.heads.group() + 1;
        seen.saturating_sub(span * SPAN).min(SPAN)
    }
}
