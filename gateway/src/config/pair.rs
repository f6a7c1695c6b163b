//! How workers are picked. *Pure.*

use serde::{Deserialize, Serialize};

use crate::pair::PolicyName;

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct PairArgs {
    /// How workers are picked [default: power_of_two].
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyName>,
    /// How prefill workers are picked [default: --policy].
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_policy: Option<PolicyName>,
    /// How decode workers are picked [default: --policy].
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_policy: Option<PolicyName>,
}

/// Checked.
#[derive(Clone, Debug)]
pub struct PairConfig {
    pub prefill_policy: PolicyName,
    /// Also for plain workers.
    pub decode_policy: PolicyName,
}

impl PairArgs {
    pub fn checked(&self) -> PairConfig {
        let policy = self.policy.unwrap_or(PolicyName::PowerOfTwo);
        PairConfig {
            prefill_policy: self.prefill_policy.unwrap_or(policy),
            decode_policy: self.decode_policy.unwrap_or(policy),
        }
    }
}
