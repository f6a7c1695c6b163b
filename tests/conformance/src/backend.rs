//! What a transfer backend must lend the suite: connected ends, and the means to disturb what is between them.

use std::{sync::Arc, time::Duration};

pub use tandem_fabric::Waker;
use tandem_fabric::{SinkFabric, SourceFabric, memory::PoolMemory};
use tandem_handoff::{ids::Channel, layout::PoolShape};

use crate::Failure;

/// Makes pairs of ends for one kind of transfer.
pub trait Backend {
    fn name(&self) -> &'static str;

    fn proofs(&self) -> Proofs;

    /// How long a case waits for what has no deadline of its own.
    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// Both ends over new pools of these shapes, not connected yet.
    ///
    /// # Errors
    /// When the machine lends no memory or no sockets.
    fn pair(&self, prefill: PoolShape, decode: PoolShape, waker: Waker) -> Result<Ends, Failure>;
}

/// What the proofs of quiet of a backend rest on, where cases must know it.
#[derive(Clone, Copy, Debug)]
pub struct Proofs {
    /// Bytes that the way between the ends may take in while D reads nothing: pieces within it may settle at P.
    pub in_flight_bytes_max: usize,
    /// P's source needs D's word, or D's end gone, before it is quiet. Otherwise `stop` alone is enough.
    pub source_needs_peer: bool,
}

/// One prefill worker's end and one decode worker's.
pub struct Ends {
    pub prefill: SourceEnd,
    pub decode: SinkEnd,
    pub link: Box<dyn Link>,
}

pub struct SourceEnd {
    pub fabric: Box<dyn SourceFabric>,
    pub pools: Vec<Arc<PoolMemory>>,
}

pub struct SinkEnd {
    pub fabric: Box<dyn SinkFabric>,
    pub pools: Vec<Arc<PoolMemory>>,
}

/// What may pass between the ends, over all open channels together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flow {
    Open,
    /// Nothing more; what has passed already may lie anywhere on the way, in the middle of a piece too.
    Held,
    /// About so many bytes more, then nothing.
    Bytes(u64),
}

/// The way between the ends.
pub trait Link: Send {
    /// Opens the data path of a channel that passed Hello, between the newest ends.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open(&mut self, channel: Channel) -> Result<(), Failure>;

    /// Breaks every open data path in the middle of whatever it does. Both ends notice in their own time.
    fn cut(&mut self);

    fn flow(&mut self, flow: Flow);

    /// A new prefill worker in the place of the old one, whose open paths stay as they are: what it sent is on its way.
    ///
    /// # Errors
    /// When the machine lends no memory.
    fn restart_prefill(&mut self) -> Result<SourceEnd, Failure>;

    /// A new decode worker in the place of the old one.
    ///
    /// # Errors
    /// When the machine lends no memory.
    fn restart_decode(&mut self) -> Result<SinkEnd, Failure>;
}
