//! Operations on one row of activations: norm, activation function, rotation, quantisation. Rows know nothing of each
//! other, so these are invariant by construction.

use super::{
    Isa, Kernel, LANES,
    lanes::Lanes,
    matmul::{ACTIVATION_BYTES, BlockScale, FINE},
    panels::BLOCK,
};

/// Calls `$body` with `(offset, lanes)` for each vector of a row of `$n` elements.
macro_rules! vectors {
    ($n:expr, |$at:ident, $lanes:ident| $body:expr) => {
        for $at in (0..$n).step_by(LANES) {
            let $lanes = LANES.min($n - $at);
            $body
        }
    };
}

#[inline(always)]
unsafe fn get<S: Lanes>(p: *const f32, lanes: usize) -> S::F {
    if lanes == LANES { S::load(p) } else { S::load_part(p, lanes, 0.0) }
}

#[inline(always)]
unsafe fn put<S: Lanes>(p: *mut f32, lanes: usize, v: S::F) {
    if lanes == LANES { S::store(p, v) } else { S::store_part(p, lanes, v) }
}

/// `out = x / sqrt(mean(x²) + eps) * weight`
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len(), "rows of one length");
    isa.run(RmsNorm { x: x.as_ptr(), weight, eps, out: out.as_mut_ptr() })
}

/// [`rms_norm`] of `x` into itself.
pub fn rms_norm_in_place(isa: Isa, x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len(), "rows of one length");
    let out = x.as_mut_ptr();
    isa.run(RmsNorm { x: out, weight, eps, out })
}

struct RmsNorm<'a> {
    /// As long as `weight`.
    x: *const f32,
    weight: &'a [f32],
    eps: f32,
    /// As long as `weight`; `x` itself or apart from it, since each vector is read before it is written.
    out: *mut f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let (x, n) = (self.x, self.weight.len());
        let mut squares = S::splat(0.0);
        vectors!(n, |at, lanes| {
            let v = get::<S>(x.add(at), lanes);
            squares = S::fma(v, v, squares);
        });
        let scale = S::splat(1.0 / (S::reduce_add(squares) / n as f32 + self.eps).sqrt());
        vectors!(n, |at, lanes| {
            let v = S::mul(get::<S>(x.add(at), lanes), scale);
            put::<S>(self.out.add(at), lanes, S::mul(v, get::<S>(self.weight.as_ptr().add(at), lanes)));
        });
    }
}

/// `x += y`
pub fn add(isa: Isa, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "rows of one length");
    isa.run(Add { x, y })
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let (x, y) = (self.x.as_mut_ptr(), self.y.as_ptr());
        vectors!(self.y.len(), |at, lanes| {
            put::<S>(x.add(at), lanes, S::add(get::<S>(x.add(at), lanes), get::<S>(y.add(at), lanes)));
        });
    }
}

/// `out = silu(gate) * up`, where silu(x) = x / (1 + e^-x)
pub fn silu_mul(isa: Isa, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == out.len(), "rows of one length");
    isa.run(SiluMul { gate, up, out })
}

struct SiluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let (gate, up, out) = (self.gate.as_ptr(), self.up.as_ptr(), self.out.as_mut_ptr());
        vectors!(self.gate.len(), |at, lanes| {
            let x = get::<S>(gate.add(at), lanes);
            let e = S::exp(S::sub(S::splat(0.0), S::max(x, S::splat(-87.0))));
            let silu = S::div(x, S::add(S::splat(1.0), e));
            put::<S>(out.add(at), lanes, S::mul(silu, get::<S>(up.add(at), lanes)));
        });
    }
}

/// Rotates the halves of one head: `(a, b) → (a cos - b sin, b cos + a sin)`, then multiplies by `scale`.
pub fn rotate(isa: Isa, head: &mut [f32], cos: &[f32], sin: &[f32], scale: f32) {
    assert!(head.len() == 2 * cos.len() && cos.len() == sin.len(), "a head of twice as many elements as angles");
    isa.run(Rotate { head, cos, sin, scale })
}

struct Rotate<'a> {
    head: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
    scale: f32,
}

impl Kernel for Rotate<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let half = self.cos.len();
        let (first, second) = (self.head.as_mut_ptr(), self.head.as_mut_ptr().add(half));
        let scale = S::splat(self.scale);
        vectors!(half, |at, lanes| {
            let (a, b) = (get::<S>(first.add(at), lanes), get::<S>(second.add(at), lanes));
            let cos = get::<S>(self.cos.as_ptr().add(at), lanes);
            let sin = get::<S>(self.sin.as_ptr().add(at), lanes);
            put::<S>(first.add(at), lanes, S::mul(S::sub(S::mul(a, cos), S::mul(b, sin)), scale));
            put::<S>(second.add(at), lanes, S::mul(S::add(S::mul(b, cos), S::mul(a, sin)), scale));
        });
    }
}

/// To coarse and fine signed bytes, 32 to a scale: scale = max|x| / 127, coarse = round(x / scale), fine = the rest in
/// steps of scale / 254.
pub fn quantise(isa: Isa, x: &[f32], bytes: &mut [i8], blocks: &mut [BlockScale]) {
    assert!(2 * x.len() == bytes.len() && x.len() == blocks.len() * BLOCK, "whole blocks");
    isa.run(Quantise { x, bytes, blocks })
}

struct Quantise<'a> {
    x: &'a [f32],
    bytes: &'a mut [i8],
    blocks: &'a mut [BlockScale],
}

impl Kernel for Quantise<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        for (i, block) in self.blocks.iter_mut().enumerate() {
            let x = self.x.as_ptr().add(i * BLOCK);
            let q = self.bytes.as_mut_ptr().add(i * ACTIVATION_BYTES);
            let (low, high) = (S::load(x), S::load(x.add(LANES)));
            let largest = S::reduce_max(S::max(S::abs(low), S::abs(high)));
            let by = S::splat(if largest > 1e-30 { 127.0 / largest } else { 0.0 });
            let (low, high) = (S::mul(low, by), S::mul(high, by));
            let coarse = S::store_i8(q, low) + S::store_i8(q.add(LANES), high);
            let rest = |v| S::mul(S::sub(v, S::round(v)), S::splat(FINE));
            let fine = S::store_i8(q.add(BLOCK), rest(low)) + S::store_i8(q.add(BLOCK + LANES), rest(high));
            let scale = largest / 127.0;
            let sum = scale * (coarse as f32 + fine as f32 / FINE);
            *block = BlockScale { scale, sum, minus_bias_sums: [-128 * coarse, -128 * fine] };
        }
    }
}
