//! A histogram of durations with a relative error below 1 %: 128 buckets for each power of two, as HdrHistogram has
//! them. *Pure.*

use std::time::Duration;

const SUB_BITS: u32 = 7;
const SUB: usize = 1 << SUB_BITS;
/// Up to 2^40 ns, 18 minutes; longer ones count as this long.
const BUCKETS: usize = (40 - SUB_BITS as usize + 1) * SUB;

#[derive(Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    max: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: vec![0; BUCKETS], total: 0, max: Duration::ZERO }
    }
}

impl Histogram {
    pub fn record(&mut self, value: Duration) {
        self.counts[bucket(value.as_nanos() as u64)] += 1;
        self.total += 1;
        self.max = self.max.max(value);
    }

    pub fn count(&self) -> u64 {
        self.total
    }

    /// The smallest value that at least this share of the values does not exceed, in microseconds; 0 without values.
    pub fn quantile_us(&self, share: f64) -> f64 {
        let wanted = (share * self.total as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return (upper_ns(bucket) as f64).min(self.max.as_nanos() as f64) / 1e3;
            }
        }
        0.0
    }

    pub fn max_us(&self) -> f64 {
        self.max.as_nanos() as f64 / 1e3
    }
}

/// Values below 2^8 have a bucket each; above, the leading 8 bits choose.
fn bucket(ns: u64) -> usize {
    let shift = (63 - (ns | 1).leading_zeros()).saturating_sub(SUB_BITS);
    let index = ((shift as usize) << SUB_BITS) + (ns >> shift) as usize;
    index.min(BUCKETS - 1)
}

fn upper_ns(bucket: usize) -> u64 {
    let shift = (bucket >> SUB_BITS).saturating_sub(1) as u32;
    let lead = bucket - ((shift as usize) << SUB_BITS);
    ((lead as u64 + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_lies_in_its_bucket_within_one_percent() {
        for ns in (0..200_000).chain([1 << 30, (1 << 30) + 12_345_678, (1 << 39) + 1]) {
            let upper = upper_ns(bucket(ns));
            assert!(upper >= ns && upper as f64 <= ns as f64 * 1.01 + 1.0, "{ns} {upper}");
        }
    }

    #[test]
    fn quantiles() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|us| histogram.record(Duration::from_micros(us)));
        assert!((histogram.quantile_us(0.5) - 500.0).abs() < 5.0);
        assert!((histogram.quantile_us(0.99) - 990.0).abs() < 10.0);
        assert_eq!((histogram.quantile_us(1.0), histogram.count()), (1000.0, 1000));
    }
}
