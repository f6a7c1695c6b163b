//! The answers of OpenAI's endpoints, whole or in chunks. Chats and completions differ in their [`Shape`] alone.

use std::{sync::Arc, time::Instant};

use axum::response::Response;
use serde::Serialize;
use tandem_model::Tokenizer;

use super::{Envelope, Matched, Usage, UsageCount, matched, reason_name, unix_seconds};
use crate::http::{
    App,
    answers::{Part, Whole},
    endpoint::Endpoint,
    error::ApiError,
    json,
    prompt::Batch,
    sse,
};

/// How a request wants its answer.
pub struct Asked {
    pub id: String,
    pub stream: bool,
    pub include_usage: bool,
    pub logprobs: bool,
}

/// What a choice speaks of: all of a sample, or what came of it since its last chunk.
#[derive(Clone, Copy)]
pub struct Piece<'a> {
    pub index: usize,
    pub is_chunk: bool,
    pub is_first: bool,
    pub said: &'a Whole,
}

/// What chats and completions each have of their own.
pub trait Shape: Sized + Send + 'static {
    const OBJECT: &'static str;
    const CHUNK_OBJECT: &'static str;
    /// The field of a choice that has the text.
    type Words<'a>: Serialize;
    type Logprobs<'a>: Serialize;

    /// Reads a body.
    ///
    /// # Errors
    /// 400 that names the field, 404 for another model.
    fn prepare(app: &App, body: &[u8]) -> Result<(Self, Asked, Batch), ApiError>;

    fn words<'a>(&'a self, piece: Piece<'a>) -> Self::Words<'a>;

    /// `offset`: characters of the choice that went out before, and after the call with this piece.
    fn logprobs<'a>(&self, tokenizer: &'a Tokenizer, piece: Piece<'_>, offset: &mut usize) -> Self::Logprobs<'a>;

    /// What a whole answer says besides.
    fn meta_info(&self, _app: &App, _wholes: &[Whole]) -> Option<impl Serialize> {
        None::<()>
    }
}

/// One request's answer. Streamed tokens without text wait for text, and their logprobs with them.
pub struct Reply<S> {
    app: Arc<App>,
    shape: S,
    asked: Asked,
    envelope: Envelope,
    usage: UsageCount,
    samples: Vec<Progress>,
}

/// How far a streamed sample is.
#[derive(Default)]
struct Progress {
    begun: bool,
    tokens: usize,
    /// What no chunk has said yet.
    waiting: Whole,
    /// Characters that went out, for `text_offset`.
    offset: usize,
}

#[derive(Serialize)]
struct Completion<'a, C, M> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    meta_info: Option<M>,
}

#[derive(Serialize)]
struct Choice<'a, W, L> {
    index: usize,
    #[serde(flatten)]
    words: W,
    logprobs: Option<L>,
    finish_reason: Option<&'static str>,
    matched_stop: Option<Matched<'a>>,
}

impl<S: Shape> Reply<S> {
    fn choice<'a>(&'a self, piece: Piece<'a>, offset: &mut usize) -> Choice<'a, S::Words<'a>, S::Logprobs<'a>> {
        let Piece { index, is_chunk, said, .. } = piece;
        let logprobs = self.asked.logprobs.then(|| self.shape.logprobs(&self.app.tokenizer, piece, offset));
        let has_any = said.prompt.is_some() || !said.logprobs.is_empty();
        Choice {
            index,
            words: self.shape.words(piece),
            logprobs: logprobs.filter(|_| has_any || !is_chunk),
            finish_reason: said.finish.as_ref().map(reason_name),
            matched_stop: said.finish.as_ref().and_then(matched),
        }
    }

    fn chunk(&mut self, index: usize, out: &mut Vec<u8>) {
        let mut sample = std::mem::take(&mut self.samples[index]);
        let piece = Piece { index, is_chunk: true, is_first: !sample.begun, said: &sample.waiting };
        self.envelope.choice(out, &self.choice(piece, &mut sample.offset));
        self.samples[index] = Progress { begun: true, waiting: Whole::default(), ..sample };
    }
}

impl<S: Shape> Endpoint for Reply<S> {
    fn prepare(app: &Arc<App>, _arrived: Instant, body: &[u8]) -> Result<(Self, Batch), ApiError> {
        let (shape, asked, batch) = S::prepare(app, body)?;
        let model = &app.facts.served_model_name;
        let envelope = Envelope::new(&asked.id, S::CHUNK_OBJECT, unix_seconds(), model, asked.include_usage);
        let usage = UsageCount::new(&batch);
        let samples = batch.samples.iter().map(|_| Progress::default()).collect();
        Ok((Self { app: app.clone(), shape, asked, envelope, usage, samples }, batch))
    }

    fn is_streamed(&self) -> bool {
        self.asked.stream
    }

    fn whole(mut self, wholes: Vec<Whole>) -> Response {
        for (index, whole) in wholes.iter().enumerate() {
            self.usage.ended(index, whole.tokens.len(), whole.cached_tokens);
        }
        let choice = |(index, said)| self.choice(Piece { index, is_chunk: false, is_first: true, said }, &mut 0);
        json(&Completion {
            id: &self.asked.id,
            object: S::OBJECT,
            created: unix_seconds(),
            model: &self.app.facts.served_model_name,
            choices: wholes.iter().enumerate().map(choice).collect(),
            usage: self.usage.usage(),
            meta_info: self.shape.meta_info(&self.app, &wholes),
        })
    }
}

impl<S: Shape> sse::Dialect for Reply<S> {
    fn part(&mut self, index: usize, part: Part, out: &mut Vec<u8>) {
        let sample = &mut self.samples[index];
        let speaks = match &part {
            Part::Prompt(_) => false,
            Part::Token { text, .. } => {
                sample.tokens += 1;
                !text.is_empty()
            }
            Part::Finished { cached_tokens, .. } => {
                self.usage.ended(index, sample.tokens, *cached_tokens);
                true
            }
        };
        sample.waiting.add(part);
        if speaks {
            self.chunk(index, out);
        }
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        if self.asked.include_usage {
            self.envelope.usage(out, self.usage.usage());
        }
    }
}
