//! The listener: accepts, serves each connection, and stops in order.
//!
//! After a 413 the rest of the body is read and thrown away, within limits: closing a socket that holds unread bytes
//! resets the connection, and a client that sends before it reads would lose the answer.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::Router;
use http::StatusCode;
use hyper::{
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpSocket, TcpStream, lookup_host},
    sync::{Semaphore, watch},
    task::JoinSet,
};

use crate::accept_log::AcceptLog;

const BACKLOG: u32 = 1024;
/// After accept fails (out of file descriptors, mostly), before the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// What is thrown away of a refused body at most, and for how long.
const DISCARD_BYTES_MAX: usize = 64 << 20;
const DISCARD_TIME_MAX: Duration = Duration::from_secs(5);

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
        let mut log = AcceptLog::new("http");
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
                    log.failed(Instant::now(), &error);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// One connection: dropped requests when the client leaves, no new ones after the signal to stop.
    fn serve(&self, mut stream: TcpStream) -> impl Future<Output = ()> + Send + 'static {
        let routes = TowerToHyperService::new(self.router.clone());
        let timeout = self.header_timeout;
        let stop = stopped(self.stop.clone());
        let refused_body = Arc::new(AtomicBool::new(false));
        async move {
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "TCP_NODELAY");
            }
            let seen = Arc::clone(&refused_body);
            let service = service_fn(move |request| {
                let (answer, seen) = (routes.call(request), Arc::clone(&seen));
                async move {
                    let response = answer.await?;
                    seen.fetch_or(response.status() == StatusCode::PAYLOAD_TOO_LARGE, Ordering::Relaxed);
                    Ok::<_, std::convert::Infallible>(response)
                }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(timeout);
            {
                let connection = http.serve_connection(TokioIo::new(&mut stream), service);
                let mut connection = std::pin::pin!(connection);
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
            if refused_body.load(Ordering::Relaxed) {
                discard(stream).await;
            }
        }
    }

    /// Waits for the open connections, at most `grace`; true when none is left.
    pub async fn drain(&mut self, grace: Duration) -> bool {
        let all = async { while self.connections.join_next().await.is_some() {} };
        tokio::time::timeout(grace, all).await.is_ok()
    }
}

/// Reads what the client still sends until it stops or a limit is met; the answer is out and the write side closed.
async fn discard(stream: TcpStream) {
    let mut rest = stream.take(DISCARD_BYTES_MAX as u64);
    // Whether the rest came or not, the connection ends.
    let _ = tokio::time::timeout(DISCARD_TIME_MAX, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
}

/// Resolves at the signal to stop, or when nobody is left to give one.
async fn stopped(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http::HeaderMap;
    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::http::body::{self, BodyLimits};

    const LIMIT: Duration = Duration::from_secs(20);

    /// What the server, which takes bodies of 1000 bytes, answers to `head` and so many bytes more, all sent before the
    /// answer is read. It has not waited for the end of a body that never comes.
    async fn answer(head: &str, more: usize) -> String {
        let limits = BodyLimits { bytes_max: 1000, time_max: Duration::from_secs(3600) };
        let take = move |headers: HeaderMap, body: Body| async move {
            body::read(&headers, body, limits).await.map(|body| body.len().to_string())
        };
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(async move {
            Server::new(Router::new().fallback(take), 60_000, 8, stopped).accept(listener).await;
        });
        let exchange = async {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(format!("POST / HTTP/1.1\r\nhost: w\r\n{head}\r\n\r\n").as_bytes()).await.unwrap();
            client.write_all(&vec![b'x'; more]).await.unwrap();
            let mut text = String::new();
            client.read_to_string(&mut text).await.expect("an answer, not a reset");
            text
        };
        let text = tokio::time::timeout(LIMIT, exchange).await.expect("an answer at once");
        serving.abort();
        drop(stop);
        text
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused_unread_and_the_client_sees_why() {
        for head in ["content-length: 9999999999\r\nexpect: 100-continue", "content-length: 9999999999"] {
            let text = answer(head, 0).await;
            assert!(text.starts_with("HTTP/1.1 413"), "{text}");
            assert!(text.contains("connection: close") && text.contains("--max-body-bytes"), "{text}");
        }
        // More than the sockets' buffers hold: the client has sent all of it before it reads.
        let text = answer("content-length: 16000000", 16_000_000).await;
        assert!(text.starts_with("HTTP/1.1 413"), "{text}");
        let text = answer("transfer-encoding: chunked\r\n\r\nf42400", 16_000_000).await;
        assert!(text.starts_with("HTTP/1.1 413"), "{text}");
    }

    #[tokio::test]
    async fn a_chunk_size_that_is_none_is_400() {
        for size in ["xyz", "-1", "fffffffffffffffff"] {
            let text = answer(&format!("connection: close\r\ntransfer-encoding: chunked\r\n\r\n{size}"), 0).await;
            assert!(text.starts_with("HTTP/1.1 400"), "{size}: {text}");
        }
    }
}
