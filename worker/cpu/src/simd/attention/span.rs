//! One span of keys for one tile and KV head: scores, softmax and weighted sum. Keys and values are unpacked a group at a
//! time, a score sums the head's elements in order, and a value sums its keys in order (H9).

use super::{Attention, GROUP, SPAN, Scratch, Tile};
use crate::{
    kv::Plane,
    simd::{Element, Kernel, LANES, lanes::Lanes},
};

/// Scores, softmax and weighted sum of one span for one tile and KV head.
pub(super) struct Span<'a, E> {
    pub at: &'a Attention<'a>,
    pub tile: Tile,
    pub head: usize,
    pub span: usize,
    pub scratch: &'a mut Scratch,
    pub partial: *mut f32,
    pub element: std::marker::PhantomData<E>,
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
