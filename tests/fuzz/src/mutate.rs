//! Small changes of an input, as transmission errors and attackers make them. *Pure* but for the randomness handed in.

use std::ops::Range;

use rand::{Rng, seq::IndexedRandom};

/// Numbers at which parsers go wrong.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    0x7F,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFF_FFFF,
    0xFFFF_FFFF,
    1 << 32,
    1 << 62,
    i64::MAX as u64,
    i64::MIN as u64,
    u64::MAX,
];
const CHANGES_MAX: u32 = 4;
const RUN_BYTES_MAX: usize = 64;

/// Changes `bytes` a few times, and cuts it to `bytes_max`. `others` lend parts of themselves.
pub fn mutate(rng: &mut impl Rng, bytes: &mut Vec<u8>, others: &[Vec<u8>], words: &[&str], bytes_max: usize) {
    for _ in 0..rng.random_range(1..=CHANGES_MAX) {
        change(rng, bytes, others, words);
    }
    bytes.truncate(bytes_max);
}

fn change(rng: &mut impl Rng, bytes: &mut Vec<u8>, others: &[Vec<u8>], words: &[&str]) {
    match rng.random_range(0..10) {
        0 => flip(rng, bytes),
        1 => overwrite(rng, bytes, |rng| vec![rng.random()]),
        2 | 3 => overwrite(rng, bytes, number),
        4 => step(rng, bytes),
        5 => drop(bytes.drain(range(rng, bytes.len()))),
        6 => {
            let again = bytes[range(rng, bytes.len())].to_vec();
            insert(rng, bytes, &again);
        }
        7 => match words.choose(rng) {
            Some(word) => insert(rng, bytes, word.as_bytes()),
            None => {
                let random: Vec<u8> = (0..rng.random_range(1..9)).map(|_| rng.random()).collect();
                insert(rng, bytes, &random);
            }
        },
        8 => {
            if let Some(other) = others.choose(rng) {
                let part = other[range(rng, other.len())].to_vec();
                match rng.random() {
                    true => insert(rng, bytes, &part),
                    false => overwrite(rng, bytes, |_| part.clone()),
                }
            }
        }
        _ => bytes.truncate(rng.random_range(0..=bytes.len())),
    }
}

fn flip(rng: &mut impl Rng, bytes: &mut [u8]) {
    if let Some(byte) = place(rng, bytes.len()).map(|at| &mut bytes[at]) {
        *byte ^= 1 << rng.random_range(0..8);
    }
}

/// A number of 1, 2, 4 or 8 bytes, little endian.
fn number(rng: &mut impl Rng) -> Vec<u8> {
    let value = NUMBERS.choose(rng).copied().unwrap_or(0);
    value.to_le_bytes()[..1 << rng.random_range(0..4)].to_vec()
}

/// A byte that counts something, a little more or less.
fn step(rng: &mut impl Rng, bytes: &mut [u8]) {
    if let Some(at) = place(rng, bytes.len()) {
        bytes[at] = bytes[at].wrapping_add_signed(rng.random_range(-4..=4));
    }
}

fn overwrite<R: Rng>(rng: &mut R, bytes: &mut [u8], with: impl FnOnce(&mut R) -> Vec<u8>) {
    let Some(at) = place(rng, bytes.len()) else { return };
    for (old, new) in bytes[at..].iter_mut().zip(with(rng)) {
        *old = new;
    }
}

fn insert(rng: &mut impl Rng, bytes: &mut Vec<u8>, part: &[u8]) {
    let at = rng.random_range(0..=bytes.len());
    bytes.splice(at..at, part.iter().copied());
}

/// Structure stands in front: half of the places lie in the first 64 bytes.
fn place(rng: &mut impl Rng, len: usize) -> Option<usize> {
    let near = if rng.random() { len.min(64) } else { len };
    (near > 0).then(|| rng.random_range(0..near))
}

fn range(rng: &mut impl Rng, len: usize) -> Range<usize> {
    let Some(start) = place(rng, len) else { return 0..0 };
    let most = (len - start).min(RUN_BYTES_MAX);
    start..start + rng.random_range(1..=most)
}
