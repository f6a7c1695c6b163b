//! P's side of the shared-memory backend: one task per channel posts ranges and takes in D's answers. It moves no bytes.

use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tandem_handoff::{
    ids::{Attempt, Channel},
    source::Piece,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
    runtime::Handle,
    sync::Notify,
};

use super::{
    ledger::Ledger,
    messages::{ANSWER_BYTES, Answer},
};
use crate::{SourceFabric, SourceReport, Waker, landing::lock};

/// Posts that go out in one write.
const BATCH_POSTS: usize = 64;
/// Answers that are read at once.
const BATCH_ANSWERS: usize = 64;

/// A cheap handle: the engine posts through one, the bootstrap driver attaches streams through another. Dropping the last
/// one closes all channels.
#[derive(Clone)]
pub struct ShmSource(Arc<Owner>);

/// What the lanes' tasks do not hold.
struct Owner {
    shared: Arc<Shared>,
    runtime: Handle,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let channels: Vec<Channel> = lock(&self.shared.bells).keys().copied().collect();
        for channel in channels {
            self.shared.close(channel);
        }
    }
}

struct Shared {
    waker: Waker,
    ledger: Mutex<Ledger>,
    /// Each rings when its channel has something to announce, or is closed.
    bells: Mutex<HashMap<Channel, Arc<Notify>>>,
}

impl ShmSource {
    pub fn new(runtime: Handle, waker: Waker) -> Self {
        let shared = Shared { waker, ledger: Mutex::default(), bells: Mutex::default() };
        Self(Arc::new(Owner { shared: Arc::new(shared), runtime }))
    }

    /// The stream on which the channel's decode worker has received this worker's pools.
    ///
    /// # Errors
    /// When the channel has such a stream already, or the stream cannot be watched.
    pub fn attach(&self, channel: Channel, stream: UnixStream) -> io::Result<()> {
        self.attach_after(channel, stream, Vec::new())
    }

    /// As [`ShmSource::attach`], with the last bytes of the handshake: the decode worker gets them when the channel's
    /// pieces go by shared memory already.
    ///
    /// # Errors
    /// As `attach`.
    pub fn attach_after(&self, channel: Channel, stream: UnixStream, last_bytes: Vec<u8>) -> io::Result<()> {
        let process = {
            let _runtime = self.0.runtime.enter();
            peer_process(&stream).map(watch).transpose()?
        };
        if !self.0.shared.with(|ledger| ledger.open(channel)) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the channel has a stream for shared memory"));
        }
        let bell = Arc::new(Notify::new());
        lock(&self.0.shared.bells).insert(channel, Arc::clone(&bell));
        let lane =
            Lane { channel, stream, process, outbox: last_bytes, inbox: Vec::new(), speaking: true, hearing: true };
        self.0.runtime.spawn(lane.run(Arc::clone(&self.0.shared), bell));
        Ok(())
    }

    /// True when the channel's pieces go by shared memory: from its attaching to its end.
    pub fn serves(&self, channel: Channel) -> bool {
        lock(&self.0.shared.ledger).has(channel)
    }
}

impl SourceFabric for ShmSource {
    fn post(&mut self, attempt: Attempt, pieces: Vec<Piece>) {
        self.0.shared.with(|ledger| ledger.post(attempt, pieces));
        self.0.shared.ring(attempt.channel());
    }

    fn stop(&mut self, attempt: Attempt) {
        self.0.shared.with(|ledger| ledger.stop(attempt));
    }

    fn peer_settled(&mut self, attempt: Attempt) {
        self.0.shared.with(|ledger| ledger.peer_settled(attempt));
        // A lane that was closed meanwhile may have waited for this alone.
        self.0.shared.ring(attempt.channel());
    }

    fn close(&mut self, channel: Channel) {
        self.0.shared.close(channel);
    }

    fn poll(&mut self) -> Vec<SourceReport> {
        lock(&self.0.shared.ledger).reports()
    }
}

impl Shared {
    /// One change of the books, and the engine's wake that it may bring about.
    fn with<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        let (out, wake) = {
            let mut ledger = lock(&self.ledger);
            let out = change(&mut ledger);
            (out, ledger.take_wake())
        };
        if wake {
            (self.waker)();
        }
        out
    }

    fn close(&self, channel: Channel) {
        self.with(|ledger| ledger.close(channel));
        self.ring(channel);
    }

    fn ring(&self, channel: Channel) {
        if let Some(bell) = lock(&self.bells).get(&channel) {
            bell.notify_one();
        }
    }
}

/// The process that connected the stream, to be told of its end. `None` where the system cannot say, as for a process of
/// another container: then the end of the stream is the only sign.
fn peer_process(stream: &UnixStream) -> Option<OwnedFd> {
    let number = stream.peer_cred().ok()?.pid().filter(|&number| number > 0)?;
    let process = pidfd_open(Pid::from_raw(number)?, PidfdFlags::NONBLOCK);
    process.inspect_err(|error| tracing::debug!(%error, "the decode worker's process cannot be watched")).ok()
}

fn watch(process: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` owns its descriptor and always gives the same one; it stays in the `AsyncFd` until that is
    // dropped, which ends the registration first.
    Ok(unsafe { AsyncFd::register(process) }?)
}

/// One channel's stream, as its task sees it.
struct Lane {
    channel: Channel,
    stream: UnixStream,
    process: Option<AsyncFd<OwnedFd>>,
    /// The handshake's last bytes, then announced posts, that the socket has not taken.
    outbox: Vec<u8>,
    /// Bytes that are no whole answer yet.
    inbox: Vec<u8>,
    /// False once nothing more is written, or believed: then only D's end is waited for.
    speaking: bool,
    /// False once the stream cannot be read: then only the end of D's process is a proof.
    hearing: bool,
}

/// How D's end of the stream came to be known.
enum Gone {
    Closed,
    Process,
}

impl Lane {
    async fn run(mut self, shared: Arc<Shared>, bell: Arc<Notify>) {
        let channel = self.channel;
        while !shared.with(|ledger| ledger.end_if_over(channel)) {
            if self.speaking {
                if shared.with(|ledger| ledger.is_closed(channel)) {
                    self.fall_silent();
                } else {
                    self.refill(&shared);
                }
            }
            match self.turn(&shared, &bell).await {
                Ok(None) => {}
                Ok(Some(gone)) => {
                    let why = match gone {
                        Gone::Closed => "the decode worker closed it",
                        Gone::Process => "the decode worker's process is gone",
                    };
                    self.broke(&shared, why);
                    shared.with(|ledger| ledger.gone(channel));
                    break;
                }
                Err(why) => {
                    self.broke(&shared, &why);
                    self.hearing = self.speaking;
                    self.fall_silent();
                }
            }
        }
        lock(&shared.bells).remove(&channel);
    }

    /// Once: a channel that was closed here, or is broken already, needs no report.
    fn broke(&self, shared: &Shared, why: &str) {
        if self.speaking {
            let why = format!("the shared-memory stream broke: {why}");
            shared.with(|ledger| ledger.broke(self.channel, why));
        }
    }

    /// D's copier learns by the end of P's stream that it is to end its own.
    fn fall_silent(&mut self) {
        self.speaking = false;
        self.outbox.clear();
        // It fails when D has hung up, which is what is waited for.
        let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Write);
    }

    fn refill(&mut self, shared: &Shared) {
        if self.outbox.is_empty() {
            for post in shared.with(|ledger| ledger.announce(self.channel, BATCH_POSTS)) {
                self.outbox.extend_from_slice(&post.encode());
            }
        }
    }

    /// Waits for one thing to happen and deals with it. `Some` is proof that D reads no more; an error is none.
    async fn turn(&mut self, shared: &Shared, bell: &Notify) -> Result<Option<Gone>, String> {
        let interest =
            if self.outbox.is_empty() { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
        let ready = tokio::select! {
            () = bell.notified() => return Ok(None),
            () = ended(&self.process) => return Ok(Some(Gone::Process)),
            ready = self.stream.ready(interest), if self.hearing => ready.map_err(|error| error.to_string())?,
        };
        if ready.is_readable() && self.take_answers(shared)? {
            return Ok(Some(Gone::Closed));
        }
        if ready.is_writable() && !self.outbox.is_empty() {
            match self.stream.try_write(&self.outbox) {
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(None)
    }

    /// Reads what is there. True at the end of the stream, when D has closed its end.
    fn take_answers(&mut self, shared: &Shared) -> Result<bool, String> {
        let mut bytes = [0; BATCH_ANSWERS * ANSWER_BYTES];
        match self.stream.try_read(&mut bytes) {
            Ok(0) => return Ok(true),
            Ok(count) if self.speaking => self.inbox.extend_from_slice(&bytes[..count]),
            Ok(_) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            // The end of a stream whose last bytes D did not read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(true),
            Err(error) => return Err(error.to_string()),
        }
        let (answers, _) = self.inbox.as_chunks::<ANSWER_BYTES>();
        let whole = answers.len() * ANSWER_BYTES;
        for answer in answers {
            let answer = Answer::decode(answer).ok_or("the decode worker sent bytes that are no answer")?;
            if answer.attempt.channel() != self.channel {
                return Err("the decode worker answered for another channel".to_owned());
            }
            shared.with(|ledger| ledger.answered(self.channel, answer));
        }
        self.inbox.drain(..whole);
        Ok(false)
    }
}

/// Resolves when the process has ended; never where it cannot be watched.
async fn ended(process: &Option<AsyncFd<OwnedFd>>) {
    match process {
        // An error says that the runtime is ending.
        Some(process) if process.readable().await.is_ok() => {}
        _ => std::future::pending().await,
    }
}
