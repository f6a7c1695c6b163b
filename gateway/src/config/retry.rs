//! Trying again. *Pure.*

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::words::switch;
use crate::error::StartError;

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct RetryArgs {
    /// Further pairs tried for one request before the first byte of its answer, where a worker cannot be reached, breaks
    /// off, falls silent, or answers 502, 503 or 504 [default: 4].
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_max_retries: Option<u32>,
    /// The pause before the first further try, in milliseconds [default: 50].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_initial_backoff_ms: Option<u64>,
    /// The longest pause between two tries, in milliseconds [default: 30000].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_max_backoff_ms: Option<u64>,
    /// Each pause is this many times the one before [default: 1.5].
    #[arg(long, value_name = "FACTOR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_backoff_multiplier: Option<f64>,
    /// Each pause is longer or shorter by up to this share of it, by chance [default: 0.2].
    #[arg(long, value_name = "SHARE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_jitter_factor: Option<f64>,
    /// Further tries, over all requests, are at most this many percent of the requests, plus ten [default: 10].
    #[arg(long, value_name = "PERCENT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_budget_percent: Option<u32>,
    /// No request is sent a second time, except to another worker when nothing reached the first, and at once on a fresh
    /// connection when a reused one turns out dead.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub disable_retries: bool,
}

/// Checked.
#[derive(Clone, Copy, Debug)]
pub struct Retries {
    pub max: u32,
    /// Requests may be sent a second time.
    pub resend: bool,
    pub initial_backoff: Duration,
    pub max_backoff: Duration,
    pub multiplier: f64,
    pub jitter: f64,
    pub budget_percent: u32,
}

impl RetryArgs {
    pub fn checked(&self) -> Result<Retries, StartError> {
        let multiplier = self.retry_backoff_multiplier.unwrap_or(1.5);
        if !(1.0..=100.0).contains(&multiplier) {
            return Err(StartError::Config("--retry-backoff-multiplier must be between 1 and 100".into()));
        }
        let jitter = self.retry_jitter_factor.unwrap_or(0.2);
        if !(0.0..=1.0).contains(&jitter) {
            return Err(StartError::Config("--retry-jitter-factor must be between 0 and 1".into()));
        }
        let budget_percent = self.retry_budget_percent.unwrap_or(10);
        if budget_percent > 100 {
            return Err(StartError::Config("--retry-budget-percent must be at most 100".into()));
        }
        let initial_backoff = Duration::from_millis(self.retry_initial_backoff_ms.unwrap_or(50));
        Ok(Retries {
            max: self.retry_max_retries.unwrap_or(4),
            resend: !self.disable_retries,
            initial_backoff,
            max_backoff: Duration::from_millis(self.retry_max_backoff_ms.unwrap_or(30_000)).max(initial_backoff),
            multiplier,
            jitter,
            budget_percent,
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::config::tests::config;

    #[test]
    fn nonsense_is_refused_by_name() {
        for flag in [
            "--retry-backoff-multiplier 0.5",
            "--retry-backoff-multiplier NaN",
            "--retry-jitter-factor 2",
            "--retry-budget-percent 101",
        ] {
            let error = config(&format!("--worker-urls http://x:1 {flag}")).unwrap_err().to_string();
            assert!(error.contains(flag.split(' ').next().unwrap()), "{flag}: {error}");
        }
    }
}
