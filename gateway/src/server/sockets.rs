//! The listening sockets, and the pingora services that accept on them. They can be opened, closed and opened again, while
//! the connections that they brought live on: a process that has handed its sockets over takes them back where its
//! successor dies.
//!
//! Sockets are bound here and handed to pingora as descriptors: pingora itself retries a busy port for half a minute and then
//! panics, does not tell which port the system chose for port 0, and stops a listener for good.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use pingora::apps::ServerApp;
use pingora::listeners::{L4BufferSettings, ListenerConfig};
use pingora::protocols::Stream;
use pingora::server::{ListenFds, ShutdownWatch};
use pingora::services::Service;
use pingora::services::listening::Service as Listening;
use tokio::sync::watch;

use crate::door::tls::Certificates;
use crate::error::StartError;
use crate::gateway::Gateway;

/// What one client connection's reads are buffered with.
const CLIENT_BUFFER_BYTES: usize = 16 * 1024;

/// One listener.
#[derive(Debug)]
pub struct Socket {
    /// What it is for: the same word in each version of the gateway, since processes that take over ask by it.
    pub name: &'static str,
    /// As the settings have it.
    pub asked: (String, u16),
    pub address: SocketAddr,
    listener: TcpListener,
}

impl Socket {
    pub fn bind(name: &'static str, asked: &(String, u16)) -> Result<Self, StartError> {
        let (host, port) = asked;
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let failed = |source| StartError::Listen { what: name, address: format!("{host}:{port}"), source };
        let listener = TcpListener::bind((bare, *port)).map_err(failed)?;
        Socket::of(name, asked, listener).map_err(failed)
    }

    /// A socket that listens already.
    pub fn of(name: &'static str, asked: &(String, u16), listener: TcpListener) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Socket { name, asked: asked.clone(), address: listener.local_addr()?, listener })
    }

    pub fn copy(&self) -> std::io::Result<OwnedFd> {
        self.listener.try_clone().map(OwnedFd::from)
    }
}

/// All listeners of this process, open or closed together.
pub struct Sockets {
    all: Mutex<Vec<Socket>>,
    open: watch::Sender<bool>,
}

impl Sockets {
    /// Closed at first: connections wait in the kernel.
    pub fn new(all: Vec<Socket>) -> Self {
        Sockets { all: Mutex::new(all), open: watch::Sender::new(false) }
    }

    /// Connections are accepted.
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    /// No more connections are accepted; the sockets stay, so that nobody is refused while somebody else accepts on them.
    pub fn close(&self) {
        self.open.send_replace(false);
    }

    /// Closes the sockets for good. Where no other process has them, new connections are refused from here on.
    pub fn release(&self) {
        self.close();
        self.all.lock().expect("no panic under this lock").clear();
    }

    /// What `look` makes of the sockets that are held.
    pub fn look<T>(&self, look: impl FnOnce(&[Socket]) -> T) -> T {
        look(&self.all.lock().expect("no panic under this lock"))
    }

    /// A descriptor of its own for whoever accepts; `None` once they are released.
    fn copy(&self, name: &str) -> Option<OwnedFd> {
        let copied = self.look(|all| all.iter().find(|s| s.name == name).map(Socket::copy))?;
        copied.inspect_err(|error| tracing::error!(%error, name, "a listening socket cannot be copied")).ok()
    }
}

/// How pingora is to listen at an address; made anew for each time.
pub type Endpoint = Box<dyn Fn(&str) -> Result<ListenerConfig, StartError> + Send + Sync>;

/// TCP with buffers of the gateway's size, and TLS where there are certificates. Fails where those cannot be served with.
pub fn endpoint(certificates: Option<Arc<Certificates>>) -> Result<Endpoint, StartError> {
    let made: Endpoint = Box::new(move |address| {
        let buffers = L4BufferSettings { read: Some(CLIENT_BUFFER_BYTES), write: None };
        let tcp = ListenerConfig::tcp(address).l4_buffer(buffers);
        match &certificates {
            Some(certificates) => Ok(tcp.tls(certificates.settings()?)),
            None => Ok(tcp),
        }
    });
    made("127.0.0.1:0")?;
    Ok(made)
}

/// A pingora service on one of [`Sockets`], listening whenever they are open.
pub struct Acceptor<A> {
    name: &'static str,
    /// The socket's name in pingora's table of descriptors.
    address: String,
    app: Arc<A>,
    endpoint: Endpoint,
    threads: usize,
    sockets: Arc<Sockets>,
    gateway: Arc<Gateway>,
    /// Of each time it listened: h2 connections take the loss of the sender for the order to end.
    closers: Vec<watch::Sender<bool>>,
}

impl<A> Acceptor<A> {
    pub fn new(
        name: &'static str,
        app: A,
        endpoint: Endpoint,
        threads: usize,
        sockets: &Arc<Sockets>,
        gateway: &Arc<Gateway>,
    ) -> Self {
        let address = sockets.look(|all| all.iter().find(|s| s.name == name).map(|s| s.address.to_string()));
        Acceptor {
            name,
            address: address.unwrap_or_default(),
            app: Arc::new(app),
            endpoint,
            threads,
            sockets: sockets.clone(),
            gateway: gateway.clone(),
            closers: Vec::new(),
        }
    }
}

#[async_trait]
impl<A: ServerApp + Send + Sync + 'static> Service for Acceptor<A> {
    async fn start_service(&mut self, fds: Option<ListenFds>, _: ShutdownWatch, listeners_per_fd: usize) {
        let mut open = self.sockets.open.subscribe();
        while open.wait_for(|open| *open).await.is_ok() {
            let (Some(fds), Some(socket)) = (&fds, self.sockets.copy(self.name)) else { return };
            let endpoint = match (self.endpoint)(&self.address) {
                Ok(endpoint) => endpoint,
                Err(error) => {
                    tracing::error!(%error, name = self.name, "cannot listen again");
                    return;
                }
            };
            fds.lock().add(self.address.clone(), socket.into_raw_fd());
            let app = Counted { app: self.app.clone(), gateway: self.gateway.clone() };
            let mut listening = Listening::new(self.name.to_owned(), app);
            listening.add_listener(endpoint);
            let close = watch::Sender::new(false);
            let closed = close.subscribe();
            self.closers.push(close.clone());
            let closing = async {
                let _ = open.wait_for(|open| !*open).await;
                close.send_replace(true);
            };
            tokio::join!(Service::start_service(&mut listening, Some(fds.clone()), closed, listeners_per_fd), closing);
        }
    }

    fn name(&self) -> &str {
        self.name
    }

    fn threads(&self) -> Option<usize> {
        Some(self.threads)
    }

    fn listen_addresses(&self) -> Option<Vec<String>> {
        Some(vec![self.address.clone()])
    }
}

/// An application whose connections are counted, so that a process knows when its last one has ended.
struct Counted<A> {
    app: Arc<A>,
    gateway: Arc<Gateway>,
}

#[async_trait]
impl<A: ServerApp + Send + Sync + 'static> ServerApp for Counted<A> {
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let _open = self.gateway.begin_connection();
        self.app.process_new(stream, shutdown).await
    }
}
