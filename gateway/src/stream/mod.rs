//! Watching a worker's answer while it passes: events are cut apart and judged, their bytes are never re-encoded. Success
//! is judged from content, not from the status: an error event, an abort, an end without each sample's finish reason or, in
//! a stream of events, without `[DONE]`, and an answer without content are failures with a name. *Pure.*

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::{Failure, Side, message_of};
use crate::leg::http1::ResponseHead;

/// An event's beginning is held back until it is whole, so that an error can be said between two events; of larger events
/// the beginning is forwarded at once.
const HELD_EVENT_BYTES_MAX: usize = 64 * 1024;
/// A whole answer is judged before it is sent, if it is not larger than this.
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

/// One leg's answer behind its head.
#[derive(Debug)]
pub struct Answer {
    side: Side,
    worker: String,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Refusal { status: u16, retry_after_secs: Option<u32>, kept: BytesMut },
    Events(Events),
    Whole { held: BytesMut, overflowed: bool },
}

impl Answer {
    /// `samples`: how many finish reasons make a stream of D complete.
    pub fn new(side: Side, worker: &str, head: &ResponseHead, samples: usize) -> Self {
        let kind = if !(200..300).contains(&head.status) {
            let retry_after_secs = head.retry_after_secs();
            Kind::Refusal { status: head.status, retry_after_secs, kept: BytesMut::new() }
        } else if head.is_event_stream() {
            Kind::Events(Events::new(samples))
        } else {
            Kind::Whole { held: BytesMut::new(), overflowed: false }
        };
        Answer { side, worker: worker.to_owned(), kind }
    }

    pub fn push(&mut self, data: Bytes) -> Step {
        match &mut self.kind {
            Kind::Refusal { kept, .. } => {
                let room = KEPT_BODY_BYTES_MAX - kept.len().min(KEPT_BODY_BYTES_MAX);
                kept.extend_from_slice(&data[..data.len().min(room)]);
                Step::quiet()
            }
            Kind::Events(events) => events.push(self.side, &data),
            Kind::Whole { held, overflowed } => {
                let limit = if self.side == Side::Prefill { KEPT_BODY_BYTES_MAX } else { HELD_ANSWER_BYTES_MAX };
                if *overflowed || held.len() + data.len() > limit {
                    *overflowed = true;
                    held.extend_from_slice(&data);
                    return Step { forward: held.split().freeze(), meaning: Meaning::None };
                }
                held.extend_from_slice(&data);
                Step::quiet()
            }
        }
    }

    /// The body ended. `clean`: as its framing said it would.
    pub fn end(&mut self, clean: bool) -> Step {
        let truncated = || {
            let what = format!("the {} worker broke off in the middle of its answer", self.side.name());
            let failure = Failure::worker(self.side, ["prefill_truncated", "decode_truncated"], what);
            Step::failed(failure.with_detail(self.worker.as_str()))
        };
        match &mut self.kind {
            Kind::Refusal { status, retry_after_secs, kept } => {
                Step::failed(Failure::refused(self.side, *status, kept.split().freeze(), *retry_after_secs))
            }
            Kind::Events(events) => events.end(self.side, clean).unwrap_or_else(truncated),
            _ if !clean => truncated(),
            Kind::Whole { overflowed: true, .. } => Step { forward: Bytes::new(), meaning: Meaning::Complete },
            Kind::Whole { held, .. } => match judge_whole(self.side, held) {
                Ok(()) => Step { forward: held.split().freeze(), meaning: Meaning::Complete },
                Err(failure) => Step::failed(failure),
            },
        }
    }
}

/// Server-sent events of one answer. Event ends are `\n\n`, `\n\r\n` and `\r\n\r\n`; a lone `\r` is not taken as a line end,
/// since no worker sends it.
#[derive(Debug)]
struct Events {
    /// The beginning of an event that is not whole yet.
    tail: BytesMut,
    /// Up to here `tail` holds no event end.
    searched: usize,
    token_seen: bool,
    /// Samples whose finish reason has not been seen yet.
    unfinished: BTreeSet<u64>,
    complete: bool,
    /// An event was too large to be judged: any sample may have finished in it, so `[DONE]` alone tells.
    unjudged: bool,
    /// The beginning of the event at hand was forwarded already.
    passing_large: bool,
}

impl Events {
    fn new(samples: usize) -> Self {
        Events {
            tail: BytesMut::new(),
            searched: 0,
            token_seen: false,
            unfinished: (0..samples as u64).collect(),
            complete: false,
            unjudged: false,
            passing_large: false,
        }
    }

    fn push(&mut self, side: Side, data: &[u8]) -> Step {
        if self.complete {
            return Step::quiet();
        }
        self.tail.extend_from_slice(data);
        let had_token = self.token_seen;
        let mut ready = 0;
        while let Some(end) = event_end(&self.tail, self.searched.max(ready)) {
            let judged = match std::mem::take(&mut self.passing_large) {
                // Too large to be held: it counts as content.
                true => Ok(Event::Token { finished: vec![] }),
                false => judge_event(side, &self.tail[ready..end]),
            };
            match judged {
                Err(failure) => return self.step(ready, Meaning::Failed(failure)),
                Ok(Event::Done) if side == Side::Decode && !self.unfinished.is_empty() && !self.unjudged => {
                    return self.step(ready, Meaning::Failed(no_finish(side)));
                }
                Ok(Event::Done) => {
                    self.complete = true;
                    return self.step(end, Meaning::Complete);
                }
                Ok(Event::Token { finished }) => {
                    self.token_seen = true;
                    self.unfinished.retain(|sample| !finished.contains(sample));
                }
                Ok(Event::Other) => {}
            }
            ready = end;
            self.searched = end;
        }
        self.searched = self.tail.len().saturating_sub(2).max(ready);
        if self.tail.len() - ready > HELD_EVENT_BYTES_MAX {
            self.passing_large = true;
            self.unjudged = true;
            self.token_seen = true;
            ready = self.tail.len() - 2;
        }
        let meaning = if self.token_seen && !had_token { Meaning::Token } else { Meaning::None };
        self.step(ready, meaning)
    }

    fn step(&mut self, ready: usize, meaning: Meaning) -> Step {
        let forward = self.tail.split_to(ready).freeze();
        self.searched = self.searched.saturating_sub(ready);
        Step { forward, meaning }
    }

    /// `None` when the answer broke off. D's is complete with `[DONE]` only, P's also by a clean end.
    fn end(&mut self, side: Side, clean: bool) -> Option<Step> {
        let untouched = self.tail.is_empty() && clean;
        if self.complete || (side == Side::Prefill && untouched) {
            return Some(Step { forward: Bytes::new(), meaning: Meaning::Complete });
        }
        (untouched && !self.token_seen).then(|| Step::failed(tokenless(side)))
    }
}

fn tokenless(side: Side) -> Failure {
    let what = format!("the {} worker ended its answer without a token", side.name());
    Failure::worker(side, ["prefill_empty_answer", "decode_empty_answer"], what)
}

fn no_finish(side: Side) -> Failure {
    let what = format!("the {} worker ended its answer without each sample's finish reason", side.name());
    Failure::worker(side, ["prefill_truncated", "decode_truncated"], what)
}

/// Just behind the blank line that ends an event, from `from` on.
fn event_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    while let Some(found) = bytes[at..].iter().position(|b| *b == b'\n') {
        let next = at + found + 1;
        match bytes.get(next..) {
            Some([b'\n', ..]) => return Some(next + 1),
            Some([b'\r', b'\n', ..]) => return Some(next + 2),
            _ => at = next,
        }
    }
    None
}

enum Event {
    Done,
    /// Content, and the samples that it ends.
    Token {
        finished: Vec<u64>,
    },
    Other,
}

fn judge_event(side: Side, event: &[u8]) -> Result<Event, Failure> {
    let Some(data) = event_data(event) else { return Ok(Event::Other) };
    if data.trim_ascii() == b"[DONE]" {
        return Ok(Event::Done);
    }
    // An event that is no JSON is the client's to judge: it is forwarded and proves nothing.
    let Ok(message) = serde_json::from_slice::<Message>(&data) else { return Ok(Event::Other) };
    message.fault(side)?;
    let finished = message.finished();
    Ok(if message.has_token() || !finished.is_empty() { Event::Token { finished } } else { Event::Other })
}

/// The `data:` lines of one event joined; `None` for comments and events without data.
fn event_data(event: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut data: Option<Cow<[u8]>> = None;
    for line in event.split(|b| *b == b'\n') {
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

fn judge_whole(side: Side, body: &[u8]) -> Result<(), Failure> {
    if side == Side::Prefill {
        return match serde_json::from_slice::<OneOrMany>(body) {
            Ok(messages) => messages.0.iter().try_for_each(|m| m.fault(side)),
            Err(_) => Ok(()),
        };
    }
    if body.trim_ascii().is_empty() {
        return Err(tokenless(side));
    }
    let messages: OneOrMany = serde_json::from_slice(body).map_err(|e| {
        let what = format!("the {} worker's answer is not JSON: {e}", side.name());
        Failure::worker(side, ["prefill_bad_answer", "decode_bad_answer"], what)
    })?;
    messages.0.iter().try_for_each(|m| m.fault(side))?;
    if messages.0.is_empty() || !messages.0.iter().all(|m| m.has_token() || !m.finished().is_empty()) {
        return Err(tokenless(side));
    }
    if messages.0.iter().any(|m| m.finished().is_empty()) {
        return Err(no_finish(side));
    }
    Ok(())
}

/// One answer, or `/generate`'s list of them.
struct OneOrMany<'a>(Vec<Message<'a>>);

impl<'de> Deserialize<'de> for OneOrMany<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        let parsed = if raw.get().starts_with('[') {
            serde_json::from_str(raw.get()).map(OneOrMany)
        } else {
            serde_json::from_str(raw.get()).map(|one| OneOrMany(vec![one]))
        };
        parsed.map_err(serde::de::Error::custom)
    }
}

/// What the gateway must know of an answer or of one event of it; everything else is skipped.
#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    object: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
    #[serde(borrow, default)]
    code: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    #[serde(default)]
    text: Filled,
    #[serde(default)]
    output_ids: Filled,
    #[serde(borrow, default)]
    meta_info: Option<MetaInfo<'a>>,
    /// `/generate`'s sample; left out where there is one.
    #[serde(default)]
    index: Option<u64>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default)]
    index: Option<u64>,
    #[serde(default)]
    delta: Option<Content>,
    #[serde(default)]
    message: Option<Content>,
    #[serde(default)]
    text: Filled,
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Content {
    #[serde(default)]
    content: Filled,
    #[serde(default)]
    reasoning_content: Filled,
    #[serde(default)]
    tool_calls: Filled,
}

#[derive(Deserialize)]
struct MetaInfo<'a> {
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Abort<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
    message: Option<String>,
    status_code: Option<u16>,
}

impl Message<'_> {
    /// An error that the worker reports inside an answer of status 200.
    fn fault(&self, side: Side) -> Result<(), Failure> {
        if let Some(error) = self.error.filter(|e| e.get() != "null") {
            let value: serde_json::Value = serde_json::from_str(error.get()).unwrap_or_default();
            let status = ["status", "status_code", "code"].iter().find_map(|k| value[k].as_u64());
            let message = message_of(&serde_json::json!({ "error": value }));
            return Err(Failure::reported(side, status.and_then(|s| s.try_into().ok()), message));
        }
        if self.object.as_deref() == Some("error") {
            let message = self.message.and_then(|m| serde_json::from_str(m.get()).ok());
            return Err(Failure::reported(side, self.code.and_then(|c| c.get().parse().ok()), message));
        }
        let finish = self.meta_info.as_ref().and_then(|m| m.finish_reason);
        match finish.and_then(|f| serde_json::from_str::<Abort>(f.get()).ok()) {
            Some(abort) if abort.kind == "abort" => Err(Failure::reported(side, abort.status_code, abort.message)),
            _ if self.choices.iter().any(|c| c.finish_reason.is_some_and(|f| f.get() == "\"abort\"")) => {
                Err(Failure::reported(side, None, Some(format!("the {} worker aborted the request", side.name()))))
            }
            _ => Ok(()),
        }
    }

    fn has_token(&self) -> bool {
        let filled =
            |c: &Option<Content>| c.as_ref().is_some_and(|c| c.content.0 || c.reasoning_content.0 || c.tool_calls.0);
        let of_choice = |c: &Choice| c.text.0 || filled(&c.delta) || filled(&c.message);
        self.text.0 || self.output_ids.0 || self.choices.iter().any(of_choice)
    }

    /// The samples that have their finish reason here.
    fn finished(&self) -> Vec<u64> {
        let given = |f: Option<&RawValue>| f.is_some_and(|f| f.get() != "null");
        let own = given(self.meta_info.as_ref().and_then(|m| m.finish_reason)).then_some(self.index);
        let of_choices = self.choices.iter().filter(|c| given(c.finish_reason)).map(|c| c.index);
        own.into_iter().chain(of_choices).map(|index| index.unwrap_or(0)).collect()
    }
}

/// Whether a value is there and holds anything: a text or list that is not empty.
#[derive(Default)]
struct Filled(bool);

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = Filled;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("any value")
            }
            fn visit_str<E>(self, text: &str) -> Result<Filled, E> {
                Ok(Filled(!text.is_empty()))
            }
            fn visit_unit<E>(self) -> Result<Filled, E> {
                Ok(Filled(false))
            }
            fn visit_bool<E>(self, _: bool) -> Result<Filled, E> {
                Ok(Filled(true))
            }
            fn visit_i64<E>(self, _: i64) -> Result<Filled, E> {
                Ok(Filled(true))
            }
            fn visit_u64<E>(self, _: u64) -> Result<Filled, E> {
                Ok(Filled(true))
            }
            fn visit_f64<E>(self, _: f64) -> Result<Filled, E> {
                Ok(Filled(true))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Filled, A::Error> {
                let mut any = false;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    any = true;
                }
                Ok(Filled(any))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Filled, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Filled(true))
            }
        }
        deserializer.deserialize_any(Look)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leg::http1::take_response_head;

    fn answer(side: Side, content_type: &str) -> Answer {
        answer_of(side, content_type, 1)
    }

    fn answer_of(side: Side, content_type: &str, samples: usize) -> Answer {
        let text = format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n\r\n");
        let head = take_response_head(&mut BytesMut::from(text.as_bytes())).unwrap().unwrap();
        Answer::new(side, "http://w", &head, samples)
    }

    fn code(step: &Step) -> &'static str {
        match &step.meaning {
            Meaning::Failed(failure) => failure.code,
            other => panic!("{other:?} is no failure"),
        }
    }

    const TOKEN: &str =
        "data: {\"choices\":[{\"delta\":{\"content\":\"a data: [DONE] b\"},\"finish_reason\":null}]}\n\n";
    const LAST: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\r\n\r\n";
    const DONE: &str = "data: [DONE]\n\n";

    #[test]
    fn a_stream_split_at_every_byte_is_forwarded_whole_and_understood() {
        let text = format!(": hi\n\n{TOKEN}{LAST}{DONE}");
        for cut in 0..text.len() {
            let mut events = answer(Side::Decode, "text/event-stream");
            let (mut sent, mut tokens, mut complete) = (Vec::new(), 0, 0);
            for part in [&text[..cut], &text[cut..]] {
                let step = events.push(Bytes::copy_from_slice(part.as_bytes()));
                sent.extend_from_slice(&step.forward);
                match step.meaning {
                    Meaning::Token => tokens += 1,
                    Meaning::Complete => complete += 1,
                    Meaning::None => {}
                    Meaning::Failed(f) => panic!("{f:?}"),
                }
                assert!(sent.is_empty() || sent.ends_with(b"\n"), "only whole events leave");
            }
            assert_eq!(String::from_utf8(sent).unwrap(), text);
            assert_eq!(complete, 1, "cut at {cut}");
            assert!(tokens <= 1);
        }
    }

    #[test]
    fn ends_that_are_no_ends() {
        let mut empty = answer(Side::Decode, "text/event-stream");
        assert_eq!(code(&empty.end(true)), "decode_empty_answer");
        let mut early = answer(Side::Decode, "text/event-stream");
        early.push(Bytes::from_static(TOKEN.as_bytes()));
        assert_eq!(code(&early.end(true)), "decode_truncated");
        let mut only_done = answer(Side::Decode, "text/event-stream");
        let step = only_done.push(Bytes::from_static(DONE.as_bytes()));
        assert_eq!((code(&step), step.forward.len()), ("decode_truncated", 0));
        let mut without_done = answer(Side::Decode, "text/event-stream");
        without_done.push(Bytes::from_static(LAST.as_bytes()));
        assert_eq!(code(&without_done.end(true)), "decode_truncated");
    }

    #[test]
    fn a_stream_is_good_with_each_samples_finish_reason_and_done() {
        let chat = |i: u64| format!("data: {{\"choices\":[{{\"index\":{i},\"finish_reason\":\"stop\"}}]}}\n\n");
        let native = |i: u64| {
            format!(
                "data: {{\"text\":\"x\",\"index\":{i},\"meta_info\":{{\"finish_reason\":{{\"type\":\"stop\"}}}}}}\n\n"
            )
        };
        let usage = "data: {\"choices\":[],\"usage\":{\"total_tokens\":3}}\n\n".to_owned();
        let both = "data: {\"choices\":[{\"index\":0,\"finish_reason\":\"stop\"},{\"index\":1,\"finish_reason\":\"length\"}]}\n\n";
        let done = DONE.to_owned();
        let cases: Vec<(usize, Vec<String>, bool)> = vec![
            (1, vec![chat(0), done.clone()], true),
            (1, vec![chat(0), usage.clone(), done.clone()], true),
            (1, vec![chat(0), usage.clone()], false),
            (1, vec![chat(0)], false),
            (2, vec![chat(0), chat(1), done.clone()], true),
            (2, vec![both.to_owned(), done.clone()], true),
            (2, vec![chat(1), native(0), done.clone()], true),
            (2, vec![native(1), native(0), done.clone()], true),
            (2, vec![chat(0), chat(1)], false),
            (2, vec![chat(0), done.clone()], false),
            (2, vec![chat(0), chat(0), done.clone()], false),
            (2, vec![chat(0), chat(7), done.clone()], false),
            (8, vec![native(3)], false),
        ];
        for (samples, events, good) in cases {
            for clean in [true, false] {
                let mut stream = answer_of(Side::Decode, "text/event-stream", samples);
                let mut meaning = Meaning::None;
                for event in &events {
                    meaning = stream.push(Bytes::from(event.clone())).meaning;
                }
                if !matches!(meaning, Meaning::Complete | Meaning::Failed(_)) {
                    meaning = stream.end(clean).meaning;
                }
                assert_eq!(meaning == Meaning::Complete, good, "{samples} {events:?}: {meaning:?}");
            }
        }
    }

    #[test]
    fn a_last_event_too_large_to_judge_needs_done() {
        let last = format!(
            "data: {{\"text\":\"{}\",\"meta_info\":{{\"finish_reason\":{{\"type\":\"stop\"}}}}}}\n\n",
            "x".repeat(2 * HELD_EVENT_BYTES_MAX)
        );
        for done in [true, false] {
            let mut stream = answer(Side::Decode, "text/event-stream");
            stream.push(Bytes::copy_from_slice(&last.as_bytes()[..last.len() - 9]));
            stream.push(Bytes::copy_from_slice(&last.as_bytes()[last.len() - 9..]));
            let step = if done { stream.push(Bytes::from_static(DONE.as_bytes())) } else { stream.end(true) };
            assert_eq!(step.meaning == Meaning::Complete, done);
        }
    }

    #[test]
    fn errors_inside_a_stream_carry_the_workers_words() {
        let cases = [
            (r#"{"error":{"message":"kv lost","code":500}}"#, 500, "kv lost"),
            (r#"{"error":"plain"}"#, 502, "plain"),
            (r#"{"object":"error","message":"too long","code":400}"#, 400, "too long"),
            (
                r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"gone","status_code":503}}}"#,
                503,
                "gone",
            ),
        ];
        for (event, status, message) in cases {
            let mut events = answer(Side::Decode, "text/event-stream");
            let step = events.push(Bytes::from(format!("{TOKEN}data: {event}\n\n")));
            assert_eq!(step.forward, TOKEN, "what came before still leaves");
            let Meaning::Failed(failure) = step.meaning else { panic!("{event}") };
            assert_eq!((failure.status, failure.message.as_str()), (status, message));
        }
    }

    #[test]
    fn a_megabyte_event_passes_without_being_held() {
        let mut events = answer(Side::Decode, "text/event-stream");
        let text = format!("data: {{\"choices\":[{{\"text\":\"{}\"}}]}}\n\n{LAST}{DONE}", "x".repeat(1 << 20));
        let mut sent = Vec::new();
        let mut complete = false;
        for part in text.as_bytes().chunks(1000) {
            let step = events.push(Bytes::copy_from_slice(part));
            sent.extend_from_slice(&step.forward);
            complete |= step.meaning == Meaning::Complete;
            let Kind::Events(state) = &events.kind else { unreachable!() };
            assert!(state.tail.len() <= HELD_EVENT_BYTES_MAX + 1000);
        }
        assert!(complete && sent == text.as_bytes());
    }

    #[test]
    fn whole_answers() {
        let judge = |body: &str| {
            let mut whole = answer(Side::Decode, "application/json");
            assert_eq!(whole.push(Bytes::copy_from_slice(body.as_bytes())), Step::quiet());
            whole.end(true)
        };
        for good in [
            r#"{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}"#,
            r#"{"choices":[{"message":{"content":""},"finish_reason":"stop"}]}"#,
            r#"{"text":"x","meta_info":{"finish_reason":{"type":"length","length":1}}}"#,
            r#"[{"text":"x","meta_info":{"finish_reason":{"type":"stop"}}},{"text":"y","meta_info":{"finish_reason":{"type":"stop"}}}]"#,
        ] {
            let step = judge(good);
            assert_eq!((step.meaning, &step.forward[..]), (Meaning::Complete, good.as_bytes()));
        }
        for (bad, expected) in [
            ("", "decode_empty_answer"),
            ("{}", "decode_empty_answer"),
            ("[]", "decode_empty_answer"),
            (r#"{"choices":[]}"#, "decode_empty_answer"),
            (r#"{"choices":[{"message":{"content":"x"}}]}"#, "decode_truncated"),
            ("<html>", "decode_bad_answer"),
            (r#"{"error":{"message":"m"}}"#, "decode_reported_error"),
        ] {
            assert_eq!(code(&judge(bad)), expected, "{bad}");
        }
        let mut cut = answer(Side::Decode, "application/json");
        cut.push(Bytes::from_static(br#"{"choices":[{"finish_reason":"stop"}]}"#));
        assert_eq!(code(&cut.end(false)), "decode_truncated");
    }

    #[test]
    fn a_prefill_answer_needs_no_token_but_may_not_be_an_error() {
        let mut empty = answer(Side::Prefill, "application/json");
        assert_eq!(empty.end(true).meaning, Meaning::Complete);
        let mut stream = answer(Side::Prefill, "text/event-stream");
        assert_eq!(stream.push(Bytes::from_static(DONE.as_bytes())).meaning, Meaning::Complete);
        let mut failed = answer(Side::Prefill, "text/event-stream");
        let step = failed.push(Bytes::from_static(b"data: {\"error\":{\"message\":\"oom\",\"code\":503}}\n\n"));
        assert_eq!(code(&step), "prefill_reported_error");
        let mut cut = answer(Side::Prefill, "text/event-stream");
        cut.push(Bytes::from_static(TOKEN.as_bytes()));
        assert_eq!(code(&cut.end(false)), "prefill_truncated");
    }
}
