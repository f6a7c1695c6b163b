//! Several backends behind one handle: each channel's pieces go by the one that its handshake chose.
//!
//! A channel is served by shared memory from the moment when its stream is attached there, by TCP otherwise. That is
//! before the first post or Reserve of the channel, so the choice never changes in the middle of a request.

use std::sync::Arc;

use tandem_handoff::{
    ids::{Attempt, Channel},
    layout::{Mapping, PoolShape},
    source::Piece,
};
use tokio::runtime::Handle;

use crate::{
    SinkFabric, SinkReport, SourceFabric, SourceReport, Waker,
    memory::PoolMemory,
    shm::{ShmSink, ShmSource},
    tcp::{TcpSink, TcpSource},
};

/// P's backends. A clone is a handle to the same ones.
#[derive(Clone)]
pub struct SourceDispatch {
    pub tcp: TcpSource,
    pub shm: ShmSource,
}

impl SourceDispatch {
    /// `memories` are P's pools, one per rank.
    pub fn new(memories: Vec<Arc<PoolMemory>>, runtime: Handle, waker: Waker) -> Self {
        let shm = ShmSource::new(runtime.clone(), Arc::clone(&waker));
        Self { tcp: TcpSource::new(memories, runtime, waker), shm }
    }
}

impl SourceFabric for SourceDispatch {
    fn post(&mut self, attempt: Attempt, pieces: Vec<Piece>) {
        if self.shm.serves(attempt.channel()) {
            self.shm.post(attempt, pieces);
        } else {
            self.tcp.post(attempt, pieces);
        }
    }

    // A backend that does not know the attempt or the channel does nothing.

    fn stop(&mut self, attempt: Attempt) {
        self.shm.stop(attempt);
        self.tcp.stop(attempt);
    }

    fn peer_settled(&mut self, attempt: Attempt) {
        self.shm.peer_settled(attempt);
        self.tcp.peer_settled(attempt);
    }

    fn close(&mut self, channel: Channel) {
        self.shm.close(channel);
        self.tcp.close(channel);
    }

    fn poll(&mut self) -> Vec<SourceReport> {
        let mut reports = self.shm.poll();
        reports.extend(self.tcp.poll());
        reports
    }
}

/// D's backends. A clone is a handle to the same ones.
#[derive(Clone)]
pub struct SinkDispatch {
    pub tcp: TcpSink,
    pub shm: ShmSink,
}

impl SinkDispatch {
    /// `memories` are D's pools, one per rank of `shape`.
    pub fn new(shape: PoolShape, memories: Vec<Arc<PoolMemory>>, runtime: Handle, waker: Waker) -> Self {
        let shm = ShmSink::new(shape, memories.clone(), Arc::clone(&waker));
        Self { tcp: TcpSink::new(shape, memories, runtime, waker), shm }
    }
}

impl SinkFabric for SinkDispatch {
    fn expect(&mut self, attempt: Attempt, pages: &[u32], mapping: Mapping) {
        if self.shm.serves(attempt.channel()) {
            self.shm.expect(attempt, pages, mapping);
        } else {
            self.tcp.expect(attempt, pages, mapping);
        }
    }

    // The backend that does not know the attempt says nothing of it: Quiet comes from the one that expects it.

    fn revoke(&mut self, attempt: Attempt) {
        self.shm.revoke(attempt);
        self.tcp.revoke(attempt);
    }

    fn peer_drained(&mut self, attempt: Attempt) {
        self.shm.peer_drained(attempt);
        self.tcp.peer_drained(attempt);
    }

    fn release(&mut self, attempt: Attempt) {
        self.shm.release(attempt);
        self.tcp.release(attempt);
    }

    fn close(&mut self, channel: Channel) {
        self.shm.close(channel);
        self.tcp.close(channel);
    }

    fn poll(&mut self) -> Vec<SinkReport> {
        let mut reports = self.shm.poll();
        reports.extend(self.tcp.poll());
        reports
    }
}
