//! The driver of the control channels: one HTTP port on P, dialled by D. Tokio tasks here do I/O and keep deadlines; what
//! frames mean is decided by the machines of `tandem-handoff` on the engine thread.
//!
//! ```text
//!   listener (P)  --accept--> HTTP: /health, /route, Upgrade --> handshake --> channel ---+
//!   dialler  (D)  --connect------------------------- Upgrade --> handshake --> channel ---+--> events (bounded) --> role
//! ```
//!
//! The pages of a channel go by shared memory or by data streams, which the handshake chooses once (`share`, and
//! `tandem_handoff::wire::transfer`).

use std::sync::Arc;

use tandem_fabric::{Waker, memory::PoolMemory};
use tandem_handoff::{
    ids::Channel,
    layout::PoolShape,
    limits::Limits,
    ticket::Address,
    wire::{Cause, CauseKind, Frame, Side},
};
use tokio::runtime::Handle;

use crate::{
    config::HandoffConfig,
    request::{SampleError, SampleErrorKind},
};

mod channel;
pub(crate) mod dialler;
mod handshake;
mod hub;
pub(crate) mod listener;
mod lobby;
mod rate;
mod share;
pub mod stats;

pub use handshake::Key as HandoffKey;
pub use listener::BootstrapPort;

#[cfg(test)]
mod tests;

/// What both roles are started with.
pub struct HandoffParts<'a> {
    pub config: &'a HandoffConfig,
    pub shape: PoolShape,
    /// The worker's pools, one per rank.
    pub memories: Vec<Arc<PoolMemory>>,
    /// Over config, weights, RoPE and template.
    pub fingerprint: [u8; 16],
    /// Build, math mode, ISA path: a difference between the workers is a warning.
    pub numerics: String,
    /// Makes the engine's loop call `poll` soon.
    pub waker: Waker,
    pub runtime: Handle,
    pub stats: Arc<stats::HandoffStats>,
}

/// Why a role cannot start.
#[derive(Debug, thiserror::Error)]
pub enum HandoffStartError {
    #[error(
        "the bootstrap port {address} cannot be bound: {error}; choose another with --disaggregation-bootstrap-port"
    )]
    Bind { address: String, error: std::io::Error },
    #[error("the handoff key file {path}: {reason}")]
    Key { path: String, reason: String },
    #[error(
        "decode workers cannot map this worker's KV pools, which --disaggregation-transfer-backend shm demands: {reason}; \
         use auto or tcp"
    )]
    Shm { reason: String },
}

/// What control channels report to a role.
#[derive(Debug)]
pub enum ControlEvent {
    /// The channel passed Hello. The address is that which D dialled.
    Up {
        channel: Channel,
        address: Option<Address>,
        shape: PoolShape,
    },
    Frame {
        channel: Channel,
        frame: Frame,
    },
    Down {
        channel: Channel,
        why: String,
    },
    DialFailed {
        address: Address,
        cause: Cause,
    },
}

/// The control channels of one worker as a role uses them. No call blocks.
pub trait ControlPlane: Send {
    /// Hands the frame to the channel. A channel that cannot take it is closed: a `Down` follows.
    fn send(&mut self, channel: Channel, frame: Frame);
    fn close(&mut self, channel: Channel, why: &str);
    /// Answered by `Up` or `DialFailed` with the same address.
    fn dial(&mut self, address: Address);
    fn poll(&mut self) -> Vec<ControlEvent>;
}

pub(crate) fn limits(config: &HandoffConfig) -> Limits {
    Limits {
        bootstrap_timeout_ms: config.bootstrap_timeout_ms,
        waiting_timeout_ms: config.waiting_timeout_ms,
        ..Limits::default()
    }
}

/// What a client is told when a handoff ends for `cause`: the message is the root cause's, whichever side found it.
pub(crate) fn sample_error(cause: &Cause) -> SampleError {
    let kind = match cause.kind {
        CauseKind::Refused => SampleErrorKind::BadRequest,
        CauseKind::Aborted => SampleErrorKind::Aborted,
        CauseKind::Unavailable => SampleErrorKind::Unavailable,
        CauseKind::Timeout => SampleErrorKind::Timeout,
        CauseKind::Lost | CauseKind::Unfit => SampleErrorKind::Peer,
        CauseKind::Internal => SampleErrorKind::Internal,
    };
    let side = match cause.side {
        Side::Prefill => "prefill worker",
        Side::Decode => "decode worker",
    };
    SampleError { kind, message: format!("{side}: {}", cause.message()) }
}
