//! D's books of the attempts that may write into its pools, for the backends whose bytes D moves itself (tcp, shm).
//!
//! Every write into an attempt's page happens under a [`Borrow`]. A revoked attempt gives none, so that the last borrow
//! that comes back is the proof of quiet, and `Quiet` is reported once for each revoked attempt (H2).

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tandem_handoff::{
    ids::{Attempt, Channel},
    layout::{Mapping, PieceSet, PoolShape},
};

use crate::{SinkReport, Waker, memory::PoolMemory};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Landing {
    shape: PoolShape,
    memories: Vec<Arc<PoolMemory>>,
    waker: Waker,
    /// Attempts that may write. One look-up per piece, first thing (H3).
    expected: Mutex<HashMap<Attempt, Arc<Expected>>>,
    reports: Mutex<Reports>,
}

/// Bounded: pieces and quiets by the attempts that were expected, breaks by the streams that were attached.
#[derive(Default)]
struct Reports {
    landed: BTreeMap<Attempt, Vec<u32>>,
    quiet: Vec<Attempt>,
    broken: Vec<(Channel, String)>,
}

/// An attempt that may write into `pages`.
pub(crate) struct Expected {
    attempt: Attempt,
    pages: Vec<u32>,
    mapping: Mapping,
    state: Mutex<State>,
}

struct State {
    revoked: bool,
    /// Writes into the attempt's pages that are in progress now.
    borrows: u32,
    landed: PieceSet,
}

/// Where a piece belongs: `bytes` from `offset` on in the pool of `rank`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub rank: u32,
    pub offset: usize,
    pub bytes: usize,
}

impl Landing {
    /// `memories` are D's pools, one per rank of `shape`.
    pub fn new(shape: PoolShape, memories: Vec<Arc<PoolMemory>>, waker: Waker) -> Self {
        Self { shape, memories, waker, expected: Mutex::default(), reports: Mutex::default() }
    }

    pub fn shape(&self) -> &PoolShape {
        &self.shape
    }

    pub fn expect(&self, attempt: Attempt, pages: &[u32], mapping: Mapping) {
        let landed = PieceSet::new(mapping.pieces(pages.len()));
        let state = Mutex::new(State { revoked: false, borrows: 0, landed });
        let expected = Expected { attempt, pages: pages.to_vec(), mapping, state };
        lock(&self.expected).insert(attempt, Arc::new(expected));
    }

    pub fn revoke(&self, attempt: Attempt) {
        let Some(expected) = lock(&self.expected).remove(&attempt) else {
            return;
        };
        let quiet = {
            let mut state = lock(&expected.state);
            state.revoked = true;
            state.borrows == 0
        };
        if quiet {
            self.report_quiet(attempt);
        }
    }

    pub fn release(&self, attempt: Attempt) {
        lock(&self.expected).remove(&attempt);
        lock(&self.reports).landed.remove(&attempt);
    }

    pub fn poll(&self) -> Vec<SinkReport> {
        let reports = std::mem::take(&mut *lock(&self.reports));
        let landed = reports.landed.into_iter().map(|(attempt, pieces)| SinkReport::Landed { attempt, pieces });
        let quiet = reports.quiet.into_iter().map(|attempt| SinkReport::Quiet { attempt });
        let broken = reports.broken.into_iter().map(|(channel, why)| SinkReport::Broken { channel, why });
        landed.chain(quiet).chain(broken).collect()
    }

    /// The books of an attempt that may write now.
    pub fn find(&self, attempt: Attempt) -> Option<Arc<Expected>> {
        lock(&self.expected).get(&attempt).cloned()
    }

    /// Where a piece that has not landed belongs.
    ///
    /// # Errors
    /// Says what is wrong with the piece, when it is none of the set, of other length, or there already.
    pub fn place(&self, expected: &Expected, piece: u32, bytes: u64) -> Result<Place, String> {
        let piece = piece as usize;
        let landed = &lock(&expected.state).landed;
        if piece >= landed.size() {
            return Err(format!("piece {piece} of a set of {}", landed.size()));
        }
        if landed.contains(piece) {
            return Err(format!("piece {piece} came twice"));
        }
        let (page, route) = expected.mapping.split(piece);
        let wanted = expected.mapping.bytes(route);
        if bytes != wanted as u64 {
            return Err(format!("piece {piece} with {bytes} bytes instead of {wanted}"));
        }
        let offset = route.target_offset(&self.shape, expected.pages[page]);
        let memory = &self.memories[route.decode_rank as usize];
        assert!(offset + wanted <= memory.len(), "an offered page lies in its pool");
        Ok(Place { rank: route.decode_rank, offset, bytes: wanted })
    }

    /// Records a piece that is whole in its page.
    pub fn land(&self, expected: &Expected, piece: u32) {
        let complete = {
            let mut state = lock(&expected.state);
            if state.revoked || !state.landed.insert(piece as usize) {
                return;
            }
            state.landed.is_full()
        };
        lock(&self.reports).landed.entry(expected.attempt).or_default().push(piece);
        if complete {
            (self.waker)();
        }
    }

    /// The channel's data path is gone.
    pub fn broke(&self, channel: Channel, why: String) {
        lock(&self.reports).broken.push((channel, why));
        (self.waker)();
    }

    fn report_quiet(&self, attempt: Attempt) {
        lock(&self.reports).quiet.push(attempt);
        (self.waker)();
    }
}

/// The right to write into an attempt's pages while one block is moved. The last one of a revoked attempt, when it is
/// given back, is the proof of quiet.
pub(crate) struct Borrow<'a> {
    landing: &'a Landing,
    expected: &'a Expected,
}

impl<'a> Borrow<'a> {
    /// `None` once the attempt is revoked.
    pub fn take(landing: &'a Landing, expected: &'a Expected) -> Option<Self> {
        let mut state = lock(&expected.state);
        if state.revoked {
            return None;
        }
        state.borrows += 1;
        Some(Self { landing, expected })
    }

    /// The rest of the place's bytes, from `from` on. Valid while the borrow is out: until then the attempt owns the page
    /// (H1) and no proof of quiet exists, so nobody else reads or writes it.
    pub fn target(&self, place: Place, from: usize) -> *mut u8 {
        assert!(from <= place.bytes, "the block lies in its piece");
        self.landing.memories[place.rank as usize].as_ptr().wrapping_add(place.offset + from)
    }
}

impl Drop for Borrow<'_> {
    fn drop(&mut self) {
        let quiet = {
            let mut state = lock(&self.expected.state);
            state.borrows -= 1;
            state.revoked && state.borrows == 0
        };
        if quiet {
            self.landing.report_quiet(self.expected.attempt);
        }
    }
}
