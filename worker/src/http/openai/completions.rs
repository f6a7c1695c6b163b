//! `POST /v1/completions`.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Extension, State},
    response::Response,
};
use http::HeaderMap;
use serde::{Deserialize, Serialize};

use super::{
    Envelope, Matched, StreamOptions, TOP_LOGPROBS_MAX, Usage, UsageCount, check_model, check_stream,
    logprobs::CompletionLogprobs, matched, reason_name, unix_seconds,
};
use crate::{
    config::Role,
    http::{
        App, Arrival,
        answers::{Part, PromptLogprobs, Whole},
        body::parse,
        error::ApiError,
        fields::{BootstrapFields, Prompts, SamplingFields},
        generate::{LogprobEntry, prompt_entries},
        json, params,
        prompt::{self, Batch},
        sse,
    },
    request::{FinishReason, LogprobRequest, TokenLogprob},
};

/// OpenAI's default.
const MAX_TOKENS_DEFAULT: u32 = 16;

#[derive(Deserialize)]
struct CompletionBody {
    model: Option<String>,
    prompt: Prompts,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// How many alternatives; present at all: logprobs are wanted.
    logprobs: Option<i64>,
    echo: Option<bool>,
    suffix: Option<String>,
    rid: Option<String>,
}

/// How a request wants its answer.
struct Answer {
    id: String,
    stream: bool,
    include_usage: bool,
    logprobs: bool,
    /// The prompts' texts, where they are to be repeated.
    echo: Option<Vec<String>>,
    n: usize,
}

impl Answer {
    fn echo_of(&self, index: usize) -> &str {
        self.echo.as_ref().map_or("", |texts| &texts[index / self.n])
    }
}

pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (answer, batch) = app.prepare(&headers, body, prepare).await?;
    let usage = UsageCount::new(&batch);
    let answers = app.submit(batch, &arrival)?;
    if answer.stream {
        let dialect = CompletionStream::new(app, answer, usage, answers.samples());
        return sse::respond(answers, dialect).await;
    }
    let wholes = answers.collect().await?;
    Ok(json(&whole_answer(&app, &answer, usage, &wholes)))
}

fn prepare(app: &App, body: &[u8]) -> Result<(Answer, Batch), ApiError> {
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
        sampling,
        logprobs: LogprobRequest {
            output: top.is_some(),
            top: top.unwrap_or(0),
            prompt_from: app.prompt_logprobs((echo && top.is_some()).then_some(0)),
        },
        bootstrap: parse::<BootstrapFields>(body)?,
        prompt_field: "prompt",
    };
    let batch = prompt::batch(app, prompts, shared)?;
    let answer = Answer { id, stream, include_usage, logprobs: top.is_some(), echo: echo_texts, n: batch.n };
    Ok((answer, batch))
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

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice<'a>>,
    usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    meta_info: Option<MetaInfo>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    text: std::borrow::Cow<'a, str>,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    matched_stop: Option<Matched<'a>>,
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

fn whole_answer<'a>(app: &'a App, answer: &'a Answer, mut usage: UsageCount, wholes: &'a [Whole]) -> Completion<'a> {
    let choice = |(index, whole): (usize, &'a Whole)| {
        usage.ended(index, whole.tokens.len(), whole.cached_tokens);
        let echo = answer.echo_of(index);
        Choice {
            index,
            text: if echo.is_empty() { whole.text.as_str().into() } else { format!("{echo}{}", whole.text).into() },
            logprobs: answer.logprobs.then(|| {
                let mut logprobs = CompletionLogprobs::default();
                let mut offset = 0;
                match &whole.prompt {
                    Some(prompt) => logprobs.prompt(&app.tokenizer, prompt, &mut offset),
                    None => offset = echo.chars().count(),
                }
                logprobs.outputs(&app.tokenizer, &whole.logprobs, &mut offset);
                logprobs
            }),
            finish_reason: whole.finish.as_ref().map(reason_name),
            matched_stop: whole.finish.as_ref().and_then(matched),
        }
    };
    Completion {
        id: &answer.id,
        object: "text_completion",
        created: unix_seconds(),
        model: &app.facts.served_model_name,
        choices: wholes.iter().enumerate().map(choice).collect(),
        usage: usage.usage(),
        meta_info: meta_info(app, wholes),
    }
}

fn meta_info(app: &App, wholes: &[Whole]) -> Option<MetaInfo> {
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

/// Chunks of streamed completions. A choice's first chunk starts with the echo.
struct CompletionStream {
    app: Arc<App>,
    envelope: Envelope,
    answer: Answer,
    usage: UsageCount,
    samples: Vec<Progress>,
}

#[derive(Default)]
struct Progress {
    begun: bool,
    tokens: usize,
    prompt: Option<PromptLogprobs>,
    waiting: Vec<TokenLogprob>,
    /// Characters that went out, for `text_offset`.
    offset: usize,
}

impl CompletionStream {
    fn new(app: Arc<App>, answer: Answer, usage: UsageCount, samples: usize) -> Self {
        let envelope = Envelope::new(
            &answer.id,
            "text_completion",
            unix_seconds(),
            &app.facts.served_model_name,
            answer.include_usage,
        );
        Self { app, envelope, answer, usage, samples: (0..samples).map(|_| Progress::default()).collect() }
    }

    fn chunk(&mut self, index: usize, text: &str, finish: Option<&FinishReason>, out: &mut Vec<u8>) {
        let sample = &mut self.samples[index];
        let first = !std::mem::replace(&mut sample.begun, true);
        let prompt = sample.prompt.take();
        let waiting = std::mem::take(&mut sample.waiting);
        let echo = if first { self.answer.echo_of(index) } else { "" };
        if prompt.is_none() {
            sample.offset += echo.chars().count();
        }
        let logprobs = (self.answer.logprobs && !(prompt.is_none() && waiting.is_empty())).then(|| {
            let mut logprobs = CompletionLogprobs::default();
            if let Some(prompt) = &prompt {
                logprobs.prompt(&self.app.tokenizer, prompt, &mut sample.offset);
            }
            logprobs.outputs(&self.app.tokenizer, &waiting, &mut sample.offset);
            logprobs
        });
        let choice = Choice {
            index,
            text: if echo.is_empty() { text.into() } else { format!("{echo}{text}").into() },
            logprobs,
            finish_reason: finish.map(reason_name),
            matched_stop: finish.and_then(matched),
        };
        self.envelope.choice(out, &choice);
    }
}

impl sse::Dialect for CompletionStream {
    fn part(&mut self, index: usize, part: Part, out: &mut Vec<u8>) {
        match part {
            Part::Prompt(logprobs) => self.samples[index].prompt = Some(logprobs),
            Part::Token { text, logprob, .. } => {
                let sample = &mut self.samples[index];
                sample.tokens += 1;
                sample.waiting.extend(logprob);
                if !text.is_empty() {
                    self.chunk(index, &text, None, out);
                }
            }
            Part::Finished { reason, text, cached_tokens } => {
                self.usage.ended(index, self.samples[index].tokens, cached_tokens);
                self.chunk(index, &text, Some(&reason), out);
            }
        }
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        if self.answer.include_usage {
            self.envelope.usage(out, self.usage.usage());
        }
    }
}
