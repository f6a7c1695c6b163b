//! One leg: a connection to a worker that carries one request and its answer. Connections are pingora's, the pool of idle
//! ones is ours. A leg is polled and holds no buffer while it waits: what can be read is read at once into the stack, up to
//! one burst, and only that much is kept.

mod connect;
pub mod http1;
mod pool;
pub mod tls;

use std::future::Future;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use pingora::protocols::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::error::{Failure, Side};
use crate::fleet::{Outcome, Picked, Worker};
use crate::leg::http1::{BadResponse, Body, ResponseHead, take_response_head};

pub use connect::{ConnectLimits, Connector, Line, Unreachable};
pub use pool::Idle;

/// What one event brings at most, and so what one write to the client holds.
const BURST_BYTES_MAX: usize = 32 * 1024;

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

/// `Sending ─▶ Flushing ─▶ Head ─▶ Body ─▶ Over`; an answer that comes early ends the sending.
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
    /// Read and not yet decoded: a part of a head or of a line of the framing.
    input: BytesMut,
    /// A byte of the response was seen.
    answered: bool,
    keep_alive: bool,
    idle_max: Duration,
    /// Ends once the worker's open legs must: it is silent, or was removed and had its time.
    cut: Pin<Box<dyn Future<Output = Failure> + Send>>,
}

impl Leg {
    pub fn new(side: Side, picked: Picked, line: Line, head: Bytes, body: Bytes) -> Self {
        picked.sent(body.len());
        let watched = picked.worker.clone();
        Leg {
            side,
            picked,
            stream: line.stream,
            reused: line.reused,
            head,
            body,
            phase: Phase::Sending,
            input: BytesMut::new(),
            answered: false,
            keep_alive: false,
            idle_max: line.idle_max,
            cut: Box::pin(async move { watched.until_cut(side).await }),
        }
    }

    pub fn worker(&self) -> &Arc<Worker> {
        &self.picked.worker
    }

    /// Tells the worker's breaker how the leg did.
    pub fn report(&self, outcome: Outcome) {
        self.picked.report(outcome);
    }

    /// Closes the connection, but the worker's word about how the leg did is still to come.
    pub fn into_picked(self) -> Picked {
        self.picked
    }

    /// The next event. Cancel-safe: what was written and read so far is kept in the leg.
    pub async fn next(&mut self) -> LegEvent {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The next event; a worker whose legs are cut breaks it.
    pub fn poll_next(&mut self, cx: &mut Context) -> Poll<LegEvent> {
        match self.poll_progress(cx) {
            Poll::Ready(event) => Poll::Ready(event),
            Poll::Pending => self.poll_cut(cx),
        }
    }

    /// Reads nothing, so that the worker is held back, but sees that it is silent or removed.
    pub fn poll_cut(&mut self, cx: &mut Context) -> Poll<LegEvent> {
        if matches!(self.phase, Phase::Over) {
            return Poll::Pending;
        }
        let failure = ready!(self.cut.as_mut().poll(cx));
        self.phase = Phase::Over;
        self.keep_alive = false;
        Poll::Ready(LegEvent::Broken(failure))
    }

    fn poll_progress(&mut self, cx: &mut Context) -> Poll<LegEvent> {
        loop {
            match self.phase {
                Phase::Sending => match self.poll_send(cx) {
                    Poll::Ready(Ok(false)) => {}
                    Poll::Ready(Ok(true)) => self.phase = Phase::Flushing,
                    // A worker may refuse early and close: what it said is still to be read.
                    Poll::Ready(Err(_)) => self.phase = Phase::Head,
                    // It may also answer before it took the whole body, and take no more of it.
                    Poll::Pending => match ready!(self.poll_head(cx)) {
                        Some(event) => return Poll::Ready(event),
                        None => continue,
                    },
                },
                Phase::Flushing => {
                    // An error shows at the read that follows.
                    let _ = ready!(Pin::new(&mut self.stream).poll_flush(cx));
                    self.phase = Phase::Head;
                }
                Phase::Head => {
                    if let Some(event) = ready!(self.poll_head(cx)) {
                        return Poll::Ready(event);
                    }
                }
                Phase::Body(body) => {
                    if let Some(event) = ready!(self.poll_body(cx, body)) {
                        return Poll::Ready(event);
                    }
                }
                Phase::Over => return Poll::Ready(LegEvent::End { clean: true }),
            }
        }
    }

    /// One vectored write of what is left of head and body; true when nothing is.
    fn poll_send(&mut self, cx: &mut Context) -> Poll<io::Result<bool>> {
        let parts = [io::IoSlice::new(&self.head), io::IoSlice::new(&self.body)];
        let parts = if self.head.is_empty() { &parts[1..] } else { &parts[..] };
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, parts))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        let of_head = written.min(self.head.len());
        self.head.advance(of_head);
        self.body.advance(written - of_head);
        Poll::Ready(Ok(self.head.is_empty() && self.body.is_empty()))
    }

    fn poll_head(&mut self, cx: &mut Context) -> Poll<Option<LegEvent>> {
        match take_response_head(&mut self.input) {
            Ok(Some(head)) => {
                let unsent = !self.head.is_empty() || !self.body.is_empty();
                self.keep_alive = head.keep_alive && !unsent;
                self.idle_max = pool::idle_bound(self.idle_max, head.keep_alive_secs);
                self.phase = Phase::Body(Body::new(head.framing));
                self.body = Bytes::new();
                return Poll::Ready(Some(LegEvent::Head(head)));
            }
            Ok(None) => {}
            Err(bad) => return Poll::Ready(Some(self.malformed(&bad))),
        }
        Poll::Ready(match ready!(self.poll_read(cx)) {
            Ok(0) => Some(self.broken("it closed the connection before it answered")),
            Ok(_) => None,
            Err(error) => Some(self.broken(&error.kind().to_string())),
        })
    }

    fn poll_body(&mut self, cx: &mut Context, mut body: Body) -> Poll<Option<LegEvent>> {
        let mut out = BytesMut::new();
        if let Err(bad) = body.decode(&mut self.input, &mut out) {
            return Poll::Ready(Some(self.malformed(&bad)));
        }
        self.phase = Phase::Body(body);
        if self.input.is_empty() {
            // Gives its share of the memory up.
            self.input = BytesMut::new();
        }
        if !out.is_empty() {
            return Poll::Ready(Some(LegEvent::Data(out.freeze())));
        }
        if body == Body::Done {
            return Poll::Ready(Some(LegEvent::End { clean: true }));
        }
        Poll::Ready(match ready!(self.poll_read(cx)) {
            Ok(0) => {
                self.phase = Phase::Over;
                self.keep_alive = false;
                Some(LegEvent::End { clean: body.ends_by_close() })
            }
            Ok(_) => None,
            Err(error) => Some(self.broken(&error.kind().to_string())),
        })
    }

    /// Everything that can be read now, up to one burst.
    fn poll_read(&mut self, cx: &mut Context) -> Poll<io::Result<usize>> {
        let mut space = [const { MaybeUninit::uninit() }; BURST_BYTES_MAX];
        let mut burst = ReadBuf::uninit(&mut space);
        loop {
            let before = burst.filled().len();
            match Pin::new(&mut self.stream).poll_read(cx, &mut burst) {
                Poll::Pending if before == 0 => return Poll::Pending,
                Poll::Ready(Err(error)) if before == 0 => return Poll::Ready(Err(error)),
                // What was read comes first; the error shows at the next read.
                Poll::Pending | Poll::Ready(Err(_)) => break,
                Poll::Ready(Ok(())) => {
                    let got = burst.filled().len() - before;
                    // A read that does not fill the space took all there was, but of TLS it took one record.
                    if got == 0 || burst.remaining() == 0 || !self.worker().spec.tls {
                        break;
                    }
                }
            }
        }
        let bytes = burst.filled();
        if !bytes.is_empty() {
            self.answered = true;
            self.worker().live().note_alive();
            self.input.extend_from_slice(bytes);
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn malformed(&mut self, bad: &BadResponse) -> LegEvent {
        self.broken(&bad.to_string())
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
            let Leg { picked, stream, idle_max, .. } = self;
            picked.worker.live().idle.put(stream, idle_max);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;
    use crate::fleet::Fleet;
    use crate::leg::tls::PeerTls;
    use std::time::Instant;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    const LIMITS: ConnectLimits = ConnectLimits { connect: Duration::from_secs(5), idle: pool::IDLE_TIME_MAX };

    async fn worker() -> (TcpListener, Arc<Worker>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        (listener, Fleet::new(&config(&format!("--worker-urls {url}")).unwrap()).snapshot().workers[0].clone())
    }

    async fn open(worker: &Worker) -> Result<Line, Unreachable> {
        Connector::new(PeerTls::default()).open(worker, false, &LIMITS).await
    }

    #[tokio::test]
    async fn a_connection_is_reused_and_a_closed_one_is_found_out() {
        let (listener, worker) = worker().await;
        let first = open(&worker).await.unwrap();
        assert!(!first.reused);
        let (server, _) = listener.accept().await.unwrap();
        worker.live().idle.put(first.stream, pool::IDLE_TIME_MAX);
        let again = open(&worker).await.unwrap();
        assert!(again.reused);
        worker.live().idle.put(again.stream, pool::IDLE_TIME_MAX);
        drop(server);
        // The close arrives in its own time; until it does the connection looks usable.
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let line = open(&worker).await.unwrap();
            if !line.reused {
                break;
            }
            assert!(Instant::now() < deadline);
            worker.live().idle.put(line.stream, pool::IDLE_TIME_MAX);
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_leg_sends_a_large_body_and_reads_a_chunked_answer() {
        let (listener, worker) = worker().await;
        let body = Bytes::from(vec![b'x'; 1 << 20]);
        let line = open(&worker).await.unwrap();
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
        assert!(open(&worker).await.unwrap().reused);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn nobody_there_is_said_and_remembered() {
        let (listener, worker) = worker().await;
        drop(listener);
        let why = open(&worker).await.err().unwrap();
        assert_eq!(why, Unreachable { why: "nobody listens there".into(), timed_out: false });
        assert!(!worker.is_healthy());
    }

    #[tokio::test]
    async fn an_answer_before_the_body_is_taken_ends_the_sending() {
        let (listener, worker) = worker().await;
        let line = open(&worker).await.unwrap();
        let body = Bytes::from(vec![b'x'; 64 << 20]);
        let mut leg = Leg::new(Side::Decode, worker.begin(0).unwrap(), line, Bytes::from_static(b"HEAD"), body);
        let (mut socket, _) = listener.accept().await.unwrap();
        socket.write_all(b"HTTP/1.1 429 X\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        let LegEvent::Head(head) = leg.next().await else { panic!() };
        assert_eq!(head.status, 429);
        assert!(matches!(leg.next().await, LegEvent::End { clean: true }));
        leg.release();
        assert!(worker.live().idle.checkout().is_none(), "half a request was sent on it");
    }

    #[tokio::test]
    async fn what_can_be_read_is_one_event_and_nothing_is_held_while_idle() {
        let (listener, worker) = worker().await;
        let line = open(&worker).await.unwrap();
        let mut leg = Leg::new(
            Side::Decode,
            worker.begin(0).unwrap(),
            line,
            Bytes::from_static(b"HEAD"),
            Bytes::from_static(b"{}"),
        );
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        for _ in 0..100 {
            wire.extend_from_slice(b"4\r\nabcd\r\n");
        }
        socket.write_all(&wire).await.unwrap();
        assert!(matches!(leg.next().await, LegEvent::Head(_)));
        let LegEvent::Data(data) = leg.next().await else { panic!() };
        assert_eq!(data, b"abcd".repeat(100));
        assert!(futures_util::poll!(std::pin::pin!(leg.next())).is_pending());
        assert_eq!(leg.input.capacity(), 0, "an idle leg holds no buffer");
    }
}
