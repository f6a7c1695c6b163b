//! P's part in D's answer: logprobs of the prompt, which only P computes, and the tokens that P found in its cache. D's
//! bytes stay as they are around what is put in. *Pure.*

use std::borrow::Cow;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::json::Cursor;
use crate::stream::events::event_data;
use crate::stream::kept::{PrefillAnswer, find, number};

/// `meta_info`'s lists about the prompt, one entry for each of its tokens.
const PROMPT_LISTS: [&str; 3] = ["input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"];
/// The parallel lists of a completion's `logprobs`; with `echo` they begin with the prompt's tokens.
const CHOICE_LISTS: [&str; 4] = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];

/// What of P's answer belongs into D's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Merge {
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// P's number of cached tokens; D counts all that it was handed.
    pub usage: bool,
}

/// What D says about the prompt itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PromptLogprobs {
    /// Nothing: P's entries go in front of D's.
    InFront,
    /// Perhaps something of its own, which P's takes the place of.
    Replaced,
}

/// A merge in progress.
#[derive(Debug)]
pub struct Merging {
    merge: Merge,
    pub prefill: Option<PrefillAnswer>,
    /// Messages and choices of a stream whose first entries went out.
    begun: Vec<(Holder, u64)>,
}

/// What holds entries of a sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Holder {
    Message,
    Choice,
}

impl Merging {
    pub fn new(merge: Merge) -> Self {
        Merging { merge, prefill: None, begun: Vec::new() }
    }

    pub fn wants_logprobs(&self) -> bool {
        self.merge.prompt_logprobs.is_some()
    }

    /// Whether this event cannot leave without P's part.
    pub fn is_missing_for(&self, event: &[u8]) -> bool {
        let waits = |data: &[u8]| self.wants_logprobs() || usage_of(data).is_some();
        self.prefill.is_none() && event_data(event).is_some_and(|data| waits(&data))
    }

    /// A whole answer with P's part in it.
    pub fn whole(&mut self, body: &[u8]) -> Bytes {
        let mut edits = Vec::new();
        match body.trim_ascii_start().first() {
            Some(b'[') => {
                for (position, message) in items(body).into_iter().enumerate() {
                    self.edits(body, message, position as u64, &mut edits);
                }
            }
            _ => self.edits(body, body, 0, &mut edits),
        }
        let mut out = BytesMut::with_capacity(body.len());
        apply(body, edits, &mut out);
        out.freeze()
    }

    /// Writes an event with P's part in it.
    pub fn event(&mut self, event: &[u8], out: &mut BytesMut) {
        let Some(data) = event_data(event) else { return out.extend_from_slice(event) };
        let mut edits = Vec::new();
        let sample = match self.wants_logprobs() {
            true => find(&data, &[b"index"]).and_then(number).unwrap_or(0),
            false => 0,
        };
        self.edits(&data, &data, sample, &mut edits);
        if edits.is_empty() {
            return out.extend_from_slice(event);
        }
        // P's text may have been written over several lines, which an event's data must not be.
        edits
            .iter_mut()
            .flat_map(|edit| &mut edit.with)
            .filter(|byte| byte.is_ascii_whitespace())
            .for_each(|b| *b = b' ');
        match data {
            Cow::Borrowed(data) => {
                let at = offset(event, data);
                out.extend_from_slice(&event[..at]);
                apply(data, edits, out);
                out.extend_from_slice(&event[at + data.len()..]);
            }
            Cow::Owned(mut data) => {
                data.iter_mut().filter(|byte| **byte == b'\n').for_each(|byte| *byte = b' ');
                out.extend_from_slice(b"data: ");
                apply(&data, edits, out);
                out.extend_from_slice(b"\n\n");
            }
        }
    }

    /// What to change in one message of `text`.
    fn edits(&mut self, text: &[u8], message: &[u8], sample: u64, edits: &mut Vec<Edit>) {
        let Some(prefill) = &self.prefill else { return };
        if let Some(cached) = prefill.cached_tokens.filter(|_| self.merge.usage) {
            edits.extend(usage_of(message).and_then(|usage| cached_edit(text, usage, cached)));
        }
        let Some(style) = self.merge.prompt_logprobs else { return };
        if let Some(of_prefill) = prefill.value(sample, &[b"prompt_logprobs"]) {
            edits.extend(set(text, message, "prompt_logprobs", of_prefill));
        }
        if let Some(meta) = find(message, &[b"meta_info"]) {
            let is_first = begins(&mut self.begun, Holder::Message, sample);
            for list in PROMPT_LISTS {
                let of_prefill = prefill.value(sample, &[b"meta_info", list.as_bytes()]);
                let Some(of_prefill) = of_prefill.filter(|raw| raw.starts_with(b"[")) else { continue };
                match find(meta, &[list.as_bytes()]).filter(|own| own.starts_with(b"[")) {
                    Some(own) => edits.push(in_front(text, own, inside(of_prefill))),
                    // Each event of SGLang's tells all so far, its own empty list included; without one, once is enough.
                    None if is_first => edits.extend(set(text, meta, list, of_prefill)),
                    None => {}
                }
            }
        }
        for (position, choice) in find(message, &[b"choices"]).map(items).unwrap_or_default().into_iter().enumerate() {
            let index = find(choice, &[b"index"]).and_then(number).unwrap_or(position as u64);
            let Some(of_prefill) = prefill.choice(index) else { continue };
            if let Some(logprobs) = find(of_prefill, &[b"prompt_logprobs"]).filter(|raw| *raw != b"null") {
                edits.extend(set(text, choice, "prompt_logprobs", logprobs));
            }
            let own = find(choice, &[b"logprobs"]).filter(|own| own.starts_with(b"{"));
            if let (Some(own), Some(theirs)) = (own, find(of_prefill, &[b"logprobs"]))
                && begins(&mut self.begun, Holder::Choice, index)
            {
                choice_edits(text, own, theirs, style, edits);
            }
        }
    }
}

impl PrefillAnswer {
    /// The first value at this path that P gave for a sample.
    fn value(&self, sample: u64, path: &[&[u8]]) -> Option<&[u8]> {
        let of_sample = self.messages.iter().filter(|(of, _)| *of == sample);
        let mut values = of_sample.filter_map(|(_, message)| find(message, path));
        values.find(|raw| *raw != b"null" && !(raw.starts_with(b"[") && inside(raw).is_empty()))
    }

    /// P's choice of this index, the first that holds logprobs.
    fn choice(&self, index: u64) -> Option<&[u8]> {
        let lists = self.messages.iter().filter_map(|(_, message)| find(message, &[b"choices"]));
        let choices = lists.flat_map(|list| items(list).into_iter().enumerate());
        let mut of_index = choices
            .filter(|(position, choice)| {
                find(choice, &[b"index"]).and_then(number).unwrap_or(*position as u64) == index
            })
            .map(|(_, choice)| choice);
        let has_some = |choice: &[u8]| {
            ["logprobs", "prompt_logprobs"]
                .iter()
                .any(|name| find(choice, &[name.as_bytes()]).is_some_and(|raw| raw != b"null"))
        };
        of_index.find(|choice| has_some(choice))
    }
}

/// P's lists hold the prompt's tokens and the one that P sampled, which is D's first, too.
fn choice_edits(text: &[u8], own: &[u8], theirs: &[u8], style: PromptLogprobs, edits: &mut Vec<Edit>) {
    let Some(prompt) = list_of(theirs, "tokens").map(prompt_items) else { return };
    let has_them = list_of(own, "tokens").is_some_and(|own| items(own).starts_with(&prompt));
    let replaces = style == PromptLogprobs::Replaced && has_them && !prompt.is_empty();
    for list in CHOICE_LISTS {
        let (Some(own), Some(theirs)) = (list_of(own, list), list_of(theirs, list)) else { continue };
        let prompt_part = span(theirs, &prompt_items(theirs));
        if prompt_part.is_empty() {
            continue;
        }
        edits.push(match items(own).get(..prompt.len()) {
            Some(own) if replaces => Edit::replaced(text, span(text, own), prompt_part),
            _ => in_front(text, own, prompt_part),
        });
    }
}

fn list_of<'a>(object: &'a [u8], name: &str) -> Option<&'a [u8]> {
    find(object, &[name.as_bytes()]).filter(|raw| raw.starts_with(b"["))
}

fn prompt_items(list: &[u8]) -> Vec<&[u8]> {
    let mut items = items(list);
    items.pop();
    items
}

/// From the first of these parts of a text to the last.
fn span<'a>(text: &'a [u8], parts: &[&[u8]]) -> &'a [u8] {
    match (parts.first(), parts.last()) {
        (Some(first), Some(last)) => &text[offset(text, first)..offset(text, last) + last.len()],
        _ => &[],
    }
}

/// P's entries, which are some, in front of D's list.
fn in_front(text: &[u8], own: &[u8], entries: &[u8]) -> Edit {
    if inside(own).is_empty() {
        return Edit::replaced(text, own, &[b"[", entries, b"]"].concat());
    }
    let at = offset(text, own) + 1;
    Edit { at: at..at, with: [entries, b","].concat(), adds: None }
}

/// Sets a field of an object, wherever it stands.
fn set(text: &[u8], object: &[u8], name: &str, value: &[u8]) -> Option<Edit> {
    match find(object, &[name.as_bytes()]) {
        Some(own) => Some(Edit::replaced(text, own, value)),
        None if object.starts_with(b"{") => {
            let at = offset(text, object) + 1;
            let with = [b"\"", name.as_bytes(), b"\":", value].concat();
            Some(Edit { at: at..at, with, adds: Some(inside(object).is_empty()) })
        }
        None => None,
    }
}

fn cached_edit(text: &[u8], usage: &[u8], cached: u64) -> Option<Edit> {
    let details = match find(usage, &[b"input_tokens"]) {
        Some(_) => "input_tokens_details",
        None => "prompt_tokens_details",
    };
    let number = cached.to_string();
    match find(usage, &[details.as_bytes()]).filter(|own| own.starts_with(b"{")) {
        Some(own) => set(text, own, "cached_tokens", number.as_bytes()),
        None => set(text, usage, details, format!(r#"{{"cached_tokens":{number}}}"#).as_bytes()),
    }
}

/// A message's usage, wherever its API has it.
fn usage_of(message: &[u8]) -> Option<&[u8]> {
    let usage = find(message, &[b"usage"]).or_else(|| find(message, &[b"response", b"usage"]));
    usage.filter(|usage| usage.starts_with(b"{"))
}

/// True the first time that a sample is named.
fn begins(begun: &mut Vec<(Holder, u64)>, holder: Holder, sample: u64) -> bool {
    let is_new = !begun.contains(&(holder, sample));
    if is_new {
        begun.push((holder, sample));
    }
    is_new
}

/// What stands between the brackets or braces.
fn inside(list: &[u8]) -> &[u8] {
    list.get(1..list.len().saturating_sub(1)).unwrap_or_default().trim_ascii()
}

fn items(list: &[u8]) -> Vec<&[u8]> {
    let mut cursor = Cursor::new(list);
    let mut items = Vec::new();
    let mut first = true;
    if cursor.enter(b'[') == Ok(true) {
        while let Ok(true) = cursor.item(&mut first) {
            let Ok(item) = cursor.value() else { break };
            items.push(item);
        }
    }
    items
}

/// Where a part of a text stands in it.
fn offset(text: &[u8], part: &[u8]) -> usize {
    part.as_ptr() as usize - text.as_ptr() as usize
}

/// Bytes of D's text, and what stands there instead.
#[derive(Debug)]
struct Edit {
    at: Range<usize>,
    with: Vec<u8>,
    /// It adds a field to an object: whether the object has no other.
    adds: Option<bool>,
}

impl Edit {
    fn replaced(text: &[u8], part: &[u8], with: &[u8]) -> Self {
        let at = offset(text, part);
        Edit { at: at..at + part.len(), with: with.to_vec(), adds: None }
    }
}

fn apply(text: &[u8], mut edits: Vec<Edit>, out: &mut BytesMut) {
    edits.sort_by_key(|edit| edit.at.start);
    let mut from = 0;
    let mut edits = edits.into_iter().peekable();
    while let Some(edit) = edits.next() {
        out.extend_from_slice(&text[from..edit.at.start]);
        out.extend_from_slice(&edit.with);
        from = edit.at.end;
        let another = edits.peek().is_some_and(|next| next.at.start == edit.at.start && next.adds.is_some());
        if edit.adds.is_some_and(|is_only| !is_only || another) {
            out.extend_from_slice(b",");
        }
    }
    out.extend_from_slice(&text[from..]);
}
