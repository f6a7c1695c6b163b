//! Settings that are read again while the gateway runs: on SIGHUP, and when the settings' or the keys' file is another
//! version. Promises: settings that are wrong change nothing; the log and the metrics tell both outcomes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use pingora::server::ShutdownWatch;
use pingora::services::background::BackgroundService;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{Config, GatewayArgs};
use crate::error::StartError;
use crate::gateway::Gateway;
use crate::logging::{self, Level};
use crate::versions::Versions;

/// Time between two looks at the files.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What a gateway serves with, and how that is read again.
pub struct Settings {
    pub(super) config: Config,
    pub(super) again: Option<Again>,
}

impl Settings {
    /// Reads environment and file below the flags, and begins the log.
    pub fn read(flags: GatewayArgs) -> Result<Self, StartError> {
        let config = flags.clone().merged()?.checked()?;
        let level = logging::start(&config.listen.log_level)?;
        Ok(Settings { config, again: Some(Again { flags, level }) })
    }
}

/// Flags, which are put over environment and file anew each time.
#[derive(Clone)]
pub(super) struct Again {
    flags: GatewayArgs,
    level: Level,
}

impl From<Config> for Settings {
    /// Settings that stay as they are.
    fn from(config: Config) -> Self {
        Settings { config, again: None }
    }
}

/// The reader as a service of the server.
pub struct Reload {
    pub gateway: Arc<Gateway>,
    pub again: Again,
}

#[async_trait]
impl BackgroundService for Reload {
    async fn start(&self, mut shutdown: ShutdownWatch) {
        let mut hangup = signal(SignalKind::hangup()).ok();
        let mut files = self.files();
        loop {
            let look = tokio::select! {
                () = next(&mut hangup) => false,
                () = tokio::time::sleep(LOOK_EVERY) => true,
                _ = shutdown.changed() => return,
            };
            // Each file is looked at each time, so that no version stays unseen behind another file's.
            let changed = files.iter_mut().fold(false, |any, file| file.is_new() | any);
            if look && !changed {
                continue;
            }
            let keys_file = self.gateway.config().security.keys_file.clone();
            self.read_again();
            if self.gateway.config().security.keys_file != keys_file {
                files = self.files();
            }
        }
    }
}

impl Reload {
    /// The files whose new versions are taken.
    fn files(&self) -> Vec<Versions> {
        let keys = self.gateway.config().security.keys_file.clone();
        let files: Vec<PathBuf> = self.again.flags.config.clone().into_iter().chain(keys).collect();
        files.into_iter().map(Versions::after_now).collect()
    }

    fn read_again(&self) {
        match self.apply() {
            Ok(kept) => {
                self.gateway.metrics.server.reloaded();
                tracing::info!("the settings were read again and taken");
                if !kept.is_empty() {
                    tracing::warn!(
                        "these differ and stay as they were until the gateway is started anew: {}",
                        kept.join("; ")
                    );
                }
            }
            Err(error) => {
                self.gateway.metrics.server.reload_failed();
                tracing::error!(%error, "the settings were read again and are wrong; all stay as they were");
            }
        }
    }

    fn apply(&self) -> Result<Vec<&'static str>, StartError> {
        let config = self.again.flags.clone().merged()?.checked()?;
        self.again.level.set(&config.listen.log_level)?;
        Ok(self.gateway.reconfigure(config))
    }
}

/// Never where the signal cannot be had.
async fn next(hangup: &mut Option<Signal>) {
    if let Some(hangup) = hangup {
        hangup.recv().await;
    } else {
        std::future::pending().await
    }
}
