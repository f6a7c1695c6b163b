//! Why an attempt ended: the one value that travels to the peer and reaches its client. *Pure.*

use std::fmt;

/// Bytes of a cause's message at most, on the wire and off it.
pub const MESSAGE_BYTES_MAX: usize = 1024;

/// Which worker of the pair found the fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Prefill,
    Decode,
}

/// What kind of end it was; decides the HTTP status of the leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CauseKind {
    /// The request can never be served (prompts differ, duplicate room).
    Refused,
    /// The two workers do not fit each other (model, page size, key, pages offered): no request's fault.
    Unfit,
    /// The client or an abort ended it.
    Aborted,
    /// Full or shutting down: a retry elsewhere is safe.
    Unavailable,
    /// A deadline passed.
    Timeout,
    /// The other worker or the channel to it was lost.
    Lost,
    /// A fault inside the worker.
    Internal,
}

/// The first cause of an attempt's end. Later ones change nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Cause {
    pub side: Side,
    pub kind: CauseKind,
    message: String,
}

impl Cause {
    /// The message is cut to [`MESSAGE_BYTES_MAX`] on a character boundary.
    pub fn new(side: Side, kind: CauseKind, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > MESSAGE_BYTES_MAX {
            let end = (0..=MESSAGE_BYTES_MAX).rev().find(|&at| message.is_char_boundary(at)).unwrap_or(0);
            message.truncate(end);
        }
        Self { side, kind, message }
    }

    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Prefill => "prefill",
            Side::Decode => "decode",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let cause = Cause::new(Side::Decode, CauseKind::Internal, "é".repeat(MESSAGE_BYTES_MAX));
        assert!(cause.message().len() <= MESSAGE_BYTES_MAX);
        assert!(cause.message().chars().all(|c| c == 'é'));
    }
}
