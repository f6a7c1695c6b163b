//! Moving bytes between KV pools, and the memory they live in.
//!
//! A fabric has two sides. The prefill worker's [`SourceFabric`] writes posted pieces and reports when the source is no
//! longer read (H5); the decode worker's [`SinkFabric`] reports pieces that landed and, for a revoked attempt, the proof
//! of quiet: no write of it is in progress or can begin (H2). What proves that is a fact of each backend and is argued
//! beside its code; the machines of `tandem-handoff` never infer it. No call of these traits blocks.
//!
//! This crate may use `unsafe`: it touches pool memory through raw pointers, and each block says why the page is its own.

use tandem_handoff::{
    ids::{Attempt, Channel},
    layout::Mapping,
    source::{Piece, Settlement},
};

pub mod dispatch;
mod landing;
pub mod memory;
pub mod probe;
pub mod shm;
mod tally;
pub mod tcp;
#[cfg(test)]
mod testkit;

/// Makes the engine's loop call `poll` soon. Called from any thread; must not block.
pub type Waker = std::sync::Arc<dyn Fn() + Send + Sync>;

/// What the prefill side learns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SourceReport {
    /// So many posted pieces of the attempt have ended this way.
    Settled { attempt: Attempt, pieces: u64, how: Settlement },
    /// The channel's data path is gone.
    Broken { channel: Channel, why: String },
}

/// The prefill side: pieces out of P's pools. Every posted piece is settled exactly once.
pub trait SourceFabric: Send {
    /// The pages of `pieces` stay unchanged and unfreed until each piece is settled (H5).
    fn post(&mut self, attempt: Attempt, pieces: Vec<Piece>);
    /// Begins no further piece of the attempt. Idempotent.
    fn stop(&mut self, attempt: Attempt);
    /// D said that it reads no source page of the attempt any more. Only a backend whose D copies out of P's memory needs
    /// it; the others know by themselves.
    fn peer_settled(&mut self, attempt: Attempt);
    /// Ends the channel's data path; what was posted on it is settled as soon as its source is proven quiet.
    fn close(&mut self, channel: Channel);
    fn poll(&mut self) -> Vec<SourceReport>;
}

/// What the decode side learns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SinkReport {
    /// These pieces are in their pages and visible to the device.
    Landed {
        attempt: Attempt,
        pieces: Vec<u32>,
    },
    /// No write of the revoked attempt is in progress or can begin.
    Quiet {
        attempt: Attempt,
    },
    Broken {
        channel: Channel,
        why: String,
    },
}

/// The decode side: pieces into D's pools.
pub trait SinkFabric: Send {
    /// Accepts the attempt's pieces into `pages` (in token order) from now on.
    fn expect(&mut self, attempt: Attempt, pages: &[u32], mapping: Mapping);
    /// Accepts nothing more; `Quiet` follows once it is proven. Idempotent.
    fn revoke(&mut self, attempt: Attempt);
    /// P reported that all its writes have settled; backends with one-sided writes need it.
    fn peer_drained(&mut self, attempt: Attempt);
    /// The attempt's set is complete: forgets it.
    fn release(&mut self, attempt: Attempt);
    /// Ends the channel's data path.
    fn close(&mut self, channel: Channel);
    fn poll(&mut self) -> Vec<SinkReport>;
}
