//! Randomness as a function of (seed, sample index, output position), never a generator with a state. *Pure.*
//!
//! The mixer is SplitMix64's finaliser (Steele, Lea and Flood 2014), applied once per input word.

/// A number in `[0, 1)` with 53 random bits.
pub fn unit(seed: u64, sample_index: u32, position: u32) -> f64 {
    let word = mix(mix(mix(seed) ^ u64::from(sample_index)) ^ u64::from(position));
    (word >> 11) as f64 / (1u64 << 53) as f64
}

fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_spread_and_depend_on_each_input() {
        let n = 20_000;
        let mean = (0..n).map(|position| unit(7, 0, position)).sum::<f64>() / f64::from(n);
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert!((0..n).all(|position| (0.0..1.0).contains(&unit(7, 0, position))));
        let base = unit(1, 2, 3);
        assert_ne!(base, unit(2, 2, 3));
        assert_ne!(base, unit(1, 3, 3));
        assert_ne!(base, unit(1, 2, 4));
        assert_ne!(unit(1, 0, 1), unit(0, 1, 1));
    }
}
