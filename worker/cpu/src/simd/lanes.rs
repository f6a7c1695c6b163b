//! What a kernel needs of an instruction set: sixteen f32 lanes, sixteen i32 lanes, and four-fold byte products.
//!
//! Each kernel is written once over [`Lanes`]. A lane never sees its neighbours except in the three `reduce_*`
//! functions, whose order is fixed, so a kernel's order of summation is the same on every implementation.

/// Lanes of a vector, and output rows of a packed panel.
pub const LANES: usize = 16;

/// # Safety
/// Every method may only be called where the CPU has the implementation's instructions, from code compiled with them
/// (the dispatcher in [`super`] sees to both); pointers must be valid for the bytes that the method names.
pub unsafe trait Lanes {
    /// Rows that one tile of a product holds in registers.
    const TILE: usize;
    type F: Copy;
    type I: Copy;
    /// 16 output rows × 4 consecutive weights, one unsigned byte each.
    type Q: Copy;

    unsafe fn splat(x: f32) -> Self::F;
    /// 16 elements at `p`, any alignment; so for the loads and stores below.
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, v: Self::F);
    unsafe fn load_f16(p: *const u16) -> Self::F;
    unsafe fn store_f16(p: *mut u16, v: Self::F);
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn abs(a: Self::F) -> Self::F;
    /// `a * b + c`, fused where the implementation fuses.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// To the nearest integer, ties to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// `a * 2^n` for integral `n` in -126..=127.
    unsafe fn scale_pow2(a: Self::F, n: Self::F) -> Self::F;
    /// Lane `i` + lane `i + 8`, then `i + 4`, then `i + 2`, then `i + 1`.
    unsafe fn reduce_add(a: Self::F) -> f32;
    unsafe fn reduce_max(a: Self::F) -> f32;
    /// `out[i][j] = rows[j][i]`.
    unsafe fn transpose(rows: [Self::F; LANES]) -> [Self::F; LANES];

    unsafe fn to_f32(a: Self::I) -> Self::F;
    /// Rounds to the nearest and stores 16 signed bytes; the sum of the 16 integers.
    unsafe fn store_i8(p: *mut i8, v: Self::F) -> i32;
    unsafe fn int_zero() -> Self::I;
    /// The sum that a product of biased bytes starts with; `minus_bias_sum` is -128 times the sum of the activations.
    unsafe fn int_biased_start(minus_bias_sum: i32) -> Self::I;
    /// 64 bytes of 4-bit weights: the low nibbles and the high nibbles.
    unsafe fn load_nibbles(p: *const u8) -> (Self::Q, Self::Q);
    /// 64 bytes of weights stored with a bias of 128.
    unsafe fn load_bytes(p: *const u8) -> Self::Q;
    /// Adds the products of weights in 0..=15 with the 4 activations at `x` (each in -127..=127).
    unsafe fn dot_nibbles(acc: Self::I, w: Self::Q, x: *const i8) -> Self::I;
    /// Adds the products of biased weights; with [`Lanes::int_biased_start`] the bias cancels exactly.
    unsafe fn dot_bytes(acc: Self::I, w: Self::Q, x: *const i8) -> Self::I;

    /// `n` elements at `p`, the other lanes `fill`.
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize, fill: f32) -> Self::F {
        let mut whole = [fill; LANES];
        std::ptr::copy_nonoverlapping(p, whole.as_mut_ptr(), n);
        Self::load(whole.as_ptr())
    }

    #[inline(always)]
    unsafe fn store_part(p: *mut f32, n: usize, v: Self::F) {
        let mut whole = [0.0; LANES];
        Self::store(whole.as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(whole.as_ptr(), p, n);
    }

    /// e^x to about one unit in the last place, for x at or below 88; below -87 the result is e^-87, as good as zero.
    #[inline(always)]
    unsafe fn exp(x: Self::F) -> Self::F {
        let x = Self::max(x, Self::splat(-87.0));
        let n = Self::round(Self::mul(x, Self::splat(std::f32::consts::LOG2_E)));
        // x - n ln 2 in two steps (Cody and Waite), then the polynomial of Cephes' expf.
        let r = Self::fma(n, Self::splat(-0.693_359_4), x);
        let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
            p = Self::fma(p, r, Self::splat(c));
        }
        let p = Self::fma(p, Self::mul(r, r), Self::add(r, Self::splat(1.0)));
        Self::scale_pow2(p, n)
    }
}

/// A stored element of a float panel or of a KV pool.
pub trait Element: Copy {
    /// # Safety
    /// As [`Lanes::load`]: 16 elements at `p`.
    unsafe fn load<S: Lanes>(p: *const Self) -> S::F;
    /// # Safety
    /// As [`Lanes::store`]: room for 16 elements at `p`.
    unsafe fn store<S: Lanes>(p: *mut Self, v: S::F);
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const f32) -> S::F {
        S::load(p)
    }
    #[inline(always)]
    unsafe fn store<S: Lanes>(p: *mut f32, v: S::F) {
        S::store(p, v)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for half::f16 {
    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const half::f16) -> S::F {
        S::load_f16(p.cast())
    }
    #[inline(always)]
    unsafe fn store<S: Lanes>(p: *mut half::f16, v: S::F) {
        S::store_f16(p.cast(), v)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> half::f16 {
        half::f16::from_f32(x)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        half::f16::to_f32(self)
    }
}

impl Element for half::bf16 {
    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const half::bf16) -> S::F {
        S::load_bf16(p.cast())
    }
    /// By rounding each element; no kernel stores bf16 in a hot loop.
    #[inline(always)]
    unsafe fn store<S: Lanes>(p: *mut half::bf16, v: S::F) {
        let mut whole = [0.0; LANES];
        S::store(whole.as_mut_ptr(), v);
        for (i, x) in whole.into_iter().enumerate() {
            p.add(i).write(half::bf16::from_f32(x));
        }
    }
    #[inline(always)]
    fn from_f32(x: f32) -> half::bf16 {
        half::bf16::from_f32(x)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        half::bf16::to_f32(self)
    }
}
