//! What all requests of one gateway share, and how it knows that none is left.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};

use arc_swap::ArcSwap;
use tokio::sync::Notify;

use crate::config::Config;
use crate::door::Door;
use crate::error::StartError;
use crate::exchange::aborts::Aborts;
use crate::exchange::engines::Engines;
use crate::exchange::retry::Budget;
use crate::fleet::probe::Prober;
use crate::fleet::{Fleet, Source};
use crate::leg::Connector;
use crate::leg::tls::PeerTls;
use crate::metrics::Metrics;

pub struct Gateway {
    /// Replaced whole when settings are read again.
    config: ArcSwap<Config>,
    pub fleet: Arc<Fleet>,
    pub connector: Connector,
    pub aborts: Aborts,
    pub engines: Engines,
    /// What all requests together may be tried again.
    pub retry_budget: Budget,
    pub prober: Arc<Prober>,
    pub metrics: Metrics,
    pub door: Door,
    /// No new connections; those that are open end with their request.
    draining: AtomicBool,
    requests: Count,
    connections: Count,
    /// What still runs ends now, each with an outcome for its client.
    grace_over: AtomicBool,
    grace_ends: Notify,
}

impl Gateway {
    pub fn new(config: Config) -> Result<Self, StartError> {
        let fleet = Arc::new(Fleet::new(&config));
        let metrics = Metrics::new()?;
        let tls = PeerTls::load(&config.security.workers)?;
        Ok(Gateway {
            connector: Connector::new(tls.clone()),
            aborts: Aborts::default(),
            engines: Engines::new()?,
            retry_budget: Budget::default(),
            prober: Arc::new(Prober::new(fleet.clone(), &config, &tls)?),
            door: Door::new(&config, &metrics.door)?,
            metrics,
            draining: AtomicBool::new(false),
            requests: Count::default(),
            connections: Count::default(),
            grace_over: AtomicBool::new(false),
            grace_ends: Notify::new(),
            fleet,
            config: ArcSwap::from_pointee(config),
        })
    }

    /// The settings as they are now. A request takes them once, so that it ends under the settings it began with.
    pub fn config(&self) -> Arc<Config> {
        self.config.load_full()
    }

    /// Takes over settings that were read again, as far as a running gateway can; returns what stays as it was.
    pub fn reconfigure(&self, new: Config) -> Vec<&'static str> {
        let (now, kept) = self.config().changed_to(new);
        self.door.configure(&now);
        self.prober.configure(&now);
        self.fleet.update(Source::Flags, now.fleet.workers.clone());
        self.config.store(Arc::new(now));
        kept
    }

    /// Whether prompts can be served.
    pub fn is_ready(&self) -> bool {
        self.fleet.snapshot().is_ready()
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }

    pub fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Relaxed);
    }

    /// Counts a request until the guard is dropped.
    pub fn begin_request(&self) -> Counted<'_> {
        self.requests.begin()
    }

    /// Counts a client's connection until the guard is dropped.
    pub fn begin_connection(&self) -> Counted<'_> {
        self.connections.begin()
    }

    /// Running exchanges have had their time.
    pub fn end_grace(&self) {
        self.grace_over.store(true, SeqCst);
        self.grace_ends.notify_waiters();
    }

    pub fn grace_is_over(&self) -> bool {
        self.grace_over.load(SeqCst)
    }

    /// Returns once [`Gateway::end_grace`] was called. Cancel-safe.
    pub async fn until_grace_ends(&self) {
        loop {
            let ends = self.grace_ends.notified();
            tokio::pin!(ends);
            ends.as_mut().enable();
            if self.grace_is_over() {
                return;
            }
            ends.await;
        }
    }

    /// Returns once no request is running.
    pub async fn until_idle(&self) {
        self.requests.until_none().await;
    }

    /// Returns once no client is connected.
    pub async fn until_no_connection(&self) {
        self.connections.until_none().await;
    }
}

/// How many of something there are.
#[derive(Default)]
struct Count {
    now: AtomicUsize,
    none: Notify,
}

impl Count {
    fn begin(&self) -> Counted<'_> {
        self.now.fetch_add(1, SeqCst);
        Counted(self)
    }

    /// Cancel-safe.
    async fn until_none(&self) {
        loop {
            let none = self.none.notified();
            tokio::pin!(none);
            none.as_mut().enable();
            if self.now.load(SeqCst) == 0 {
                return;
            }
            none.await;
        }
    }
}

/// One of them, until it is dropped.
pub struct Counted<'a>(&'a Count);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if self.0.now.fetch_sub(1, SeqCst) == 1 {
            self.0.none.notify_waiters();
        }
    }
}
