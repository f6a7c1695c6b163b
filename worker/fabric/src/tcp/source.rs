//! P's side of the TCP backend: one sender task per data stream reads posted pieces out of the pools.
//!
//! A sender gathers the frames that wait into one write call, headers and pieces alternating; the kernel copies them.
//! Queues are bounded by the scheduler: each piece of an attempt is posted once, and attempts hold pages of P's pool.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
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

use super::batch::Batch;
use crate::{SourceFabric, SourceReport, Waker, memory::PoolMemory, tally::Tally};

/// A cheap handle: the engine posts through one, the bootstrap driver attaches streams through another.
#[derive(Clone)]
pub struct TcpSource(Arc<Shared>);

pub(super) struct Shared {
    pub(super) memories: Vec<Arc<PoolMemory>>,
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
    stopped: Arc<AtomicBool>,
    tally: Tally,
}

pub(super) struct Job {
    pub attempt: Attempt,
    pub piece: Piece,
    pub stopped: Arc<AtomicBool>,
}

/// The pieces for one decode rank. It exists from the first post or the attaching of its stream, whichever is first.
#[derive(Default)]
struct Lane {
    queue: Mutex<VecDeque<Job>>,
    /// The queue has grown, or an attempt was stopped.
    changed: Notify,
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
        let stopped = {
            let mut books = lock(&self.0.books);
            let posts = books.attempts.entry(attempt).or_default();
            posts.tally.posted(pieces.len());
            Arc::clone(&posts.stopped)
        };
        let mut by_rank: BTreeMap<u32, Vec<Job>> = BTreeMap::new();
        for piece in pieces {
            let job = Job { attempt, piece, stopped: Arc::clone(&stopped) };
            by_rank.entry(piece.target_rank).or_default().push(job);
        }
        for (rank, jobs) in by_rank {
            let lane = self.0.lane(attempt.channel(), rank);
            lock(&lane.queue).extend(jobs);
            lane.changed.notify_one();
        }
    }

    fn stop(&mut self, attempt: Attempt) {
        let lanes = {
            let books = lock(&self.0.books);
            let Some(posts) = books.attempts.get(&attempt) else {
                return;
            };
            posts.stopped.store(true, Ordering::SeqCst);
            let lanes = books.lanes.iter().filter(|((channel, _), _)| *channel == attempt.channel());
            lanes.map(|(_, lane)| Arc::clone(lane)).collect::<Vec<_>>()
        };
        for lane in lanes {
            let mut queue = lock(&lane.queue);
            let before = queue.len();
            queue.retain(|job| job.attempt != attempt);
            let dropped = before - queue.len();
            drop(queue);
            self.0.settle(attempt, dropped as u64, Settlement::Dropped);
            // What the sender has taken already it gives up itself.
            lane.changed.notify_one();
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
            posts.tally.report(attempt, &mut reports);
            !posts.tally.is_settled()
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
    pub(super) fn settle(&self, attempt: Attempt, pieces: u64, how: Settlement) {
        if pieces == 0 {
            return;
        }
        let mut books = lock(&self.books);
        let Some(posts) = books.attempts.get_mut(&attempt) else {
            return;
        };
        posts.tally.settle(pieces, how);
        let wake = posts.tally.is_settled() || how != Settlement::Sent;
        drop(books);
        if wake {
            (self.waker)();
        }
    }

    pub(super) fn sent(&self, bytes: usize) {
        self.bytes_sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn drop_queue(&self, lane: &Lane) {
        let jobs = std::mem::take(&mut *lock(&lane.queue));
        for job in jobs {
            self.settle(job.attempt, 1, Settlement::Dropped);
        }
    }
}

async fn run_lane(shared: Arc<Shared>, channel: Channel, lane: Arc<Lane>, stream: TcpStream) {
    let mut batch = Batch::new(&shared);
    let why = loop {
        batch.refill(&mut lock(&lane.queue));
        if batch.is_empty() {
            tokio::select! {
                () = lane.changed.notified() => continue,
                why = peer_closed(&stream) => break why,
            }
        }
        tokio::select! {
            // A stop must not wait for a peer that reads nothing.
            () = lane.changed.notified() => continue,
            ready = stream.writable() => if let Err(error) = ready {
                break error.to_string();
            },
        }
        match batch.write(&stream) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => break error.to_string(),
            _ => {}
        }
    };
    drop(batch);
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
