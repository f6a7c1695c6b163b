//! Prefill workers by the length of prompts: each has a range of lengths, so that short prompts do not wait behind long ones,
//! and the ranges are such that each worker gets the same number of bytes. *Pure.*
//!
//! What was seen is counted by length, eight classes per octave, and halved at each fit (`--bucket-adjust-interval-secs`),
//! so that the past fades. A fit gives each class its interval of the whole work, which is laid over the workers in the
//! order of the pool; a class that belongs to several is shared by the dice. Until something was fitted, and where the
//! worker is much busier than the least loaded (`--balance-*-threshold`), the least loaded gets the request.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use rand::RngCore;

use super::{Ask, Balance, Candidate, Least, Policy};
use crate::config::PairConfig;

const CLASSES_PER_OCTAVE: usize = 8;
const CLASSES: usize = 64 * CLASSES_PER_OCTAVE;

#[derive(Debug)]
pub struct Bucket {
    interval: Duration,
    balance: Balance,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// Bytes per class.
    work: Box<[u64; CLASSES]>,
    /// The share of all work below each class and up to its end; empty before the first fit.
    shares: Vec<f64>,
    /// `None` before the first request.
    fit_at: Option<Instant>,
}

impl Bucket {
    pub fn new(config: &PairConfig) -> Self {
        let seen = Seen { work: Box::new([0; CLASSES]), shares: Vec::new(), fit_at: None };
        Bucket { interval: config.bucket_interval, balance: config.balance, seen: Mutex::new(seen) }
    }

    /// The interval of the whole work that this length has, in 0..=1; `None` before the first fit.
    fn interval_of(&self, bytes: usize, now: Instant) -> Option<(f64, f64)> {
        let class = class(bytes);
        let mut seen = self.seen.lock().expect("no panic under this lock");
        seen.work[class] = seen.work[class].saturating_add(bytes as u64);
        if now >= *seen.fit_at.get_or_insert(now + self.interval) {
            seen.fit();
            seen.fit_at = Some(now + self.interval);
        }
        Some((*seen.shares.get(class)?, seen.shares[class + 1]))
    }
}

impl Seen {
    fn fit(&mut self) {
        let all: f64 = self.work.iter().map(|w| *w as f64).sum();
        if all > 0.0 {
            let mut below = 0.0;
            self.shares = vec![0.0];
            self.shares.extend(self.work.iter().map(|work| {
                below += *work as f64;
                below / all
            }));
        }
        self.work.iter_mut().for_each(|work| *work /= 2);
    }
}

/// Monotonic in the length.
fn class(bytes: usize) -> usize {
    let bytes = bytes.max(CLASSES_PER_OCTAVE) as u64;
    let octave = bytes.ilog2() as usize;
    let within = (bytes >> (octave - 3)) as usize % CLASSES_PER_OCTAVE;
    octave * CLASSES_PER_OCTAVE + within
}

impl Policy for Bucket {
    fn name(&self) -> &'static str {
        "bucket"
    }

    fn choose(&self, ask: &Ask, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize {
        let least = Least::of(candidates);
        if let Some((from, to)) = self.interval_of(ask.prompt_bytes, ask.now) {
            let within = dice.next_u32() as f64 / (1u64 << 32) as f64;
            let place = (from + within * (to - from)) * candidates.len() as f64;
            let place = (place as usize).min(candidates.len() - 1);
            if least.is_near(candidates[place].load, self.balance) {
                return place;
            }
        }
        least.first(candidates, dice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::tests::{ask, dice, idle, legs, pair_config, workers};
    use rand::Rng as _;

    /// Lengths between 100 bytes and 100 KB, each octave as likely.
    fn length(dice: &mut impl RngCore) -> usize {
        (100.0 * 1000f64.powf(dice.random::<f64>())) as usize
    }

    fn fitted(count: usize) -> (Bucket, Instant) {
        let (policy, mut dice, start) = (Bucket::new(&pair_config("")), dice(), Instant::now());
        for second in 0..6 {
            for _ in 0..500 {
                let ask = Ask { prompt_bytes: length(&mut dice), now: start + Duration::from_secs(second), ..ask() };
                policy.choose(&ask, &idle(count), &mut dice);
            }
        }
        (policy, start + Duration::from_secs(5))
    }

    #[test]
    fn classes_grow_with_the_length() {
        assert!((0..100_000).map(class).is_sorted());
        assert!((0..64).map(|bit| class(1 << bit)).is_sorted());
        assert!(class(usize::MAX) < CLASSES);
        assert_ne!(class(1000), class(1200));
    }

    #[test]
    fn each_worker_gets_as_many_bytes_and_longer_prompts_than_the_one_before() {
        let (policy, now) = fitted(4);
        let (mut dice, workers) = (dice(), idle(4));
        let (mut bytes, mut requests) = ([0; 4], [0; 4]);
        for _ in 0..8000 {
            let length = length(&mut dice);
            let chosen = policy.choose(&Ask { prompt_bytes: length, now, ..ask() }, &workers, &mut dice);
            bytes[chosen] += length;
            requests[chosen] += 1;
        }
        let all: usize = bytes.iter().sum();
        assert!(bytes.iter().all(|b| b * 4 > all * 8 / 10 && b * 4 < all * 12 / 10), "{bytes:?}");
        assert!(requests.is_sorted_by(|a, b| a > b), "{requests:?}");
    }

    #[test]
    fn one_length_is_shared_by_all() {
        let (policy, mut dice, workers, start) = (Bucket::new(&pair_config("")), dice(), idle(4), Instant::now());
        let mut counts = [0; 4];
        for i in 0..4000 {
            let now = start + Duration::from_millis(5 * i);
            counts[policy.choose(&Ask { prompt_bytes: 1000, now, ..ask() }, &workers, &mut dice)] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn the_fit_follows_what_is_seen() {
        let (policy, mut now) = fitted(2);
        let (mut dice, workers) = (dice(), idle(2));
        let mut choose = |bytes, now| policy.choose(&Ask { prompt_bytes: bytes, now, ..ask() }, &workers, &mut dice);
        assert_eq!(choose(10_000, now), 0);
        for _ in 0..20 {
            now += Duration::from_secs(5);
            for i in 0..200 {
                choose(if i % 10 == 0 { 10_000 } else { 1200 }, now);
            }
        }
        assert_eq!(choose(10_000, now), 1, "now it is one of the longest");
    }

    #[test]
    fn the_least_loaded_where_its_own_is_too_busy_and_before_the_first_fit() {
        let (policy, now) = fitted(2);
        let long = Ask { prompt_bytes: 90_000, now, ..ask() };
        assert_eq!(policy.choose(&long, &workers([legs(0), legs(64)]), &mut dice()), 1);
        assert_eq!(policy.choose(&long, &workers([legs(0), legs(65)]), &mut dice()), 0);
        let new = Bucket::new(&pair_config(""));
        assert_eq!(new.choose(&long, &workers([legs(0), legs(1)]), &mut dice()), 0);
    }
}
