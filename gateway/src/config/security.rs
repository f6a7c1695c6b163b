//! Who may ask what. *Pure.*

use serde::{Deserialize, Serialize};

use crate::config::words::word;

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct SecurityArgs {
    /// Clients must send `Authorization: Bearer KEY`; workers get the same from probes.
    #[arg(long, value_name = "KEY")]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "word")]
    pub api_key: Option<String>,
}

/// Checked.
#[derive(Clone, Debug)]
pub struct Security {
    pub api_key: Option<String>,
}

impl SecurityArgs {
    pub fn checked(&self) -> Security {
        Security { api_key: self.api_key.clone() }
    }
}
