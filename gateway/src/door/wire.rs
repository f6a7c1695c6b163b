//! A client's connection below HTTP. Pingora reads heads up to a mebibyte and tells nobody how far it is, peeks for HTTP/2
//! without a limit, and closes sockets that still have unread bytes, whose reset can overtake the last answer. So each
//! connection passes through a [`Wire`], which counts a head's bytes, peeks with care, and lingers where it was told to.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::tls::{SslDigest, TlsRef};
use pingora::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream, TimingDigest,
    UniqueID, UniqueIDType,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::time::{timeout, timeout_at};

/// What a connection's reading of heads is allowed, and how far it is. Shared by the wire and by who reads requests off it.
#[derive(Debug)]
pub struct Gauge {
    head_bytes_max: usize,
    /// Bytes of the head that is being read; more than the limit means that a further read was refused.
    head_bytes: AtomicUsize,
    reading_head: AtomicBool,
    opened: Instant,
    /// Microseconds from the opening to the head's first byte, plus one; 0 while none came.
    first_byte: AtomicU64,
    /// Bytes of the next head that came behind the last request.
    carried: AtomicUsize,
    lingers: AtomicBool,
}

impl Gauge {
    pub fn new(head_bytes_max: usize) -> Self {
        Gauge {
            head_bytes_max,
            head_bytes: AtomicUsize::new(0),
            reading_head: AtomicBool::new(false),
            opened: Instant::now(),
            first_byte: AtomicU64::new(0),
            carried: AtomicUsize::new(0),
            lingers: AtomicBool::new(false),
        }
    }

    /// The next head has begun: `bytes` of it came behind the last request.
    pub fn carry(&self, bytes: usize) {
        self.carried.store(bytes, Relaxed);
    }

    pub fn begin_head(&self) {
        let already = self.carried.swap(0, Relaxed);
        self.head_bytes.store(already, Relaxed);
        self.first_byte.store(if already > 0 { self.now() } else { 0 }, Relaxed);
        self.reading_head.store(true, Relaxed);
    }

    /// The head is read, or given up.
    pub fn end_head(&self) {
        self.reading_head.store(false, Relaxed);
    }

    /// When the head's first byte came.
    pub fn head_began(&self) -> Option<Instant> {
        let after = self.first_byte.load(Relaxed).checked_sub(1)?;
        Some(self.opened + Duration::from_micros(after))
    }

    fn now(&self) -> u64 {
        self.opened.elapsed().as_micros() as u64 + 1
    }

    pub fn head_is_too_large(&self) -> bool {
        self.head_bytes.load(Relaxed) > self.head_bytes_max
    }

    pub fn head_bytes_max(&self) -> usize {
        self.head_bytes_max
    }

    /// The client may still be sending: closing reads on for a moment, so that the last answer reaches it.
    pub fn linger(&self) {
        self.lingers.store(true, Relaxed);
    }

    /// Counts `read` bytes of a head.
    fn count(&self, read: usize) {
        if read > 0 && self.head_bytes.fetch_add(read, Relaxed) == 0 {
            self.first_byte.store(self.now(), Relaxed);
        }
    }
}

/// How long a closing connection is read on at most.
const LINGER: Duration = Duration::from_secs(1);
/// What every HTTP/2 connection begins with.
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A client's connection, gauged.
pub struct Wire {
    inner: Stream,
    gauge: Arc<Gauge>,
    /// Bytes that were peeked at, to be read first.
    peeked: BytesMut,
    peek_limit: Duration,
}

impl Wire {
    /// `peek_limit`: the first bytes of a connection that may be HTTP/2 come within this.
    pub fn new(inner: Stream, gauge: Arc<Gauge>, peek_limit: Duration) -> Self {
        Wire { inner, gauge, peeked: BytesMut::new(), peek_limit }
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("id", &self.inner.id()).finish_non_exhaustive()
    }
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let in_head = this.gauge.reading_head.load(Relaxed);
        if in_head && this.gauge.head_is_too_large() {
            return Poll::Ready(Err(io::Error::other("the head is larger than its limit")));
        }
        let before = buf.filled().len();
        if this.peeked.is_empty() {
            ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
        } else {
            let take = this.peeked.len().min(buf.remaining());
            buf.put_slice(&this.peeked[..take]);
            this.peeked.advance(take);
        }
        if in_head {
            this.gauge.count(buf.filled().len() - before);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[async_trait]
impl Shutdown for Wire {
    async fn shutdown(&mut self) {
        self.inner.shutdown().await;
        if self.gauge.lingers.load(Relaxed) {
            let mut sink = [0; 4096];
            let drained = async { while matches!(self.inner.read(&mut sink).await, Ok(n) if n > 0) {} };
            let _ = timeout(LINGER, drained).await;
        }
    }
}

#[async_trait]
impl Peek for Wire {
    /// Reads until it is clear whether the connection speaks HTTP/2. Pingora's own waits for as many bytes as the preface
    /// has, which an HTTP/1 request need not have, and loses what came of a shorter one.
    async fn try_peek(&mut self, buf: &mut [u8]) -> io::Result<bool> {
        buf.fill(0);
        let deadline = tokio::time::Instant::now() + self.peek_limit;
        while self.peeked.len() < H2_PREFACE.len() && H2_PREFACE.starts_with(&self.peeked) {
            match timeout_at(deadline, self.inner.read_buf(&mut self.peeked)).await {
                Ok(Ok(0)) => break,
                Ok(read) => drop(read?),
                Err(_) => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
        let seen = self.peeked.len().min(buf.len());
        buf[..seen].copy_from_slice(&self.peeked[..seen]);
        Ok(true)
    }
}

impl UniqueID for Wire {
    fn id(&self) -> UniqueIDType {
        self.inner.id()
    }
}

impl Ssl for Wire {
    fn get_ssl(&self) -> Option<&TlsRef> {
        self.inner.get_ssl()
    }

    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.inner.get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.inner.selected_alpn_proto()
    }
}

impl GetTimingDigest for Wire {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.inner.get_timing_digest()
    }

    fn get_read_pending_time(&self) -> Duration {
        self.inner.get_read_pending_time()
    }

    fn get_write_pending_time(&self) -> Duration {
        self.inner.get_write_pending_time()
    }
}

impl GetProxyDigest for Wire {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.inner.get_proxy_digest()
    }
}

impl GetSocketDigest for Wire {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.inner.get_socket_digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncWriteExt, duplex};

    fn wire(head_bytes_max: usize) -> (tokio::io::DuplexStream, Wire, Arc<Gauge>) {
        let (client, server) = duplex(1 << 20);
        let gauge = Arc::new(Gauge::new(head_bytes_max));
        (client, Wire::new(Box::new(server), gauge.clone(), Duration::from_secs(5)), gauge)
    }

    #[tokio::test]
    async fn a_head_may_fill_its_limit_and_a_further_read_fails() {
        let (mut client, mut wire, gauge) = wire(8);
        client.write_all(&[b'x'; 20]).await.unwrap();
        gauge.begin_head();
        let mut buf = [0; 4];
        for _ in 0..2 {
            wire.read_exact(&mut buf).await.unwrap();
        }
        assert!(!gauge.head_is_too_large() && gauge.head_began().is_some());
        wire.read_exact(&mut buf).await.unwrap();
        assert!(gauge.head_is_too_large());
        assert!(wire.read_exact(&mut buf).await.is_err());
        gauge.end_head();
        wire.read_exact(&mut buf).await.unwrap();
    }

    #[tokio::test]
    async fn peeking_loses_nothing_and_needs_no_more_than_came() {
        for sent in [&b"GET / HTTP/1.0\r\n\r\n"[..], b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0", b""] {
            let (mut client, mut wire, _) = wire(100);
            client.write_all(sent).await.unwrap();
            AsyncWriteExt::shutdown(&mut client).await.unwrap();
            let mut buf = [1; 24];
            assert!(wire.try_peek(&mut buf).await.unwrap());
            assert_eq!(buf == H2_PREFACE, sent.starts_with(H2_PREFACE));
            let mut got = Vec::new();
            wire.read_to_end(&mut got).await.unwrap();
            assert_eq!(got, sent);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peek_ends_in_time() {
        let (_client, mut wire, _) = wire(100);
        assert_eq!(wire.try_peek(&mut [0; 24]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_lingering_close_reads_on() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let server = pingora::protocols::l4::stream::Stream::from(listener.accept().await.unwrap().0);
        let gauge = Arc::new(Gauge::new(100));
        gauge.linger();
        let mut wire = Wire::new(Box::new(server), gauge, Duration::from_secs(5));
        client.write_all(&[0; 500_000]).await.unwrap();
        let closing = tokio::spawn(async move { Shutdown::shutdown(&mut wire).await });
        assert_eq!(client.read_to_end(&mut Vec::new()).await.unwrap(), 0, "an end and no reset");
        client.write_all(&[0; 500_000]).await.unwrap();
        drop(client);
        closing.await.unwrap();
    }
}
