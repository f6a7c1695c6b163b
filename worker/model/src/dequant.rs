//! Rows of stored elements as f32, exactly as GGML defines its formats (`ggml-quants.c`, `dequantize_row_*`): the same
//! operations in the same order, so that every consumer of a file agrees on its numbers to the bit. *Pure.*

use half::{bf16, f16};

use crate::weights::DType;

/// Writes one row of `out.len()` elements; `row` is `dtype.row_bytes(out.len())` bytes long and needs no alignment.
///
/// # Panics
/// If the lengths do not belong together. Loaders check shapes, so this is a fault of the caller.
pub fn dequantize_row(dtype: DType, row: &[u8], out: &mut [f32]) {
    assert_eq!(out.len() % dtype.block().0, 0, "a row of {} elements is no whole number of blocks", out.len());
    assert_eq!(row.len(), dtype.row_bytes(out.len()), "bytes of a row of {} elements as {dtype:?}", out.len());
    match dtype {
        DType::F32 => elements::<4>(row, out, f32::from_le_bytes),
        DType::F16 => elements::<2>(row, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
        DType::BF16 => elements::<2>(row, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        DType::Q8_0 => blocks::<34, 32>(row, out, q8_0),
        DType::Q4_0 => blocks::<18, 32>(row, out, q4_0),
        DType::Q4_1 => blocks::<20, 32>(row, out, q4_1),
        DType::Q5_0 => blocks::<22, 32>(row, out, q5_0),
        DType::Q5_1 => blocks::<24, 32>(row, out, q5_1),
        DType::Q4K => blocks::<144, 256>(row, out, q4_k),
        DType::Q5K => blocks::<176, 256>(row, out, q5_k),
        DType::Q6K => blocks::<210, 256>(row, out, q6_k),
    }
}

fn elements<const BYTES: usize>(row: &[u8], out: &mut [f32], convert: impl Fn([u8; BYTES]) -> f32) {
    let (chunks, _) = row.as_chunks::<BYTES>();
    for (out, bytes) in out.iter_mut().zip(chunks) {
        *out = convert(*bytes);
    }
}

fn blocks<const BYTES: usize, const ELEMENTS: usize>(
    row: &[u8],
    out: &mut [f32],
    convert: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    let (blocks, _) = row.as_chunks::<BYTES>();
    let (outs, _) = out.as_chunks_mut::<ELEMENTS>();
    for (block, out) in blocks.iter().zip(outs) {
        convert(block, out);
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Block: `d: f16, q: [i8; 32]`.
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (out, q) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(*q as i8) * d;
    }
}

/// Block: `d: f16, q: [u4; 32]`; low nibbles are the first half.
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (j, q) in block[2..].iter().enumerate() {
        out[j] = f32::from((q & 0xF) as i8 - 8) * d;
        out[j + 16] = f32::from((q >> 4) as i8 - 8) * d;
    }
}

/// Block: `d: f16, m: f16, q: [u4; 32]`.
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (j, q) in block[4..].iter().enumerate() {
        out[j] = f32::from(q & 0xF) * d + m;
        out[j + 16] = f32::from(q >> 4) * d + m;
    }
}

/// Bits 4 of the 32 elements of a `Q5_*` block stand together in 32 bits.
fn fifth_bits(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Block: `d: f16, high: u32, q: [u4; 32]`.
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let high = fifth_bits(block, 2);
    for (j, q) in block[6..].iter().enumerate() {
        let low = (q & 0xF) | ((high >> j << 4) & 0x10) as u8;
        let top = (q >> 4) | ((high >> (j + 12)) & 0x10) as u8;
        out[j] = f32::from(low as i8 - 16) * d;
        out[j + 16] = f32::from(top as i8 - 16) * d;
    }
}

/// Block: `d: f16, m: f16, high: u32, q: [u4; 32]`.
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let high = fifth_bits(block, 4);
    for (j, q) in block[8..].iter().enumerate() {
        let low = (q & 0xF) | ((high >> j << 4) & 0x10) as u8;
        let top = (q >> 4) | ((high >> (j + 12)) & 0x10) as u8;
        out[j] = f32::from(low) * d + m;
        out[j + 16] = f32::from(top) * d + m;
    }
}

/// The six-bit scale and minimum of sub-block `j` of 8, out of the 12 packed bytes of a `Q4_K` or `Q5_K` block.
fn scale_min(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 0xF) | (packed[j - 4] >> 6 << 4), (packed[j + 4] >> 4) | (packed[j] >> 6 << 4))
    };
    (f32::from(scale), f32::from(min))
}

/// Block: `d: f16, dmin: f16, scales: [u8; 12], q: [u4; 256]`; eight sub-blocks of 32.
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, q) = (&block[4..16], &block[16..]);
    for (pair, out) in out.chunks_exact_mut(64).enumerate() {
        let q = &q[pair * 32..][..32];
        let ((s1, m1), (s2, m2)) = (scale_min(packed, 2 * pair), scale_min(packed, 2 * pair + 1));
        let (d1, m1, d2, m2) = (d * s1, dmin * m1, d * s2, dmin * m2);
        for l in 0..32 {
            out[l] = d1 * f32::from(q[l] & 0xF) - m1;
            out[l + 32] = d2 * f32::from(q[l] >> 4) - m2;
        }
    }
}

/// Block: `d: f16, dmin: f16, scales: [u8; 12], high: [u8; 32], q: [u4; 256]`; bit 2p and 2p+1 of `high[l]` belong to
/// elements l and l+32 of pair p.
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, high, q) = (&block[4..16], &block[16..48], &block[48..]);
    for (pair, out) in out.chunks_exact_mut(64).enumerate() {
        let q = &q[pair * 32..][..32];
        let ((s1, m1), (s2, m2)) = (scale_min(packed, 2 * pair), scale_min(packed, 2 * pair + 1));
        let (d1, m1, d2, m2) = (d * s1, dmin * m1, d * s2, dmin * m2);
        for l in 0..32 {
            let bits = high[l] >> (2 * pair);
            out[l] = d1 * f32::from((q[l] & 0xF) + ((bits & 1) << 4)) - m1;
            out[l + 32] = d2 * f32::from((q[l] >> 4) + ((bits & 2) << 3)) - m2;
        }
    }
}

/// Block: `low: [u4; 256], high: [u2; 256], scales: [i8; 16], d: f16`; two halves of 128 elements.
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    for (n, out) in out.chunks_exact_mut(128).enumerate() {
        let (low, high, scales) = (&block[n * 64..][..64], &block[128 + n * 32..][..32], &block[192 + n * 8..][..8]);
        let scale = |at: usize| d * f32::from(scales[at] as i8);
        let value = |low: u8, high: u8| f32::from((low | (high & 3) << 4) as i8 - 32);
        for l in 0..32 {
            let s = l / 16;
            out[l] = scale(s) * value(low[l] & 0xF, high[l]);
            out[l + 32] = scale(s + 2) * value(low[l + 32] & 0xF, high[l] >> 2);
            out[l + 64] = scale(s + 4) * value(low[l] >> 4, high[l] >> 4);
            out[l + 96] = scale(s + 6) * value(low[l + 32] >> 4, high[l] >> 6);
        }
    }
}
