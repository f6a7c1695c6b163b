//! Rotary frequencies, computed as `transformers` does (`modeling_rope_utils.py`), in its f32 arithmetic: a frequency
//! off by one rounding would be off by a visible angle at position 100,000. *Pure.*

use std::f64::consts::PI;

use crate::config::{Rope, RopeScaling};

impl Rope {
    /// Radians per position for each of the `head_dim / 2` rotated pairs.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let half = head_dim / 2;
        let wave = |i: usize| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            self.theta.powf(f64::from(exponent)) as f32
        };
        let plain = (0..half).map(|i| 1.0 / wave(i));
        match &self.scaling {
            RopeScaling::Default => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / *factor as f32).collect(),
            RopeScaling::Factors(factors) => plain.zip(factors).map(|(frequency, factor)| frequency / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => plain
                .map(|frequency| {
                    llama3(frequency, *factor, *low_freq_factor, *high_freq_factor, *original_max_positions)
                })
                .collect(),
            RopeScaling::Yarn { factor, .. } => {
                let ramp = self.yarn_ramp(head_dim);
                (0..half)
                    .zip(ramp)
                    .map(|(i, ramp)| {
                        let (near, far) = (1.0 / wave(i), 1.0 / (*factor as f32 * wave(i)));
                        let extrapolated = 1.0 - ramp;
                        far * (1.0 - extrapolated) + near * extrapolated
                    })
                    .collect()
            }
        }
    }

    /// Multiplies cosine and sine (YaRN's temperature, applied to q and k alike).
    pub fn attention_scale(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
            _ => 1.0,
        }
    }

    /// How far each pair is interpolated: 0 for fast pairs, 1 for slow ones, a line between.
    fn yarn_ramp(&self, head_dim: usize) -> Vec<f32> {
        let RopeScaling::Yarn { beta_fast, beta_slow, original_max_positions, truncate, .. } = self.scaling else {
            return vec![0.0; head_dim / 2];
        };
        let dim = head_dim as f64;
        let pair_of =
            |rotations: f64| dim * (original_max_positions / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
        let (low, high) = (pair_of(beta_fast), pair_of(beta_slow));
        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let span = (high - low) as f32;
        (0..head_dim / 2).map(|i| ((i as f32 - low as f32) / span).clamp(0.0, 1.0)).collect()
    }
}

/// YaRN's attention temperature for a context `factor` times as long.
pub(crate) fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

fn llama3(frequency: f32, factor: f64, low: f64, high: f64, original: f64) -> f32 {
    let wavelength = (2.0 * PI) as f32 / frequency;
    let (factor, original) = (factor as f32, original as f32);
    let (low, high) = (low as f32, high as f32);
    if wavelength > original / low {
        frequency / factor
    } else if wavelength < original / high {
        frequency
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(theta: f64, scaling: RopeScaling) -> Rope {
        Rope { theta, scaling }
    }

    #[test]
    fn plain_frequencies_fall_from_one() {
        let frequencies = rope(10_000.0, RopeScaling::Default).inverse_frequencies(8);
        assert_eq!(frequencies, [1.0, 0.1, 0.01, 0.001]);
    }

    #[test]
    fn linear_divides_all() {
        let frequencies = rope(10_000.0, RopeScaling::Linear { factor: 4.0 }).inverse_frequencies(8);
        assert_eq!(frequencies, [0.25, 0.025, 0.0025, 0.00025]);
    }

    #[test]
    fn llama3_keeps_fast_pairs_and_divides_slow_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 64.0,
        };
        let plain = rope(500_000.0, RopeScaling::Default).inverse_frequencies(32);
        let scaled = rope(500_000.0, scaling).inverse_frequencies(32);
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[15], plain[15] / 8.0);
        assert!(scaled.iter().zip(&plain).all(|(scaled, plain)| scaled <= plain && *scaled >= plain / 8.0));
    }

    #[test]
    fn yarn_lies_between_plain_and_linear() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: yarn_mscale(4.0, 1.0),
            original_max_positions: 32768.0,
            truncate: true,
        };
        let plain = rope(1e6, RopeScaling::Default).inverse_frequencies(128);
        let yarn = rope(1e6, scaling);
        let scaled = yarn.inverse_frequencies(128);
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], 1.0 / (4.0 / plain[63]));
        assert!((yarn.attention_scale() - 1.138_629_4).abs() < 1e-6);
    }
}
