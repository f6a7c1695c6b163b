//! The names of the states that an attempt passes through, for traces, metrics and announcements. *Pure.*

use std::fmt;

/// Where a request of [`Source`](crate::source::Source) or [`Sink`](crate::sink::Sink) is. One that the machine has
/// forgotten has none: it ended, and its last fact said how.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum AttemptState {
    /// P: no Reserve yet.
    Waiting,
    /// P: D's pages are known, chunks are posted as they are computed.
    Open,
    /// P: Done was sent, the last posts are settling.
    Pushed,
    /// D: no channel to the prefill worker yet, nobody has seen the pages.
    Dialling,
    /// D: the pages were offered, pieces land.
    Offered,
    /// D: everything landed and Done came, the checksums are being compared.
    Verifying,
    /// Either side: failed, and not yet quiet.
    Draining,
    /// Either side: draining for longer than the drain deadline.
    Quarantined,
}

/// The five states that users of SGLang know from its `KVPoll`, with its numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum KvPoll {
    Failed = 0,
    Bootstrapping = 1,
    WaitingForInput = 2,
    Transferring = 3,
    /// Of an attempt that its machine has forgotten after a good end.
    Success = 4,
}

impl AttemptState {
    pub const ALL: [AttemptState; 8] = [
        Self::Waiting,
        Self::Open,
        Self::Pushed,
        Self::Dialling,
        Self::Offered,
        Self::Verifying,
        Self::Draining,
        Self::Quarantined,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Open => "open",
            Self::Pushed => "pushed",
            Self::Dialling => "dialling",
            Self::Offered => "offered",
            Self::Verifying => "verifying",
            Self::Draining => "draining",
            Self::Quarantined => "quarantined",
        }
    }

    pub fn poll(self) -> KvPoll {
        match self {
            Self::Waiting | Self::Dialling => KvPoll::Bootstrapping,
            Self::Open | Self::Offered => KvPoll::WaitingForInput,
            Self::Pushed | Self::Verifying => KvPoll::Transferring,
            Self::Draining | Self::Quarantined => KvPoll::Failed,
        }
    }
}

impl fmt::Display for AttemptState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
