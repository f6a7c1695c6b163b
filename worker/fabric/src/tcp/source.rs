//! P's side of the TCP backend: one sender task per data stream reads posted pieces out of the pools.
//!
//! Queues are bounded by the scheduler: each piece of an attempt is posted once, and attempts hold pages of P's pool.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io::{self, IoSlice},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tandem_handoff::{
    ids::{Attempt, Channel},
    source::{Piece, Settlement},
};
use tokio::{net::TcpStream, runtime::Handle, sync::Notify, task::AbortHandle};

use super::frame::{HEADER_BYTES, Header};
use crate::{SourceFabric, SourceReport, Waker, memory::PoolMemory};

/// What follows the header of a stopped frame.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];

/// A cheap handle: the engine posts through one, the bootstrap driver attaches streams through another.
#[derive(Clone)]
pub struct TcpSource(Arc<Shared>);

struct Shared {
    memories: Vec<Arc<PoolMemory>>,
    runtime: Handle,
    waker: Waker,
    books: Mutex<Books>,
    bytes_sent: AtomicU64,
}

#[derive(Default)]
struct Books {
    lanes: HashMap<(Channel, u32), Arc<Lane>>,
    attempts: BTreeMap<Attempt, Posts>,
    broken: Vec<(Channel, String)>,
}

/// The posts of one attempt, until all are settled and reported.
#[derive(Default)]
struct Posts {
    stop: Arc<Stop>,
    outstanding: u64,
    sent: u64,
    dropped: u64,
    unknown: u64,
}

#[derive(Default)]
struct Stop {
    stopped: AtomicBool,
    notify: Notify,
}

struct Job {
    attempt: Attempt,
    piece: Piece,
    stop: Arc<Stop>,
}

/// The pieces for one decode rank. It exists from the first post or the attaching of its stream, whichever is first.
#[derive(Default)]
struct Lane {
    queue: Mutex<VecDeque<Job>>,
    ready: Notify,
    task: Mutex<Option<AbortHandle>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TcpSource {
    /// `memories` are P's pools, one per rank.
    pub fn new(memories: Vec<Arc<PoolMemory>>, runtime: Handle, waker: Waker) -> Self {
        Self(Arc::new(Shared { memories, runtime, waker, books: Mutex::default(), bytes_sent: AtomicU64::new(0) }))
    }

    /// The stream that carries the pieces for `rank` of the channel's decode worker.
    pub fn attach(&self, channel: Channel, rank: u32, stream: TcpStream) {
        let lane = self.0.lane(channel, rank);
        let task = self.0.runtime.spawn(run_lane(Arc::clone(&self.0), channel, Arc::clone(&lane), stream));
        if let Some(older) = lock(&lane.task).replace(task.abort_handle()) {
            older.abort();
        }
    }

    pub fn bytes_sent(&self) -> u64 {
        self.0.bytes_sent.load(Ordering::Relaxed)
    }
}

impl SourceFabric for TcpSource {
    fn post(&mut self, attempt: Attempt, pieces: Vec<Piece>) {
        let stop = {
            let mut books = lock(&self.0.books);
            let posts = books.attempts.entry(attempt).or_default();
            posts.outstanding += pieces.len() as u64;
            Arc::clone(&posts.stop)
        };
        for piece in pieces {
            let lane = self.0.lane(attempt.channel(), piece.target_rank);
            lock(&lane.queue).push_back(Job { attempt, piece, stop: Arc::clone(&stop) });
            lane.ready.notify_one();
        }
    }

    fn stop(&mut self, attempt: Attempt) {
        let (stop, lanes) = {
            let books = lock(&self.0.books);
            let Some(posts) = books.attempts.get(&attempt) else {
                return;
            };
            let lanes = books.lanes.iter().filter(|((channel, _), _)| *channel == attempt.channel());
            (Arc::clone(&posts.stop), lanes.map(|(_, lane)| Arc::clone(lane)).collect::<Vec<_>>())
        };
        stop.stopped.store(true, Ordering::SeqCst);
        stop.notify.notify_waiters();
        for lane in lanes {
            let mut queue = lock(&lane.queue);
            let before = queue.len();
            queue.retain(|job| job.attempt != attempt);
            let dropped = before - queue.len();
            drop(queue);
            self.0.settle(attempt, dropped as u64, Settlement::Dropped);
        }
    }

    fn peer_settled(&mut self, _attempt: Attempt) {
        // The sender's own copy is the proof here; what D says adds nothing to it.
    }

    fn close(&mut self, channel: Channel) {
        let lanes: Vec<Arc<Lane>> = {
            let mut books = lock(&self.0.books);
            let keys: Vec<_> = books.lanes.keys().filter(|(of, _)| *of == channel).copied().collect();
            keys.iter().filter_map(|key| books.lanes.remove(key)).collect()
        };
        for lane in lanes {
            if let Some(task) = lock(&lane.task).take() {
                task.abort();
            }
            self.0.drop_queue(&lane);
        }
    }

    fn poll(&mut self) -> Vec<SourceReport> {
        let mut books = lock(&self.0.books);
        let mut reports = Vec::new();
        books.attempts.retain(|&attempt, posts| {
            let ended = [
                (&mut posts.sent, Settlement::Sent),
                (&mut posts.dropped, Settlement::Dropped),
                (&mut posts.unknown, Settlement::Unknown),
            ];
            for (count, how) in ended {
                let pieces = std::mem::take(count);
                if pieces > 0 {
                    reports.push(SourceReport::Settled { attempt, pieces, how });
                }
            }
            posts.outstanding > 0
        });
        reports.extend(books.broken.drain(..).map(|(channel, why)| SourceReport::Broken { channel, why }));
        reports
    }
}

impl Shared {
    fn lane(&self, channel: Channel, rank: u32) -> Arc<Lane> {
        Arc::clone(lock(&self.books).lanes.entry((channel, rank)).or_default())
    }

    /// Counts settled pieces; wakes the engine when nothing of the attempt is outstanding.
    fn settle(&self, attempt: Attempt, pieces: u64, how: Settlement) {
        if pieces == 0 {
            return;
        }
        let mut books = lock(&self.books);
        let Some(posts) = books.attempts.get_mut(&attempt) else {
            return;
        };
        posts.outstanding -= pieces;
        match how {
            Settlement::Sent => posts.sent += pieces,
            Settlement::Dropped => posts.dropped += pieces,
            Settlement::Unknown => posts.unknown += pieces,
        }
        let wake = posts.outstanding == 0 || how != Settlement::Sent;
        drop(books);
        if wake {
            (self.waker)();
        }
    }

    fn drop_queue(&self, lane: &Lane) {
        let jobs = std::mem::take(&mut *lock(&lane.queue));
        for job in jobs {
            self.settle(job.attempt, 1, Settlement::Dropped);
        }
    }
}

/// Settles the piece that a sender task works on when the task is done with it, or is itself dropped: after that nobody
/// reads the source (H5).
struct InFlight<'a> {
    shared: &'a Shared,
    attempt: Attempt,
    how: Settlement,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.shared.settle(self.attempt, 1, self.how);
    }
}

async fn run_lane(shared: Arc<Shared>, channel: Channel, lane: Arc<Lane>, stream: TcpStream) {
    let why = loop {
        let ready = lane.ready.notified();
        let job = lock(&lane.queue).pop_front();
        let Some(job) = job else {
            tokio::select! {
                () = ready => continue,
                why = peer_closed(&stream) => break why,
            }
        };
        if let Err(error) = send(&shared, &stream, job).await {
            break error.to_string();
        }
    };
    // The stream stays open until the channel is closed, which the report below brings about; later posts queue up and
    // are dropped by that close.
    shared.drop_queue(&lane);
    lock(&shared.books).broken.push((channel, format!("a data stream broke: {why}")));
    (shared.waker)();
}

/// Waits for the end of a stream on which the peer sends nothing.
async fn peer_closed(stream: &TcpStream) -> String {
    loop {
        if let Err(error) = stream.readable().await {
            return error.to_string();
        }
        match stream.try_read(&mut [0; 1]) {
            Ok(0) => return "the decode worker closed it".to_owned(),
            Ok(_) => return "the decode worker sent bytes on it".to_owned(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return error.to_string(),
        }
    }
}

/// Writes one frame. A stop in the middle fills the rest with zeros, without the source.
async fn send(shared: &Shared, stream: &TcpStream, job: Job) -> io::Result<()> {
    let Job { attempt, piece, stop } = job;
    let mut in_flight = Some(InFlight { shared, attempt, how: Settlement::Dropped });
    let header = Header { attempt, piece: piece.index, bytes: piece.bytes as u64 }.encode();
    let total = HEADER_BYTES + piece.bytes;
    let mut written = 0;
    while written < total {
        let stopped = stop.notify.notified();
        if stop.stopped.load(Ordering::SeqCst) && in_flight.is_some() {
            if written == 0 {
                return Ok(());
            }
            in_flight = None;
        }
        if in_flight.is_some() {
            tokio::select! {
                ready = stream.writable() => ready?,
                () = stopped => continue,
            }
        } else {
            stream.writable().await?;
        }
        let head = &header[written.min(HEADER_BYTES)..];
        let sent = written.saturating_sub(HEADER_BYTES);
        let body: &[u8] = match &in_flight {
            Some(_) => source_bytes(&shared.memories, &piece, sent),
            None => &ZEROS[..ZEROS.len().min(piece.bytes - sent)],
        };
        match stream.try_write_vectored(&[IoSlice::new(head), IoSlice::new(body)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => written += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                poison(&mut in_flight);
                return Err(error);
            }
        }
        if written < total {
            poison(&mut in_flight);
        }
    }
    if let Some(in_flight) = &mut in_flight {
        in_flight.how = Settlement::Sent;
    }
    shared.bytes_sent.fetch_add(piece.bytes as u64, Ordering::Relaxed);
    Ok(())
}

/// The frame was begun: if the task ends here, what D got is unknown.
fn poison(in_flight: &mut Option<InFlight<'_>>) {
    if let Some(in_flight) = in_flight {
        in_flight.how = Settlement::Unknown;
    }
}

/// The bytes of a piece from `from` on, for one write call.
fn source_bytes<'a>(memories: &'a [Arc<PoolMemory>], piece: &Piece, from: usize) -> &'a [u8] {
    let memory = &memories[piece.source_rank as usize];
    let start = piece.source_offset + from;
    let bytes = piece.bytes - from;
    assert!(start + bytes <= memory.len(), "the piece lies in its pool");
    // SAFETY: the range lies in the mapping (asserted), which lives as long as `memories`. Nobody writes to it while the
    // slice is in use: the device finished these pages before they were posted, and H5 keeps them unchanged and unfreed
    // until this piece is settled, which happens after the last use of a slice, when `InFlight` drops.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().add(start), bytes) }
}
