//! OpenAI's endpoints, with SGLang's additions.

use std::{
    borrow::Cow,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use super::{App, error::ApiError, fields::Object, prompt::Batch};
use crate::request::FinishReason;

pub mod chat;
pub mod completions;
mod logprobs;
mod messages;
pub mod reply;

pub use logprobs::finite;

/// Alternatives per token, at most.
const TOP_LOGPROBS_MAX: i64 = 20;

/// Names that mean "whatever you serve", which clients and routers send when their user names no model.
const ANY_MODEL: [&str; 2] = ["default", "unknown"];

#[derive(Deserialize, Clone, Copy, Default)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Whether the model is the one that is served.
pub fn check_model(app: &App, model: Option<&str>) -> Result<(), ApiError> {
    let served = app.facts.served_model_name.as_str();
    match model {
        Some(name) if name != served && !ANY_MODEL.contains(&name) => Err(ApiError {
            param: Some(Cow::Borrowed("model")),
            ..ApiError::new(
                http::StatusCode::NOT_FOUND,
                "model_not_found",
                format!("the model {name:?} does not exist; this worker serves {served:?}"),
            )
        }),
        _ => Ok(()),
    }
}

/// `(stream, include_usage)`
fn check_stream(stream: Option<bool>, options: Option<Object<StreamOptions>>) -> Result<(bool, bool), ApiError> {
    let stream = stream.unwrap_or(false);
    if options.is_some() && !stream {
        return Err(ApiError::invalid("stream_options", "stream_options is only allowed with stream: true"));
    }
    Ok((stream, options.is_some_and(|Object(options)| options.include_usage == Some(true))))
}

#[derive(Serialize, Clone, Copy, Default, Debug, PartialEq)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
    completion_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Serialize, Clone, Copy, Default, Debug, PartialEq)]
struct PromptTokensDetails {
    cached_tokens: u32,
}

/// Counts the tokens of a request as its samples end.
struct UsageCount {
    prompt_tokens: usize,
    completion_tokens: usize,
    cached_tokens: u32,
    n: usize,
}

impl UsageCount {
    fn new(batch: &Batch) -> Self {
        Self { prompt_tokens: batch.prompt_tokens_total(), completion_tokens: 0, cached_tokens: 0, n: batch.n }
    }

    /// A prompt counts once, so only its first sample's cached tokens do.
    fn ended(&mut self, index: usize, completion_tokens: usize, cached_tokens: u32) {
        self.completion_tokens += completion_tokens;
        if index.is_multiple_of(self.n) {
            self.cached_tokens += cached_tokens;
        }
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: self.cached_tokens },
        }
    }
}

/// Which stop rule ended the answer: SGLang's `matched_stop` and `matched`.
#[derive(Serialize, Debug, PartialEq)]
#[serde(untagged)]
pub enum Matched<'a> {
    Token(u32),
    Text(&'a str),
}

pub fn matched(reason: &FinishReason) -> Option<Matched<'_>> {
    match reason {
        FinishReason::Length => None,
        FinishReason::StopToken(token) => Some(Matched::Token(*token)),
        FinishReason::StopString(text) => Some(Matched::Text(text)),
    }
}

pub fn reason_name(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::StopToken(_) | FinishReason::StopString(_) => "stop",
    }
}

/// Seconds since 1970, for `created`.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What all chunks of a stream have in common, rendered once: everything before the choice, and everything after it.
struct Envelope {
    head: Vec<u8>,
    /// After a choice. With `include_usage` each chunk says `usage: null`, as OpenAI does.
    tail: &'static [u8],
}

impl Envelope {
    fn new(id: &str, object: &str, created: u64, model: &str, include_usage: bool) -> Self {
        #[derive(Serialize)]
        struct Common<'a> {
            id: &'a str,
            object: &'a str,
            created: u64,
            model: &'a str,
        }
        let mut head =
            serde_json::to_vec(&Common { id, object, created, model }).expect("strings and a number serialise");
        head.pop();
        head.extend_from_slice(b",\"choices\":[");
        Self { head, tail: if include_usage { b"],\"usage\":null}" } else { b"]}" } }
    }

    fn choice(&self, out: &mut Vec<u8>, choice: &impl Serialize) {
        super::sse::wrapped(out, &self.head, choice, self.tail);
    }

    /// The last chunk: no choices, the usage of all samples.
    fn usage(&self, out: &mut Vec<u8>, usage: Usage) {
        let head = [&self.head, b"],\"usage\":".as_slice()].concat();
        super::sse::wrapped(out, &head, &usage, b"}");
    }
}
