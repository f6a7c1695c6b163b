//! Watching a worker's answer while it passes: it is cut into events and judged, its bytes are not re-encoded. Success is
//! judged from content, not from the status: an error event, an abort, an end without each sample's finish reason or, in a
//! stream of events, without its last event, and an answer without content are failures with a name. Where P's answer has
//! a part in D's, D's waits for it. *Pure.*

mod events;
mod judge;
mod kept;
mod merge;

use bytes::{Bytes, BytesMut};

use crate::error::{Failure, Side};
use crate::leg::http1::ResponseHead;
use crate::request::Endpoint;
use events::{Events, no_finish, tokenless, too_large, truncated};
use judge::Unfinished;
use kept::Kept;
use merge::Merging;

pub use kept::PrefillAnswer;
pub use merge::{Merge, PromptLogprobs};

/// A whole answer is judged before it is sent, if it is not larger than this; and so much is kept of P's answer for D's.
const HELD_ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Of an error body or a prefill answer this much is kept for its message.
const KEPT_BODY_BYTES_MAX: usize = 256 * 1024;

/// What a piece of an answer means.
#[derive(Debug, PartialEq)]
pub enum Meaning {
    /// Nothing new.
    None,
    /// The first sign of a token: on the decode leg, proof that D has committed.
    Token,
    /// The answer is complete and good.
    Complete,
    Failed(Failure),
}

/// Bytes that may go to the client now, and what they mean.
#[derive(Debug, PartialEq)]
pub struct Step {
    pub forward: Bytes,
    pub meaning: Meaning,
}

impl Step {
    fn quiet() -> Self {
        Step { forward: Bytes::new(), meaning: Meaning::None }
    }

    fn failed(failure: Failure) -> Self {
        Step { forward: Bytes::new(), meaning: Meaning::Failed(failure) }
    }
}

/// What a good answer must hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Expected {
    pub endpoint: Endpoint,
    /// So many finish reasons make D's answer complete.
    pub samples: usize,
}

/// One leg's answer behind its head.
#[derive(Debug)]
pub struct Answer {
    side: Side,
    worker: String,
    expected: Expected,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Refusal { status: u16, retry_after_secs: Option<u32>, kept: BytesMut },
    Events(Box<Events>),
    Whole(Whole),
}

impl Answer {
    pub fn new(side: Side, worker: &str, head: &ResponseHead, expected: Expected) -> Self {
        let kind = if !(200..300).contains(&head.status) {
            let retry_after_secs = head.retry_after_secs();
            Kind::Refusal { status: head.status, retry_after_secs, kept: BytesMut::new() }
        } else if head.is_event_stream() {
            Kind::Events(Box::new(Events::new(side, expected.samples)))
        } else {
            let limit = if side == Side::Prefill { KEPT_BODY_BYTES_MAX } else { HELD_ANSWER_BYTES_MAX };
            Kind::Whole(Whole::new(limit))
        };
        Answer { side, worker: worker.to_owned(), expected, kind }
    }

    /// Of P: its messages are kept for [`Answer::take_prefill`].
    pub fn keeping(mut self) -> Self {
        match &mut self.kind {
            Kind::Events(events) => events.kept = Some(Kept::default()),
            Kind::Whole(whole) => {
                whole.limit = HELD_ANSWER_BYTES_MAX;
                whole.keeps = true;
            }
            Kind::Refusal { .. } => {}
        }
        self
    }

    /// Of P, once it is complete: what was kept.
    pub fn take_prefill(&mut self) -> PrefillAnswer {
        match &mut self.kind {
            Kind::Events(events) => events.kept.as_mut().map_or_else(PrefillAnswer::default, Kept::take),
            Kind::Whole(whole) if whole.overflowed => Kept::cut(),
            Kind::Whole(whole) => PrefillAnswer::of(&whole.held.split().freeze()),
            Kind::Refusal { .. } => PrefillAnswer::default(),
        }
    }

    /// Of D: parts of P's answer are merged into it.
    pub fn merging(mut self, merge: Merge) -> Self {
        if merge != Merge::default() {
            match &mut self.kind {
                Kind::Events(events) => events.merging = Some(Merging::new(merge)),
                Kind::Whole(whole) => whole.merging = Some(Merging::new(merge)),
                Kind::Refusal { .. } => {}
            }
        }
        self
    }

    /// Nothing goes on before [`Answer::prefill`]: until then this leg is not to be read.
    pub fn waits_for_prefill(&self) -> bool {
        match &self.kind {
            Kind::Events(events) => events.waiting,
            Kind::Whole(whole) => whole.waiting,
            Kind::Refusal { .. } => false,
        }
    }

    /// P's answer is there; what waited for it goes on.
    pub fn prefill(&mut self, prefill: PrefillAnswer) -> Step {
        let side = self.side;
        let (merging, cut) = match &mut self.kind {
            Kind::Events(events) => (&mut events.merging, prefill.is_cut),
            Kind::Whole(whole) => (&mut whole.merging, prefill.is_cut),
            Kind::Refusal { .. } => return Step::quiet(),
        };
        let Some(merging) = merging else { return Step::quiet() };
        if cut && merging.wants_logprobs() {
            return Step::failed(too_large(Side::Prefill));
        }
        merging.prefill = Some(prefill);
        match &mut self.kind {
            Kind::Events(events) => events.go_on(),
            Kind::Whole(whole) if whole.waiting => {
                whole.waiting = false;
                whole.end(side, self.expected)
            }
            _ => Step::quiet(),
        }
    }

    pub fn push(&mut self, data: Bytes) -> Step {
        match &mut self.kind {
            Kind::Refusal { kept, .. } => {
                let room = KEPT_BODY_BYTES_MAX - kept.len().min(KEPT_BODY_BYTES_MAX);
                kept.extend_from_slice(&data[..data.len().min(room)]);
                Step::quiet()
            }
            Kind::Events(events) => events.push(data),
            Kind::Whole(whole) => whole.push(self.side, data),
        }
    }

    /// The body ended. `clean`: as its framing said it would.
    pub fn end(&mut self, clean: bool) -> Step {
        let step = match &mut self.kind {
            Kind::Refusal { status, retry_after_secs, kept } => {
                Step::failed(Failure::refused(self.side, *status, kept.split().freeze(), *retry_after_secs))
            }
            Kind::Events(events) => events.end(clean),
            Kind::Whole(_) if !clean => Step::failed(truncated(self.side)),
            Kind::Whole(whole) => whole.end(self.side, self.expected),
        };
        match step.meaning {
            Meaning::Failed(failure) => Step { meaning: Meaning::Failed(failure.with_detail(&*self.worker)), ..step },
            _ => step,
        }
    }
}

/// An answer in one piece, held until it is judged.
#[derive(Debug)]
struct Whole {
    held: BytesMut,
    limit: usize,
    overflowed: bool,
    keeps: bool,
    merging: Option<Merging>,
    waiting: bool,
}

impl Whole {
    fn new(limit: usize) -> Self {
        Whole { held: BytesMut::new(), limit, overflowed: false, keeps: false, merging: None, waiting: false }
    }

    fn push(&mut self, side: Side, data: Bytes) -> Step {
        self.held.extend_from_slice(&data);
        if self.held.len() > self.limit && self.merging.as_ref().is_some_and(Merging::wants_logprobs) {
            return Step::failed(too_large(side));
        }
        self.overflowed |= self.held.len() > self.limit;
        match self.overflowed {
            true => Step { forward: self.held.split().freeze(), meaning: Meaning::None },
            false => Step::quiet(),
        }
    }

    fn end(&mut self, side: Side, expected: Expected) -> Step {
        if self.overflowed {
            return Step { forward: Bytes::new(), meaning: Meaning::Complete };
        }
        if let Err(failure) = judge_whole(side, &self.held, expected) {
            return Step::failed(failure);
        }
        let forward = match &mut self.merging {
            Some(merging) if merging.prefill.is_none() => {
                self.waiting = true;
                return Step::quiet();
            }
            Some(merging) => merging.whole(&self.held),
            // P's bytes go nowhere.
            None if self.keeps => Bytes::new(),
            None => self.held.split().freeze(),
        };
        Step { forward, meaning: Meaning::Complete }
    }
}

fn judge_whole(side: Side, body: &[u8], expected: Expected) -> Result<(), Failure> {
    if side == Side::Decode && body.trim_ascii().is_empty() {
        return Err(tokenless(side));
    }
    let seen = match judge::look_at_all(body, &mut Unfinished::new(expected.samples)) {
        Ok(seen) => seen,
        Err(_) if side == Side::Prefill => return Ok(()),
        Err(_) => {
            let why =
                serde_json::from_slice::<serde::de::IgnoredAny>(body).err().map_or_else(String::new, |e| e.to_string());
            let what = format!("the {} worker's answer is not JSON: {why}", side.name());
            return Err(Failure::worker(side, ["prefill_bad_answer", "decode_bad_answer"], what));
        }
    };
    if seen.fault {
        return Err(judge::fault(side, body));
    }
    if side == Side::Prefill || !expected.endpoint.generates() {
        return Ok(());
    }
    if !seen.content && seen.finishes == 0 {
        return Err(tokenless(side));
    }
    if seen.finishes > 0 { Ok(()) } else { Err(no_finish(side)) }
}

#[cfg(test)]
mod merge_tests;
#[cfg(test)]
mod tests;
