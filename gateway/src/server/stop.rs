//! Who tells the gateway to stop, and how.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// Who tells the gateway to stop.
pub enum Stop {
    /// SIGTERM, SIGINT and SIGQUIT let running exchanges end; a second one does not wait for them.
    Signals,
    /// The same by a channel.
    Channel(watch::Receiver<Option<How>>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// Running exchanges may end.
    Drain,
    /// Running exchanges are broken off; their clients are told.
    Now,
}

/// The wishes to stop, one after another.
pub(super) enum Wishes {
    Signals {
        terminate: Signal,
        quit: Signal,
        interrupt: Signal,
    },
    Channel(watch::Receiver<Option<How>>),
    /// Signals cannot be had: the process is stopped by its default action.
    Never,
}

impl Wishes {
    pub fn new(stop: &Stop) -> Self {
        match stop {
            Stop::Channel(channel) => Wishes::Channel(channel.clone()),
            Stop::Signals => {
                let all =
                    (signal(SignalKind::terminate()), signal(SignalKind::quit()), signal(SignalKind::interrupt()));
                match all {
                    (Ok(terminate), Ok(quit), Ok(interrupt)) => Wishes::Signals { terminate, quit, interrupt },
                    _ => Wishes::Never,
                }
            }
        }
    }

    /// Cancel-safe.
    pub async fn next(&mut self) -> How {
        match self {
            Wishes::Never => std::future::pending().await,
            Wishes::Signals { terminate, quit, interrupt } => tokio::select! {
                _ = terminate.recv() => How::Drain,
                _ = quit.recv() => How::Drain,
                _ = interrupt.recv() => How::Drain,
            },
            Wishes::Channel(channel) => match channel.changed().await {
                Ok(()) => channel.borrow().unwrap_or(How::Now),
                Err(_) => std::future::pending().await,
            },
        }
    }
}
