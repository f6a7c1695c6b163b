//! A request's body, looked at once: what the gateway must know of it, and how to put the gateway's fields into the client's
//! own bytes. Unknown fields survive byte for byte, since nothing is re-encoded. *Pure.*

mod endpoint;
mod fields;
mod scan;
mod text;

use std::borrow::Cow;

use bytes::{Bytes, BytesMut};

pub use endpoint::Endpoint;
pub use fields::Field;

use crate::error::Failure;
use crate::exchange::ticket::Samples;
use crate::json::Cursor;
use scan::{Anatomy, Prompts, prompt_slot};

/// Samples of one request at most, so that one body cannot ask for millions of rooms.
const SAMPLES_MAX: u64 = 4096;

/// A checked body: one JSON object, and what the gateway must know of it.
#[derive(Clone, Debug)]
pub struct Scanned {
    body: Bytes,
    anatomy: Anatomy,
    pub endpoint: Endpoint,
    pub stream: bool,
    pub samples: Samples,
    /// How many samples of each prompt.
    pub n: u64,
    /// A field that asks for logprobs of the prompt, which of two legs only the prefill leg computes.
    pub prompt_logprobs: Option<&'static str>,
}

/// Reads the body once. Fails with a 400 that says where the JSON is wrong or which field is.
pub fn scan(endpoint: Endpoint, body: Bytes) -> Result<Scanned, Failure> {
    let utf8 = std::str::from_utf8(&body).is_ok();
    let anatomy = match scan::anatomy(&body) {
        Ok(anatomy) if utf8 => anatomy,
        _ => return Err(not_json(&body)),
    };
    let mut scanned =
        Scanned { body, anatomy, endpoint, stream: false, samples: Samples::One, n: 1, prompt_logprobs: None };
    scanned.judge()?;
    Ok(scanned)
}

/// Off the usual path: serde_json finds the words for what is wrong, and where.
fn not_json(body: &[u8]) -> Failure {
    let why = match serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(body) {
        Err(error) => error.to_string(),
        Ok(_) => "it is nested too deeply".to_owned(),
    };
    Failure::client(400, "invalid_json", format!("the request body is not one JSON object: {why}"))
}

impl Scanned {
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The JSON text of a field's value; of duplicates the last, as JSON parsers take it.
    pub fn raw(&self, field: Field) -> Option<&str> {
        let entry = self.anatomy.known.iter().rev().find(|entry| entry.field == field)?;
        std::str::from_utf8(&self.body[entry.value.clone()]).ok()
    }

    /// A field that holds a string.
    pub fn string(&self, field: Field) -> Option<Cow<'_, str>> {
        Cursor::new(self.raw(field)?.as_bytes()).text().ok().map(|text| text.meant())
    }

    pub fn model(&self) -> Option<Cow<'_, str>> {
        self.string(Field::Model)
    }

    /// Who asks: what keeps the requests of one user together where no header does.
    pub fn session_user(&self) -> Option<Cow<'_, str>> {
        self.string(Field::User)
    }

    /// The id that `POST /abort_request` takes; `None` also for a list of them.
    pub fn rid(&self) -> Option<Cow<'_, str>> {
        self.string(Field::Rid)
    }

    /// SGLang's field: higher is more urgent. `None` also for what is no number.
    pub fn priority(&self) -> Option<i64> {
        self.raw(Field::Priority)?.parse().ok()
    }

    /// The whole prompt as one text, for policies that compare the beginnings of prompts. Made anew with each call.
    pub fn routing_text(&self) -> Cow<'_, str> {
        text::of(self)
    }

    /// The bytes of a plain worker's request: the client's, without what only the gateway may say.
    pub fn plain(&self) -> Bytes {
        self.rewritten(Field::is_handoff, "")
    }

    /// The bytes of a leg: the client's, with `fields` in front of its own and without what only the gateway may say to a
    /// pair.
    pub fn splice(&self, fields: &str) -> Bytes {
        self.rewritten(|field| field.is_handoff() || field.is_rank(), fields)
    }

    /// The client's bytes with `fields` in front of its own, and without those that `drops` names.
    pub fn rewritten(&self, drops: impl Fn(Field) -> bool, fields: &str) -> Bytes {
        let cuts = || self.anatomy.known.iter().filter(|entry| drops(entry.field));
        let kept = self.anatomy.fields - cuts().count();
        if fields.is_empty() && kept == self.anatomy.fields {
            return self.body.clone();
        }
        let mut out = BytesMut::with_capacity(self.body.len() + fields.len() + 1);
        out.extend_from_slice(&self.body[..self.anatomy.inside]);
        out.extend_from_slice(fields.as_bytes());
        if kept > 0 && !fields.is_empty() {
            out.extend_from_slice(b",");
        }
        let mut from = self.anatomy.inside;
        let mut cuts = cuts().peekable();
        while let Some(cut) = cuts.next_if(|cut| cut.before == from) {
            from = cut.value.end;
        }
        if from > self.anatomy.inside && kept > 0 {
            // What was cut at the front leaves the comma behind it.
            let is_space = |byte: &u8| byte.is_ascii_whitespace() || *byte == b',';
            from += self.body[from..].iter().take_while(|byte| is_space(byte)).count();
        }
        for cut in cuts {
            out.extend_from_slice(&self.body[from..cut.before]);
            from = cut.value.end;
        }
        out.extend_from_slice(&self.body[from..]);
        out.freeze()
    }

    fn judge(&mut self) -> Result<(), Failure> {
        self.stream = match self.raw(Field::Stream) {
            None | Some("null" | "false") => false,
            Some("true") => true,
            Some(_) => return Err(bad_field("stream", "must be true or false")),
        };
        if !self.endpoint.generates() {
            return Ok(());
        }
        let prompts = match self.endpoint {
            Endpoint::Completions => self.prompts(Field::Prompt, "prompt")?,
            Endpoint::Generate => self.prompts(Field::Text, "text")?.or(self.prompts(Field::InputIds, "input_ids")?),
            _ => None,
        };
        self.n = match self.endpoint {
            Endpoint::Chat | Endpoint::Completions => count_of("n", self.raw(Field::N))?,
            Endpoint::Generate => self.generate_n()?,
            _ => 1,
        };
        let total = prompts.unwrap_or(1).saturating_mul(self.n);
        if total > SAMPLES_MAX {
            return Err(bad_field("n", &format!("asks for {total} samples, the limit is {SAMPLES_MAX}")));
        }
        if prompts.is_some() || self.n > 1 {
            self.samples = Samples::List(total as usize);
        }
        self.prompt_logprobs = self.asks_prompt_logprobs();
        Ok(())
    }

    /// The number of prompts where the field holds a list of prompts.
    fn prompts(&self, field: Field, name: &'static str) -> Result<Option<u64>, Failure> {
        match prompt_slot(field).and_then(|slot| self.anatomy.prompts[slot]) {
            Some(Prompts::Many(count)) => Ok(Some(count)),
            Some(Prompts::None) => Err(bad_field(name, "must not be an empty list")),
            Some(Prompts::One) | None => Ok(None),
        }
    }

    /// `sampling_params.n`; one object or a list of them, of which the first counts, as in SGLang.
    fn generate_n(&self) -> Result<u64, Failure> {
        let Some(raw) = self.raw(Field::SamplingParams) else { return Ok(1) };
        let mut cursor = Cursor::new(raw.as_bytes());
        let mut n = None;
        let mut first = true;
        let has_params = cursor.enter(b'[').and_then(|list| Ok(!list || cursor.item(&mut first)?));
        if has_params == Ok(true) && cursor.enter(b'{') == Ok(true) {
            let mut first = true;
            while let Ok(Some(name)) = cursor.field(&mut first) {
                let is_n = &*name.name() == b"n";
                match cursor.skip() {
                    Ok(value) if is_n => n = Some(&raw[value]),
                    _ => {}
                }
            }
        }
        count_of("sampling_params.n", n)
    }

    fn asks_prompt_logprobs(&self) -> Option<&'static str> {
        let given = |field| self.raw(field).filter(|raw| !matches!(*raw, "null" | "false"));
        if given(Field::PromptLogprobs).is_some() {
            return Some("prompt_logprobs");
        }
        match self.endpoint {
            // The text of an echo is everybody's, its logprobs are not.
            Endpoint::Completions if self.raw(Field::Echo) == Some("true") => given(Field::Logprobs).map(|_| "echo"),
            Endpoint::Generate => {
                let wanted = self.raw(Field::ReturnLogprob).is_some_and(|raw| raw.contains("true"));
                let from_prompt = self.raw(Field::LogprobStartLen).is_some_and(any_position);
                (wanted && from_prompt).then_some("logprob_start_len")
            }
            _ => None,
        }
    }
}

fn bad_field(name: &'static str, what: &str) -> Failure {
    Failure::client(400, "invalid_field", format!("`{name}` {what}")).at(name)
}

fn count_of(name: &'static str, raw: Option<&str>) -> Result<u64, Failure> {
    match raw {
        None | Some("null") => Ok(1),
        Some(text) => match text.parse::<u64>() {
            Ok(n) if n >= 1 => Ok(n),
            _ => Err(bad_field(name, "must be a whole number of at least 1")),
        },
    }
}

/// Whether a `logprob_start_len` (a number, or a list of them) names a position of the prompt: any that is not negative.
fn any_position(text: &str) -> bool {
    text.trim_matches(['[', ']']).split(',').map(str::trim).any(|t| t.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests;
