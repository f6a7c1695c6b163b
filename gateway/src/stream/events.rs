//! Server-sent events of one answer: cut apart as they come, judged, and passed on as they are. What is whole leaves at
//! once, without being copied where one read held it. Event ends are `\n\n`, `\n\r\n` and `\r\n\r\n`; a lone `\r` is not
//! taken as a line end, since no worker sends it. *Pure.*

use std::borrow::Cow;

use bytes::{Buf, Bytes, BytesMut};

use crate::error::{Failure, Side};
use crate::stream::judge::{self, Unfinished};
use crate::stream::kept::Kept;
use crate::stream::merge::Merging;
use crate::stream::{HELD_ANSWER_BYTES_MAX, Meaning, Step};

/// An event's beginning is held back until it is whole, so that an error can be said between two events; of larger events
/// the beginning is forwarded at once.
pub const HELD_EVENT_BYTES_MAX: usize = 64 * 1024;

/// The events of one leg.
#[derive(Debug)]
pub struct Events {
    side: Side,
    /// The beginning of an event that is not whole yet, or all that came while P's part is missing.
    tail: BytesMut,
    /// Up to here `tail` holds no event end.
    searched: usize,
    token_seen: bool,
    unfinished: Unfinished,
    complete: bool,
    /// An event was too large to be judged: any sample may have finished in it, so `[DONE]` alone tells.
    unjudged: bool,
    /// The beginning of the event at hand was forwarded already.
    passing_large: bool,
    pub merging: Option<Merging>,
    /// An event waits for P's part.
    pub waiting: bool,
    /// How the body ended while an event waited.
    ended: Option<bool>,
    /// What P's messages are kept in, if somebody asks for them.
    pub kept: Option<Kept>,
}

/// What an event came to.
enum Event {
    /// The last one: `[DONE]`, or the last of an API without it.
    Last,
    Content,
    Other,
}

/// Events of one piece that were dealt with.
struct Passed {
    /// They end here.
    end: usize,
    /// With P's part in them, where there is one to merge.
    merged: Option<BytesMut>,
    meaning: Meaning,
}

impl Events {
    pub fn new(side: Side, samples: usize) -> Self {
        Events {
            side,
            tail: BytesMut::new(),
            searched: 0,
            token_seen: false,
            unfinished: Unfinished::new(samples),
            complete: false,
            unjudged: false,
            passing_large: false,
            merging: None,
            waiting: false,
            ended: None,
            kept: None,
        }
    }

    pub fn push(&mut self, data: Bytes) -> Step {
        if self.complete {
            return Step::quiet();
        }
        if self.waiting {
            self.tail.extend_from_slice(&data);
            return Step::quiet();
        }
        if self.tail.is_empty() {
            let passed = self.pass(&data);
            self.tail.extend_from_slice(&data[passed.end..]);
            let forward = passed.merged.map_or_else(|| data.slice(..passed.end), BytesMut::freeze);
            return Step { forward, meaning: passed.meaning };
        }
        self.tail.extend_from_slice(&data);
        self.push_tail()
    }

    fn push_tail(&mut self) -> Step {
        let mut held = std::mem::take(&mut self.tail);
        let passed = self.pass(&held);
        let forward = match passed.merged {
            Some(merged) => {
                held.advance(passed.end);
                merged.freeze()
            }
            None => held.split_to(passed.end).freeze(),
        };
        self.tail = held;
        Step { forward, meaning: passed.meaning }
    }

    /// P's part is there now.
    pub fn go_on(&mut self) -> Step {
        if !std::mem::take(&mut self.waiting) {
            return Step::quiet();
        }
        self.searched = 0;
        let step = self.push_tail();
        match self.ended.filter(|_| !self.waiting && !matches!(step.meaning, Meaning::Complete | Meaning::Failed(_))) {
            Some(clean) => Step { meaning: self.end(clean).meaning, ..step },
            None => step,
        }
    }

    /// Deals with the whole events in `bytes`, which begin with an event.
    fn pass(&mut self, bytes: &[u8]) -> Passed {
        let had_token = self.token_seen;
        let mut end = 0;
        let mut merged = self.merging.as_ref().map(|_| BytesMut::with_capacity(bytes.len()));
        let mut meaning = Meaning::None;
        while let Some(next) = event_end(bytes, self.searched.max(end)) {
            let event = &bytes[end..next];
            let judged = match std::mem::take(&mut self.passing_large) {
                // Too large to be held: it counts as content.
                true => Ok(Event::Content),
                false => self.judge(event),
            };
            match judged {
                Err(failure) => meaning = Meaning::Failed(failure),
                Ok(_) if self.must_wait(event) => self.waiting = true,
                Ok(what) => {
                    self.write(event, merged.as_mut());
                    end = next;
                    self.token_seen |= matches!(what, Event::Content);
                    self.complete = matches!(what, Event::Last);
                }
            }
            if self.complete {
                meaning = Meaning::Complete;
            }
            if self.waiting || meaning != Meaning::None {
                self.searched = 0;
                break;
            }
        }
        if meaning == Meaning::None && !self.waiting {
            end += self.hold(&bytes[end..], merged.as_mut(), &mut meaning);
        }
        if meaning == Meaning::None && self.token_seen && !had_token {
            meaning = Meaning::Token;
        }
        Passed { end, merged, meaning }
    }

    /// What is no whole event yet stays, unless it is too large for that. Returns how much of it leaves.
    fn hold(&mut self, rest: &[u8], merged: Option<&mut BytesMut>, meaning: &mut Meaning) -> usize {
        self.searched = rest.len().saturating_sub(2);
        if self.merging.is_some() && rest.len() > HELD_ANSWER_BYTES_MAX {
            *meaning = Meaning::Failed(too_large(self.side));
        }
        if self.merging.is_some() || rest.len() <= HELD_EVENT_BYTES_MAX {
            return 0;
        }
        self.passing_large = true;
        self.unjudged = true;
        self.token_seen = true;
        self.searched = 0;
        self.write(&rest[..rest.len() - 2], merged);
        rest.len() - 2
    }

    fn must_wait(&self, event: &[u8]) -> bool {
        self.merging.as_ref().is_some_and(|merging| merging.is_missing_for(event))
    }

    fn write(&mut self, event: &[u8], merged: Option<&mut BytesMut>) {
        if let (Some(out), Some(merging)) = (merged, &mut self.merging) {
            merging.event(event, out);
        }
    }

    fn judge(&mut self, event: &[u8]) -> Result<Event, Failure> {
        let Some(data) = event_data(event) else { return Ok(Event::Other) };
        if data.trim_ascii() == b"[DONE]" {
            let good = self.side == Side::Prefill || self.unfinished.is_empty() || self.unjudged;
            return if good { Ok(Event::Last) } else { Err(no_finish(self.side)) };
        }
        // An event that is no JSON is the client's to judge: it is forwarded and proves nothing.
        let Ok(seen) = judge::look(&data, 0, &mut self.unfinished) else { return Ok(Event::Other) };
        if seen.fault {
            return Err(judge::fault(self.side, &data));
        }
        if let Some(kept) = &mut self.kept {
            kept.message(&data);
        }
        Ok(match seen {
            _ if seen.last => Event::Last,
            _ if seen.content || seen.finishes > 0 => Event::Content,
            _ => Event::Other,
        })
    }

    /// D's is complete with its last event only, P's also by a clean end.
    pub fn end(&mut self, clean: bool) -> Step {
        if self.waiting {
            self.ended = Some(clean);
            return Step::quiet();
        }
        let untouched = self.tail.is_empty() && clean;
        if self.complete || (self.side == Side::Prefill && untouched) {
            return Step { forward: Bytes::new(), meaning: Meaning::Complete };
        }
        if untouched && !self.token_seen {
            return Step::failed(tokenless(self.side));
        }
        Step::failed(truncated(self.side))
    }

    #[cfg(test)]
    pub fn held_bytes(&self) -> usize {
        self.tail.len()
    }
}

pub fn tokenless(side: Side) -> Failure {
    let what = format!("the {} worker ended its answer without a token", side.name());
    Failure::worker(side, ["prefill_empty_answer", "decode_empty_answer"], what)
}

pub fn no_finish(side: Side) -> Failure {
    let what = format!("the {} worker ended its answer without each sample's finish reason", side.name());
    Failure::worker(side, ["prefill_truncated", "decode_truncated"], what)
}

pub fn truncated(side: Side) -> Failure {
    let what = format!("the {} worker broke off in the middle of its answer", side.name());
    Failure::worker(side, ["prefill_truncated", "decode_truncated"], what)
}

/// Merging needs the whole of what it merges.
pub fn too_large(side: Side) -> Failure {
    let what = format!(
        "the {} worker's part of the prompt's logprobs is larger than {HELD_ANSWER_BYTES_MAX} bytes; \
         ask for fewer of them, or use a plain worker",
        side.name()
    );
    Failure::worker(side, ["prefill_answer_too_large", "decode_answer_too_large"], what)
}

/// Just behind the blank line that ends an event, from `from` on.
fn event_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        let next = at + memchr::memchr(b'\n', bytes.get(at..)?)? + 1;
        match bytes.get(next..) {
            Some([b'\n', ..]) => return Some(next + 1),
            Some([b'\r', b'\n', ..]) => return Some(next + 2),
            _ => at = next,
        }
    }
}

/// Where the only `data:` value of an event stands, or its lines joined; `None` for comments and events without data.
pub fn event_data(event: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut data: Option<Cow<[u8]>> = None;
    let mut at = 0;
    while at < event.len() {
        let end = memchr::memchr(b'\n', &event[at..]).map_or(event.len(), |found| at + found);
        let line = &event[at..end];
        at = end + 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let Some(value) = line.strip_prefix(b"data:") else { continue };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match &mut data {
            None => data = Some(Cow::Borrowed(value)),
            Some(joined) => {
                let joined = joined.to_mut();
                joined.push(b'\n');
                joined.extend_from_slice(value);
            }
        }
    }
    data
}
