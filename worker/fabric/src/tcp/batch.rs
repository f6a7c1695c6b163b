//! The frames that a sender is writing: the first may be in its middle, the others have not begun.
//!
//! Each piece in a batch is settled exactly once, when its frame is whole, when it is stopped, or when the batch is
//! dropped with its task; the source is read only inside [`Batch::write`], so never after that (H5).

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    sync::{Arc, atomic::Ordering},
};

use tandem_handoff::{
    ids::Attempt,
    source::{Piece, Settlement},
};
use tokio::net::TcpStream;

use super::{
    frame::{HEADER_BYTES, Header},
    source::{Job, Shared},
};
use crate::memory::PoolMemory;

/// Frames, and bytes, that leave in one write call at most. A single frame may have more bytes.
const FRAMES_MAX: usize = 64;
const BYTES_MAX: usize = 512 * 1024;

/// What fills the rest of a stopped frame.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];

pub(super) struct Batch<'a> {
    shared: &'a Shared,
    frames: VecDeque<Frame>,
    /// Bytes of all frames, whatever has been written of the first.
    bytes: usize,
    /// Bytes of the first frame that the kernel has copied.
    written: usize,
    /// The first frame was stopped in its middle: its piece is settled, and zeros fill the rest, without the source.
    hollow: bool,
}

struct Frame {
    job: Job,
    header: [u8; HEADER_BYTES],
}

impl Frame {
    fn bytes(&self) -> usize {
        HEADER_BYTES + self.job.piece.bytes
    }

    fn is_stopped(&self) -> bool {
        self.job.stopped.load(Ordering::SeqCst)
    }
}

impl<'a> Batch<'a> {
    pub fn new(shared: &'a Shared) -> Self {
        Self { shared, frames: VecDeque::with_capacity(FRAMES_MAX), bytes: 0, written: 0, hollow: false }
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Gives up what has been stopped, and takes in what the queue has.
    pub fn refill(&mut self, queue: &mut VecDeque<Job>) {
        let begun = usize::from(self.written > 0);
        if begun == 1 && !self.hollow && self.frames[0].is_stopped() {
            // D has a part of the frame, and its rest will follow: what is in D's page is unknown.
            self.hollow = true;
            self.shared.settle(self.frames[0].job.attempt, 1, Settlement::Unknown);
        }
        for at in (begun..self.frames.len()).rev() {
            if self.frames[at].is_stopped()
                && let Some(frame) = self.frames.remove(at)
            {
                self.bytes -= frame.bytes();
                self.shared.settle(frame.job.attempt, 1, Settlement::Dropped);
            }
        }
        while self.frames.len() < FRAMES_MAX && self.bytes < BYTES_MAX {
            let Some(job) = queue.pop_front() else {
                return;
            };
            let Job { attempt, piece, .. } = job;
            let header = Header { attempt, piece: piece.index, bytes: piece.bytes as u64 }.encode();
            let frame = Frame { job, header };
            self.bytes += frame.bytes();
            self.frames.push_back(frame);
        }
    }

    /// One write call, which copies what the socket takes.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing now. After any other error what D got of the first frame is unknown.
    pub fn write(&mut self, stream: &TcpStream) -> io::Result<()> {
        match stream.try_write_vectored(&self.slices()) {
            Ok(0) => Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                self.advance(count);
                Ok(())
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::WouldBlock {
                    self.written = self.written.max(1);
                }
                Err(error)
            }
        }
    }

    fn slices(&self) -> Vec<IoSlice<'_>> {
        let mut slices = Vec::with_capacity(2 * self.frames.len());
        let mut skip = self.written;
        for (at, frame) in self.frames.iter().enumerate() {
            slices.push(IoSlice::new(&frame.header[skip.min(HEADER_BYTES)..]));
            let sent = skip.saturating_sub(HEADER_BYTES);
            skip = 0;
            if at == 0 && self.hollow {
                let rest = frame.job.piece.bytes - sent;
                slices.push(IoSlice::new(&ZEROS[..ZEROS.len().min(rest)]));
                if rest > ZEROS.len() {
                    break;
                }
            } else {
                slices.push(IoSlice::new(source_bytes(&self.shared.memories, &frame.job.piece, sent)));
            }
        }
        slices
    }

    /// The kernel has copied so many bytes more.
    fn advance(&mut self, count: usize) {
        self.written += count;
        let mut sent = None;
        while let Some(first) = self.frames.front()
            && self.written >= first.bytes()
        {
            self.written -= first.bytes();
            self.bytes -= first.bytes();
            let Some(Frame { job, .. }) = self.frames.pop_front() else {
                break;
            };
            if std::mem::take(&mut self.hollow) {
                continue;
            }
            self.shared.sent(job.piece.bytes);
            // One entry in the books for all whole frames of an attempt in a row.
            sent = match sent {
                Some((attempt, pieces)) if attempt == job.attempt => Some((attempt, pieces + 1)),
                other => {
                    self.settle_sent(other);
                    Some((job.attempt, 1))
                }
            };
        }
        self.settle_sent(sent);
    }

    fn settle_sent(&self, sent: Option<(Attempt, u64)>) {
        if let Some((attempt, pieces)) = sent {
            self.shared.settle(attempt, pieces, Settlement::Sent);
        }
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        for (at, frame) in self.frames.drain(..).enumerate() {
            let how = match at == 0 && self.written > 0 {
                true if self.hollow => continue,
                true => Settlement::Unknown,
                false => Settlement::Dropped,
            };
            self.shared.settle(frame.job.attempt, 1, how);
        }
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
    // until this piece is settled. Slices live within one call of `Batch::write`, and no frame of the batch is settled
    // before that call has returned.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().add(start), bytes) }
}
