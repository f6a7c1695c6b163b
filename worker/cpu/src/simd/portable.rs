//! [`Lanes`] in plain Rust, for every other machine; compilers vectorise most of it. Multiplication and addition are
//! not fused, since a machine without the instruction would need hundreds of cycles for each.

use half::{bf16, f16};

use super::lanes::{LANES, Lanes};

pub struct Portable;

type F = [f32; LANES];

#[inline(always)]
fn each(mut f: impl FnMut(usize) -> f32) -> F {
    std::array::from_fn(&mut f)
}

#[inline(always)]
fn halves(a: F, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut v = a;
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            v[i] = f(v[i], v[i + width]);
        }
    }
    v[0]
}

#[inline(always)]
unsafe fn dot(acc: [i32; LANES], w: [u8; 64], x: *const i8, bias: i32) -> [i32; LANES] {
    let x: [i32; 4] = std::array::from_fn(|k| i32::from(x.add(k).read()));
    std::array::from_fn(|i| acc[i] + (0..4).map(|k| (i32::from(w[4 * i + k]) - bias) * x[k]).sum::<i32>())
}

// SAFETY: plain Rust on any CPU; pointers are used within the bytes that the trait names.
unsafe impl Lanes for Portable {
    const TILE: usize = 4;
    type F = F;
    type I = [i32; LANES];
    type Q = [u8; 64];

    #[inline(always)]
    unsafe fn splat(x: f32) -> F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F {
        p.cast::<F>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: F) {
        p.cast::<F>().write_unaligned(v)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F {
        each(|i| f16::from_bits(p.add(i).read_unaligned()).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: F) {
        for (i, x) in v.into_iter().enumerate() {
            p.add(i).write_unaligned(f16::from_f32(x).to_bits());
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F {
        each(|i| bf16::from_bits(p.add(i).read_unaligned()).to_f32())
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        each(|i| a[i].max(b[i]))
    }
    #[inline(always)]
    unsafe fn abs(a: F) -> F {
        each(|i| a[i].abs())
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn round(a: F) -> F {
        each(|i| a[i].round_ties_even())
    }
    #[inline(always)]
    unsafe fn scale_pow2(a: F, n: F) -> F {
        each(|i| a[i] * f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn reduce_add(a: F) -> f32 {
        halves(a, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn reduce_max(a: F) -> f32 {
        halves(a, f32::max)
    }
    #[inline(always)]
    unsafe fn transpose(rows: [F; LANES]) -> [F; LANES] {
        std::array::from_fn(|i| each(|j| rows[j][i]))
    }

    #[inline(always)]
    unsafe fn to_f32(a: Self::I) -> F {
        each(|i| a[i] as f32)
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: F) -> i32 {
        let mut sum = 0;
        for (i, x) in v.into_iter().enumerate() {
            let q = x.round_ties_even() as i8;
            p.add(i).write(q);
            sum += i32::from(q);
        }
        sum
    }
    #[inline(always)]
    unsafe fn int_zero() -> Self::I {
        [0; LANES]
    }
    /// `dot_bytes` takes the bias away before it multiplies.
    #[inline(always)]
    unsafe fn int_biased_start(_minus_bias_sum: i32) -> Self::I {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self::Q, Self::Q) {
        let both = Self::load_bytes(p);
        (both.map(|b| b & 15), both.map(|b| b >> 4))
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::Q {
        p.cast::<[u8; 64]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn dot_nibbles(acc: Self::I, w: Self::Q, x: *const i8) -> Self::I {
        dot(acc, w, x, 0)
    }
    #[inline(always)]
    unsafe fn dot_bytes(acc: Self::I, w: Self::Q, x: *const i8) -> Self::I {
        dot(acc, w, x, 128)
    }
}
