//! The checksum of one KV head of one page, and what D says when two differ. *Pure.*
//!
//! It is taken over `[layer][K|V][token][dim]` of the head, after P zeroed the unused tokens of the last page. Heads are
//! counted over the whole model, so workers with different TP compare the same numbers.

use std::fmt;

/// Of the bytes of one head of one page: the low 32 bits of their XXH3.
pub fn head_checksum(bytes: &[u8]) -> u32 {
    xxhash_rust::xxh3::xxh3_64(bytes) as u32
}

/// The first page and head whose bytes on D are not those that P computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corrupt {
    /// Which page of the prompt, counted from its first token.
    pub prompt_page: usize,
    /// D's number of that page.
    pub page: u32,
    /// KV head of the whole model, and the D rank whose copy of it is wrong.
    pub head: u32,
    pub rank: u32,
}

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Corrupt { prompt_page, page, head, rank } = self;
        write!(f, "page {prompt_page} of the prompt (page {page} of the pool), KV head {head} on rank {rank}")
    }
}
