//! How many requests run, and how many may wait for that. *Pure.*

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::RateSpec;
use crate::error::StartError;

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct AdmissionArgs {
    /// Requests with a prompt that run at a time at most, a hard cap; -1 is no cap [default: -1].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent_requests: Option<i64>,
    /// Requests that may wait for a place to run; further ones are answered 429 [default: 100].
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_size: Option<usize>,
    /// A request waits for a place to run this long at most, in seconds, and is then answered 503. A request may ask for less
    /// by the header x-tandem-queue-timeout-ms [default: 60].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_timeout_secs: Option<u64>,
    /// Requests with a prompt per second at most, over all clients; further ones are answered 429 [default: no limit].
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limit_tokens_per_second: Option<u32>,
}

/// Checked.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct AdmissionConfig {
    /// `None`: no cap.
    pub running_max: Option<usize>,
    pub queue_max: usize,
    pub queue_wait: Duration,
    pub rate: Option<RateSpec>,
}

impl AdmissionArgs {
    pub fn checked(&self) -> Result<AdmissionConfig, StartError> {
        let bad = |what: &str| Err(StartError::Config(what.into()));
        let running_max = match self.max_concurrent_requests {
            None | Some(-1) => None,
            Some(n) if n >= 1 => Some(n as usize),
            Some(_) => return bad("--max-concurrent-requests must be at least 1, or -1 for no cap"),
        };
        let rate = match self.rate_limit_tokens_per_second {
            None => None,
            Some(0) => return bad("--rate-limit-tokens-per-second must be at least 1"),
            Some(n) => Some(RateSpec { per_second: n.into(), burst: n.into() }),
        };
        Ok(AdmissionConfig {
            running_max,
            queue_max: self.queue_size.unwrap_or(100),
            queue_wait: Duration::from_secs(self.queue_timeout_secs.unwrap_or(60)),
            rate,
        })
    }
}
