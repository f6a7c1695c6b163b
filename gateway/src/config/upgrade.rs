//! Taking over from the process that serves, and being taken over from. *Pure.*

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::words::switch;
use crate::error::StartError;

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct UpgradeArgs {
    /// Take the listening sockets over from the gateway that serves at --upgrade-sock, once the workers are ready; that one
    /// goes on accepting until then and leaves when its connections have ended.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub upgrade: bool,
    /// A unix socket at which this gateway hands over to one that is started with --upgrade [default: none, no upgrade].
    #[arg(long, value_name = "PATH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade_sock: Option<PathBuf>,
    /// A new process must have its workers ready within this many seconds, or the old one serves on [default: 60].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade_timeout_secs: Option<u64>,
}

/// Checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Upgrade {
    /// Where another process may take over.
    pub sock: Option<PathBuf>,
    /// Where this process takes over.
    pub take_over_at: Option<PathBuf>,
    pub timeout: Duration,
}

impl UpgradeArgs {
    pub fn checked(&self) -> Result<Upgrade, StartError> {
        if self.upgrade && self.upgrade_sock.is_none() {
            let what = "--upgrade needs --upgrade-sock PATH, the one that the running gateway was started with";
            return Err(StartError::Config(what.into()));
        }
        let secs = self.upgrade_timeout_secs.unwrap_or(60);
        if secs == 0 {
            return Err(StartError::Config("--upgrade-timeout-secs must be at least 1".into()));
        }
        Ok(Upgrade {
            take_over_at: self.upgrade_sock.clone().filter(|_| self.upgrade),
            sock: self.upgrade_sock.clone(),
            timeout: Duration::from_secs(secs),
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::config::tests::config;

    #[test]
    fn a_takeover_needs_to_know_from_whom() {
        let error = config("--worker-urls http://w:1 --upgrade").unwrap_err().to_string();
        assert!(error.contains("--upgrade-sock"), "{error}");
        let upgrade = config("--worker-urls http://w:1 --upgrade --upgrade-sock /run/g.sock").unwrap().upgrade;
        assert_eq!((upgrade.take_over_at, upgrade.timeout.as_secs()), (upgrade.sock, 60));
        let upgrade = config("--worker-urls http://w:1 --upgrade-sock /run/g.sock").unwrap().upgrade;
        assert!(upgrade.take_over_at.is_none() && upgrade.sock.is_some());
    }
}
