//! D's side of the TCP backend: one reader task per data stream copies pieces into the pools.

use std::{
    collections::HashMap,
    io::{self, IoSliceMut},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use tandem_handoff::{
    ids::{Attempt, Channel},
    layout::{Mapping, PoolShape},
};
use tokio::{io::AsyncReadExt, net::TcpStream, runtime::Handle, task::AbortHandle};

use super::frame::{HEADER_BYTES, Header};
use crate::{
    SinkFabric, SinkReport, Waker,
    landing::{Borrow, Expected, Landing, Place, lock},
    memory::PoolMemory,
};

/// Bytes of a discarded frame that are read at once.
const SCRATCH_BYTES: usize = 64 * 1024;

/// A cheap handle: the engine expects and revokes through one, the bootstrap driver attaches streams through another.
#[derive(Clone)]
pub struct TcpSink(Arc<Shared>);

struct Shared {
    landing: Landing,
    runtime: Handle,
    readers: Mutex<HashMap<Channel, Vec<AbortHandle>>>,
    bytes_received: AtomicU64,
}

impl TcpSink {
    /// `memories` are D's pools, one per rank of `shape`.
    pub fn new(shape: PoolShape, memories: Vec<Arc<PoolMemory>>, runtime: Handle, waker: Waker) -> Self {
        Self(Arc::new(Shared {
            landing: Landing::new(shape, memories, waker),
            runtime,
            readers: Mutex::default(),
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
        self.0.landing.expect(attempt, pages, mapping);
    }

    fn revoke(&mut self, attempt: Attempt) {
        self.0.landing.revoke(attempt);
    }

    fn peer_drained(&mut self, _attempt: Attempt) {
        // The reader's own borrow is the proof here; what P says adds nothing to it.
    }

    fn release(&mut self, attempt: Attempt) {
        self.0.landing.release(attempt);
    }

    fn close(&mut self, channel: Channel) {
        for reader in lock(&self.0.readers).remove(&channel).unwrap_or_default() {
            reader.abort();
        }
    }

    fn poll(&mut self) -> Vec<SinkReport> {
        self.0.landing.poll()
    }
}

async fn run_reader(shared: Arc<Shared>, channel: Channel, rank: u32, stream: TcpStream) {
    let mut frames = Frames { stream, header: [0; HEADER_BYTES], read: 0 };
    let Err(why) = read_frames(&shared, channel, rank, &mut frames).await;
    shared.landing.broke(channel, format!("a data stream broke: {why}"));
}

async fn read_frames(
    shared: &Shared,
    channel: Channel,
    rank: u32,
    frames: &mut Frames,
) -> Result<std::convert::Infallible, String> {
    let landing = &shared.landing;
    let piece_bytes_max = landing.shape().page_bytes() as u64;
    loop {
        let header = frames.header().await.map_err(|error| error.to_string())?;
        let header = Header::decode(&header).ok_or("the peer sent bytes that begin no frame")?;
        if header.attempt.channel() != channel || header.bytes > piece_bytes_max {
            return Err("the peer sent a frame that is not of this channel".to_owned());
        }
        let Some(expected) = landing.find(header.attempt) else {
            frames.discard(header.bytes).await.map_err(|error| error.to_string())?;
            continue;
        };
        let place = landing.place(&expected, header.piece, header.bytes)?;
        if place.rank != rank {
            return Err(format!("piece {} of rank {} on the stream of rank {rank}", header.piece, place.rank));
        }
        match frames.copy(landing, &expected, place).await.map_err(|error| error.to_string())? {
            0 => landing.land(&expected, header.piece),
            rest => frames.discard(rest as u64).await.map_err(|error| error.to_string())?,
        }
        shared.bytes_received.fetch_add(header.bytes, Ordering::Relaxed);
    }
}

/// A data stream, with as much of the next header as came behind the last piece.
struct Frames {
    stream: TcpStream,
    header: [u8; HEADER_BYTES],
    read: usize,
}

impl Frames {
    async fn header(&mut self) -> io::Result<[u8; HEADER_BYTES]> {
        while self.read < HEADER_BYTES {
            match self.stream.read(&mut self.header[self.read..]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.read += count,
            }
        }
        self.read = 0;
        Ok(self.header)
    }

    /// Reads a piece into its page. Returns how many of its bytes are left in the stream: not 0 when the attempt was
    /// revoked.
    async fn copy(&mut self, landing: &Landing, expected: &Expected, place: Place) -> io::Result<usize> {
        let mut filled = 0;
        while filled < place.bytes {
            self.stream.readable().await?;
            let Some(borrow) = Borrow::take(landing, expected) else {
                break;
            };
            let left = place.bytes - filled;
            // SAFETY: `place` lies in its pool (asserted where it was made). The borrow is held until after the read call,
            // so the page is the attempt's alone (see `Borrow::target`); pieces of one attempt do not overlap, and each
            // arrives on one stream, whose only reader this task is.
            let target = unsafe { std::slice::from_raw_parts_mut(borrow.target(place, filled), left) };
            let mut slices = [IoSliceMut::new(target), IoSliceMut::new(&mut self.header)];
            match self.stream.try_read_vectored(&mut slices) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    filled += count.min(left);
                    self.read = count.saturating_sub(left);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(place.bytes - filled)
    }

    /// Reads and forgets the rest of a frame that no live attempt owns.
    async fn discard(&mut self, mut bytes: u64) -> io::Result<()> {
        let mut scratch = vec![0; SCRATCH_BYTES];
        while bytes > 0 {
            let most = SCRATCH_BYTES.min(usize::try_from(bytes).unwrap_or(SCRATCH_BYTES));
            match self.stream.read(&mut scratch[..most]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => bytes -= count as u64,
            }
        }
        Ok(())
    }
}
