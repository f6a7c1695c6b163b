//! What one message of an answer shows: content, the samples that it ends, an error. The usual message is walked once,
//! without allocating; only one with an error is read into values, for its words. *Pure.*

use crate::error::{Failure, Side, message_of};
use crate::json::{Cursor, NotJson};

/// What a message shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Seen {
    /// Content: a token, or the sign of one.
    pub content: bool,
    /// Finish reasons in it.
    pub finishes: usize,
    /// It is the last one of a stream whose API has no `[DONE]`.
    pub last: bool,
    /// An error that the worker reports inside an answer of status 200.
    pub fault: bool,
}

/// Samples whose finish reason has not been seen yet.
#[derive(Debug)]
pub struct Unfinished {
    bits: Box<[u64]>,
    left: usize,
}

impl Unfinished {
    pub fn new(samples: usize) -> Self {
        let mut bits = vec![u64::MAX; samples.div_ceil(64)].into_boxed_slice();
        if let Some(last) = bits.last_mut().filter(|_| !samples.is_multiple_of(64)) {
            *last >>= 64 - samples % 64;
        }
        Unfinished { bits, left: samples }
    }

    pub fn is_empty(&self) -> bool {
        self.left == 0
    }

    fn finish(&mut self, sample: u64) {
        let bit = 1 << (sample % 64);
        let word = usize::try_from(sample / 64).ok().and_then(|word| self.bits.get_mut(word));
        if let Some(word) = word.filter(|word| **word & bit != 0) {
            *word &= !bit;
            self.left -= 1;
        }
    }
}

/// Walks one message. `position`: its place in a list of answers, where it does not tell its index itself.
pub fn look(message: &[u8], position: u64, unfinished: &mut Unfinished) -> Result<Seen, NotJson> {
    let mut cursor = Cursor::new(message);
    let seen = look_at(&mut cursor, position, unfinished)?;
    if cursor.is_at_end() { Ok(seen) } else { Err(NotJson) }
}

/// Walks a whole answer: one message, or `/generate`'s list of them. The least that all of them show.
pub fn look_at_all(body: &[u8], unfinished: &mut Unfinished) -> Result<Seen, NotJson> {
    let mut cursor = Cursor::new(body);
    if !cursor.enter(b'[')? {
        return look(body, 0, unfinished);
    }
    let (mut first, mut position) = (true, 0);
    let mut all = Seen { content: true, finishes: usize::MAX, ..Seen::default() };
    while cursor.item(&mut first)? {
        let seen = look_at(&mut cursor, position, unfinished)?;
        all.content &= seen.content || seen.finishes > 0;
        all.finishes = all.finishes.min(seen.finishes);
        all.fault |= seen.fault;
        position += 1;
    }
    if position == 0 {
        all = Seen::default();
    }
    if cursor.is_at_end() { Ok(all) } else { Err(NotJson) }
}

fn look_at(cursor: &mut Cursor, position: u64, unfinished: &mut Unfinished) -> Result<Seen, NotJson> {
    let mut seen = Seen::default();
    if !cursor.enter(b'{')? {
        cursor.skip()?;
        return Ok(seen);
    }
    let mut own = Own { index: position, finished: false, is_response: false, status: Status::Other };
    let mut first = true;
    while let Some(name) = cursor.field(&mut first)? {
        match &*name.name() {
            b"choices" => choices(cursor, &mut seen, unfinished)?,
            b"meta_info" => own.finished |= has_finish(cursor, &[b"finish_reason"], &mut seen)?,
            // Messages' `message_delta`, and Responses' pieces of text.
            b"delta" => match cursor.peek()? {
                b'{' => own.finished |= has_finish(cursor, &[b"stop_reason"], &mut seen)?,
                _ => seen.content |= is_filled(cursor)?,
            },
            b"text" | b"output_ids" | b"content" | b"output" => seen.content |= is_filled(cursor)?,
            b"stop_reason" => own.finished |= is_filled(cursor)?,
            b"index" => own.index = number(cursor)?.unwrap_or(position),
            b"error" => seen.fault |= is_given(cursor)?,
            b"object" => own.object(cursor, &mut seen)?,
            b"status" => own.status = Status::of(cursor)?,
            b"type" => own.kind(cursor, &mut seen)?,
            _ => cursor.pass()?,
        }
    }
    own.conclude(&mut seen, unfinished);
    Ok(seen)
}

/// What the fields of a message say about the message itself, in any order.
struct Own {
    index: u64,
    finished: bool,
    is_response: bool,
    status: Status,
}

/// Of a whole answer of the Responses API.
#[derive(PartialEq, Eq)]
enum Status {
    Ended,
    Failed,
    Other,
}

impl Status {
    fn of(cursor: &mut Cursor) -> Result<Self, NotJson> {
        if cursor.peek()? != b'"' {
            return cursor.skip().map(|_| Status::Other);
        }
        Ok(match &*cursor.text()?.name() {
            b"completed" | b"incomplete" | b"queued" | b"in_progress" => Status::Ended,
            b"failed" | b"cancelled" => Status::Failed,
            _ => Status::Other,
        })
    }
}

impl Own {
    fn object(&mut self, cursor: &mut Cursor, seen: &mut Seen) -> Result<(), NotJson> {
        if cursor.peek()? != b'"' {
            return cursor.pass();
        }
        match &*cursor.text()?.name() {
            b"error" => seen.fault = true,
            b"response" => self.is_response = true,
            _ => {}
        }
        Ok(())
    }

    /// The kind of an event of the Responses or Messages API.
    fn kind(&mut self, cursor: &mut Cursor, seen: &mut Seen) -> Result<(), NotJson> {
        if cursor.peek()? != b'"' {
            return cursor.pass();
        }
        match &*cursor.text()?.name() {
            b"error" | b"response.failed" => seen.fault = true,
            b"response.completed" | b"response.incomplete" | b"message_stop" => {
                self.finished = true;
                self.index = 0;
                seen.last = true;
            }
            // Its index is the block's, not a sample's.
            b"message_delta" => self.index = 0,
            b"content_block_delta" => seen.content = true,
            _ => {}
        }
        Ok(())
    }

    fn conclude(self, seen: &mut Seen, unfinished: &mut Unfinished) {
        let ended = self.is_response && self.status == Status::Ended;
        seen.fault |= self.is_response && self.status == Status::Failed;
        if self.finished || ended {
            seen.finishes += 1;
            unfinished.finish(self.index);
        }
    }
}

fn choices(cursor: &mut Cursor, seen: &mut Seen, unfinished: &mut Unfinished) -> Result<(), NotJson> {
    if !cursor.enter(b'[')? {
        return cursor.pass();
    }
    let mut first = true;
    let mut position = 0;
    while cursor.item(&mut first)? {
        if !cursor.enter(b'{')? {
            cursor.skip()?;
            continue;
        }
        let (mut index, mut finished) = (position, false);
        let mut first = true;
        while let Some(name) = cursor.field(&mut first)? {
            match &*name.name() {
                b"index" => index = number(cursor)?.unwrap_or(position),
                b"delta" | b"message" => seen.content |= says_something(cursor)?,
                b"text" => seen.content |= is_filled(cursor)?,
                b"finish_reason" => finished = is_finish(cursor, seen)?,
                _ => cursor.pass()?,
            }
        }
        if finished {
            seen.finishes += 1;
            unfinished.finish(index);
        }
        position += 1;
    }
    Ok(())
}

/// Whether a message or delta of a chat holds content of any kind.
fn says_something(cursor: &mut Cursor) -> Result<bool, NotJson> {
    if !cursor.enter(b'{')? {
        return cursor.skip().map(|_| false);
    }
    let (mut first, mut says) = (true, false);
    while let Some(name) = cursor.field(&mut first)? {
        match &*name.name() {
            b"content" | b"reasoning_content" | b"reasoning" | b"tool_calls" => says |= is_filled(cursor)?,
            _ => cursor.pass()?,
        }
    }
    Ok(says)
}

/// Whether an object has one of these reasons for its end.
fn has_finish(cursor: &mut Cursor, names: &[&[u8]], seen: &mut Seen) -> Result<bool, NotJson> {
    if !cursor.enter(b'{')? {
        return cursor.skip().map(|_| false);
    }
    let (mut first, mut finished) = (true, false);
    while let Some(name) = cursor.field(&mut first)? {
        if names.contains(&&*name.name()) {
            finished |= is_finish(cursor, seen)?;
        } else {
            cursor.skip()?;
        }
    }
    Ok(finished)
}

/// Whether a finish reason is given: a word, or SGLang's object with a `type`. `abort` is a fault.
fn is_finish(cursor: &mut Cursor, seen: &mut Seen) -> Result<bool, NotJson> {
    match cursor.peek()? {
        b'"' => seen.fault |= &*cursor.text()?.name() == b"abort",
        b'{' => {
            cursor.enter(b'{')?;
            let mut first = true;
            while let Some(name) = cursor.field(&mut first)? {
                match (&*name.name(), cursor.peek()?) {
                    (b"type", b'"') => seen.fault |= &*cursor.text()?.name() == b"abort",
                    _ => cursor.pass()?,
                }
            }
        }
        _ => return is_given(cursor),
    }
    Ok(true)
}

/// Whether a value is not `null`.
fn is_given(cursor: &mut Cursor) -> Result<bool, NotJson> {
    let is_null = cursor.peek()? == b'n';
    cursor.skip().map(|_| !is_null)
}

/// Whether a value holds anything: a text or list that is not empty, or something else but `null`.
fn is_filled(cursor: &mut Cursor) -> Result<bool, NotJson> {
    match cursor.peek()? {
        b'"' => cursor.text().map(|text| !text.is_empty()),
        b'[' => {
            let mut inside = cursor.clone();
            inside.enter(b'[')?;
            let is_empty = inside.peek()? == b']';
            cursor.skip().map(|_| !is_empty)
        }
        _ => is_given(cursor),
    }
}

fn number(cursor: &mut Cursor) -> Result<Option<u64>, NotJson> {
    let digits = cursor.value()?;
    let value = digits.iter().try_fold(0u64, |value, digit| match digit {
        b'0'..=b'9' => value.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    });
    Ok(value)
}

/// The failure inside a message of status 200, with the worker's words: an error object, SGLang's flat one, an abort, or a
/// failed response.
pub fn fault(side: Side, message: &[u8]) -> Failure {
    let value: serde_json::Value = serde_json::from_slice(message).unwrap_or_default();
    let messages = match &value {
        serde_json::Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    let told = messages.iter().find_map(|message| told_by(side, message));
    told.unwrap_or_else(|| {
        Failure::reported(side, None, Some(format!("the {} worker aborted the request", side.name())))
    })
}

fn told_by(side: Side, message: &serde_json::Value) -> Option<Failure> {
    let status_of = |value: &serde_json::Value| {
        let number = |key| value[key].as_u64().or_else(|| value[key].as_str()?.parse().ok());
        ["status", "status_code", "code"].into_iter().find_map(number).and_then(|status| status.try_into().ok())
    };
    for error in [&message["error"], &message["response"]["error"]] {
        if !error.is_null() {
            let words = message_of(&serde_json::json!({ "error": error }));
            return Some(Failure::reported(side, status_of(error), words));
        }
    }
    if message["object"] == "error" || message["type"] == "error" {
        return Some(Failure::reported(side, status_of(message), message_of(message)));
    }
    let finish = &message["meta_info"]["finish_reason"];
    if finish["type"] == "abort" {
        return Some(Failure::reported(side, status_of(finish), message_of(finish)));
    }
    None
}
