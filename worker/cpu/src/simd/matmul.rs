//! `y = W x + b` for packed weights and rows of activations.
//!
//! The order of summation of one output is fixed by the matrix alone: blocks of K in order within a slice, slices in
//! order. How many rows a tile holds, where tasks are cut and which thread runs them do not enter (H9).

use std::ops::Range;

use super::{
    Element, Isa, Kernel, LANES,
    lanes::Lanes,
    panels::{BLOCK, Form, Matrix, Q4_BLOCK_BYTES, Q8_BLOCK_BYTES},
    rows,
};
use crate::threads::Team;

/// Rows of activations, in f32 and, where a product needs them so, as integers with a scale per 32: a coarse signed byte
/// and a fine one of its 254th part. One byte alone would move SmolLM2's logits by more than the margins between its
/// first choices; with two, the quantised weights are all that separates fast arithmetic from exact.
#[derive(Default)]
pub struct Activations {
    pub cols: usize,
    /// `[rows, cols]`
    pub values: Vec<f32>,
    /// `[rows, cols / 32, coarse|fine, 32]`, only if `quantised`.
    bytes: Vec<i8>,
    /// `[rows, cols / 32]`
    blocks: Vec<BlockScale>,
    pub quantised: bool,
}

/// What a product needs to know of 32 quantised activations.
#[derive(Clone, Copy, Default)]
pub struct BlockScale {
    pub scale: f32,
    /// The sum of the 32 values as the integers hold them.
    pub sum: f32,
    /// -128 × the sums of the 32 coarse and of the 32 fine integers
    pub minus_bias_sums: [i32; 2],
}

/// Fine steps in a coarse one.
pub const FINE: f32 = 254.0;

/// Bytes of one block of activations.
pub const ACTIVATION_BYTES: usize = 2 * BLOCK;

/// One row of [`Activations`] that a row operation fills.
pub struct RowMut<'a> {
    pub values: &'a mut [f32],
    bytes: &'a mut [i8],
    blocks: &'a mut [BlockScale],
}

impl Activations {
    /// Makes room for `rows` rows of `cols` columns; contents are then unspecified.
    pub fn reshape(&mut self, rows: usize, cols: usize, quantised: bool) {
        self.cols = cols;
        self.quantised = quantised;
        self.values.resize(rows * cols, 0.0);
        self.bytes.resize(if quantised { rows * cols * 2 } else { 0 }, 0);
        self.blocks.resize(if quantised { rows * cols / BLOCK } else { 0 }, BlockScale::default());
    }

    pub fn rows(&self) -> usize {
        self.values.len() / self.cols.max(1)
    }

    pub fn rows_mut(&mut self) -> impl ExactSizeIterator<Item = RowMut<'_>> {
        let (rows, width) = (self.rows(), if self.quantised { self.cols } else { 0 });
        let mut values = self.values.chunks_mut(self.cols.max(1));
        let (mut bytes, mut blocks) = (&mut self.bytes[..], &mut self.blocks[..]);
        (0..rows).map(move |_| {
            let row = bytes.split_off_mut(..2 * width).expect("as many rows of bytes");
            let scales = blocks.split_off_mut(..width / BLOCK).expect("as many rows of scales");
            RowMut { values: values.next().expect("as many rows of values"), bytes: row, blocks: scales }
        })
    }
}

impl RowMut<'_> {
    /// Quantises the values if the row is to be.
    pub fn finish(self, isa: Isa) {
        if !self.bytes.is_empty() {
            rows::quantise(isa, self.values, self.bytes, self.blocks);
        }
    }
}

/// Products of the same activations by several matrices side by side: `out` is `[rows, sum of the matrices' rows]`.
///
/// # Panics
/// If shapes do not agree.
pub fn matmul(isa: Isa, team: &Team, matrices: &[&Matrix], x: &Activations, out: &mut [f32]) {
    let rows = x.rows();
    let stride: usize = matrices.iter().map(|m| m.rows).sum();
    assert_eq!(out.len(), rows * stride, "an output of {rows} rows of {stride}");
    for m in matrices {
        assert_eq!(m.cols, x.cols, "columns of weights and activations");
        assert!(x.quantised || !m.form.quantised(), "{:?} needs quantised activations", m.form);
    }
    let panels: usize = matrices.iter().map(|m| m.panels()).sum();
    let block_rows = rows_per_block(x);
    let row_blocks = rows.div_ceil(block_rows);
    let chunk = panels.div_ceil(team.threads() * 4).clamp(1, 64);
    let chunks = panels.div_ceil(chunk);
    let shared = Output { out: out.as_mut_ptr(), stride };
    team.run(row_blocks * chunks, &|task, _| {
        let (row_block, chunk_index) = (task / chunks, task % chunks);
        let rows = row_block * block_rows..rows.min((row_block + 1) * block_rows);
        let range = chunk_index * chunk..panels.min((chunk_index + 1) * chunk);
        let mut first = 0;
        let mut column = 0;
        for matrix in matrices {
            let own = range.start.max(first)..range.end.min(first + matrix.panels());
            if !own.is_empty() {
                let own = own.start - first..own.end - first;
                isa.run(Block { matrix, panels: own, rows: rows.clone(), x, out: &shared, column });
            }
            first += matrix.panels();
            column += matrix.rows;
        }
    });
}

/// So many rows that their activations stay in a second-level cache while panel after panel passes over them.
fn rows_per_block(x: &Activations) -> usize {
    const CACHE_BYTES: usize = 512 << 10;
    let row_bytes = x.cols * if x.quantised { 2 } else { 4 };
    (CACHE_BYTES / row_bytes / 8 * 8).max(8)
}

struct Output {
    out: *mut f32,
    stride: usize,
}

// SAFETY: tasks write disjoint parts, (rows of a block) × (columns of a panel), of a buffer that `matmul` holds
// mutably until every task has ended.
unsafe impl Sync for Output {}

/// Some panels of one matrix times some rows; the kernel of this module.
struct Block<'a> {
    matrix: &'a Matrix,
    panels: Range<usize>,
    rows: Range<usize>,
    x: &'a Activations,
    out: &'a Output,
    /// Where the matrix's first output lies in a row of `out`.
    column: usize,
}

impl Kernel for Block<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        for panel in self.panels.clone() {
            let mut row = self.rows.start;
            while row < self.rows.end {
                let left = self.rows.end - row;
                row += if left >= 8 && S::TILE >= 8 {
                    self.tile::<S, 8>(panel, row)
                } else if left >= 4 {
                    self.tile::<S, 4>(panel, row)
                } else if left >= 2 {
                    self.tile::<S, 2>(panel, row)
                } else {
                    self.tile::<S, 1>(panel, row)
                };
            }
        }
    }
}

impl Block<'_> {
    /// Rows `row..row + R` of one panel; the number of rows done.
    #[inline(always)]
    unsafe fn tile<S: Lanes, const R: usize>(&self, panel: usize, row: usize) -> usize {
        let w = self.matrix.panel(panel).as_ptr();
        let sums = match self.matrix.form {
            Form::F32 => self.float::<S, f32, R>(w.cast(), row),
            Form::F16 => self.float::<S, half::f16, R>(w.cast(), row),
            Form::BF16 => self.float::<S, half::bf16, R>(w.cast(), row),
            Form::Q4 => self.integer::<S, Q4, R>(w, row),
            Form::Q8 => self.integer::<S, Q8, R>(w, row),
        };
        let lanes = LANES.min(self.matrix.rows - panel * LANES);
        for (r, sum) in sums.into_iter().enumerate() {
            let out = self.out.out.add((row + r) * self.out.stride + self.column + panel * LANES);
            let sum = if self.matrix.bias.is_empty() {
                sum
            } else {
                S::add(sum, S::load_part(self.matrix.bias.as_ptr().add(panel * LANES), lanes, 0.0))
            };
            if lanes == LANES {
                S::store(out, sum);
            } else {
                S::store_part(out, lanes, sum);
            }
        }
        R
    }

    #[inline(always)]
    unsafe fn float<S: Lanes, E: Element, const R: usize>(&self, w: *const E, row: usize) -> [S::F; R] {
        let (cols, slice) = (self.matrix.cols, self.matrix.slice);
        let x: [*const f32; R] = std::array::from_fn(|r| self.x.values.as_ptr().wrapping_add((row + r) * cols));
        let mut total = [S::splat(0.0); R];
        let mut start = 0;
        while start < cols {
            let sums = dot::<S, E, R>(w.add(start * LANES), LANES, slice, x.map(|x| x.wrapping_add(start)));
            for r in 0..R {
                total[r] = S::add(total[r], sums[r]);
            }
            start += slice;
        }
        total
    }

    #[inline(always)]
    unsafe fn integer<S: Lanes, P: Packed, const R: usize>(&self, w: *const u8, row: usize) -> [S::F; R] {
        let blocks = self.matrix.cols / BLOCK;
        let slice = self.matrix.slice / BLOCK;
        let x: [*const i8; R] =
            std::array::from_fn(|r| self.x.bytes.as_ptr().wrapping_add((row + r) * blocks * ACTIVATION_BYTES));
        let scales: [*const BlockScale; R] =
            std::array::from_fn(|r| self.x.blocks.as_ptr().wrapping_add((row + r) * blocks));
        let mut total = [S::splat(0.0); R];
        let mut start = 0;
        while start < blocks {
            let mut sums = [S::splat(0.0); R];
            for block in start..start + slice {
                let x = x.map(|x| x.wrapping_add(block * ACTIVATION_BYTES));
                let scales = scales.map(|s| s.wrapping_add(block));
                P::block::<S, R>(w.add(block * P::BYTES), x, scales, &mut sums);
            }
            for r in 0..R {
                total[r] = S::add(total[r], sums[r]);
            }
            start += slice;
        }
        total
    }
}

/// Sums over `k` in order, one multiply-add per element: `sums[r][lane] = Σ w[k * stride + lane] x[r][k]`.
///
/// # Safety
/// `w` has 16 elements at each `k * stride`, each `x` has `k` elements.
#[inline(always)]
pub unsafe fn dot<S: Lanes, E: Element, const R: usize>(
    w: *const E,
    stride: usize,
    k: usize,
    x: [*const f32; R],
) -> [S::F; R] {
    let mut sums = [S::splat(0.0); R];
    for i in 0..k {
        let w = E::load::<S>(w.add(i * stride));
        for r in 0..R {
            sums[r] = S::fma(w, S::splat(*x[r].add(i)), sums[r]);
        }
    }
    sums
}

/// A quantised form: how one block of 32 is multiplied.
trait Packed {
    const BYTES: usize;
    /// Adds the products of one block to `sums`.
    ///
    /// # Safety
    /// `w` is one block of a panel, each `x` a block of activations, each of `scales` theirs.
    unsafe fn block<S: Lanes, const R: usize>(
        w: *const u8,
        x: [*const i8; R],
        scales: [*const BlockScale; R],
        sums: &mut [S::F; R],
    );
}

/// What the two sums of integer products say together, in coarse steps.
#[inline(always)]
unsafe fn joined<S: Lanes>(coarse: S::I, fine: S::I) -> S::F {
    S::fma(S::to_f32(fine), S::splat(1.0 / FINE), S::to_f32(coarse))
}

struct Q4;
struct Q8;

impl Packed for Q4 {
    const BYTES: usize = Q4_BLOCK_BYTES;
    #[inline(always)]
    unsafe fn block<S: Lanes, const R: usize>(
        w: *const u8,
        x: [*const i8; R],
        scales: [*const BlockScale; R],
        sums: &mut [S::F; R],
    ) {
        let mut coarse = [S::int_zero(); R];
        let mut fine = [S::int_zero(); R];
        for j in 0..4 {
            let (low, high) = S::load_nibbles(w.add(j * 4 * LANES));
            for r in 0..R {
                coarse[r] = S::dot_nibbles(coarse[r], low, x[r].add(4 * j));
                coarse[r] = S::dot_nibbles(coarse[r], high, x[r].add(16 + 4 * j));
                fine[r] = S::dot_nibbles(fine[r], low, x[r].add(BLOCK + 4 * j));
                fine[r] = S::dot_nibbles(fine[r], high, x[r].add(BLOCK + 16 + 4 * j));
            }
        }
        let d = S::load_f16(w.add(16 * LANES).cast());
        let m = S::load_f16(w.add(18 * LANES).cast());
        for r in 0..R {
            let scale = S::mul(d, S::splat((*scales[r]).scale));
            sums[r] = S::fma(joined::<S>(coarse[r], fine[r]), scale, sums[r]);
            sums[r] = S::fma(m, S::splat((*scales[r]).sum), sums[r]);
        }
    }
}

impl Packed for Q8 {
    const BYTES: usize = Q8_BLOCK_BYTES;
    #[inline(always)]
    unsafe fn block<S: Lanes, const R: usize>(
        w: *const u8,
        x: [*const i8; R],
        scales: [*const BlockScale; R],
        sums: &mut [S::F; R],
    ) {
        let mut coarse: [S::I; R] = scales.map(|s| S::int_biased_start((*s).minus_bias_sums[0]));
        let mut fine: [S::I; R] = scales.map(|s| S::int_biased_start((*s).minus_bias_sums[1]));
        for j in 0..8 {
            let w = S::load_bytes(w.add(j * 4 * LANES));
            for r in 0..R {
                coarse[r] = S::dot_bytes(coarse[r], w, x[r].add(4 * j));
                fine[r] = S::dot_bytes(fine[r], w, x[r].add(BLOCK + 4 * j));
            }
        }
        let d = S::load_f16(w.add(BLOCK * LANES).cast());
        for r in 0..R {
            let scale = S::mul(d, S::splat((*scales[r]).scale));
            sums[r] = S::fma(joined::<S>(coarse[r], fine[r]), scale, sums[r]);
        }
    }
}
