//! `POST /v1/chat/completions`.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    body::Body,
    extract::{Extension, State},
    response::Response,
};
use http::HeaderMap;
use serde::{Deserialize, Serialize};
use tandem_model::{ChatInput, ChatValue};

use super::{
    Envelope, Matched, StreamOptions, TOP_LOGPROBS_MAX, Usage, UsageCount, check_model, check_stream,
    logprobs::{self, ChatLogprobs},
    matched,
    messages::{self, Message},
    reason_name, unix_seconds,
};
use crate::{
    http::{
        App, Arrival,
        answers::{Part, Whole},
        body::parse,
        error::ApiError,
        fields::{BootstrapFields, SamplingFields},
        json, params,
        prompt::{self, Batch},
        sse,
    },
    request::{FinishReason, LogprobRequest, TokenLogprob},
};

#[derive(Deserialize)]
struct ChatBody {
    model: Option<String>,
    messages: Vec<Message>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<bool>,
    top_logprobs: Option<i64>,
    tools: Option<ChatValue>,
    chat_template_kwargs: Option<BTreeMap<String, ChatValue>>,
    rid: Option<String>,
}

/// How a request wants its answer.
struct Answer {
    id: String,
    stream: bool,
    include_usage: bool,
    logprobs: bool,
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
        let dialect = ChatStream::new(app, answer, usage, answers.samples());
        return sse::respond(answers, dialect).await;
    }
    let wholes = answers.collect().await?;
    Ok(json(&whole_answer(&app, &answer, usage, &wholes)))
}

fn prepare(app: &App, body: &[u8]) -> Result<(Answer, Batch), ApiError> {
    let chat: ChatBody = parse(body)?;
    check_model(app, chat.model.as_deref())?;
    let (stream, include_usage) = check_stream(chat.stream, chat.stream_options)?;
    let logprobs = chat.logprobs.unwrap_or(false);
    let top = params::int("top_logprobs", chat.top_logprobs.unwrap_or(0), 0..=TOP_LOGPROBS_MAX)? as u32;
    if top > 0 && !logprobs {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true"));
    }
    let defaults = params::Defaults { max_tokens: None, generation: Some(&app.generation) };
    let sampling = params::sampling(parse::<SamplingFields>(body)?, defaults, app.vocab(), rand::random)?;
    let input = ChatInput {
        messages: messages::for_template(chat.messages)?,
        tools: chat.tools.filter(|tools| !tools.is_none()),
        add_generation_prompt: true,
        extra: chat.chat_template_kwargs.unwrap_or_default().into_iter().collect(),
    };
    let text = app
        .tokenizer
        .apply_chat_template(&input)
        .map_err(|e| ApiError::invalid("messages", format!("the chat template refuses these messages: {e}")))?;
    let tokens = prompt::encode_text(app, &text, false, "messages")?;
    let id = chat.rid.unwrap_or_else(|| app.new_id("chatcmpl-"));
    let shared = prompt::Shared {
        rids: std::slice::from_ref(&id),
        sampling,
        logprobs: LogprobRequest { output: logprobs, top, prompt_from: None },
        bootstrap: parse::<BootstrapFields>(body)?,
        prompt_field: "messages",
    };
    let batch = prompt::batch(app, vec![tokens], shared)?;
    Ok((Answer { id, stream, include_usage, logprobs }, batch))
}

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice<'a>>,
    usage: Usage,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    message: Said<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
    matched_stop: Option<Matched<'a>>,
}

#[derive(Serialize)]
struct Said<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<&'a str>,
}

fn whole_answer<'a>(app: &'a App, answer: &'a Answer, mut usage: UsageCount, wholes: &'a [Whole]) -> Completion<'a> {
    let choice = |(index, whole): (usize, &'a Whole)| {
        usage.ended(index, whole.tokens.len(), whole.cached_tokens);
        Choice {
            index,
            message: Said { role: "assistant", content: &whole.text, refusal: None },
            logprobs: answer.logprobs.then(|| logprobs::chat(&app.tokenizer, &whole.logprobs)),
            finish_reason: whole.finish.as_ref().map(reason_name),
            matched_stop: whole.finish.as_ref().and_then(matched),
        }
    };
    Completion {
        id: &answer.id,
        object: "chat.completion",
        created: unix_seconds(),
        model: &app.facts.served_model_name,
        choices: wholes.iter().enumerate().map(choice).collect(),
        usage: usage.usage(),
    }
}

/// Chunks of a streamed chat. A sample's first chunk carries the role and text together; tokens without text wait, and
/// their logprobs with them.
struct ChatStream {
    app: Arc<App>,
    envelope: Envelope,
    include_usage: bool,
    logprobs: bool,
    usage: UsageCount,
    samples: Vec<Progress>,
}

#[derive(Default)]
struct Progress {
    begun: bool,
    tokens: usize,
    waiting: Vec<TokenLogprob>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
    matched_stop: Option<Matched<'a>>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl ChatStream {
    fn new(app: Arc<App>, answer: Answer, usage: UsageCount, samples: usize) -> Self {
        let envelope = Envelope::new(
            &answer.id,
            "chat.completion.chunk",
            unix_seconds(),
            &app.facts.served_model_name,
            answer.include_usage,
        );
        Self {
            app,
            envelope,
            include_usage: answer.include_usage,
            logprobs: answer.logprobs,
            usage,
            samples: (0..samples).map(|_| Progress::default()).collect(),
        }
    }

    fn chunk(&mut self, index: usize, text: &str, finish: Option<&FinishReason>, out: &mut Vec<u8>) {
        let sample = &mut self.samples[index];
        let first = !std::mem::replace(&mut sample.begun, true);
        let waiting = std::mem::take(&mut sample.waiting);
        let choice = ChunkChoice {
            index,
            delta: Delta { role: first.then_some("assistant"), content: (first || !text.is_empty()).then_some(text) },
            logprobs: (self.logprobs && !waiting.is_empty()).then(|| logprobs::chat(&self.app.tokenizer, &waiting)),
            finish_reason: finish.map(reason_name),
            matched_stop: finish.and_then(matched),
        };
        self.envelope.choice(out, &choice);
    }
}

impl sse::Dialect for ChatStream {
    fn part(&mut self, index: usize, part: Part, out: &mut Vec<u8>) {
        match part {
            // Chats have no field for the prompt's logprobs, and ask for none.
            Part::Prompt(_) => {}
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
        if self.include_usage {
            self.envelope.usage(out, self.usage.usage());
        }
    }
}
