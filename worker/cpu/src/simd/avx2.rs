//! [`Lanes`] on AVX2 with FMA and F16C: two registers per vector.

use std::arch::x86_64::*;

use super::lanes::{LANES, Lanes};

pub struct Avx2;

#[derive(Clone, Copy)]
pub struct Pair<T>(T, T);

macro_rules! both {
    ($f:ident $(::<$c:tt>)?, $($v:ident),+) => {
        Pair($f$(::<$c>)?($($v.0),+), $f$(::<$c>)?($($v.1),+))
    };
}

/// A vector of four weights per row times four activations, signed products of 16 bits summed to 32.
#[inline(always)]
unsafe fn dot_half(acc: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(unsigned, signed);
    _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// As `dot_half`, for weights with a bias of 128: |w| · (x with w's sign). |w| ≤ 128 and |x| ≤ 127 cannot saturate.
#[inline(always)]
unsafe fn dot_half_biased(acc: __m256i, biased: __m256i, x: __m256i) -> __m256i {
    let w = _mm256_xor_si256(biased, _mm256_set1_epi8(-128));
    dot_half(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
}

// SAFETY: plain implementations; the contract of each method is the trait's.
unsafe impl Lanes for Avx2 {
    const TILE: usize = 4;
    type F = Pair<__m256>;
    type I = Pair<__m256i>;
    type Q = Pair<__m256i>;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        Pair(_mm256_set1_ps(x), _mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        Pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)))
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::F) {
        _mm256_storeu_ps(p, v.0);
        _mm256_storeu_ps(p.add(8), v.1);
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        Pair(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: Self::F) {
        _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v.0));
        _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v.1));
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
        let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
        Pair(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)))
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        let sign = Self::splat(-0.0);
        both!(_mm256_andnot_ps, sign, a)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        both!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>, a)
    }
    #[inline(always)]
    unsafe fn scale_pow2(a: Self::F, n: Self::F) -> Self::F {
        let n = both!(_mm256_cvtps_epi32, n);
        let bias = Pair(_mm256_set1_epi32(127), _mm256_set1_epi32(127));
        let n = both!(_mm256_add_epi32, n, bias);
        let n = both!(_mm256_slli_epi32::<23>, n);
        let n = both!(_mm256_castsi256_ps, n);
        both!(_mm256_mul_ps, a, n)
    }
    #[inline(always)]
    unsafe fn reduce_add(a: Self::F) -> f32 {
        let a = _mm256_add_ps(a.0, a.1);
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
    }
    #[inline(always)]
    unsafe fn reduce_max(a: Self::F) -> f32 {
        let a = _mm256_max_ps(a.0, a.1);
        let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
    }
    /// Through memory: sixteen rows do not fit the registers anyway.
    #[inline(always)]
    unsafe fn transpose(rows: [Self::F; LANES]) -> [Self::F; LANES] {
        let (mut from, mut to) = ([[0.0f32; LANES]; LANES], [[0.0f32; LANES]; LANES]);
        for (row, v) in from.iter_mut().zip(rows) {
            Self::store(row.as_mut_ptr(), v);
        }
        for i in 0..LANES {
            for j in 0..LANES {
                to[i][j] = from[j][i];
            }
        }
        to.map(|row| Self::load(row.as_ptr()))
    }

    #[inline(always)]
    unsafe fn to_f32(a: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps, a)
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: Self::F) -> i32 {
        let mut ints = [0i32; LANES];
        _mm256_storeu_si256(ints.as_mut_ptr().cast(), _mm256_cvtps_epi32(v.0));
        _mm256_storeu_si256(ints.as_mut_ptr().add(8).cast(), _mm256_cvtps_epi32(v.1));
        for (i, q) in ints.into_iter().enumerate() {
            p.add(i).write(q as i8);
        }
        ints.iter().sum()
    }
    #[inline(always)]
    unsafe fn int_zero() -> Self::I {
        Pair(_mm256_setzero_si256(), _mm256_setzero_si256())
    }
    /// `dot_bytes` takes the bias away before it multiplies.
    #[inline(always)]
    unsafe fn int_biased_start(_minus_bias_sum: i32) -> Self::I {
        Self::int_zero()
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self::Q, Self::Q) {
        let both = Self::load_bytes(p);
        let mask = Pair(_mm256_set1_epi8(0x0f), _mm256_set1_epi8(0x0f));
        let high = both!(_mm256_srli_epi16::<4>, both);
        (both!(_mm256_and_si256, both, mask), both!(_mm256_and_si256, high, mask))
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::Q {
        Pair(_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast()))
    }
    #[inline(always)]
    unsafe fn dot_nibbles(acc: Self::I, w: Self::Q, x: *const i8) -> Self::I {
        let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
        Pair(dot_half(acc.0, w.0, x), dot_half(acc.1, w.1, x))
    }
    #[inline(always)]
    unsafe fn dot_bytes(acc: Self::I, w: Self::Q, x: *const i8) -> Self::I {
        let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
        Pair(dot_half_biased(acc.0, w.0, x), dot_half_biased(acc.1, w.1, x))
    }
}
