//! The frames of the control channel, and their bytes. *Pure.* Versioned by Hello, bounded, and total: any bytes give a
//! frame or a [`WireError`].

mod codec;
mod first;
pub mod hello;
pub mod transfer;

use codec::{Reader, Writer};

pub use codec::WireError;
pub use first::{FirstLogprob, FirstToken, TOP_LOGPROBS_MAX};

pub use crate::cause::{Cause, CauseKind, Side};
use crate::ids::{Attempt, Incarnation, Room};

/// Bytes of one control frame at most, without its length prefix.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// Pages that one Reserve names at most.
pub const PAGES_MAX: usize = 200_000;
/// Entries of Done's account at most: ranks times rails.
pub const ACCOUNT_MAX: usize = 4096;
/// Checksums in one Done at most: pages of the longest prompt times KV heads. With every other list of a Done at its
/// limit too, the frame is still within [`FRAME_BYTES_MAX`].
pub const CHECKSUMS_MAX: usize = 200_000;

/// One frame. Every frame but Ping carries its attempt, which is checked first (H3).
#[derive(Clone, PartialEq, Debug)]
pub enum Frame {
    /// D→P: pages for a prompt.
    Reserve(Reserve),
    /// P→D: everything was posted; the first token.
    Done(Done),
    /// P→D: the attempt is over at P. Says nothing about quiet.
    Failed { attempt: Attempt, cause: Cause },
    /// D→P: the attempt is over at D. The room is named for the case that its Reserve never came.
    Abort { attempt: Attempt, room: Room, cause: Cause },
    /// P→D: every posted write of the attempt has settled, and none will follow.
    Drained { attempt: Attempt },
    /// D→P: D's own copier has stopped reading P's pages (shared memory backends).
    Settled { attempt: Attempt },
    /// Both ways: the sender is alive and believes to speak with `to`.
    Ping { from: Incarnation, to: Incarnation },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reserve {
    pub attempt: Attempt,
    pub room: Room,
    pub prompt_tokens: u32,
    /// [`prompt_hash`] of all token ids: the two sides tokenize separately.
    pub prompt_hash: u128,
    /// Tokens that D holds already, a multiple of the page.
    pub held_tokens: u32,
    /// [`prompt_hash`] of the held prefix.
    pub held_hash: u128,
    /// D will compare a checksum per page and KV head: Done is to carry them.
    pub checksums: bool,
    /// D's pages for the rest of the prompt, in token order.
    pub pages: Vec<u32>,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Done {
    pub attempt: Attempt,
    pub first: FirstToken,
    pub account: Vec<Sent>,
    pub phases: Phases,
    /// `[page of the Reserve][kv head of the whole model]`; empty when the Reserve asked for none.
    pub checksums: Vec<u32>,
}

/// What went to one decode rank over one rail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sent {
    pub rank: u32,
    pub rail: u32,
    pub pieces: u64,
    pub bytes: u64,
}

/// How long P spent on the attempt, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Phases {
    /// From the request's arrival to D's Reserve.
    pub rendezvous_us: u64,
    /// From Reserve to the last post.
    pub prefill_us: u64,
}

/// The 128-bit hash of token ids by which P and D compare their prompts.
pub fn prompt_hash(tokens: &[u32]) -> u128 {
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    hasher.digest128()
}

impl Frame {
    pub fn attempt(&self) -> Option<Attempt> {
        match self {
            Frame::Reserve(reserve) => Some(reserve.attempt),
            Frame::Done(done) => Some(done.attempt),
            Frame::Failed { attempt, .. }
            | Frame::Abort { attempt, .. }
            | Frame::Drained { attempt }
            | Frame::Settled { attempt } => Some(*attempt),
            Frame::Ping { .. } => None,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::with_capacity(64));
        match self {
            Frame::Reserve(reserve) => write_reserve(&mut w, reserve),
            Frame::Done(done) => write_done(&mut w, done),
            Frame::Failed { attempt, cause } => {
                w.u8(3).attempt(attempt).cause(cause);
            }
            Frame::Abort { attempt, room, cause } => {
                w.u8(4).attempt(attempt).u64(room.get()).cause(cause);
            }
            Frame::Drained { attempt } => {
                w.u8(5).attempt(attempt);
            }
            Frame::Settled { attempt } => {
                w.u8(6).attempt(attempt);
            }
            Frame::Ping { from, to } => {
                w.u8(7).u64(from.0).u64(to.0);
            }
        }
        w.0
    }

    /// # Errors
    /// Says what is wrong with the bytes; the caller closes the channel.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader(bytes);
        let frame = match r.u8("frame")? {
            1 => Frame::Reserve(read_reserve(&mut r)?),
            2 => Frame::Done(read_done(&mut r)?),
            3 => Frame::Failed { attempt: r.attempt()?, cause: r.cause()? },
            4 => Frame::Abort { attempt: r.attempt()?, room: read_room(&mut r)?, cause: r.cause()? },
            5 => Frame::Drained { attempt: r.attempt()? },
            6 => Frame::Settled { attempt: r.attempt()? },
            7 => Frame::Ping { from: Incarnation(r.u64("from")?), to: Incarnation(r.u64("to")?) },
            other => return Err(WireError::Unknown { field: "frame", value: other.into() }),
        };
        r.end()?;
        Ok(frame)
    }
}

fn read_room(r: &mut Reader<'_>) -> Result<Room, WireError> {
    let value = r.u64("room")?;
    Room::new(value).ok_or(WireError::Unknown { field: "room", value })
}

fn write_reserve(w: &mut Writer, reserve: &Reserve) {
    w.u8(1).attempt(&reserve.attempt).u64(reserve.room.get());
    w.u32(reserve.prompt_tokens).u128(reserve.prompt_hash);
    w.u32(reserve.held_tokens).u128(reserve.held_hash).u8(reserve.checksums.into());
    w.count(reserve.pages.len(), PAGES_MAX);
    for page in &reserve.pages {
        w.u32(*page);
    }
}

fn read_reserve(r: &mut Reader<'_>) -> Result<Reserve, WireError> {
    let attempt = r.attempt()?;
    let room = read_room(r)?;
    let prompt_tokens = r.u32("prompt tokens")?;
    let prompt_hash = r.u128("prompt hash")?;
    let held_tokens = r.u32("held tokens")?;
    let held_hash = r.u128("held hash")?;
    let checksums = r.flag("checksums")?;
    let count = r.count(PAGES_MAX, 4, "pages")?;
    let pages = (0..count).map(|_| r.u32("pages")).collect::<Result<_, _>>()?;
    Ok(Reserve { attempt, room, prompt_tokens, prompt_hash, held_tokens, held_hash, checksums, pages })
}

fn write_done(w: &mut Writer, done: &Done) {
    w.u8(2).attempt(&done.attempt);
    w.u32(done.first.token).u32(done.first.cached_tokens);
    match &done.first.logprob {
        None => {
            w.u8(0);
        }
        Some(logprob) => {
            w.u8(1).f32(logprob.logprob).count(logprob.top.len(), TOP_LOGPROBS_MAX);
            for (token, value) in &logprob.top {
                w.u32(*token).f32(*value);
            }
        }
    }
    w.count(done.account.len(), ACCOUNT_MAX);
    for sent in &done.account {
        w.u32(sent.rank).u32(sent.rail).u64(sent.pieces).u64(sent.bytes);
    }
    w.u64(done.phases.rendezvous_us).u64(done.phases.prefill_us);
    w.count(done.checksums.len(), CHECKSUMS_MAX);
    for checksum in &done.checksums {
        w.u32(*checksum);
    }
}

fn read_done(r: &mut Reader<'_>) -> Result<Done, WireError> {
    let attempt = r.attempt()?;
    let token = r.u32("token")?;
    let cached_tokens = r.u32("cached tokens")?;
    let logprob = if r.flag("logprob")? {
        let logprob = r.f32("logprob")?;
        let count = r.count(TOP_LOGPROBS_MAX, 8, "top logprobs")?;
        let top = (0..count)
            .map(|_| Ok((r.u32("top logprobs")?, r.f32("top logprobs")?)))
            .collect::<Result<_, WireError>>()?;
        Some(FirstLogprob { logprob, top })
    } else {
        None
    };
    let count = r.count(ACCOUNT_MAX, 24, "account")?;
    let account = (0..count)
        .map(|_| {
            Ok(Sent {
                rank: r.u32("account")?,
                rail: r.u32("account")?,
                pieces: r.u64("account")?,
                bytes: r.u64("account")?,
            })
        })
        .collect::<Result<_, WireError>>()?;
    let phases = Phases { rendezvous_us: r.u64("phases")?, prefill_us: r.u64("phases")? };
    let count = r.count(CHECKSUMS_MAX, 4, "checksums")?;
    let checksums = (0..count).map(|_| r.u32("checksums")).collect::<Result<_, _>>()?;
    Ok(Done { attempt, first: FirstToken { token, logprob, cached_tokens }, account, phases, checksums })
}

#[cfg(test)]
mod tests;
