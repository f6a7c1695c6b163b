//! How long things may take. *Pure.*

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::StartError;

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct DeadlineArgs {
    /// A request's whole time at most, in seconds [default: 1800].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_timeout_secs: Option<u64>,
    /// Connecting to a worker at most, in milliseconds [default: 5000].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_timeout_ms: Option<u64>,
    /// A streamed answer's first token after at most, in seconds [default: 600].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_timeout_secs: Option<u64>,
    /// Silence between two pieces of a streamed answer at most, in seconds [default: 120].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silence_timeout_secs: Option<u64>,
    /// A client that takes no byte for this many seconds counts as gone [default: 120].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_write_timeout_secs: Option<u64>,
    /// A client's request must arrive within this many seconds: its head, and then its body, which gets another second for
    /// each 16 KiB that came [default: 60].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_read_timeout_secs: Option<u64>,
    /// Running exchanges may go on for this long after a first SIGTERM or SIGINT, in seconds [default: 180].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shutdown_grace_period_secs: Option<u64>,
}

/// Checked.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    pub connect: Duration,
    pub first_token: Duration,
    pub silence: Duration,
    pub whole: Duration,
    pub client_write: Duration,
    pub client_read: Duration,
    pub drain: Duration,
}

impl DeadlineArgs {
    pub fn checked(&self) -> Result<Deadlines, StartError> {
        let secs = |name: &str, given: Option<u64>, default: u64| match given.unwrap_or(default) {
            0 => Err(StartError::Config(format!("--{name} must be at least 1"))),
            secs => Ok(Duration::from_secs(secs)),
        };
        let whole = secs("request-timeout-secs", self.request_timeout_secs, 1800)?;
        Ok(Deadlines {
            connect: Duration::from_millis(self.connect_timeout_ms.unwrap_or(5000).max(1)),
            first_token: secs("first-token-timeout-secs", self.first_token_timeout_secs, 600)?.min(whole),
            silence: secs("silence-timeout-secs", self.silence_timeout_secs, 120)?.min(whole),
            whole,
            client_read: secs("client-read-timeout-secs", self.client_read_timeout_secs, 60)?,
            client_write: secs("client-write-timeout-secs", self.client_write_timeout_secs, 120)?,
            drain: Duration::from_secs(self.shutdown_grace_period_secs.unwrap_or(180)),
        })
    }
}
