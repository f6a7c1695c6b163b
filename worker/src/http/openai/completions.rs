//! `POST /v1/completions`.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use tandem_model::Tokenizer;

use super::{
    StreamOptions, TOP_LOGPROBS_MAX, check_model, check_stream,
    logprobs::CompletionLogprobs,
    reply::{Asked, Piece, Shape},
};
use crate::{
    config::Role,
    http::{
        App,
        answers::Whole,
        body::parse,
        error::ApiError,
        fields::{BootstrapFields, Object, Prompts, SamplingFields},
        generate::{LogprobEntry, prompt_entries},
        params,
        prompt::{self, Batch},
    },
    request::LogprobRequest,
};

/// OpenAI's default.
const MAX_TOKENS_DEFAULT: u32 = 16;

#[derive(Deserialize)]
struct CompletionBody {
    model: Option<String>,
    prompt: Prompts,
    stream: Option<bool>,
    stream_options: Option<Object<StreamOptions>>,
    /// How many alternatives; present at all: logprobs are wanted.
    logprobs: Option<i64>,
    echo: Option<bool>,
    suffix: Option<String>,
    rid: Option<String>,
}

pub struct Completions {
    /// The prompts' texts, where they are to be repeated.
    echo: Option<Vec<String>>,
    n: usize,
}

impl Completions {
    /// A choice's text starts with it.
    fn echo_of(&self, piece: Piece<'_>) -> &str {
        self.echo.as_ref().filter(|_| piece.is_first).map_or("", |texts| &texts[piece.index / self.n])
    }
}

impl Shape for Completions {
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    type Words<'a> = Words<'a>;
    type Logprobs<'a> = CompletionLogprobs;

    fn prepare(app: &App, body: &[u8]) -> Result<(Self, Asked, Batch), ApiError> {
        let request: CompletionBody = parse(body)?;
        check_model(app, request.model.as_deref())?;
        let (stream, include_usage) = check_stream(request.stream, request.stream_options)?;
        if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::invalid("suffix", "suffix is not supported by this worker"));
        }
        let top = match request.logprobs {
            Some(top) => Some(params::int("logprobs", top, 0..=TOP_LOGPROBS_MAX)? as u32),
            None => None,
        };
        let echo = request.echo.unwrap_or(false);
        let defaults = params::Defaults { max_tokens: Some(MAX_TOKENS_DEFAULT), generation: Some(&app.generation) };
        let sampling = params::sampling(parse::<SamplingFields>(body)?, defaults, app.vocab(), rand::random)?;
        let prompts = prompt::encode(app, request.prompt.clone(), "prompt")?;
        let echo_texts = echo.then(|| texts(app, request.prompt));
        let id = request.rid.unwrap_or_else(|| app.new_id("cmpl-"));
        let shared = prompt::Shared {
            rids: std::slice::from_ref(&id),
            sampling: vec![sampling],
            logprobs: LogprobRequest {
                output: top.is_some(),
                top: top.unwrap_or(0),
                prompt_from: app.prompt_logprobs((echo && top.is_some()).then_some(0)),
            },
            bootstrap: parse::<BootstrapFields>(body)?,
            prompt_field: "prompt",
        };
        let batch = prompt::batch(app, prompts, shared)?;
        let asked = Asked { id, stream, include_usage, logprobs: top.is_some() };
        Ok((Self { echo: echo_texts, n: batch.n }, asked, batch))
    }

    fn words<'a>(&'a self, piece: Piece<'a>) -> Words<'a> {
        let (echo, text) = (self.echo_of(piece), piece.said.text.as_str());
        Words { text: if echo.is_empty() { text.into() } else { format!("{echo}{text}").into() } }
    }

    fn logprobs(&self, tokenizer: &Tokenizer, piece: Piece<'_>, offset: &mut usize) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::default();
        match &piece.said.prompt {
            Some(prompt) => logprobs.prompt(tokenizer, prompt, offset),
            None => *offset += self.echo_of(piece).chars().count(),
        }
        logprobs.outputs(tokenizer, &piece.said.logprobs, offset);
        logprobs
    }

    fn meta_info(&self, app: &App, wholes: &[Whole]) -> Option<impl Serialize> {
        if app.facts.role != Role::Prefill {
            return None;
        }
        let mut lists = wholes
            .iter()
            .map(|whole| whole.prompt.as_ref().map(|prompt| prompt_entries(prompt, None)))
            .collect::<Option<Vec<_>>>()?;
        let input_token_logprobs =
            if lists.len() == 1 { InputLogprobs::One(lists.remove(0)) } else { InputLogprobs::Many(lists) };
        Some(MetaInfo { input_token_logprobs })
    }
}

#[derive(Serialize)]
pub struct Words<'a> {
    text: Cow<'a, str>,
}

/// On a prefill worker only: the prompt's logprobs where gateways look for them when they merge the two legs. One list
/// for one sample, a list of lists for several.
#[derive(Serialize)]
struct MetaInfo {
    input_token_logprobs: InputLogprobs,
}

#[derive(Serialize)]
#[serde(untagged)]
enum InputLogprobs {
    One(Vec<LogprobEntry>),
    Many(Vec<Vec<LogprobEntry>>),
}

/// The prompts as text: the client's own, or what its token ids stand for.
fn texts(app: &App, prompts: Prompts) -> Vec<String> {
    match prompts {
        Prompts::Text(text) => vec![text],
        Prompts::Texts(texts) => texts,
        Prompts::Ids(ids) => vec![app.tokenizer.decode(&ids, true)],
        Prompts::IdLists(lists) => lists.iter().map(|ids| app.tokenizer.decode(ids, true)).collect(),
    }
}
