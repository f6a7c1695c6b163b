//! Attention over the paged pool.
//!
//! Keys are cut at fixed positions into spans of [`SPAN`]; a span's softmax and weighted sum are computed by
//! themselves and merged into the row's total in span order. So a row's bits depend on its own position only, whether
//! its spans were computed by one task or by many (H9). Within a span a score sums the head's elements in order, and a
//! value sums its keys in order. Masked keys are left out, never multiplied by zero: their memory may hold anything.

use std::sync::Mutex;

use half::f16;

use super::{Element, Isa, Kernel, LANES, lanes::Lanes};
use crate::{
    kv::{KvPools, Plane},
    threads::Team,
};

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

/// Scores, softmax and weighted sum of one span for one tile and KV head.
struct Span<'a, E> {
    at: &'a Attention<'a>,
    tile: Tile,
    head: usize,
    span: usize,
    scratch: &'a mut Scratch,
    partial: *mut f32,
    element: std::marker::PhantomData<E>,
}

impl<E: Element> Kernel for Span<'_, E> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(mut self) {
        let heads = self.at.heads;
        let rows = self.tile.rows * heads.group();
        let keys = (self.at.end(self.tile) - self.span * SPAN).min(SPAN);
        for first in (0..keys).step_by(GROUP) {
            let count = GROUP.min(keys - first);
            self.unpack_keys::<S>(first, count);
            if S::TILE >= 8 {
                self.score::<S, 4>(first, count, rows);
            } else {
                self.score::<S, 1>(first, count, rows);
            }
        }
        for row in 0..rows {
            self.softmax::<S>(row);
        }
        for first in (0..keys).step_by(GROUP) {
            let count = GROUP.min(keys - first);
            self.unpack_values::<S>(first, count);
            self.accumulate::<S>(first, count, rows);
        }
    }
}

impl<E: Element> Span<'_, E> {
    /// Calls `f(index, count, tokens)` for each run of consecutive tokens in a page, `first` being the first key.
    #[inline(always)]
    unsafe fn runs(&self, first: usize, count: usize, plane: Plane, mut f: impl FnMut(usize, usize, *const E)) {
        let page_size = self.at.kv.shape().page_size as usize;
        let pages = self.at.sequences[self.tile.sequence].pages;
        let mut done = 0;
        while done < count {
            let token = self.span * SPAN + first + done;
            let (page, offset) = (token / page_size, token % page_size);
            let run = (page_size - offset).min(count - done);
            let base = self.at.kv.plane(pages[page], self.head, self.at.layer, plane).cast::<E>();
            f(done, run, base.add(offset * self.at.heads.head_dim));
            done += run;
        }
    }

    /// Keys into `[dim][GROUP]` as f32. Lanes beyond `count` repeat the last key; their scores are never used.
    #[inline(always)]
    unsafe fn unpack_keys<S: Lanes>(&mut self, first: usize, count: usize) {
        let dim = self.at.heads.head_dim;
        let mut keys = [std::ptr::null::<E>(); GROUP];
        self.runs(first, count, Plane::K, |index, run, base| {
            for i in 0..run {
                keys[index + i] = base.wrapping_add(i * dim);
            }
        });
        let last = keys[count - 1];
        keys[count..].fill(last);
        let out = self.scratch.keys.as_mut_ptr();
        for lane in (0..count).step_by(LANES) {
            let rows: [*const E; LANES] = std::array::from_fn(|i| keys[lane + i]);
            let whole = dim / LANES * LANES;
            for d in (0..whole).step_by(LANES) {
                let mut square = [S::splat(0.0); LANES];
                for i in 0..LANES {
                    square[i] = E::load::<S>(rows[i].add(d));
                }
                let square = S::transpose(square);
                for i in 0..LANES {
                    S::store(out.add((d + i) * GROUP + lane), square[i]);
                }
            }
            for d in whole..dim {
                for (i, row) in rows.iter().enumerate() {
                    out.add(d * GROUP + lane + i).write(row.add(d).read().to_f32());
                }
            }
        }
    }

    /// Values into `[GROUP][padded dim]` as f32, the padding zero.
    #[inline(always)]
    unsafe fn unpack_values<S: Lanes>(&mut self, first: usize, count: usize) {
        let (dim, padded) = (self.at.heads.head_dim, self.at.heads.padded_dim());
        let out = self.scratch.values.as_mut_ptr();
        self.runs(first, count, Plane::V, |index, run, base| {
            for i in 0..run {
                let (from, to) = (base.add(i * dim), out.add((index + i) * padded));
                let whole = dim / LANES * LANES;
                for d in (0..whole).step_by(LANES) {
                    S::store(to.add(d), E::load::<S>(from.add(d)));
                }
                for d in whole..dim {
                    to.add(d).write(from.add(d).read().to_f32());
                }
            }
        });
    }

    #[inline(always)]
    unsafe fn query(&self, row: usize) -> *const f32 {
        let (heads, tile) = (self.at.heads, self.tile);
        let (position, q) = (row / heads.group(), self.head * heads.group() + row % heads.group());
        let step_row = self.at.sequences[tile.sequence].first_row + tile.first + position;
        self.at.qkv.as_ptr().add(step_row * heads.qkv_cols() + q * heads.head_dim)
    }

    /// Scores of all rows for one group of keys, `N` vectors of keys at a time.
    #[inline(always)]
    unsafe fn score<S: Lanes, const N: usize>(&mut self, first: usize, count: usize, rows: usize) {
        for lane in (0..count).step_by(N * LANES) {
            let mut row = 0;
            while row < rows {
                row += match rows - row {
                    1 => self.score_rows::<S, N, 1>(first, lane, row),
                    2 => self.score_rows::<S, N, 2>(first, lane, row),
                    3 => self.score_rows::<S, N, 3>(first, lane, row),
                    _ => self.score_rows::<S, N, 4>(first, lane, row),
                };
            }
        }
    }

    #[inline(always)]
    unsafe fn score_rows<S: Lanes, const N: usize, const R: usize>(
        &mut self,
        first: usize,
        lane: usize,
        row: usize,
    ) -> usize {
        let mut x = [std::ptr::null(); R];
        for (r, x) in x.iter_mut().enumerate() {
            *x = self.query(row + r);
        }
        let mut sums = [[S::splat(0.0); N]; R];
        let keys = self.scratch.keys.as_ptr().add(lane);
        multiply_add::<S, N, R>(keys, GROUP, self.at.heads.head_dim, x, &mut sums);
        for (r, sums) in sums.iter().enumerate() {
            for (n, sum) in sums.iter().enumerate() {
                S::store(self.scratch.scores.as_mut_ptr().add((row + r) * SPAN + first + lane + n * LANES), *sum);
            }
        }
        R
    }

    /// Turns a row's scores into weights e^(score - maximum); maximum and sum go into the partial result.
    #[inline(always)]
    unsafe fn softmax<S: Lanes>(&mut self, row: usize) {
        let valid = self.at.valid(self.tile, self.span, row);
        let out = self.partial.add(row * self.at.heads.partial_len());
        for d in (0..self.at.heads.padded_dim()).step_by(LANES) {
            S::store(out.add(d), S::splat(0.0));
        }
        if valid == 0 {
            return;
        }
        let scores = self.scratch.scores.as_mut_ptr().add(row * SPAN);
        let (whole, rest) = (valid / LANES * LANES, valid % LANES);
        let mut largest = S::load_part(scores.add(whole), rest, f32::NEG_INFINITY);
        for at in (0..whole).step_by(LANES) {
            largest = S::max(largest, S::load(scores.add(at)));
        }
        let maximum = S::reduce_max(largest);
        let by = S::splat(maximum);
        let mut sum = S::splat(0.0);
        for at in (0..whole).step_by(LANES) {
            let weight = S::exp(S::sub(S::load(scores.add(at)), by));
            S::store(scores.add(at), weight);
            sum = S::add(sum, weight);
        }
        if rest > 0 {
            let weight = S::exp(S::sub(S::load_part(scores.add(whole), rest, maximum), by));
            S::store_part(scores.add(whole), rest, weight);
            sum = S::add(sum, S::load_part(scores.add(whole), rest, 0.0));
        }
        let padded = self.at.heads.padded_dim();
        out.add(padded).write(maximum);
        out.add(padded + 1).write(S::reduce_add(sum));
    }

    #[inline(always)]
    unsafe fn accumulate<S: Lanes>(&mut self, first: usize, count: usize, rows: usize) {
        let mut row = 0;
        while row < rows {
            row += match rows - row {
                1 => self.accumulate_rows::<S, 1>(first, count, row),
                2 => self.accumulate_rows::<S, 2>(first, count, row),
                3 => self.accumulate_rows::<S, 3>(first, count, row),
                _ => self.accumulate_rows::<S, 4>(first, count, row),
            };
        }
    }

    /// The keys that all `R` rows see together, then for each row those that only it and later rows see.
    #[inline(always)]
    unsafe fn accumulate_rows<S: Lanes, const R: usize>(&mut self, first: usize, count: usize, row: usize) -> usize {
        let seen = |r: usize| self.at.valid(self.tile, self.span, row + r).saturating_sub(first).min(count);
        let common = seen(0);
        let mut x = [std::ptr::null(); R];
        let mut out = [std::ptr::null_mut(); R];
        for r in 0..R {
            x[r] = self.scratch.scores.as_ptr().add((row + r) * SPAN + first);
            out[r] = self.partial.add((row + r) * self.at.heads.partial_len());
        }
        self.weigh::<S, R>(0, common, x, out);
        for r in 1..R {
            self.weigh::<S, 1>(common, seen(r), [x[r]], [out[r]]);
        }
        R
    }

    #[inline(always)]
    unsafe fn weigh<S: Lanes, const R: usize>(
        &self,
        from: usize,
        to: usize,
        weights: [*const f32; R],
        out: [*mut f32; R],
    ) {
        if from >= to {
            return;
        }
        let padded = self.at.heads.padded_dim();
        let values = self.scratch.values.as_ptr().add(from * padded);
        let weights = weights.map(|w| w.wrapping_add(from));
        let wide = if S::TILE >= 8 { padded / (4 * LANES) * (4 * LANES) } else { 0 };
        for d in (0..wide).step_by(4 * LANES) {
            weigh_columns::<S, 4, R>(values.add(d), padded, to - from, weights, out.map(|o| o.wrapping_add(d)));
        }
        for d in (wide..padded).step_by(LANES) {
            weigh_columns::<S, 1, R>(values.add(d), padded, to - from, weights, out.map(|o| o.wrapping_add(d)));
        }
    }
}

#[inline(always)]
unsafe fn weigh_columns<S: Lanes, const N: usize, const R: usize>(
    values: *const f32,
    stride: usize,
    keys: usize,
    weights: [*const f32; R],
    out: [*mut f32; R],
) {
    let mut sums = [[S::splat(0.0); N]; R];
    for r in 0..R {
        for n in 0..N {
            sums[r][n] = S::load(out[r].add(n * LANES));
        }
    }
    multiply_add::<S, N, R>(values, stride, keys, weights, &mut sums);
    for r in 0..R {
        for n in 0..N {
            S::store(out[r].add(n * LANES), sums[r][n]);
        }
    }
}

/// `sums[r][n][lane] += Σ w[k * stride + 16 n + lane] x[r][k]`, k in order, one multiply-add each.
#[inline(always)]
unsafe fn multiply_add<S: Lanes, const N: usize, const R: usize>(
    w: *const f32,
    stride: usize,
    k: usize,
    x: [*const f32; R],
    sums: &mut [[S::F; N]; R],
) {
    let mut local = *sums;
    for i in 0..k {
        let mut columns = [S::splat(0.0); N];
        for (n, column) in columns.iter_mut().enumerate() {
            *column = S::load(w.add(i * stride + n * LANES));
        }
        for r in 0..R {
            let x = S::splat(*x[r].add(i));
            for n in 0..N {
                local[r][n] = S::fma(columns[n], x, local[r][n]);
            }
        }
    }
    *sums = local;
}

/// Takes one span's partial results of a tile's rows into their totals; the first span begins them.
struct Merge<'a> {
    at: &'a Attention<'a>,
    tile: Tile,
    span: usize,
    partial: *const f32,
    total: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let (len, padded) = (self.at.heads.partial_len(), self.at.heads.padded_dim());
        for row in 0..self.tile.rows * self.at.heads.group() {
            let (from, to) = (self.partial.add(row * len), self.total.as_mut_ptr().add(row * len));
            if self.span == 0 {
                std::ptr::copy_nonoverlapping(from, to, padded + 2);
                continue;
            }
            if self.at.valid(self.tile, self.span, row) == 0 {
                continue;
            }
            let (old, new) = (*to.add(padded), *from.add(padded));
            let maximum = old.max(new);
            let keep = S::exp(S::splat(old - maximum));
            let take = S::exp(S::splat(new - maximum));
            for d in (0..padded).step_by(LANES) {
                S::store(to.add(d), S::fma(S::load(from.add(d)), take, S::mul(S::load(to.add(d)), keep)));
            }
            let (keep, take) = (S::reduce_max(keep), S::reduce_max(take));
            to.add(padded).write(maximum);
            to.add(padded + 1).write(*to.add(padded + 1) * keep + *from.add(padded + 1) * take);
        }
    }
}

/// Divides a tile's totals by their sums of weights into the output.
struct Finish<'a> {
    at: &'a Attention<'a>,
    tile: Tile,
    head: usize,
    total: &'a [f32],
    out: &'a Shared,
}

impl Kernel for Finish<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let heads = self.at.heads;
        let (len, padded, dim) = (heads.partial_len(), heads.padded_dim(), heads.head_dim);
        for row in 0..self.tile.rows * heads.group() {
            let total = self.total.as_ptr().add(row * len);
            let by = S::splat(*total.add(padded + 1));
            let step_row = self.at.sequences[self.tile.sequence].first_row + self.tile.first + row / heads.group();
            let q = self.head * heads.group() + row % heads.group();
            let out = self.out.0.add((step_row * heads.heads + q) * dim);
            for d in (0..dim).step_by(LANES) {
                S::store_part(out.add(d), LANES.min(dim - d), S::div(S::load(total.add(d)), by));
            }
        }
    }
}

/// Writes one token's K and V of one head (all replicas) into its page.
///
/// # Panics
/// If the page does not exist, or the rows are not one head.
pub fn write_token(isa: Isa, kv: &KvPools, layer: usize, head: usize, token: (u32, u32), k: &[f32], v: &[f32]) {
    let shape = kv.shape();
    let (page, offset) = token;
    assert!(offset < shape.page_size && k.len() == shape.head_dim as usize && v.len() == k.len(), "one head's row");
    for (plane, row) in [(Plane::K, k), (Plane::V, v)] {
        for base in kv.replicas(page, head, layer, plane) {
            let at = offset as usize * row.len();
            if shape.element_bytes == 2 {
                isa.run(Store::<f16> { row, out: base.cast::<f16>().wrapping_add(at) });
            } else {
                isa.run(Store::<f32> { row, out: base.cast::<f32>().wrapping_add(at) });
            }
        }
    }
}

struct Store<'a, E> {
    row: &'a [f32],
    /// Room for the row in a page that the step owns.
    out: *mut E,
}

impl<E: Element> Kernel for Store<'_, E> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let whole = self.row.len() / LANES * LANES;
        for d in (0..whole).step_by(LANES) {
            E::store::<S>(self.out.add(d), S::load(self.row.as_ptr().add(d)));
        }
        for d in whole..self.row.len() {
            self.out.add(d).write(E::from_f32(self.row[d]));
        }
    }
}
