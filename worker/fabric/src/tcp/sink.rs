//! D's side of the TCP backend: one reader task per data stream copies pieces into the pools.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tandem_handoff::{
    ids::{Attempt, Channel},
    layout::{Mapping, PieceSet, PoolShape},
};
use tokio::{io::AsyncReadExt, net::TcpStream, runtime::Handle, task::AbortHandle};

use super::frame::{HEADER_BYTES, Header};
use crate::{SinkFabric, SinkReport, Waker, memory::PoolMemory};

/// Bytes of a discarded frame that are read at once.
const SCRATCH_BYTES: usize = 64 * 1024;

/// A cheap handle: the engine expects and revokes through one, the bootstrap driver attaches streams through another.
#[derive(Clone)]
pub struct TcpSink(Arc<Shared>);

struct Shared {
    shape: PoolShape,
    memories: Vec<Arc<PoolMemory>>,
    runtime: Handle,
    waker: Waker,
    /// Attempts that may write. One look-up per frame, first thing (H3).
    expected: Mutex<HashMap<Attempt, Arc<Expected>>>,
    readers: Mutex<HashMap<Channel, Vec<AbortHandle>>>,
    reports: Mutex<Reports>,
    bytes_received: AtomicU64,
}

/// Bounded: pieces and quiets by the attempts that were expected, breaks by the streams that were attached.
#[derive(Default)]
struct Reports {
    landed: BTreeMap<Attempt, Vec<u32>>,
    quiet: Vec<Attempt>,
    broken: Vec<(Channel, String)>,
}

/// An attempt that may write into `pages`.
struct Expected {
    attempt: Attempt,
    pages: Vec<u32>,
    mapping: Mapping,
    state: Mutex<ExpectedState>,
}

struct ExpectedState {
    revoked: bool,
    /// Reads into the attempt's pages that are in progress now.
    borrows: u32,
    landed: PieceSet,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TcpSink {
    /// `memories` are D's pools, one per rank of `shape`.
    pub fn new(shape: PoolShape, memories: Vec<Arc<PoolMemory>>, runtime: Handle, waker: Waker) -> Self {
        Self(Arc::new(Shared {
            shape,
            memories,
            runtime,
            waker,
            expected: Mutex::default(),
            readers: Mutex::default(),
            reports: Mutex::default(),
            bytes_received: AtomicU64::new(0),
        }))
    }

    /// The stream that carries the pieces for `rank` from the channel's prefill worker.
    pub fn attach(&self, channel: Channel, rank: u32, stream: TcpStream) {
        let task = self.0.runtime.spawn(run_reader(Arc::clone(&self.0), channel, rank, stream));
        lock(&self.0.readers).entry(channel).or_default().push(task.abort_handle());
    }

    pub fn bytes_received(&self) -> u64 {
        self.0.bytes_received.load(Ordering::Relaxed)
    }
}

impl SinkFabric for TcpSink {
    fn expect(&mut self, attempt: Attempt, pages: &[u32], mapping: Mapping) {
        let landed = PieceSet::new(mapping.pieces(pages.len()));
        let state = Mutex::new(ExpectedState { revoked: false, borrows: 0, landed });
        let expected = Expected { attempt, pages: pages.to_vec(), mapping, state };
        lock(&self.0.expected).insert(attempt, Arc::new(expected));
    }

    fn revoke(&mut self, attempt: Attempt) {
        let Some(expected) = lock(&self.0.expected).remove(&attempt) else {
            return;
        };
        let quiet = {
            let mut state = lock(&expected.state);
            state.revoked = true;
            state.borrows == 0
        };
        if quiet {
            self.0.report_quiet(attempt);
        }
    }

    fn peer_drained(&mut self, _attempt: Attempt) {
        // The reader's own borrow is the proof here; what P says adds nothing to it.
    }

    fn release(&mut self, attempt: Attempt) {
        lock(&self.0.expected).remove(&attempt);
        lock(&self.0.reports).landed.remove(&attempt);
    }

    fn close(&mut self, channel: Channel) {
        for reader in lock(&self.0.readers).remove(&channel).unwrap_or_default() {
            reader.abort();
        }
    }

    fn poll(&mut self) -> Vec<SinkReport> {
        let reports = std::mem::take(&mut *lock(&self.0.reports));
        let landed = reports.landed.into_iter().map(|(attempt, pieces)| SinkReport::Landed { attempt, pieces });
        let quiet = reports.quiet.into_iter().map(|attempt| SinkReport::Quiet { attempt });
        let broken = reports.broken.into_iter().map(|(channel, why)| SinkReport::Broken { channel, why });
        landed.chain(quiet).chain(broken).collect()
    }
}

impl Shared {
    fn report_quiet(&self, attempt: Attempt) {
        lock(&self.reports).quiet.push(attempt);
        (self.waker)();
    }

    /// Records a piece that is whole in its page.
    fn land(&self, expected: &Expected, piece: u32) {
        let complete = {
            let mut state = lock(&expected.state);
            if state.revoked || !state.landed.insert(piece as usize) {
                return;
            }
            state.landed.is_full()
        };
        lock(&self.reports).landed.entry(expected.attempt).or_default().push(piece);
        if complete {
            (self.waker)();
        }
    }

    /// Where the frame's piece belongs, in the pool of `rank`.
    fn destination(&self, expected: &Expected, rank: u32, header: &Header) -> Result<usize, String> {
        let piece = header.piece as usize;
        let landed = &lock(&expected.state).landed;
        if piece >= landed.size() {
            return Err(format!("piece {piece} of a set of {}", landed.size()));
        }
        if landed.contains(piece) {
            return Err(format!("piece {piece} came twice"));
        }
        let (page, route) = expected.mapping.split(piece);
        if route.decode_rank != rank {
            return Err(format!("piece {piece} of rank {} on the stream of rank {rank}", route.decode_rank));
        }
        let bytes = expected.mapping.bytes(route);
        if header.bytes != bytes as u64 {
            return Err(format!("piece {piece} with {} bytes instead of {bytes}", header.bytes));
        }
        let offset = self.shape.head_offset(expected.pages[page], route.decode_head);
        assert!(offset + bytes <= self.memories[rank as usize].len(), "an offered page lies in its pool");
        Ok(offset)
    }
}

/// The right to write into an attempt's pages during one read call. The last one of a revoked attempt, when it is given
/// back, is the proof of quiet.
struct Borrow<'a> {
    shared: &'a Shared,
    expected: &'a Expected,
}

impl<'a> Borrow<'a> {
    /// `None` once the attempt is revoked.
    fn take(shared: &'a Shared, expected: &'a Expected) -> Option<Self> {
        let mut state = lock(&expected.state);
        if state.revoked {
            return None;
        }
        state.borrows += 1;
        Some(Self { shared, expected })
    }
}

impl Drop for Borrow<'_> {
    fn drop(&mut self) {
        let quiet = {
            let mut state = lock(&self.expected.state);
            state.borrows -= 1;
            state.revoked && state.borrows == 0
        };
        if quiet {
            self.shared.report_quiet(self.expected.attempt);
        }
    }
}

async fn run_reader(shared: Arc<Shared>, channel: Channel, rank: u32, mut stream: TcpStream) {
    let Err(why) = read_frames(&shared, channel, rank, &mut stream).await;
    lock(&shared.reports).broken.push((channel, format!("a data stream broke: {why}")));
    (shared.waker)();
}

async fn read_frames(
    shared: &Shared,
    channel: Channel,
    rank: u32,
    stream: &mut TcpStream,
) -> Result<std::convert::Infallible, String> {
    let piece_bytes_max = shared.shape.page_bytes() as u64;
    loop {
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header).await.map_err(|error| error.to_string())?;
        let header = Header::decode(&header).ok_or("the peer sent bytes that begin no frame")?;
        if header.attempt.channel() != channel || header.bytes > piece_bytes_max {
            return Err("the peer sent a frame that is not of this channel".to_owned());
        }
        let expected = lock(&shared.expected).get(&header.attempt).cloned();
        let Some(expected) = expected else {
            discard(stream, header.bytes).await.map_err(|error| error.to_string())?;
            continue;
        };
        let offset = shared.destination(&expected, rank, &header)?;
        let copied = copy(shared, &expected, rank, offset, header.bytes as usize, stream);
        match copied.await.map_err(|error| error.to_string())? {
            0 => shared.land(&expected, header.piece),
            rest => discard(stream, rest as u64).await.map_err(|error| error.to_string())?,
        }
        shared.bytes_received.fetch_add(header.bytes, Ordering::Relaxed);
    }
}

/// Reads a piece into its page. Returns how many bytes are left in the stream: not 0 when the attempt was revoked.
async fn copy(
    shared: &Shared,
    expected: &Expected,
    rank: u32,
    offset: usize,
    bytes: usize,
    stream: &TcpStream,
) -> io::Result<usize> {
    let memory = &shared.memories[rank as usize];
    let mut filled = 0;
    while filled < bytes {
        stream.readable().await?;
        let Some(_borrow) = Borrow::take(shared, expected) else {
            break;
        };
        // SAFETY: `destination` asserted that the range lies in the mapping. The borrow is held until after the read call:
        // while it is out the attempt owns the page (H1), no proof of quiet exists, so nobody else reads or writes it;
        // pieces of one attempt do not overlap, and each arrives on one stream, whose only reader this task is.
        let target = unsafe { std::slice::from_raw_parts_mut(memory.as_ptr().add(offset + filled), bytes - filled) };
        match stream.try_read(target) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes - filled)
}

/// Reads and forgets the rest of a frame that no live attempt owns.
async fn discard(stream: &mut TcpStream, mut bytes: u64) -> io::Result<()> {
    let mut scratch = vec![0; SCRATCH_BYTES];
    while bytes > 0 {
        let most = SCRATCH_BYTES.min(usize::try_from(bytes).unwrap_or(SCRATCH_BYTES));
        match stream.read(&mut scratch[..most]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => bytes -= count as u64,
        }
    }
    Ok(())
}
