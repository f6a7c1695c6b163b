//! The events of a request's samples: merged, measured, and ended by the first failure.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

use futures_util::{
    FutureExt, Stream, StreamExt,
    stream::{SelectAll, select_all},
};

use super::{error::ApiError, port::Events};
use crate::{
    metrics::RequestMetrics,
    request::{FinishReason, SampleEvent, TokenLogprob},
};

/// Prompt logprobs as the engine gives them.
pub type PromptLogprobs = Vec<(u32, Option<TokenLogprob>)>;

/// What a sample says, [`SampleEvent`] without its failure.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    Prompt(PromptLogprobs),
    Token { token: u32, text: String, logprob: Option<TokenLogprob> },
    Finished { reason: FinishReason, text: String, cached_tokens: u32 },
}

/// All samples of one request. Dropping it aborts those that have not ended.
pub struct Answers {
    merged: SelectAll<Numbered>,
    clocks: Vec<Clock>,
    arrived: Instant,
    metrics: RequestMetrics,
}

/// A sample's events with the sample's index.
struct Numbered {
    index: usize,
    events: Events,
}

#[derive(Clone, Copy, Default)]
struct Clock {
    last_token: Option<Instant>,
    ended: bool,
}

impl Stream for Numbered {
    type Item = (usize, SampleEvent);

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let index = self.index;
        self.events.poll_next_unpin(cx).map(|event| event.map(|event| (index, event)))
    }
}

impl Answers {
    /// `streams` in the order of the samples.
    pub fn new(streams: Vec<Events>, arrived: Instant, metrics: RequestMetrics) -> Self {
        let clocks = vec![Clock::default(); streams.len()];
        let numbered = streams.into_iter().enumerate().map(|(index, events)| Numbered { index, events });
        Answers { merged: select_all(numbered), clocks, arrived, metrics }
    }

    pub fn samples(&self) -> usize {
        self.clocks.len()
    }

    /// The next part of any sample; `None` once all have finished (H7: an engine that goes silent is a failure).
    ///
    /// # Errors
    /// The first failure of a sample ends the request: drop the rest.
    pub async fn next(&mut self) -> Option<Result<(usize, Part), ApiError>> {
        match self.merged.next().await {
            Some((index, event)) => Some(self.seen(index, event)),
            None if self.is_over() => None,
            None => Some(Err(Self::cut_off())),
        }
    }

    /// A part that is there already.
    pub fn ready(&mut self) -> Option<Result<(usize, Part), ApiError>> {
        let (index, event) = self.merged.next().now_or_never()??;
        Some(self.seen(index, event))
    }

    /// Whether every sample has finished.
    pub fn is_over(&self) -> bool {
        self.clocks.iter().all(|clock| clock.ended)
    }

    fn seen(&mut self, index: usize, event: SampleEvent) -> Result<(usize, Part), ApiError> {
        let now = Instant::now();
        let clock = &mut self.clocks[index];
        let part = match event {
            SampleEvent::Prompt(logprobs) => Part::Prompt(logprobs),
            SampleEvent::Token { token, text, logprob } => {
                match clock.last_token.replace(now) {
                    None => self.metrics.time_to_first_token.observe((now - self.arrived).as_secs_f64()),
                    Some(last) => self.metrics.inter_token_latency.observe((now - last).as_secs_f64()),
                }
                self.metrics.generation_tokens.inc();
                Part::Token { token, text, logprob }
            }
            SampleEvent::Finished { reason, text, cached_tokens } => {
                clock.ended = true;
                self.metrics.e2e_latency.observe((now - self.arrived).as_secs_f64());
                self.metrics.requests.inc();
                self.metrics.cached_tokens.inc_by(cached_tokens.into());
                Part::Finished { reason, text, cached_tokens }
            }
            SampleEvent::Failed(error) => return Err(error.into()),
        };
        Ok((index, part))
    }

    fn cut_off() -> ApiError {
        ApiError::internal("the engine ended a sample without saying why")
    }

    /// Every sample's whole answer.
    ///
    /// # Errors
    /// The first failure of a sample.
    pub async fn collect(mut self) -> Result<Vec<Whole>, ApiError> {
        let mut wholes: Vec<Whole> = (0..self.samples()).map(|_| Whole::default()).collect();
        while let Some(next) = self.next().await {
            let (index, part) = next?;
            wholes[index].add(part);
        }
        Ok(wholes)
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.metrics.aborted.inc_by(self.clocks.iter().filter(|clock| !clock.ended).count() as u64);
    }
}

/// All parts of one sample.
#[derive(Default, Debug)]
pub struct Whole {
    pub prompt: Option<PromptLogprobs>,
    pub text: String,
    pub tokens: Vec<u32>,
    /// One per token where asked for.
    pub logprobs: Vec<TokenLogprob>,
    pub finish: Option<FinishReason>,
    pub cached_tokens: u32,
}

impl Whole {
    pub fn add(&mut self, part: Part) {
        match part {
            Part::Prompt(logprobs) => self.prompt = Some(logprobs),
            Part::Token { token, text, logprob } => {
                self.tokens.push(token);
                self.text.push_str(&text);
                self.logprobs.extend(logprob);
            }
            Part::Finished { reason, text, cached_tokens } => {
                self.text.push_str(&text);
                self.finish = Some(reason);
                self.cached_tokens = cached_tokens;
            }
        }
    }
}
