//! The listener: accepts, serves each connection, and stops in order.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream, lookup_host},
    sync::{Semaphore, watch},
    task::JoinSet,
};

const BACKLOG: u32 = 1024;
/// After accept fails (out of file descriptors, mostly), before the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Takes a port without listening on it yet: whoever connects before the worker is ready is refused at once.
///
/// # Errors
/// When the address is none of this machine's, or the port is taken.
pub async fn bind(host: &str, port: u16) -> io::Result<TcpSocket> {
    let name = host.trim_start_matches('[').trim_end_matches(']');
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
    for address in lookup_host((name, port)).await? {
        match bind_to(address) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn bind_to(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restarted worker takes its port back while old connections linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

pub fn listen(socket: TcpSocket) -> io::Result<TcpListener> {
    socket.listen(BACKLOG)
}

/// Serves until `stop` turns true, then finishes what runs; see [`Server::drain`].
pub struct Server {
    router: Router,
    header_timeout: Duration,
    connections_max: usize,
    stop: watch::Receiver<bool>,
    connections: JoinSet<()>,
}

impl Server {
    pub fn new(router: Router, header_timeout_ms: u64, connections_max: usize, stop: watch::Receiver<bool>) -> Self {
        let header_timeout = Duration::from_millis(header_timeout_ms);
        Server { router, header_timeout, connections_max, stop, connections: JoinSet::new() }
    }

    /// Accepts until the signal to stop.
    pub async fn accept(&mut self, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(self.connections_max));
        let stop = stopped(self.stop.clone());
        tokio::pin!(stop);
        loop {
            while self.connections.try_join_next().is_some() {}
            let accepted = async {
                let place = places.clone().acquire_owned().await;
                (listener.accept().await, place)
            };
            let (accepted, place) = tokio::select! {
                accepted = accepted => accepted,
                () = &mut stop => return,
            };
            match accepted {
                Ok((stream, _)) => {
                    let served = self.serve(stream);
                    self.connections.spawn(async move {
                        let _place = place;
                        served.await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// One connection: dropped requests when the client leaves, no new ones after the signal to stop.
    fn serve(&self, stream: TcpStream) -> impl Future<Output = ()> + Send + 'static {
        let service = TowerToHyperService::new(self.router.clone());
        let timeout = self.header_timeout;
        let stop = stopped(self.stop.clone());
        async move {
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "TCP_NODELAY");
            }
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(timeout);
            let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
            let end = tokio::select! {
                end = connection.as_mut() => end,
                () = stop => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = end {
                tracing::debug!(%error, "a connection ended early");
            }
        }
    }

    /// Waits for the open connections, at most `grace`; true when none is left.
    pub async fn drain(&mut self, grace: Duration) -> bool {
        let all = async { while self.connections.join_next().await.is_some() {} };
        tokio::time::timeout(grace, all).await.is_ok()
    }
}

/// Resolves at the signal to stop, or when nobody is left to give one.
async fn stopped(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
