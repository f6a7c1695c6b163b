//! Spans' partial results merged into a tile's totals, in span order (H9), and totals turned into the output.

use super::{Attention, Shared, Tile};
use crate::simd::{Kernel, LANES, lanes::Lanes};

/// Takes one span's partial results of a tile's rows into their totals; the first span begins them.
pub(super) struct Merge<'a> {
    pub at: &'a Attention<'a>,
    pub tile: Tile,
    pub span: usize,
    pub partial: *const f32,
    pub total: &'a mut [f32],
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
pub(super) struct Finish<'a> {
    pub at: &'a Attention<'a>,
    pub tile: Tile,
    pub head: usize,
    pub total: &'a [f32],
    pub out: &'a Shared,
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
