//! How workers are picked. *Pure.*

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::StartError;
use crate::pair::{AssignmentMode, Balance, PolicyName};

/// Of the table in which a policy remembers; less is no use.
const MEMORY_BYTES_MIN: usize = 64 << 10;

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
    /// cache_aware: the share of a conversation, from 0 to 1, that a worker must hold more of to be preferred [default: 0.3].
    #[arg(long, value_name = "SHARE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_threshold: Option<f64>,
    /// cache_aware, bucket: a worker with this many requests more than the least loaded, and by --balance-rel-threshold, is
    /// passed over. Tokens count as well, 1024 of them as a request [default: 64].
    #[arg(long, value_name = "REQUESTS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance_abs_threshold: Option<u64>,
    /// cache_aware, bucket: a worker with this many times the load of the least loaded, and by --balance-abs-threshold, is
    /// passed over [default: 1.5].
    #[arg(long, value_name = "FACTOR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance_rel_threshold: Option<f64>,
    /// cache_aware, manual: memory for prefixes or keys, for each side of each pool, in bytes; what was not used for longest is
    /// forgotten [default: 67108864].
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tree_size: Option<usize>,
    /// bucket: time between two fits of the lengths to what was seen, in seconds [default: 5].
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_adjust_interval_secs: Option<u64>,
    /// consistent_hashing: a worker with this many times the mean of requests is passed over, from 1 on [default: 1.25].
    #[arg(long, value_name = "FACTOR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consistent_hashing_load_factor: Option<f64>,
    /// manual: a key that was not used for so long is forgotten, in seconds [default: 14400].
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_idle_secs: Option<u64>,
    /// manual: how new keys are given to workers [default: random].
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assignment_mode: Option<AssignmentMode>,
}

/// Checked.
#[derive(Clone, PartialEq, Debug)]
pub struct PairConfig {
    pub prefill_policy: PolicyName,
    /// Also for plain workers.
    pub decode_policy: PolicyName,
    pub cache_threshold: f64,
    pub balance: Balance,
    pub memory_bytes_max: usize,
    pub bucket_interval: Duration,
    pub hashing_load_factor: f64,
    pub idle_max: Duration,
    pub assignment_mode: AssignmentMode,
}

impl PairArgs {
    pub fn checked(&self) -> Result<PairConfig, StartError> {
        let policy = self.policy.unwrap_or(PolicyName::PowerOfTwo);
        let checked = PairConfig {
            prefill_policy: self.prefill_policy.unwrap_or(policy),
            decode_policy: self.decode_policy.unwrap_or(policy),
            cache_threshold: self.cache_threshold.unwrap_or(0.3),
            balance: Balance {
                abs: self.balance_abs_threshold.unwrap_or(64),
                rel: self.balance_rel_threshold.unwrap_or(1.5),
            },
            memory_bytes_max: self.max_tree_size.unwrap_or(64 << 20),
            bucket_interval: Duration::from_secs(self.bucket_adjust_interval_secs.unwrap_or(5)),
            hashing_load_factor: self.consistent_hashing_load_factor.unwrap_or(1.25),
            idle_max: Duration::from_secs(self.max_idle_secs.unwrap_or(4 * 3600)),
            assignment_mode: self.assignment_mode.unwrap_or_default(),
        };
        let bad = |what: &str| Err(StartError::Config(what.to_owned()));
        if checked.decode_policy == PolicyName::Bucket {
            return bad(
                "bucket goes by the length of prompts, which only prefill works on: give it as --prefill-policy, \
                        and another --decode-policy",
            );
        }
        if !(0.0..=1.0).contains(&checked.cache_threshold) {
            return bad("--cache-threshold is a share from 0 to 1");
        }
        // NaN is none of what these accept.
        let at_least_1 = 1.0..=f64::MAX;
        if !at_least_1.contains(&checked.balance.rel) {
            return bad("--balance-rel-threshold is a factor of at least 1");
        }
        if !at_least_1.contains(&checked.hashing_load_factor) {
            return bad("--consistent-hashing-load-factor is a factor of at least 1");
        }
        if checked.memory_bytes_max < MEMORY_BYTES_MIN {
            return bad("--max-tree-size must be at least 65536 bytes");
        }
        Ok(checked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    #[test]
    fn refusals_say_what_to_do() {
        for (line, expected) in [
            ("--policy bucket", "--prefill-policy"),
            ("--decode-policy bucket", "another --decode-policy"),
            ("--cache-threshold 1.1", "from 0 to 1"),
            ("--cache-threshold NaN", "from 0 to 1"),
            ("--balance-rel-threshold 0.5", "at least 1"),
            ("--balance-rel-threshold NaN", "at least 1"),
            ("--consistent-hashing-load-factor inf", "at least 1"),
            ("--max-tree-size 1", "65536"),
        ] {
            let error = config(&format!("--worker-urls http://w:1 {line}")).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn a_policy_per_side() {
        let line = "--prefill http://p:1 --decode http://d:1 --policy least_load --prefill-policy bucket";
        let pair = config(line).unwrap().pair;
        assert_eq!((pair.prefill_policy, pair.decode_policy), (PolicyName::Bucket, PolicyName::LeastLoad));
    }
}
