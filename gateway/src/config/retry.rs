//! Trying again. *Pure.*

use serde::{Deserialize, Serialize};

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct RetryArgs {
    /// Further pairs tried when a worker cannot be reached, before anything was sent to it [default: 4].
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_max_retries: Option<u32>,
}

/// Checked.
#[derive(Clone, Copy, Debug)]
pub struct Retries {
    pub max: u32,
}

impl RetryArgs {
    pub fn checked(&self) -> Retries {
        Retries { max: self.retry_max_retries.unwrap_or(4) }
    }
}
