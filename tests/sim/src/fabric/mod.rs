//! Three models of a fabric, behind the traits that the real roles use. What they have in common is here.
//!
//! A model moves bytes from the memory of one process into that of another, in parts, each at its own virtual time, and
//! reads the source when it copies and not before. What proves quiet differs, as in DESIGN's table: [`tcp`] revokes one
//! attempt at D, [`shm`] stops D's copier, [`rdma`] writes one-sided and needs Drained or a fence of the channel.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tandem_fabric::{SinkFabric, SinkReport, SourceFabric, SourceReport};
use tandem_handoff::{
    ids::{Attempt, Channel, Incarnation},
    layout::Mapping,
    source::Piece,
};

use crate::{ground::Ground, trace::numbers, wire::Wire};

pub mod rdma;
pub mod shm;
pub mod tcp;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Tcp,
    Shm,
    Rdma,
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::Tcp, Kind::Shm, Kind::Rdma];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Tcp => "tcp",
            Kind::Shm => "shm",
            Kind::Rdma => "rdma",
        }
    }
}

/// Something that a model does at a time of its own.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    Tcp(tcp::Event),
    Shm(shm::Event),
    Rdma(rdma::Event),
}

/// Faults of the data path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Harm {
    /// The data path of a channel breaks; both ends see it.
    Break(Channel),
    /// rdma: the next acknowledgement of a channel is lost.
    LoseAck(Channel),
    /// rdma: the next fence of a channel fails.
    FailFence(Channel),
}

/// One model. Calls come from the roles, events from the agenda.
pub trait Model: Send {
    fn post(&mut self, ground: &mut Ground, attempt: Attempt, pieces: Vec<Piece>);
    fn stop(&mut self, ground: &mut Ground, attempt: Attempt);
    fn close_source(&mut self, ground: &mut Ground, channel: Channel);
    /// D told P that its copier has stopped.
    fn peer_settled(&mut self, ground: &mut Ground, attempt: Attempt);
    fn expect(&mut self, ground: &mut Ground, attempt: Attempt, pages: &[u32], mapping: Mapping);
    fn revoke(&mut self, ground: &mut Ground, attempt: Attempt);
    fn peer_drained(&mut self, ground: &mut Ground, attempt: Attempt);
    fn release(&mut self, ground: &mut Ground, attempt: Attempt);
    fn close_sink(&mut self, ground: &mut Ground, channel: Channel);
    fn event(&mut self, ground: &mut Ground, event: Event);
    /// True when there was something to break.
    fn harm(&mut self, ground: &mut Ground, harm: Harm) -> bool;
    /// The process is gone, with its memory.
    fn died(&mut self, ground: &mut Ground, process: Incarnation);
}

pub fn model(kind: Kind) -> Box<dyn Model> {
    match kind {
        Kind::Tcp => Box::new(tcp::Tcp::default()),
        Kind::Shm => Box::new(shm::Shm::default()),
        Kind::Rdma => Box::new(rdma::Rdma::default()),
    }
}

/// A way to the wire that all processes of a world share.
pub type SharedWire = Arc<Mutex<Wire>>;

pub fn lock(wire: &SharedWire) -> MutexGuard<'_, Wire> {
    wire.lock().unwrap_or_else(PoisonError::into_inner)
}

/// P's end of the model, as its role sees it.
pub struct SourceEnd {
    pub wire: SharedWire,
    pub process: Incarnation,
}

impl SourceFabric for SourceEnd {
    fn post(&mut self, attempt: Attempt, pieces: Vec<Piece>) {
        let Wire { ground, fabric, .. } = &mut *lock(&self.wire);
        if ground.trace.is_on() {
            let indices: Vec<u32> = pieces.iter().map(|piece| piece.index).collect();
            ground.tells(self.process, attempt, format_args!("posts piece {} of", numbers(&indices)));
        }
        ground.posted(attempt, pieces.len() as u64);
        fabric.post(ground, attempt, pieces);
    }

    fn stop(&mut self, attempt: Attempt) {
        let Wire { ground, fabric, .. } = &mut *lock(&self.wire);
        fabric.stop(ground, attempt);
    }

    fn close(&mut self, channel: Channel) {
        let Wire { ground, fabric, .. } = &mut *lock(&self.wire);
        fabric.close_source(ground, channel);
    }

    fn peer_settled(&mut self, attempt: Attempt) {
        let Wire { ground, fabric, .. } = &mut *lock(&self.wire);
        fabric.peer_settled(ground, attempt);
    }

    fn poll(&mut self) -> Vec<SourceReport> {
        let host =
            lock(&self.wire).ground.hosts.get_mut(&self.process).map(|host| std::mem::take(&mut host.source_reports));
        host.unwrap_or_default()
    }
}

/// D's end of the model, as its role sees it.
pub struct SinkEnd {
    pub wire: SharedWire,
    pub process: Incarnation,
}

impl SinkFabric for SinkEnd {
    fn expect(&mut self, attempt: Attempt, pages: &[u32], mapping: Mapping) {
        let Wire { ground, fabric, .. } = &mut *lock(&self.wire);
        ground.expects(attempt, pages);
        fabric.expect(ground, attempt, pages, mapping);
    }

    fn revoke(&mut self, attempt: Attempt) {
        let Wire { ground, fabric, .. } = &mut *lock(&self.wire);
        let name = ground.attempt_name(attempt);
        ground.says(self.process, format_args!("revokes {name}"));
        fabric.revoke(ground, attempt);
    }

    fn peer_drained(&mut self, attempt: Attempt) {
        let Wire { ground, fabric, .. } = &mut *lock(&self.wire);
        ground.told_drained(attempt);
        fabric.peer_drained(ground, attempt);
    }

    fn release(&mut self, attempt: Attempt) {
        let Wire { ground, fabric, .. } = &mut *lock(&self.wire);
        fabric.release(ground, attempt);
    }

    fn close(&mut self, channel: Channel) {
        let Wire { ground, fabric, .. } = &mut *lock(&self.wire);
        fabric.close_sink(ground, channel);
    }

    fn poll(&mut self) -> Vec<SinkReport> {
        let host =
            lock(&self.wire).ground.hosts.get_mut(&self.process).map(|host| std::mem::take(&mut host.sink_reports));
        host.unwrap_or_default()
    }
}

/// Where a piece belongs in D's memory, by D's own books: the rank and the byte.
fn destination(
    ground: &mut Ground,
    attempt: Attempt,
    pages: &[u32],
    mapping: &Mapping,
    piece: &Piece,
) -> Option<(u32, usize)> {
    let index = piece.index as usize;
    if index >= mapping.pieces(pages.len()) {
        let name = ground.attempt_name(attempt);
        ground.violation("H2", format!("P sends piece {index} of {name}, which has {}", mapping.pieces(pages.len())));
        return None;
    }
    let (page, route) = mapping.split(index);
    let shape = ground.memory(attempt.decode).shape;
    Some((route.decode_rank, route.target_offset(&shape, pages[page])))
}
