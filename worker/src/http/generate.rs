//! `POST /generate`: SGLang's own endpoint. Streamed text is cumulative, as SGLang's is.

use std::{sync::Arc, time::Instant};

use axum::response::Response;
use serde::{Deserialize, Serialize, de::IgnoredAny};
use tandem_model::Tokenizer;

use super::{
    App,
    answers::{Part, PromptLogprobs, Whole},
    body::parse,
    endpoint::Endpoint,
    error::ApiError,
    fields::{BootstrapFields, Listed, Object, OneOrMany, Prompts, SamplingFields, Texts},
    json,
    openai::{Matched, finite, matched},
    params::{self, Sampling},
    prompt::{self, Batch},
    sse,
};
use crate::request::{FinishReason, LogprobRequest};

/// SGLang's default.
const MAX_TOKENS_DEFAULT: u32 = 128;

/// As many as fit beside the first token in the handoff.
const TOP_LOGPROBS_MAX: i64 = tandem_handoff::wire::TOP_LOGPROBS_MAX as i64;

#[derive(Deserialize)]
struct GenerateBody {
    text: Option<Texts>,
    input_ids: Option<Ids>,
    /// One for all prompts, or one for each.
    sampling_params: Option<OneOrMany<Object<SamplingFields>>>,
    lora_path: Option<IgnoredAny>,
    return_logprob: Option<bool>,
    logprob_start_len: Option<i64>,
    top_logprobs_num: Option<i64>,
    return_text_in_logprobs: Option<bool>,
    stream: Option<bool>,
    rid: Option<Texts>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a list of token ids or a list of such lists")]
enum Ids {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

/// How a request wants its answer.
struct Answer {
    /// One per sample, as `meta_info.id`.
    ids: Vec<String>,
    prompt_tokens: Vec<usize>,
    n: usize,
    stream: bool,
    /// A list of prompts, or several samples of one: the answer is a list.
    is_list: bool,
    logprobs: bool,
    top: bool,
    texts_in_logprobs: bool,
}

impl Endpoint for Generate {
    fn prepare(app: &Arc<App>, arrived: Instant, body: &[u8]) -> Result<(Self, Batch), ApiError> {
        let (answer, batch) = prepare(app, body)?;
        let samples = batch.samples.iter().map(|_| Sample::default()).collect();
        Ok((Self { app: app.clone(), answer, arrived, samples }, batch))
    }

    fn is_streamed(&self) -> bool {
        self.answer.stream
    }

    fn whole(mut self, wholes: Vec<Whole>) -> Response {
        for (index, whole) in wholes.into_iter().enumerate() {
            self.take(index, whole);
        }
        let results: Vec<_> = (0..self.samples.len()).map(|index| self.result(index, true)).collect();
        if self.answer.is_list { json(&results) } else { json(&results[0]) }
    }
}

fn prepare(app: &App, body: &[u8]) -> Result<(Answer, Batch), ApiError> {
    let request: GenerateBody = parse(body)?;
    params::refuse("lora_path", request.lora_path.is_some())?;
    let (prompts, field, is_list) = prompts(request.text, request.input_ids)?;
    let logprobs = request.return_logprob.unwrap_or(false);
    let top = params::int("top_logprobs_num", request.top_logprobs_num.unwrap_or(0), 0..=TOP_LOGPROBS_MAX)? as u32;
    let start = params::int("logprob_start_len", request.logprob_start_len.unwrap_or(-1), -1..=i64::from(u32::MAX))?;
    let prompts = prompt::encode(app, prompts, field)?;
    let sampling = sampling(app, request.sampling_params, prompts.len())?;
    let from = u32::try_from(start).ok().filter(|_| logprobs);
    if let Some(short) = prompts.iter().find(|prompt| from.is_some_and(|from| from as usize > prompt.len())) {
        let message = format!("logprob_start_len {start} is beyond a prompt of {} tokens", short.len());
        return Err(ApiError::invalid("logprob_start_len", message));
    }
    let rids = rids(app, request.rid, prompts.len())?;
    let shared = prompt::Shared {
        rids: &rids,
        sampling,
        logprobs: LogprobRequest {
            output: logprobs,
            top: if logprobs { top } else { 0 },
            prompt_from: app.prompt_logprobs(from),
        },
        bootstrap: parse::<BootstrapFields>(body)?,
        prompt_field: field,
    };
    let batch = prompt::batch(app, prompts, shared)?;
    let is_list = is_list || batch.n > 1;
    let shared_id = is_list && rids.len() == 1;
    let ids = batch.samples.iter().enumerate();
    let answer = Answer {
        ids: ids.map(|(i, s)| if shared_id { format!("{}_{i}", s.rid) } else { s.rid.clone() }).collect(),
        prompt_tokens: batch.prompt_tokens.clone(),
        n: batch.n,
        stream: request.stream.unwrap_or(false),
        is_list,
        logprobs,
        top: logprobs && top > 0,
        texts_in_logprobs: request.return_text_in_logprobs.unwrap_or(false),
    };
    Ok((answer, batch))
}

/// The prompts, the field they came in, and whether it was a list.
fn prompts(text: Option<Texts>, ids: Option<Ids>) -> Result<(Prompts, &'static str, bool), ApiError> {
    match (text.map(|text| text.value), ids) {
        (Some(OneOrMany::One(text)), None) => Ok((Prompts::Text(text), "text", false)),
        (Some(OneOrMany::Many(texts)), None) => Ok((Prompts::Texts(texts), "text", true)),
        (None, Some(Ids::One(ids))) => Ok((Prompts::Ids(ids), "input_ids", false)),
        (None, Some(Ids::Many(lists))) => Ok((Prompts::IdLists(lists), "input_ids", true)),
        _ => Err(ApiError::invalid("text", "send exactly one of text and input_ids")),
    }
}

/// Sampling for all prompts, or one for each; then all have the same `n`, since rooms are counted by it.
fn sampling(
    app: &App,
    given: Option<OneOrMany<Object<SamplingFields>>>,
    prompts: usize,
) -> Result<Vec<Sampling>, ApiError> {
    let defaults = params::Defaults { max_tokens: Some(MAX_TOKENS_DEFAULT), generation: None };
    let check = |fields| params::sampling(fields, defaults, app.vocab(), rand::random);
    let list = match given {
        None => return Ok(vec![check(SamplingFields::default())?]),
        Some(OneOrMany::One(Object(fields))) => return Ok(vec![check(fields)?]),
        Some(OneOrMany::Many(list)) => list,
    };
    if list.len() != prompts {
        let message = format!("sampling_params has {} entries for {prompts} prompts", list.len());
        return Err(ApiError::invalid("sampling_params", message));
    }
    let entry = |(at, Object(fields)): (usize, Object<SamplingFields>)| {
        check(fields).map_err(|error| {
            let place = format!("sampling_params[{at}]");
            let param = error.param.as_deref().map_or(place.clone(), |field| format!("{place}.{field}"));
            ApiError { message: format!("{place}: {}", error.message), param: Some(param.into()), ..error }
        })
    };
    let checked: Vec<Sampling> = list.into_iter().enumerate().map(entry).collect::<Result<_, _>>()?;
    match checked.iter().find(|one| one.n != checked[0].n) {
        Some(other) => {
            let message = format!("n must be the same for all prompts, but is {} and {}", checked[0].n, other.n);
            Err(ApiError::invalid("sampling_params", message))
        }
        None => Ok(checked),
    }
}

/// One id for all prompts, or one for each.
fn rids(app: &App, given: Option<Texts>, prompts: usize) -> Result<Vec<String>, ApiError> {
    match given.map(Listed::into_list) {
        None => Ok(vec![app.new_id("")]),
        Some(list) if list.len() == 1 || list.len() == prompts => Ok(list),
        Some(list) => {
            let message = format!("rid has {} entries for {prompts} prompts", list.len());
            Err(ApiError::invalid("rid", message))
        }
    }
}

/// `[logprob, token id, text]`; the first token of a prompt has no logprob, and text is only there if asked for.
#[derive(Serialize)]
pub struct LogprobEntry(Option<f32>, u32, Option<String>);

impl LogprobEntry {
    fn new(logprob: Option<f32>, token: u32, texts: Option<&Tokenizer>) -> Self {
        Self(logprob.map(finite), token, texts.map(|tokenizer| tokenizer.token_text(token)))
    }
}

/// SGLang's `input_token_logprobs`.
pub fn prompt_entries(prompt: &PromptLogprobs, texts: Option<&Tokenizer>) -> Vec<LogprobEntry> {
    let entry = |(token, logprob): &(u32, Option<_>)| {
        LogprobEntry::new(logprob.as_ref().map(|l: &crate::request::TokenLogprob| l.logprob), *token, texts)
    };
    prompt.iter().map(entry).collect()
}

type Tops = Vec<Option<Vec<LogprobEntry>>>;

fn tops(top: &[(u32, f32)], texts: Option<&Tokenizer>) -> Vec<LogprobEntry> {
    top.iter().map(|&(token, logprob)| LogprobEntry::new(Some(logprob), token, texts)).collect()
}

/// What has come so far, in the form it goes out.
#[derive(Default)]
struct Sample {
    text: String,
    output_ids: Vec<u32>,
    finish: Option<FinishReason>,
    cached_tokens: u32,
    input_token_logprobs: Vec<LogprobEntry>,
    input_top_logprobs: Tops,
    output_token_logprobs: Vec<LogprobEntry>,
    output_top_logprobs: Tops,
}

/// One request and its answer so far.
pub struct Generate {
    app: Arc<App>,
    answer: Answer,
    arrived: Instant,
    samples: Vec<Sample>,
}

#[derive(Serialize)]
struct Generated<'a> {
    text: &'a str,
    output_ids: &'a [u32],
    meta_info: MetaInfo<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

#[derive(Serialize)]
struct MetaInfo<'a> {
    id: &'a str,
    finish_reason: Option<Finish<'a>>,
    prompt_tokens: usize,
    completion_tokens: usize,
    cached_tokens: u32,
    weight_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    e2e_latency: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_token_logprobs: Option<&'a [LogprobEntry]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_token_logprobs: Option<&'a [LogprobEntry]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_top_logprobs: Option<&'a Tops>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_top_logprobs: Option<&'a Tops>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Finish<'a> {
    Length { length: usize },
    Stop { matched: Option<Matched<'a>> },
}

impl Generate {
    fn texts(&self) -> Option<&Tokenizer> {
        self.answer.texts_in_logprobs.then_some(&self.app.tokenizer)
    }

    fn take(&mut self, index: usize, whole: Whole) {
        if let Some(prompt) = whole.prompt {
            self.add(index, Part::Prompt(prompt));
        }
        let mut logprobs = whole.logprobs.into_iter();
        for token in whole.tokens {
            self.add(index, Part::Token { token, text: String::new(), logprob: logprobs.next() });
        }
        let sample = &mut self.samples[index];
        sample.text = whole.text;
        sample.finish = whole.finish;
        sample.cached_tokens = whole.cached_tokens;
    }

    fn add(&mut self, index: usize, part: Part) {
        match part {
            Part::Prompt(prompt) => {
                let entries = prompt_entries(&prompt, self.texts());
                let top = prompt.iter().map(|(_, l)| l.as_ref().map(|l| tops(&l.top, self.texts()))).collect();
                let sample = &mut self.samples[index];
                sample.input_token_logprobs = entries;
                sample.input_top_logprobs = top;
            }
            Part::Token { token, text, logprob } => {
                let entry = logprob
                    .map(|l| (LogprobEntry::new(Some(l.logprob), l.token, self.texts()), tops(&l.top, self.texts())));
                let sample = &mut self.samples[index];
                sample.output_ids.push(token);
                sample.text.push_str(&text);
                if let Some((chosen, top)) = entry {
                    sample.output_token_logprobs.push(chosen);
                    sample.output_top_logprobs.push(Some(top));
                }
            }
            Part::Finished { reason, text, cached_tokens } => {
                let sample = &mut self.samples[index];
                sample.text.push_str(&text);
                sample.finish = Some(reason);
                sample.cached_tokens = cached_tokens;
            }
        }
    }

    fn result(&self, index: usize, ended: bool) -> Generated<'_> {
        let (sample, answer) = (&self.samples[index], &self.answer);
        let finish = sample.finish.as_ref().map(|reason| match reason {
            FinishReason::Length => Finish::Length { length: sample.output_ids.len() },
            stop => Finish::Stop { matched: matched(stop) },
        });
        Generated {
            text: &sample.text,
            output_ids: &sample.output_ids,
            meta_info: MetaInfo {
                id: &answer.ids[index],
                finish_reason: finish,
                prompt_tokens: answer.prompt_tokens[index / answer.n],
                completion_tokens: sample.output_ids.len(),
                cached_tokens: sample.cached_tokens,
                weight_version: "default",
                e2e_latency: ended.then(|| self.arrived.elapsed().as_secs_f64()),
                input_token_logprobs: answer.logprobs.then_some(&sample.input_token_logprobs),
                output_token_logprobs: answer.logprobs.then_some(&sample.output_token_logprobs),
                input_top_logprobs: answer.top.then_some(&sample.input_top_logprobs),
                output_top_logprobs: answer.top.then_some(&sample.output_top_logprobs),
            },
            index: (answer.stream && answer.is_list).then_some(index),
        }
    }
}

impl sse::Dialect for Generate {
    fn part(&mut self, index: usize, part: Part, out: &mut Vec<u8>) {
        let (speaks, ended) = match &part {
            Part::Prompt(_) => (false, false),
            Part::Token { .. } => (true, false),
            Part::Finished { .. } => (true, true),
        };
        self.add(index, part);
        if speaks {
            sse::event(out, &self.result(index, ended));
        }
    }

    fn end(&mut self, _out: &mut Vec<u8>) {}
}
