//! One channel's copier on D: a thread that reads posts, moves their ranges out of P's pools block by block, and answers.
//!
//! It waits for the stream and for its leash alone, never for P to read: answers that the stream does not take are kept,
//! and no further posts are read when too many are. It owns the mapping and the stream, and gives them up in this order.

use std::{
    io::{self, PipeReader, Read, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tandem_handoff::ids::Channel;

use super::{
    messages::{ANSWER_BYTES, Answer, Outcome, POST_BYTES, Post},
    pools::PeerPools,
};
use crate::landing::{Borrow, Landing};

/// Bytes that are copied under one borrow: what a revoke waits for at most.
pub(super) const BLOCK_BYTES: usize = 256 * 1024;
/// Posts that are read at once.
const BATCH_POSTS: usize = 64;
/// Bytes copied after which the answers go out, though further posts are at hand.
const ANSWER_AFTER_BYTES: u64 = 1 << 20;
/// Bytes of answers that P has not read: above it no further posts are read. More than the answers to all posts that a
/// prefill worker leaves open.
const OUTBOX_BYTES_MAX: usize = 64 * 1024;

pub(super) struct Copier {
    landing: Arc<Landing>,
    channel: Channel,
    // Before the stream: fields are dropped in this order, also in a panic, and the end of the stream tells P that the
    // mapping is not read any more (H5).
    pools: PeerPools,
    stream: UnixStream,
    /// Set when the channel is closed here, and then the pipe ends.
    cut: Arc<AtomicBool>,
    wakes: PipeReader,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

/// Why a copier ends.
enum End {
    /// The channel was closed here.
    Cut,
    Broken(String),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        End::Broken(error.to_string())
    }
}

impl Copier {
    /// `stream` does not block.
    pub fn new(
        landing: Arc<Landing>,
        channel: Channel,
        pools: PeerPools,
        stream: UnixStream,
        cut: Arc<AtomicBool>,
        wakes: PipeReader,
    ) -> Self {
        Self { landing, channel, pools, stream, cut, wakes, inbox: Vec::new(), outbox: Vec::new() }
    }

    pub fn run(mut self) {
        let end = self.serve();
        let (landing, channel) = (Arc::clone(&self.landing), self.channel);
        drop(self);
        if let Err(End::Broken(why)) = end {
            landing.broke(channel, format!("the shared-memory stream broke: {why}"));
        }
    }

    fn serve(&mut self) -> Result<std::convert::Infallible, End> {
        loop {
            self.check_leash()?;
            self.send_answers()?;
            if self.outbox.len() > OUTBOX_BYTES_MAX || !self.receive()? {
                self.wait()?;
                continue;
            }
            let inbox = std::mem::take(&mut self.inbox);
            let (posts, rest) = inbox.as_chunks::<POST_BYTES>();
            let mut copied = 0;
            for post in posts {
                let post =
                    Post::decode(post).ok_or_else(|| broken("the prefill worker sent bytes that are no post"))?;
                let outcome = self.copy(&post)?;
                let answer = Answer { attempt: post.attempt, piece: post.piece, outcome };
                self.outbox.extend_from_slice(&answer.encode());
                copied += post.bytes;
                if copied >= ANSWER_AFTER_BYTES {
                    copied = 0;
                    self.send_answers()?;
                }
            }
            self.inbox = rest.to_vec();
        }
    }

    fn check_leash(&self) -> Result<(), End> {
        if self.cut.load(Ordering::Acquire) { Err(End::Cut) } else { Ok(()) }
    }

    /// Writes what the stream takes.
    fn send_answers(&mut self) -> Result<(), End> {
        while !self.outbox.is_empty() {
            match self.stream.write(&self.outbox) {
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads what is there. False when nothing is.
    fn receive(&mut self) -> Result<bool, End> {
        let mut bytes = [0; BATCH_POSTS * POST_BYTES];
        match self.stream.read(&mut bytes) {
            Ok(0) => Err(broken("the prefill worker closed it")),
            Ok(count) => {
                self.inbox.extend_from_slice(&bytes[..count]);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Moves one range to where D's own books say that its piece belongs.
    fn copy(&self, post: &Post) -> Result<Outcome, End> {
        if post.attempt.channel() != self.channel {
            return Err(broken("the prefill worker posted for another channel"));
        }
        let source = self.pools.range(post.rank, post.offset, post.bytes).map_err(End::Broken)?;
        let Some(expected) = self.landing.find(post.attempt) else {
            return Ok(Outcome::PassedOver);
        };
        let place = self.landing.place(&expected, post.piece, post.bytes).map_err(End::Broken)?;
        for from in (0..place.bytes).step_by(BLOCK_BYTES) {
            self.check_leash()?;
            let Some(borrow) = Borrow::take(&self.landing, &expected) else {
                return Ok(Outcome::PassedOver);
            };
            let bytes = BLOCK_BYTES.min(place.bytes - from);
            // SAFETY: the source lies in P's mapped pool (`range` compared it with the mapping, and the place has the
            // post's length), which cannot shrink and which this thread keeps mapped; it is only ever reached by raw
            // pointers. The target lies in D's pool (`place` asserted it) and is the attempt's alone while the borrow is
            // out (see `Borrow::target`); pieces of one attempt do not overlap, and those of one channel are moved by this
            // thread alone. The two are different memories.
            unsafe { source.wrapping_add(from).copy_to_nonoverlapping(borrow.target(place, from), bytes) };
        }
        self.landing.land(&expected, post.piece);
        Ok(Outcome::Copied)
    }

    /// Waits until there is something to read, room for answers, or an end.
    fn wait(&self) -> Result<(), End> {
        let mut events = 0;
        if self.outbox.len() <= OUTBOX_BYTES_MAX {
            events |= libc::POLLIN;
        }
        if !self.outbox.is_empty() {
            events |= libc::POLLOUT;
        }
        let watch = |fd: RawFd, events| libc::pollfd { fd, events, revents: 0 };
        let mut watched = [watch(self.stream.as_raw_fd(), events), watch(self.wakes.as_raw_fd(), 0)];
        // SAFETY: the array lives through the call and has the given length; both descriptors are open.
        let count = unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, -1) };
        let error = io::Error::last_os_error();
        if count < 0 && error.kind() != io::ErrorKind::Interrupted {
            return Err(error.into());
        }
        Ok(())
    }
}

fn broken(why: &str) -> End {
    End::Broken(why.to_owned())
}

const _: () = assert!(OUTBOX_BYTES_MAX > super::ledger::ANNOUNCED_MAX * ANSWER_BYTES);
