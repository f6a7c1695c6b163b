//! D's side of the shared-memory backend: the handle through which the engine expects and revokes. One copier thread per
//! channel moves the bytes.

use std::{
    collections::HashMap,
    io::{self, PipeWriter},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use tandem_handoff::{
    ids::{Attempt, Channel},
    layout::{Mapping, PoolShape},
};
use tokio::net::UnixStream;

use super::{copier::Copier, pools::PeerPools};
use crate::{
    SinkFabric, SinkReport, Waker,
    landing::{Landing, lock},
    memory::PoolMemory,
};

/// A cheap handle: the engine expects and revokes through one, the bootstrap driver attaches streams through another.
/// Dropping the last one ends the copiers.
#[derive(Clone)]
pub struct ShmSink(Arc<Shared>);

struct Shared {
    landing: Arc<Landing>,
    leashes: Mutex<HashMap<Channel, Leash>>,
}

/// Ends a copier when it is dropped: at once when it waits, after the block in copy otherwise.
struct Leash {
    cut: Arc<AtomicBool>,
    /// Its end wakes the copier.
    _wake: PipeWriter,
}

impl Drop for Leash {
    fn drop(&mut self) {
        self.cut.store(true, Ordering::Release);
    }
}

impl ShmSink {
    /// `memories` are D's pools, one per rank of `shape`.
    pub fn new(shape: PoolShape, memories: Vec<Arc<PoolMemory>>, waker: Waker) -> Self {
        let landing = Arc::new(Landing::new(shape, memories, waker));
        Self(Arc::new(Shared { landing, leashes: Mutex::default() }))
    }

    /// The stream on which the channel's prefill worker has handed its pools over.
    ///
    /// # Errors
    /// When the channel has such a stream already, or the system gives no thread.
    pub fn attach(&self, channel: Channel, stream: UnixStream, pools: PeerPools) -> io::Result<()> {
        let mut leashes = lock(&self.0.leashes);
        if leashes.contains_key(&channel) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the channel has a stream for shared memory"));
        }
        let (wakes, wake) = io::pipe()?;
        let cut = Arc::new(AtomicBool::new(false));
        let landing = Arc::clone(&self.0.landing);
        let copier = Copier::new(landing, channel, pools, stream.into_std()?, Arc::clone(&cut), wakes);
        thread::Builder::new().name("kv-copier".to_owned()).spawn(move || copier.run())?;
        leashes.insert(channel, Leash { cut, _wake: wake });
        Ok(())
    }

    /// True when the channel's pieces come by shared memory: from its attaching to its closing.
    pub fn serves(&self, channel: Channel) -> bool {
        lock(&self.0.leashes).contains_key(&channel)
    }
}

impl SinkFabric for ShmSink {
    fn expect(&mut self, attempt: Attempt, pages: &[u32], mapping: Mapping) {
        self.0.landing.expect(attempt, pages, mapping);
    }

    fn revoke(&mut self, attempt: Attempt) {
        self.0.landing.revoke(attempt);
    }

    fn peer_drained(&mut self, _attempt: Attempt) {
        // The copier's own borrow is the proof here; what P says adds nothing to it.
    }

    fn release(&mut self, attempt: Attempt) {
        self.0.landing.release(attempt);
    }

    fn close(&mut self, channel: Channel) {
        lock(&self.0.leashes).remove(&channel);
    }

    fn poll(&mut self) -> Vec<SinkReport> {
        self.0.landing.poll()
    }
}
