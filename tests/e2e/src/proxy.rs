//! A TCP proxy before a prefill worker's bootstrap port: it cuts, stalls, delays and falsifies what passes between the two
//! halves of a split. Control channels and data streams are told apart by the Upgrade header that opens a connection.
//!
//! It promises that bytes keep their order, that nothing passes a direction while it is stalled, and that little fits into
//! it: a stalled data stream soon stops its sender.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::net;

/// The head of a connection's first request.
const HEAD_BYTES_MAX: usize = 8 << 10;
const HEAD_TIME_MAX: Duration = Duration::from_secs(10);
/// What one read of a stream takes.
const READ_BYTES: usize = 16 << 10;
/// The socket to the prefill worker: with small segments and a small window the kernels at both ends of a fresh connection
/// take some ten KiB together, not megabytes.
const SEGMENT_BYTES: u32 = 500;
const WINDOW_BYTES: u32 = 4 << 10;

/// The header of a piece on a data stream: how it begins, its length, and where in it the number of bytes that follow stands.
const PIECE_MAGIC: &[u8] = b"TKV1";
const PIECE_HEADER_BYTES: usize = 48;
const PIECE_LENGTH_AT: usize = 40;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    Control,
    Data,
}

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    ToPrefill,
    ToDecode,
}

#[derive(Clone, Copy, Default)]
struct Flow {
    stalled: bool,
    delay: Duration,
}

#[derive(Clone, Copy, Default)]
struct Weather {
    /// New connections are accepted, and nothing more.
    holds_new: bool,
    flows: [[Flow; 2]; 2],
    /// Connections that were open before the latest cut end.
    cuts: [u64; 2],
    falsifies: bool,
}

impl Weather {
    fn flow(&mut self, line: Line, way: Way) -> &mut Flow {
        &mut self.flows[line as usize][way as usize]
    }
}

/// One proxy. Dropping it closes its connections.
pub struct Proxy {
    pub port: u16,
    weather: watch::Sender<Weather>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a port of its own before `port` of this test's address.
    pub async fn before(port: u16) -> Self {
        let own = net::free_port();
        let listener = TcpListener::bind((net::host(), own)).await.expect("the port is free");
        let weather = watch::Sender::new(Weather::default());
        let target = SocketAddr::from((net::host(), port));
        let task = tokio::spawn(accept(listener, target, weather.clone()));
        Self { port: own, weather, task }
    }

    /// Ends every open connection of this kind.
    pub fn cut(&self, line: Line) {
        self.weather.send_modify(|weather| weather.cuts[line as usize] += 1);
    }

    /// Nothing goes this way until [`Proxy::clear`].
    pub fn stall(&self, line: Line, way: Way) {
        self.weather.send_modify(|weather| weather.flow(line, way).stalled = true);
    }

    /// What goes this way takes so much longer, until [`Proxy::clear`].
    pub fn delay(&self, line: Line, way: Way, delay: Duration) {
        self.weather.send_modify(|weather| weather.flow(line, way).delay = delay);
    }

    /// New connections are accepted and get no answer, until [`Proxy::clear`].
    pub fn hold_new(&self) {
        self.weather.send_modify(|weather| weather.holds_new = true);
    }

    /// From here on a bit of each KV value is flipped on its way.
    pub fn falsify(&self) {
        self.weather.send_modify(|weather| weather.falsifies = true);
    }

    /// Fair weather again; what was cut stays cut.
    pub fn clear(&self) {
        self.weather.send_modify(|weather| *weather = Weather { cuts: weather.cuts, ..Weather::default() });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The connections' tasks are in a set that the task owns.
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, weather: watch::Sender<Weather>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    let weather = weather.subscribe();
                    // An error is the end of either side, which both are told by the end of their connection.
                    connections.spawn(async move { carry(stream, target, weather).await.ok() });
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// One connection from its first byte to its end.
async fn carry(
    mut decode: TcpStream,
    target: SocketAddr,
    mut weather: watch::Receiver<Weather>,
) -> std::io::Result<()> {
    decode.set_nodelay(true)?;
    let head = tokio::time::timeout(HEAD_TIME_MAX, read_head(&mut decode)).await??;
    let line = line_of(&head);
    let cuts = weather.borrow().cuts[line as usize];
    let mut cut = weather.clone();
    let was_cut = cut.wait_for(|weather| weather.cuts[line as usize] != cuts);
    let carried = async {
        weather.wait_for(|weather| !weather.holds_new).await.map_err(gone)?;
        let prefill = connect(target).await?;
        let (from_decode, to_decode) = decode.into_split();
        let (from_prefill, mut to_prefill) = prefill.into_split();
        to_prefill.write_all(&head).await?;
        let pump = |way| Pump { line, way, weather: weather.clone(), falsifier: Falsifier::default() };
        tokio::select! {
            ended = pump(Way::ToPrefill).run(from_decode, to_prefill) => ended,
            ended = pump(Way::ToDecode).run(from_prefill, to_decode) => ended,
        }
    };
    tokio::select! {
        ended = carried => ended,
        _ = was_cut => Ok(()),
    }
}

fn gone(_: watch::error::RecvError) -> std::io::Error {
    std::io::ErrorKind::NotConnected.into()
}

async fn connect(target: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(WINDOW_BYTES)?;
    socket2::SockRef::from(&socket).set_tcp_mss(SEGMENT_BYTES)?;
    let stream = socket.connect(target).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Up to and with the empty line.
async fn read_head(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= HEAD_BYTES_MAX {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        head.push(stream.read_u8().await?);
    }
    Ok(head)
}

/// What is no data stream counts as control: a probe of the port, too.
fn line_of(head: &[u8]) -> Line {
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    if head.lines().any(|line| line.starts_with("upgrade:") && line.contains("data")) {
        Line::Data
    } else {
        Line::Control
    }
}

/// One direction of one connection.
struct Pump {
    line: Line,
    way: Way,
    weather: watch::Receiver<Weather>,
    falsifier: Falsifier,
}

impl Pump {
    async fn run(mut self, mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> std::io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            self.until_open().await?;
            let count = from.read(&mut buffer).await?;
            if count == 0 {
                return Ok(());
            }
            // A stall that came while this waited for bytes holds them, too.
            let flow = self.until_open().await?;
            if !flow.delay.is_zero() {
                tokio::time::sleep(flow.delay).await;
            }
            if self.line == Line::Data && self.way == Way::ToDecode {
                let falsifies = self.weather.borrow().falsifies;
                self.falsifier.pass(&mut buffer[..count], falsifies);
            }
            to.write_all(&buffer[..count]).await?;
        }
    }

    async fn until_open(&mut self) -> std::io::Result<Flow> {
        let (line, way) = (self.line as usize, self.way as usize);
        let weather = self.weather.wait_for(|weather| !weather.flows[line][way].stalled).await.map_err(gone)?;
        Ok(weather.flows[line][way])
    }
}

/// Follows the frames of a data stream, so that it can falsify pieces and leave their headers alone.
#[derive(Default)]
struct Falsifier {
    /// What has come of a header.
    header: Vec<u8>,
    piece_rest: u64,
    piece_at: u64,
}

impl Falsifier {
    fn pass(&mut self, bytes: &mut [u8], falsifies: bool) {
        for byte in bytes {
            if self.piece_rest == 0 {
                self.header.push(*byte);
                // What comes before the first piece, the upgrade and the handshake, is passed over.
                let begun = self.header.len().min(PIECE_MAGIC.len());
                if self.header[..begun] != PIECE_MAGIC[..begun] {
                    self.header.clear();
                    self.header.extend((*byte == PIECE_MAGIC[0]).then_some(*byte));
                }
                if self.header.len() == PIECE_HEADER_BYTES {
                    let length = &self.header[PIECE_LENGTH_AT..];
                    self.piece_rest = u64::from_le_bytes(length.try_into().expect("eight bytes"));
                    self.piece_at = 0;
                    self.header.clear();
                }
            } else {
                // The sign of each 16-bit value.
                if falsifies && self.piece_at % 2 == 1 {
                    *byte ^= 0x80;
                }
                self.piece_at += 1;
                self.piece_rest -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    /// A server that echoes, the proxy before it, and a connection of this kind that passed its upgrade.
    async fn echo(line: Line) -> (Proxy, TcpStream) {
        let server = TcpListener::bind((net::host(), 0)).await.unwrap();
        let proxy = Proxy::before(server.local_addr().unwrap().port()).await;
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = server.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.split();
                    tokio::io::copy(&mut from, &mut to).await
                });
            }
        });
        let mut client = TcpStream::connect((net::host(), proxy.port)).await.unwrap();
        let name = if line == Line::Data { "tandem-data" } else { "tandem-control" };
        let head = format!("GET / HTTP/1.1\r\nUpgrade: {name}\r\n\r\n");
        client.write_all(head.as_bytes()).await.unwrap();
        let mut echoed = vec![0; head.len()];
        client.read_exact(&mut echoed).await.unwrap();
        assert_eq!(echoed, head.as_bytes());
        (proxy, client)
    }

    async fn returns(client: &mut TcpStream, text: &[u8]) {
        let mut back = vec![0; text.len()];
        tokio::time::timeout(LIMIT, client.read_exact(&mut back)).await.expect("in time").expect("an echo");
        assert_eq!(back, text);
    }

    #[tokio::test]
    async fn a_cut_ends_its_own_kind_only() {
        let (proxy, mut client) = echo(Line::Data).await;
        proxy.cut(Line::Control);
        client.write_all(b"on").await.unwrap();
        returns(&mut client, b"on").await;
        proxy.cut(Line::Data);
        let end = tokio::time::timeout(LIMIT, client.read_u8()).await.expect("in time");
        assert!(end.is_err(), "the connection ended");
    }

    #[tokio::test]
    async fn a_stall_holds_one_way_until_it_clears_and_little_fits_in() {
        let (proxy, mut client) = echo(Line::Control).await;
        proxy.stall(Line::Control, Way::ToDecode);
        client.write_all(b"there").await.unwrap();
        let early = tokio::time::timeout(Duration::from_millis(100), client.read_u8()).await;
        assert!(early.is_err(), "nothing came back");
        proxy.clear();
        returns(&mut client, b"there").await;

        proxy.stall(Line::Control, Way::ToPrefill);
        let filled = tokio::time::timeout(Duration::from_secs(1), client.write_all(&vec![7; 64 << 20])).await;
        assert!(filled.is_err(), "the sender is stopped");
    }

    #[tokio::test]
    async fn a_delay_is_added_and_order_kept() {
        let (proxy, mut client) = echo(Line::Control).await;
        proxy.delay(Line::Control, Way::ToPrefill, Duration::from_millis(80));
        let began = Instant::now();
        client.write_all(b"first").await.unwrap();
        client.write_all(b"second").await.unwrap();
        returns(&mut client, b"firstsecond").await;
        assert!(began.elapsed() >= Duration::from_millis(80), "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn a_held_connection_gets_no_answer_until_it_clears() {
        let (proxy, _client) = echo(Line::Control).await;
        proxy.hold_new();
        let mut held = TcpStream::connect((net::host(), proxy.port)).await.unwrap();
        held.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let early = tokio::time::timeout(Duration::from_millis(100), held.read_u8()).await;
        assert!(early.is_err(), "nothing came back");
        proxy.clear();
        returns(&mut held, b"GET / HTTP/1.1\r\n\r\n").await;
    }

    #[test]
    fn only_pieces_are_falsified() {
        let mut header = [1u8; PIECE_HEADER_BYTES];
        header[..PIECE_MAGIC.len()].copy_from_slice(PIECE_MAGIC);
        header[PIECE_LENGTH_AT..].copy_from_slice(&4u64.to_le_bytes());
        let sound: Vec<u8> = [b"HTTP/1.1 101\r\nT\r\nT", &header[..], &[5; 4], &header[..], &[6; 4]].concat();
        let mut bytes = sound.clone();
        let mut falsifier = Falsifier::default();
        for chunk in bytes.chunks_mut(7) {
            falsifier.pass(chunk, true);
        }
        let changed: Vec<usize> = (0..sound.len()).filter(|&at| sound[at] != bytes[at]).collect();
        let first = 18 + PIECE_HEADER_BYTES;
        let second = first + 4 + PIECE_HEADER_BYTES;
        assert_eq!(changed, [first + 1, first + 3, second + 1, second + 3]);
    }
}
