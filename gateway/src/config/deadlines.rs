//! How long things may take. *Pure.*

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::words::switch;
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
    /// The prefill worker's part at most, in seconds [default: --request-timeout-secs]. A shorter time than the request's
    /// is refused, since it fails requests that are only slow; say --allow-short-prefill-timeout if that is meant.
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_timeout_secs: Option<u64>,
    /// Lets --prefill-timeout-secs be shorter than --request-timeout-secs.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub allow_short_prefill_timeout: bool,
    /// A streamed answer's first token after at most, in seconds [default: 600].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_timeout_secs: Option<u64>,
    /// Silence between two pieces of a streamed answer at most, in seconds [default: 120].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silence_timeout_secs: Option<u64>,
    /// The most that a client may ask for with x-tandem-timeout-ms, x-tandem-prefill-timeout-ms,
    /// x-tandem-first-token-timeout-ms and x-tandem-silence-timeout-ms, in seconds; more is refused with 400
    /// [default: --request-timeout-secs].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_override_max_secs: Option<u64>,
    /// A whole answer, or a failure, that the decode worker reports while the prefill worker still works is held this
    /// long for the prefill worker's word about what happened, in milliseconds [default: 5].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_verdict_ms: Option<u64>,
    /// An idle connection to a worker is kept for this many seconds, but at most 4, and a second less than the worker's
    /// own Keep-Alive [default: 4].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_pool_idle_timeout_secs: Option<u64>,
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
    /// After another process has taken over, running exchanges may go on for this long, in seconds; idle connections end by
    /// --client-read-timeout-secs [default: as --request-timeout-secs].
    #[arg(long, value_name = "SECS", visible_alias = "drain-timeout")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain_timeout_secs: Option<u64>,
}

/// Checked.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    pub connect: Duration,
    pub prefill: Duration,
    /// The prefill leg may be given less time than the request.
    pub short_prefill: bool,
    pub first_token: Duration,
    pub silence: Duration,
    pub whole: Duration,
    /// The most that a client may ask for.
    pub override_max: Duration,
    pub verdict: Duration,
    pub pool_idle: Duration,
    pub client_write: Duration,
    pub client_read: Duration,
    /// For the exchanges of a process that was told to stop.
    pub drain: Duration,
    /// For the exchanges of a process that another has taken over from.
    pub handed_over: Duration,
}

impl DeadlineArgs {
    pub fn checked(&self) -> Result<Deadlines, StartError> {
        let whole = secs("request-timeout-secs", self.request_timeout_secs, 1800)?;
        let prefill = secs("prefill-timeout-secs", self.prefill_timeout_secs, whole.as_secs())?;
        if prefill < whole && !self.allow_short_prefill_timeout {
            return Err(StartError::Config(format!(
                "--prefill-timeout-secs {} is shorter than --request-timeout-secs {}: a prompt that takes longer to \
                 prefill would fail although its request has time left; raise it, leave it out, or say \
                 --allow-short-prefill-timeout if that is meant",
                prefill.as_secs(),
                whole.as_secs()
            )));
        }
        let override_max = secs("timeout-override-max-secs", self.timeout_override_max_secs, whole.as_secs())?;
        Ok(Deadlines {
            connect: Duration::from_millis(self.connect_timeout_ms.unwrap_or(5000).max(1)),
            prefill,
            short_prefill: self.allow_short_prefill_timeout,
            first_token: secs("first-token-timeout-secs", self.first_token_timeout_secs, 600)?.min(whole),
            silence: secs("silence-timeout-secs", self.silence_timeout_secs, 120)?.min(whole),
            whole,
            override_max,
            verdict: Duration::from_millis(self.prefill_verdict_ms.unwrap_or(5)),
            pool_idle: Duration::from_secs(self.upstream_pool_idle_timeout_secs.unwrap_or(4)),
            client_read: secs("client-read-timeout-secs", self.client_read_timeout_secs, 60)?,
            client_write: secs("client-write-timeout-secs", self.client_write_timeout_secs, 120)?,
            handed_over: self.drain_timeout_secs.map_or(whole, Duration::from_secs),
            drain: Duration::from_secs(self.shutdown_grace_period_secs.unwrap_or(180)),
        })
    }
}

/// At least a second; more than a hundred years is taken for a mistake that would overflow the clock.
fn secs(name: &str, given: Option<u64>, default: u64) -> Result<Duration, StartError> {
    const SECS_MAX: u64 = 100 * 366 * 24 * 3600;
    match given.unwrap_or(default) {
        secs @ 1..=SECS_MAX => Ok(Duration::from_secs(secs)),
        _ => Err(StartError::Config(format!("--{name} must be between 1 and {SECS_MAX}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    fn deadlines(flags: &str) -> Result<Deadlines, String> {
        config(&format!("--worker-urls http://x:1 {flags}")).map(|c| c.deadlines).map_err(|e| e.to_string())
    }

    #[test]
    fn prefill_has_the_requests_time_unless_less_is_meant() {
        let default = deadlines("--request-timeout-secs 3600").unwrap();
        assert_eq!((default.prefill, default.override_max), (default.whole, default.whole));
        let error = deadlines("--request-timeout-secs 3600 --prefill-timeout-secs 1800").unwrap_err();
        assert!(error.contains("1800") && error.contains("3600") && error.contains("--allow-short-prefill-timeout"));
        let meant = deadlines("--prefill-timeout-secs 5 --allow-short-prefill-timeout").unwrap();
        assert_eq!(meant.prefill, Duration::from_secs(5));
        assert!(deadlines("--prefill-timeout-secs 1800").is_ok(), "as long as the request");
    }

    #[test]
    fn no_deadline_is_zero_or_endless() {
        for flags in ["--silence-timeout-secs 0", "--prefill-timeout-secs 0", "--request-timeout-secs 99999999999999"] {
            assert!(deadlines(flags).unwrap_err().contains("must be between 1 and"), "{flags}");
        }
    }
}
