//! What the tests of all backends share: shapes, pools with known bytes, and waiting.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tandem_handoff::{
    ids::{Channel, Incarnation, SessionId},
    layout::{Mapping, PoolShape},
    source::{Piece, Settlement},
};

use crate::{SourceFabric, SourceReport, memory::PoolMemory};

pub const CHANNEL: Channel = Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3) };
/// Nothing here takes longer, unless it hangs.
pub const LIMIT: Duration = Duration::from_secs(20);

pub fn shape(tp: u32, head_dim: u32) -> PoolShape {
    PoolShape { layers: 2, kv_heads: 4, head_dim, page_size: 16, element_bytes: 4, tp, pages: 8 }
}

pub fn private(shape: &PoolShape) -> Vec<Arc<PoolMemory>> {
    (0..shape.tp).map(|_| Arc::new(PoolMemory::new(shape.pool_bytes()).expect("memory"))).collect()
}

pub fn write(pool: &PoolMemory, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= pool.len());
    // SAFETY: the range lies in the pool, and the test writes while no attempt owns the page.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), pool.as_ptr().add(offset), bytes.len()) }
}

pub fn read(pool: &PoolMemory, offset: usize, bytes: usize) -> Vec<u8> {
    assert!(offset + bytes <= pool.len());
    // SAFETY: the range lies in the pool, and the test reads after the piece landed or its attempt is quiet.
    unsafe { std::slice::from_raw_parts(pool.as_ptr().add(offset), bytes).to_vec() }
}

/// One byte of a page that is being written: only to see that the write has begun.
pub fn peek(pool: &PoolMemory, offset: usize) -> u8 {
    assert!(offset < pool.len());
    // SAFETY: the byte lies in the pool; a volatile read of one byte sees the old value or the new one.
    unsafe { pool.as_ptr().add(offset).read_volatile() }
}

/// The bytes of a head of a page: a function of both.
pub fn pattern(shape: &PoolShape, page: u32, head: u32) -> Vec<u8> {
    (0..shape.head_bytes()).map(|at| (at as u32 ^ (page * 31) ^ (head * 97)) as u8).collect()
}

/// Fills P's pools so that each head of each page holds its pattern.
pub fn fill(shape: &PoolShape, pools: &[Arc<PoolMemory>]) {
    for rank in 0..shape.tp {
        for (slot, head) in shape.heads_of_rank(rank).enumerate() {
            for page in 0..shape.pages {
                let offset = shape.head_offset(page, slot as u32);
                write(&pools[rank as usize], offset, &pattern(shape, page, head));
            }
        }
    }
}

/// D's pages `to` hold what P's pages `from` hold.
pub fn assert_moved(shape: &PoolShape, pools: &[Arc<PoolMemory>], from: &[u32], to: &[u32]) {
    for rank in 0..shape.tp {
        for (slot, head) in shape.heads_of_rank(rank).enumerate() {
            for (&page_p, &page_d) in from.iter().zip(to) {
                let got = read(&pools[rank as usize], shape.head_offset(page_d, slot as u32), shape.head_bytes());
                assert!(got == pattern(shape, page_p, head), "tp {}, page {page_d}, head {head}", shape.tp);
            }
        }
    }
}

pub fn pieces(p: &PoolShape, d: &PoolShape, source: &[u32], target: &[u32]) -> Vec<Piece> {
    let mapping = Mapping::new(p, d);
    let mut pieces = Vec::new();
    for (at, (&from, &to)) in source.iter().zip(target).enumerate() {
        for (route_index, route) in mapping.routes().iter().enumerate() {
            pieces.push(Piece {
                index: mapping.piece(at, route_index) as u32,
                source_rank: route.prefill_rank,
                source_offset: route.source_offset(p, from),
                target_rank: route.decode_rank,
                target_offset: route.target_offset(d, to),
                bytes: mapping.bytes(route),
            });
        }
    }
    pieces
}

/// Tries until `done` says so.
pub fn until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT, "nothing happened for {LIMIT:?}");
        std::thread::yield_now();
    }
}

/// How many pieces have settled in which way.
#[derive(Default, Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    pub sent: u64,
    pub dropped: u64,
    pub unknown: u64,
    /// The channel broke.
    pub broken: bool,
}

impl Settled {
    pub fn all(&self) -> u64 {
        self.sent + self.dropped + self.unknown
    }

    /// Takes in what the source has to report now.
    pub fn poll(&mut self, source: &mut dyn SourceFabric) -> Self {
        for report in source.poll() {
            match report {
                SourceReport::Settled { pieces, how: Settlement::Sent, .. } => self.sent += pieces,
                SourceReport::Settled { pieces, how: Settlement::Dropped, .. } => self.dropped += pieces,
                SourceReport::Settled { pieces, how: Settlement::Unknown, .. } => self.unknown += pieces,
                SourceReport::Broken { .. } => self.broken = true,
            }
        }
        *self
    }
}
