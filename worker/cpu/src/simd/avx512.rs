//! [`Lanes`] on AVX-512 (F, BW, VL, DQ) with VNNI: one register per vector.

use std::arch::x86_64::*;

use super::lanes::{LANES, Lanes};

pub struct Avx512;

// SAFETY: plain implementations; the contract of each method is the trait's.
unsafe impl Lanes for Avx512 {
    const TILE: usize = 8;
    type F = __m512;
    type I = __m512i;
    type Q = __m512i;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        _mm512_storeu_ps(p, v)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m512) {
        _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn abs(a: __m512) -> __m512 {
        _mm512_abs_ps(a)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
    }
    #[inline(always)]
    unsafe fn scale_pow2(a: __m512, n: __m512) -> __m512 {
        _mm512_scalef_ps(a, n)
    }
    #[inline(always)]
    unsafe fn reduce_add(a: __m512) -> f32 {
        let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
    }
    #[inline(always)]
    unsafe fn reduce_max(a: __m512) -> f32 {
        _mm512_reduce_max_ps(a)
    }
    #[inline(always)]
    unsafe fn transpose(r: [__m512; LANES]) -> [__m512; LANES] {
        let mut t = r;
        for i in (0..LANES).step_by(4) {
            let (a, b) = (_mm512_unpacklo_ps(r[i], r[i + 1]), _mm512_unpackhi_ps(r[i], r[i + 1]));
            let (c, d) = (_mm512_unpacklo_ps(r[i + 2], r[i + 3]), _mm512_unpackhi_ps(r[i + 2], r[i + 3]));
            t[i] = _mm512_shuffle_ps::<0x44>(a, c);
            t[i + 1] = _mm512_shuffle_ps::<0xee>(a, c);
            t[i + 2] = _mm512_shuffle_ps::<0x44>(b, d);
            t[i + 3] = _mm512_shuffle_ps::<0xee>(b, d);
        }
        let mut out = t;
        for i in 0..4 {
            let low = _mm512_shuffle_f32x4::<0x88>(t[i], t[i + 4]);
            let high = _mm512_shuffle_f32x4::<0xdd>(t[i], t[i + 4]);
            let low2 = _mm512_shuffle_f32x4::<0x88>(t[i + 8], t[i + 12]);
            let high2 = _mm512_shuffle_f32x4::<0xdd>(t[i + 8], t[i + 12]);
            out[i] = _mm512_shuffle_f32x4::<0x88>(low, low2);
            out[i + 8] = _mm512_shuffle_f32x4::<0xdd>(low, low2);
            out[i + 4] = _mm512_shuffle_f32x4::<0x88>(high, high2);
            out[i + 12] = _mm512_shuffle_f32x4::<0xdd>(high, high2);
        }
        out
    }

    #[inline(always)]
    unsafe fn to_f32(a: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(a)
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: __m512) -> i32 {
        let q = _mm512_cvtps_epi32(v);
        _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(q));
        _mm512_reduce_add_epi32(q)
    }
    #[inline(always)]
    unsafe fn int_zero() -> __m512i {
        _mm512_setzero_si512()
    }
    #[inline(always)]
    unsafe fn int_biased_start(minus_bias_sum: i32) -> __m512i {
        _mm512_set1_epi32(minus_bias_sum)
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (__m512i, __m512i) {
        let both = _mm512_loadu_si512(p.cast());
        let mask = _mm512_set1_epi8(0x0f);
        (_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask))
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m512i {
        _mm512_loadu_si512(p.cast())
    }
    #[inline(always)]
    unsafe fn dot_nibbles(acc: __m512i, w: __m512i, x: *const i8) -> __m512i {
        _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x.cast::<i32>().read_unaligned()))
    }
    #[inline(always)]
    unsafe fn dot_bytes(acc: __m512i, w: __m512i, x: *const i8) -> __m512i {
        Self::dot_nibbles(acc, w, x)
    }
}
