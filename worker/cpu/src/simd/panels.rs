//! Weights in the form that the kernels read: panels of 16 output rows, K one after the other, rows across lanes.
//!
//! | form | a panel is | made from |
//! |---|---|---|
//! | `F32`, `F16`, `BF16` | `[k][row]` elements | that type; `F32` in exact arithmetic from every quantised type |
//! | `Q4` | per 32 of K: `[4][row][4]` bytes (low nibble k, high nibble k + 16), `d[row]`, `m[row]` in f16; w = d q + m | Q4_0, Q4_1, Q4_K |
//! | `Q8` | per 32 of K: `[8][row][4]` bytes with a bias of 128, `d[row]` in f16; w = d q | Q8_0, Q5_0 exactly; Q5_1, Q5_K, Q6_K requantised |

use half::f16;
use tandem_model::{
    dequant::dequantize_row,
    weights::{DType, Tensor},
};

use super::{LANES, arena::Region};
use crate::{CpuMath, threads::Team};

/// Elements of K that share a scale.
pub const BLOCK: usize = 32;
pub const Q4_BLOCK_BYTES: usize = LANES * (BLOCK / 2 + 4);
pub const Q8_BLOCK_BYTES: usize = LANES * (BLOCK + 2);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    F32,
    F16,
    BF16,
    Q4,
    Q8,
}

impl Form {
    pub fn of(dtype: DType, math: CpuMath) -> Form {
        match (dtype, math) {
            (DType::F32, _) => Form::F32,
            (DType::F16, _) => Form::F16,
            (DType::BF16, _) => Form::BF16,
            (_, CpuMath::Exact) => Form::F32,
            (DType::Q4_0 | DType::Q4_1 | DType::Q4K, CpuMath::Fast) => Form::Q4,
            (DType::Q8_0 | DType::Q5_0 | DType::Q5_1 | DType::Q5K | DType::Q6K, CpuMath::Fast) => Form::Q8,
        }
    }

    /// Whether the activations are quantised for this form.
    pub fn quantised(self) -> bool {
        matches!(self, Form::Q4 | Form::Q8)
    }

    pub fn panel_bytes(self, cols: usize) -> usize {
        match self {
            Form::F32 => cols * LANES * 4,
            Form::F16 | Form::BF16 => cols * LANES * 2,
            Form::Q4 => cols / BLOCK * Q4_BLOCK_BYTES,
            Form::Q8 => cols / BLOCK * Q8_BLOCK_BYTES,
        }
    }

    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(LANES) * self.panel_bytes(cols)
    }
}

/// A packed matrix `[rows, cols]` with an optional bias.
pub struct Matrix {
    pub form: Form,
    pub rows: usize,
    pub cols: usize,
    /// Columns of one slice: each slice of K is summed by itself, and the sums are added in slice order (H9). A
    /// divisor of `cols`, and a multiple of [`BLOCK`] in quantised forms.
    pub slice: usize,
    /// `[rows]`, or empty.
    pub bias: Vec<f32>,
    region: Region,
}

impl Matrix {
    /// Packs `tensor` into `region`, which has `form.bytes(rows, cols)` bytes.
    pub fn pack(tensor: &Tensor, bias: Vec<f32>, form: Form, slice: usize, mut region: Region, team: &Team) -> Self {
        let (rows, cols) = (tensor.rows, tensor.cols);
        assert_eq!(cols % slice, 0, "{}: slices of {slice} columns of {cols}", tensor.name);
        assert!(
            !form.quantised() || slice.is_multiple_of(BLOCK),
            "{}: slices of {slice} columns cut blocks",
            tensor.name
        );
        let panels: Vec<_> = region.bytes_mut().chunks_mut(form.panel_bytes(cols)).enumerate().collect();
        team.for_each(panels, |(panel, out), _| pack_panel(tensor, form, panel * LANES, out));
        Self { form, rows, cols, slice, bias, region }
    }

    pub fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    pub fn panel(&self, index: usize) -> &[u8] {
        let bytes = self.form.panel_bytes(self.cols);
        &self.region.bytes()[index * bytes..(index + 1) * bytes]
    }
}

fn pack_panel(tensor: &Tensor, form: Form, first_row: usize, out: &mut [u8]) {
    let row_bytes = tensor.dtype.row_bytes(tensor.cols);
    for lane in 0..LANES.min(tensor.rows - first_row) {
        let row = first_row + lane;
        let bytes = &tensor.bytes()[row * row_bytes..(row + 1) * row_bytes];
        match form {
            Form::F16 | Form::BF16 => {
                for (k, element) in bytes.chunks_exact(2).enumerate() {
                    out[(k * LANES + lane) * 2..][..2].copy_from_slice(element);
                }
            }
            Form::F32 => {
                for (k, value) in dequantised(tensor, bytes).into_iter().enumerate() {
                    out[(k * LANES + lane) * 4..][..4].copy_from_slice(&value.to_le_bytes());
                }
            }
            Form::Q4 => pack_q4(tensor.dtype, bytes, lane, out),
            Form::Q8 => pack_q8(tensor, bytes, lane, out),
        }
    }
}

fn dequantised(tensor: &Tensor, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; tensor.cols];
    dequantize_row(tensor.dtype, bytes, &mut values);
    values
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn put_half(out: &mut [u8], at: usize, value: f32) {
    out[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

fn pack_q4(dtype: DType, row: &[u8], lane: usize, out: &mut [u8]) {
    let mut put = |block: usize, d: f32, m: f32, nibbles: &[u8; 16]| {
        let out = &mut out[block * Q4_BLOCK_BYTES..][..Q4_BLOCK_BYTES];
        for (i, pair) in nibbles.iter().enumerate() {
            out[(i / 4) * 4 * LANES + lane * 4 + i % 4] = *pair;
        }
        put_half(out, 16 * LANES + 2 * lane, d);
        put_half(out, 18 * LANES + 2 * lane, m);
    };
    match dtype {
        DType::Q4_0 => row.as_chunks::<18>().0.iter().enumerate().for_each(|(i, block)| {
            let d = half_at(block, 0);
            put(i, d, -8.0 * d, block[2..].try_into().expect("18 - 2 bytes"));
        }),
        DType::Q4_1 => row.as_chunks::<20>().0.iter().enumerate().for_each(|(i, block)| {
            put(i, half_at(block, 0), half_at(block, 2), block[4..].try_into().expect("20 - 4 bytes"));
        }),
        DType::Q4K => row.as_chunks::<144>().0.iter().enumerate().for_each(|(i, block)| {
            for sub in 0..8 {
                let (d, m, nibbles) = q4k_block(block, sub);
                put(i * 8 + sub, d, m, &nibbles);
            }
        }),
        _ => unreachable!("{dtype:?} is not kept in 4 bits"),
    }
}

/// Sub-block `sub` of 32 elements of a Q4_K block as scale, offset and nibble pairs (k, k + 16).
fn q4k_block(block: &[u8; 144], sub: usize) -> (f32, f32, [u8; 16]) {
    let packed = &block[4..16];
    let (scale, min) = if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        let both = packed[sub + 4];
        ((both & 15) | (packed[sub - 4] >> 6) << 4, (both >> 4) | (packed[sub] >> 6) << 4)
    };
    let quants = &block[16 + sub / 2 * 32..][..32];
    let shift = 4 * (sub % 2);
    let nibbles = std::array::from_fn(|i| (quants[i] >> shift & 15) | (quants[i + 16] >> shift & 15) << 4);
    (half_at(block, 0) * f32::from(scale), -(half_at(block, 2) * f32::from(min)), nibbles)
}

fn pack_q8(tensor: &Tensor, row: &[u8], lane: usize, out: &mut [u8]) {
    let mut put = |block: usize, d: f32, q: &[i8; BLOCK]| {
        let out = &mut out[block * Q8_BLOCK_BYTES..][..Q8_BLOCK_BYTES];
        for (k, q) in q.iter().enumerate() {
            out[k / 4 * 4 * LANES + lane * 4 + k % 4] = (*q as u8) ^ 0x80;
        }
        put_half(out, BLOCK * LANES + 2 * lane, d);
    };
    match tensor.dtype {
        DType::Q8_0 => row.as_chunks::<34>().0.iter().enumerate().for_each(|(i, block)| {
            put(i, half_at(block, 0), &std::array::from_fn(|k| block[2 + k] as i8));
        }),
        DType::Q5_0 => row.as_chunks::<22>().0.iter().enumerate().for_each(|(i, block)| {
            let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
            let q = |k: usize| {
                let low = if k < 16 { block[6 + k] & 15 } else { block[6 + k - 16] >> 4 };
                (low | ((high >> k & 1) as u8) << 4) as i8 - 16
            };
            put(i, half_at(block, 0), &std::array::from_fn(q));
        }),
        _ => dequantised(tensor, row).as_chunks::<BLOCK>().0.iter().enumerate().for_each(|(i, values)| {
            let (d, q) = requantise(values);
            put(i, d, &q);
        }),
    }
}

/// The nearest multiples of a scale that f16 holds.
fn requantise(values: &[f32; BLOCK]) -> (f32, [i8; BLOCK]) {
    let largest = values.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    let d = f16::from_f32(largest / 127.0).to_f32();
    let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
    (d, values.map(|v| (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8))
}
