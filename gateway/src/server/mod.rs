//! Listening and stopping. Pingora is the server; three things are done around it:
//!
//! - Listeners are bound here, before pingora starts, and handed over as descriptors: pingora itself retries a busy port for
//!   half a minute and then panics, and does not tell which port the system chose for port 0.
//! - `Server::run_forever` never returns and takes the process's signals; `Server::run` returns and takes them from a
//!   [`ShutdownSignalWatch`], which is ours.
//! - Pingora's graceful stop sleeps a fixed time and then drops what still runs. Ours closes the listeners at once, waits for
//!   the last exchange (bounded), has those that still run tell their clients, and then has pingora stop without delay.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use async_trait::async_trait;
use pingora::apps::ServerApp;
use pingora::listeners::tls::TlsSettings;
use pingora::listeners::{L4BufferSettings, ListenerConfig};
use pingora::server::configuration::ServerConf;
use pingora::server::{ListenFds, RunArgs, Server, ShutdownSignal, ShutdownSignalWatch, ShutdownWatch};
use pingora::services::Service;
use pingora::services::background::background_service;
use pingora::services::listening::Service as Listening;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::config::Config;
use crate::door::tls::Certificates;
use crate::door::{AdminApp, DataApp, MetricsApp};
use crate::error::StartError;
use crate::fleet::probe::ProbeService;
use crate::gateway::Gateway;

/// How long clients whose exchange outlived the grace may take to receive its end.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// What one client connection's reads are buffered with.
const CLIENT_BUFFER_BYTES: usize = 16 * 1024;

/// Where the gateway listens.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    pub data: SocketAddr,
    pub metrics: SocketAddr,
    /// Where operators have a listener of their own.
    pub admin: Option<SocketAddr>,
    /// The data and admin listeners speak TLS.
    pub tls: bool,
}

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

/// Serves until told to stop. `listening` is called once, when both listeners are bound.
pub fn serve(config: Config, stop: Stop, listening: impl FnOnce(Addresses)) -> Result<(), StartError> {
    let data = bind("requests", &config.listen.data)?;
    let metrics = bind("metrics", &config.listen.metrics)?;
    let admin = config.listen.admin.as_ref().map(|address| bind("administering", address)).transpose()?;
    let certificates = config.security.server.clone().map(Certificates::load).transpose()?;
    let tls = || certificates.as_ref().map(Certificates::settings).transpose();
    let admin_address = admin.as_ref().map(|(_, address)| *address);
    let addresses = Addresses { data: data.1, metrics: metrics.1, admin: admin_address, tls: certificates.is_some() };
    if let Some(path) = &config.listen.address_file {
        write_addresses(path, addresses)?;
    }
    let threads = config.listen.threads;
    let gateway = Arc::new(Gateway::new(config)?);

    let conf = ServerConf {
        threads: 1,
        grace_period_seconds: Some(0),
        graceful_shutdown_timeout_seconds: Some(0),
        ..Default::default()
    };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    let (close, closed) = watch::channel(false);
    server.add_service(Bound::new("data", DataApp(gateway.clone()), data, threads, tls()?, closed.clone()));
    if let Some(admin) = admin {
        server.add_service(Bound::new("admin", AdminApp(gateway.clone()), admin, 1, tls()?, closed.clone()));
    }
    server.add_service(Bound::new("metrics", MetricsApp(gateway.clone()), metrics, 1, None, closed));
    server.add_service(background_service("probe", ProbeService(gateway.prober.clone())));
    listening(addresses);
    // One sender outlives pingora: a listener takes the loss of its channel for an error.
    let shutdown_signal = Box::new(Stopper { gateway, stop, close: close.clone() });
    server.run(RunArgs { shutdown_signal });
    drop(close);
    Ok(())
}

fn bind(what: &'static str, (host, port): &(String, u16)) -> Result<(TcpListener, SocketAddr), StartError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let failed = |source| StartError::Listen { what, address: format!("{host}:{port}"), source };
    let listener = TcpListener::bind((bare, *port)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Written beside and renamed, so that a reader never sees half of it.
fn write_addresses(path: &Path, addresses: Addresses) -> Result<(), StartError> {
    let failed = |source| StartError::AddressFile { path: path.display().to_string(), source };
    let Addresses { data, metrics, admin, .. } = addresses;
    let text = serde_json::json!({"data": data.to_string(), "metrics": metrics.to_string(), "admin": admin.map(|a| a.to_string())});
    let beside = path.with_extension("tmp");
    std::fs::write(&beside, format!("{text}\n")).map_err(failed)?;
    std::fs::rename(&beside, path).map_err(failed)
}

/// A pingora listening service on a socket that is bound already, and with a shutdown of our own.
struct Bound<A> {
    inner: Listening<A>,
    /// The socket's name in pingora's table of descriptors.
    name: String,
    socket: Option<TcpListener>,
    closed: ShutdownWatch,
}

impl<A> Bound<A> {
    fn new(
        title: &str,
        app: A,
        (socket, address): (TcpListener, SocketAddr),
        threads: usize,
        tls: Option<TlsSettings>,
        closed: ShutdownWatch,
    ) -> Self {
        let name = address.to_string();
        let mut inner = Listening::new(title.to_owned(), app);
        inner.threads = Some(threads);
        let buffers = L4BufferSettings { read: Some(CLIENT_BUFFER_BYTES), write: None };
        let endpoint = ListenerConfig::tcp(&*name).l4_buffer(buffers);
        inner.add_listener(match tls {
            Some(tls) => endpoint.tls(tls),
            None => endpoint,
        });
        Bound { inner, name, socket: Some(socket), closed }
    }
}

#[async_trait]
impl<A: ServerApp + Send + Sync + 'static> Service for Bound<A> {
    async fn start_service(&mut self, fds: Option<ListenFds>, _: ShutdownWatch, listeners_per_fd: usize) {
        if let (Some(fds), Some(socket)) = (&fds, self.socket.take()) {
            fds.lock().add(self.name.clone(), socket.into_raw_fd());
        }
        Service::start_service(&mut self.inner, fds, self.closed.clone(), listeners_per_fd).await;
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn threads(&self) -> Option<usize> {
        self.inner.threads
    }

    fn listen_addresses(&self) -> Option<Vec<String>> {
        Some(vec![self.name.clone()])
    }
}

/// Turns a wish to stop into pingora's stop, after the drain.
struct Stopper {
    gateway: Arc<Gateway>,
    stop: Stop,
    close: watch::Sender<bool>,
}

#[async_trait]
impl ShutdownSignalWatch for Stopper {
    async fn recv(&self) -> ShutdownSignal {
        let mut wishes = Wishes::new(&self.stop);
        let how = wishes.next().await;
        self.gateway.draining.store(true, Relaxed);
        self.close.send_replace(true);
        if how == How::Drain {
            let limit = self.gateway.config().deadlines.drain;
            tracing::info!("stopping: no new connections, running exchanges may end within {} s", limit.as_secs());
            tokio::select! {
                _ = self.gateway.until_idle() => tracing::info!("all exchanges ended"),
                _ = tokio::time::sleep(limit) => tracing::warn!("exchanges still ran after {} s", limit.as_secs()),
                _ = wishes.next() => tracing::warn!("told again to stop: not waiting any longer"),
            }
        }
        self.gateway.end_grace();
        if tokio::time::timeout(LAST_WORDS, self.gateway.until_idle()).await.is_err() {
            tracing::warn!("some clients did not take the end of their exchange");
        }
        // Its runtimes end without delay; nothing is left to wait for.
        ShutdownSignal::FastShutdown
    }
}

/// The wishes to stop, one after another.
enum Wishes {
    Signals {
        terminate: tokio::signal::unix::Signal,
        quit: tokio::signal::unix::Signal,
        interrupt: tokio::signal::unix::Signal,
    },
    Channel(watch::Receiver<Option<How>>),
    /// Signals cannot be had: the process is stopped by its default action.
    Never,
}

impl Wishes {
    fn new(stop: &Stop) -> Self {
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

    async fn next(&mut self) -> How {
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
