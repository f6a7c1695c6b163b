//! One leg: a connection to a worker that carries one request and its answer. Connections are pingora's, the pool is ours:
//! last in first out, a non-blocking read at checkout finds those that the worker closed, and none idles longer than the
//! shortest keep-alive of the workers we front (5 s).

pub mod http1;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use futures_util::FutureExt;
use pingora::ErrorType;
use pingora::connectors::TransportConnector;
use pingora::protocols::Stream;
use pingora::upstreams::peer::HttpPeer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::config::ip_of;
use crate::error::{Failure, Side};
use crate::fleet::{Outcome, Picked, Worker};
use crate::leg::http1::{Body, ResponseHead, take_response_head};

const IDLE_TIME_MAX: Duration = Duration::from_secs(4);
const IDLE_CONNECTIONS_MAX: usize = 512;
/// What one event to the client holds at most.
const BURST_BYTES_MAX: usize = 32 * 1024;
const READ_BYTES_MIN: usize = 4 * 1024;

/// The connections to one worker that wait for their next request.
#[derive(Debug, Default)]
pub struct Idle(Mutex<VecDeque<(Stream, Instant)>>);

impl Idle {
    fn checkout(&self) -> Option<Stream> {
        loop {
            let (mut stream, since) = self.0.lock().expect("no panic under this lock").pop_back()?;
            if since.elapsed() < IDLE_TIME_MAX && is_quiet(&mut stream) {
                return Some(stream);
            }
        }
    }

    fn put(&self, stream: Stream) {
        let mut idle = self.0.lock().expect("no panic under this lock");
        while idle.front().is_some_and(|(_, since)| since.elapsed() >= IDLE_TIME_MAX) {
            idle.pop_front();
        }
        if idle.len() < IDLE_CONNECTIONS_MAX {
            idle.push_back((stream, Instant::now()));
        }
    }

    pub fn clear(&self) {
        self.0.lock().expect("no panic under this lock").clear();
    }
}

/// Nothing to read and not closed. Bytes that nobody asked for make a connection unusable, too.
fn is_quiet(stream: &mut Stream) -> bool {
    let mut byte = [0u8; 1];
    tokio::task::unconstrained(stream.read(&mut byte)).now_or_never().is_none()
}

/// Makes connections.
pub struct Connector {
    transport: TransportConnector,
    connect_timeout: Duration,
}

/// A connection ready for a request.
pub struct Line {
    stream: Stream,
    reused: bool,
}

impl Connector {
    pub fn new(connect_timeout: Duration) -> Self {
        Connector { transport: TransportConnector::new(None), connect_timeout }
    }

    /// A connection to `worker`: an idle one, or a new one if there is none or `fresh` is asked for. The error says why, in
    /// words that a client may read.
    pub async fn open(&self, worker: &Worker, fresh: bool) -> Result<Line, String> {
        if !fresh && let Some(stream) = worker.live().idle.checkout() {
            return Ok(Line { stream, reused: true });
        }
        let stream = match tokio::time::timeout(self.connect_timeout, self.connect(worker)).await {
            Ok(connected) => connected,
            Err(_) => Err(format!("no connection within {} ms", self.connect_timeout.as_millis())),
        };
        match stream {
            Ok(stream) => {
                worker.live().note_connected();
                Ok(Line { stream, reused: false })
            }
            Err(why) => {
                worker.live().note_unreachable(&why);
                Err(why)
            }
        }
    }

    /// Tries each address of the worker in turn.
    async fn connect(&self, worker: &Worker) -> Result<Stream, String> {
        let (host, port) = (worker.spec.host.as_str(), worker.spec.port);
        let addresses: Vec<SocketAddr> = match ip_of(host) {
            Some(ip) => vec![SocketAddr::new(ip, port)],
            None => {
                let found = tokio::net::lookup_host((host, port)).await;
                found
                    .map_err(|error| {
                        tracing::debug!(worker = worker.url(), %error, "cannot resolve");
                        "its name cannot be resolved"
                    })?
                    .collect()
            }
        };
        let mut why = "its name has no address";
        for address in addresses {
            let mut peer = HttpPeer::new(address, worker.spec.tls, host.to_owned());
            peer.options.total_connection_timeout = Some(self.connect_timeout);
            match self.transport.new_stream(&peer).await {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    tracing::debug!(worker = worker.url(), %address, %error, "cannot connect");
                    why = in_words(&error.etype);
                }
            }
        }
        Err(why.to_owned())
    }
}

/// Why no connection was made, without addresses.
fn in_words(error: &ErrorType) -> &'static str {
    match error {
        ErrorType::ConnectRefused => "nobody listens there",
        ErrorType::ConnectTimedout => "it accepted no connection in time",
        ErrorType::ConnectNoRoute => "there is no route to it",
        ErrorType::TLSHandshakeFailure | ErrorType::TLSHandshakeTimedout => "the TLS handshake failed",
        ErrorType::InvalidCert => "its certificate is not trusted",
        _ => "no connection to it could be made",
    }
}

/// What a leg reports, in order: a head, data, then one end or break.
#[derive(Debug)]
pub enum LegEvent {
    Head(ResponseHead),
    Data(Bytes),
    /// The body ended; `clean` as its framing said it would.
    End {
        clean: bool,
    },
    Broken(Failure),
}

/// `Sending ─▶ Flushing ─▶ Head ─▶ Body ─▶ Over`
enum Phase {
    Sending,
    Flushing,
    Head,
    Body(Body),
    Over,
}

/// One request on its way through one connection. Dropping it closes the connection, which tells the worker to stop.
pub struct Leg {
    side: Side,
    picked: Picked,
    stream: Stream,
    reused: bool,
    head: Bytes,
    body: Bytes,
    phase: Phase,
    input: BytesMut,
    read_bytes: usize,
    /// A byte of the response was seen.
    answered: bool,
    keep_alive: bool,
}

impl Leg {
    pub fn new(side: Side, picked: Picked, line: Line, head: Bytes, body: Bytes) -> Self {
        picked.sent(body.len());
        Leg {
            side,
            picked,
            stream: line.stream,
            reused: line.reused,
            head,
            body,
            phase: Phase::Sending,
            input: BytesMut::new(),
            read_bytes: READ_BYTES_MIN,
            answered: false,
            keep_alive: false,
        }
    }

    pub fn worker(&self) -> &Arc<Worker> {
        &self.picked.worker
    }

    /// Tells the worker's breaker how the leg did.
    pub fn report(&self, outcome: Outcome) {
        self.picked.report(outcome);
    }

    /// The next event. Cancel-safe: what was written and read so far is kept in the leg. A worker that falls silent, or whose
    /// time after its removal is over, breaks it.
    pub async fn next(&mut self) -> LegEvent {
        let (worker, side) = (self.worker().clone(), self.side);
        tokio::select! {
            biased;
            event = self.progress() => event,
            failure = worker.until_cut(side) => {
                self.phase = Phase::Over;
                self.keep_alive = false;
                LegEvent::Broken(failure)
            }
        }
    }

    async fn progress(&mut self) -> LegEvent {
        loop {
            match self.phase {
                Phase::Sending => match self.send_some().await {
                    Ok(false) => {}
                    Ok(true) => self.phase = Phase::Flushing,
                    // A worker may refuse early and close: what it said is still to be read.
                    Err(_) => self.phase = Phase::Head,
                },
                Phase::Flushing => {
                    // An error shows at the read that follows.
                    let _ = self.stream.flush().await;
                    self.phase = Phase::Head;
                }
                Phase::Head => {
                    if let Some(event) = self.read_head().await {
                        return event;
                    }
                }
                Phase::Body(body) => {
                    if let Some(event) = self.read_body(body).await {
                        return event;
                    }
                }
                Phase::Over => return LegEvent::End { clean: true },
            }
        }
    }

    /// One vectored write of what is left of head and body; true when nothing is.
    async fn send_some(&mut self) -> io::Result<bool> {
        let parts = [io::IoSlice::new(&self.head), io::IoSlice::new(&self.body)];
        let parts = if self.head.is_empty() { &parts[1..] } else { &parts[..] };
        let written = self.stream.write_vectored(parts).await?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let of_head = written.min(self.head.len());
        self.head.advance(of_head);
        self.body.advance(written - of_head);
        Ok(self.head.is_empty() && self.body.is_empty())
    }

    async fn read_head(&mut self) -> Option<LegEvent> {
        match take_response_head(&mut self.input) {
            Ok(Some(head)) => {
                self.keep_alive = head.keep_alive;
                self.phase = Phase::Body(Body::new(head.framing));
                return Some(LegEvent::Head(head));
            }
            Ok(None) => {}
            Err(bad) => return Some(self.broken(&bad.to_string())),
        }
        match self.read().await {
            Ok(0) => Some(self.broken("it closed the connection before it answered")),
            Ok(_) => None,
            Err(error) => Some(self.broken(&error.kind().to_string())),
        }
    }

    async fn read_body(&mut self, mut body: Body) -> Option<LegEvent> {
        let mut out = BytesMut::new();
        if let Err(bad) = body.decode(&mut self.input, &mut out) {
            return Some(self.broken(&bad.to_string()));
        }
        self.phase = Phase::Body(body);
        if !out.is_empty() {
            return Some(LegEvent::Data(out.freeze()));
        }
        if body == Body::Done {
            return Some(LegEvent::End { clean: true });
        }
        match self.read().await {
            Ok(0) => {
                self.phase = Phase::Over;
                self.keep_alive = false;
                Some(LegEvent::End { clean: body.ends_by_close() })
            }
            Ok(_) => None,
            Err(error) => Some(self.broken(&error.kind().to_string())),
        }
    }

    /// Everything that can be read now, up to one burst.
    async fn read(&mut self) -> io::Result<usize> {
        self.input.reserve(self.read_bytes);
        let mut total = self.stream.read_buf(&mut self.input).await?;
        self.answered |= total > 0;
        if total > 0 {
            self.worker().live().note_alive();
        }
        let mut last = total;
        while last > 0 && last >= self.read_bytes && self.input.len() < BURST_BYTES_MAX {
            self.read_bytes = (self.read_bytes * 2).min(BURST_BYTES_MAX);
            self.input.reserve(self.read_bytes);
            match tokio::task::unconstrained(self.stream.read_buf(&mut self.input)).now_or_never() {
                Some(Ok(more)) => last = more,
                Some(Err(_)) | None => break,
            }
            total += last;
        }
        if total < self.read_bytes / 2 {
            self.read_bytes = (self.read_bytes / 2).max(READ_BYTES_MIN);
        }
        Ok(total)
    }

    fn broken(&mut self, what: &str) -> LegEvent {
        self.phase = Phase::Over;
        self.keep_alive = false;
        let unanswered_reuse = self.reused && !self.answered;
        LegEvent::Broken(Failure::transport(self.side, self.worker().url(), what, unanswered_reuse))
    }

    /// Gives the connection back for the next request if its answer ended and it may be used again; else closes it.
    pub fn release(self) {
        let done = matches!(self.phase, Phase::Body(Body::Done));
        if done && self.keep_alive && self.input.is_empty() {
            let Leg { picked, stream, .. } = self;
            picked.worker.live().idle.put(stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;
    use crate::fleet::Fleet;
    use tokio::net::TcpListener;

    async fn worker() -> (TcpListener, Arc<Worker>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        (listener, Fleet::new(&config(&format!("--worker-urls {url}")).unwrap()).snapshot().workers[0].clone())
    }

    fn connector() -> Connector {
        Connector::new(Duration::from_secs(5))
    }

    #[tokio::test]
    async fn a_connection_is_reused_and_a_closed_one_is_found_out() {
        let (listener, worker) = worker().await;
        let first = connector().open(&worker, false).await.unwrap();
        assert!(!first.reused);
        let (server, _) = listener.accept().await.unwrap();
        worker.live().idle.put(first.stream);
        let again = connector().open(&worker, false).await.unwrap();
        assert!(again.reused);
        worker.live().idle.put(again.stream);
        drop(server);
        // The close arrives in its own time; until it does the connection looks usable.
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let line = connector().open(&worker, false).await.unwrap();
            if !line.reused {
                break;
            }
            assert!(Instant::now() < deadline);
            worker.live().idle.put(line.stream);
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_leg_sends_a_large_body_and_reads_a_chunked_answer() {
        let (listener, worker) = worker().await;
        let body = Bytes::from(vec![b'x'; 1 << 20]);
        let line = connector().open(&worker, false).await.unwrap();
        let mut leg = Leg::new(Side::Decode, worker.begin(0).unwrap(), line, Bytes::from_static(b"HEAD"), body);
        let server = tokio::spawn(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut got = vec![0; 4 + (1 << 20)];
            socket.read_exact(&mut got).await.unwrap();
            assert!(got.starts_with(b"HEADxxx") && got.ends_with(b"xxx"));
            socket
                .write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
                .await
                .unwrap();
            socket
        });
        assert_eq!(worker.legs(), 1);
        let LegEvent::Head(head) = leg.next().await else { panic!() };
        assert_eq!(head.status, 200);
        let mut got = Vec::new();
        loop {
            match leg.next().await {
                LegEvent::Data(data) => got.extend_from_slice(&data),
                LegEvent::End { clean } => break assert!(clean),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(got, b"abc");
        leg.release();
        assert_eq!(worker.legs(), 0);
        assert!(connector().open(&worker, false).await.unwrap().reused);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn nobody_there_is_said_and_remembered() {
        let (listener, worker) = worker().await;
        drop(listener);
        let why = connector().open(&worker, false).await.err().unwrap();
        assert_eq!(why, "nobody listens there");
        assert!(!worker.is_healthy());
    }
}
