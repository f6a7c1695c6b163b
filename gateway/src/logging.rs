//! The log: to stderr, with a level that may change while the gateway runs.

use std::io::IsTerminal as _;
use std::sync::Arc;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::door::handshakes::Handshakes;
use crate::error::StartError;

type Set = dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync;

/// Sets the level of the log that [`start`] began.
#[derive(Clone)]
pub struct Level(Arc<Set>);

impl Level {
    pub fn set(&self, level: &str) -> Result<(), StartError> {
        (self.0)(filter(level)?).map_err(|why| StartError::Config(format!("--log-level {level:?}: {why}")))
    }
}

/// Logs go to stderr; a subscriber that the process has already stays.
pub fn start(level: &str) -> Result<Level, StartError> {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(level)?)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // Otherwise a line that cannot be written is told by `eprintln!`, which panics because it cannot be written.
        .log_internal_errors(false)
        .with_filter_reloading();
    let handle = builder.reload_handle();
    let set = move |filter| handle.reload(filter).map_err(|error| error.to_string());
    // Where another subscriber stays, its level is another's to set.
    match builder.finish().with(Handshakes::default()).try_init() {
        Ok(()) => Ok(Level(Arc::new(set))),
        Err(_) => Ok(Level(Arc::new(|_| Ok(())))),
    }
}

/// What `--log-level` stands for. A bare level is the gateway's own; the libraries below it say only what an operator must know.
pub fn log_filter(level: &str) -> String {
    if level.contains(['=', ',']) { level.to_owned() } else { format!("{level},pingora_core=warn,pingora=warn") }
}

fn filter(level: &str) -> Result<EnvFilter, StartError> {
    EnvFilter::try_new(log_filter(level)).map_err(|e| StartError::Config(format!("--log-level {level:?}: {e}")))
}
