//! One live sample: its stream, its sampler, its text, and what it has promised to tell. *Pure* but for the stream's
//! queue, which holds a whole answer and is never waited for.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::{
    output::{End, Output},
    request::{FinishReason, LogprobRequest, SampleError, SampleEvent, SampleRequest, TokenLogprob},
    sampling::{SamplerState, logprobs},
};

/// The logprobs of a prompt: per token, absent for the very first.
type PromptLogprobs = Vec<(u32, Option<TokenLogprob>)>;

pub(super) struct Sample {
    pub rid: String,
    pub prompt: Arc<[u32]>,
    pub logprobs: LogprobRequest,
    pub sampler: SamplerState,
    pub output: Output,
    pub max_tokens: u32,
    pub cached_tokens: u32,
    events: mpsc::Sender<SampleEvent>,
    /// Filled chunk by chunk; taken when it is sent.
    prompt_logprobs: Option<PromptLogprobs>,
    /// P: token 0, shown to the HTTP leg once the transfer is delivered.
    pub first: Option<(u32, Option<TokenLogprob>)>,
}

impl Sample {
    pub fn new(
        request: SampleRequest,
        events: mpsc::Sender<SampleEvent>,
        sampler: SamplerState,
        output: Output,
        max_tokens: u32,
    ) -> Self {
        let mut prompt_logprobs = request.logprobs.prompt_from.map(|_| Vec::new());
        if let (Some(list), Some(0)) = (&mut prompt_logprobs, request.logprobs.prompt_from) {
            list.push((request.prompt[0], None));
        }
        Self {
            rid: request.rid,
            prompt: request.prompt,
            logprobs: request.logprobs,
            sampler,
            output,
            max_tokens,
            cached_tokens: 0,
            events,
            prompt_logprobs,
            first: None,
        }
    }

    /// The first prompt position whose logprob needs a row of logits.
    pub fn prompt_rows_from(request: &SampleRequest) -> Option<usize> {
        let from = (request.logprobs.prompt_from? as usize).max(1);
        (from < request.prompt.len()).then_some(from)
    }

    /// Takes the rows of tokens `start ..` for the positions from `from` on, and returns the next position wanted.
    pub fn take_prompt_rows(&mut self, from: usize, start: usize, rows: &[f32], vocab: usize) -> usize {
        let end = (start + rows.len() / vocab).min(self.prompt.len() - 1);
        let Some(list) = &mut self.prompt_logprobs else { return end + 1 };
        for position in from.max(start + 1)..=end {
            let row = &rows[(position - 1 - start) * vocab..][..vocab];
            let token = self.prompt[position];
            list.push((token, Some(logprobs::of(row, token, self.logprobs.top))));
        }
        end + 1
    }

    /// The logprob of an output token, where the request asked for it.
    pub fn output_logprob(&self, row: &[f32], token: u32) -> Option<TokenLogprob> {
        self.logprobs.output.then(|| logprobs::of(row, token, self.logprobs.top))
    }

    /// Shows the prompt's logprobs once, when there are any.
    pub fn send_prompt(&mut self) {
        if let Some(list) = self.prompt_logprobs.take() {
            self.send(SampleEvent::Prompt(list));
        }
    }

    pub fn send_token(&self, token: u32, text: String, logprob: Option<TokenLogprob>) {
        self.send(SampleEvent::Token { token, text, logprob });
    }

    /// The one good end.
    pub fn finish(self, end: End) {
        self.send(SampleEvent::Finished { reason: end.reason, text: end.text, cached_tokens: self.cached_tokens });
    }

    /// P's end: the answer goes on elsewhere.
    pub fn finish_first(mut self) {
        self.send_prompt();
        if let Some((token, logprob)) = self.first.take() {
            let said = self.output.push(token);
            let held = said.end.map_or(String::new(), |end| end.text);
            self.send_token(token, said.text + &held, logprob);
        }
        self.finish(End { reason: FinishReason::Length, text: String::new() });
    }

    /// The one bad end.
    pub fn fail(self, error: SampleError) {
        self.send(SampleEvent::Failed(error));
    }

    /// The queue has room for a whole answer, so a refused event means that the client has left.
    fn send(&self, event: SampleEvent) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.events.try_send(event) {
            tracing::error!(rid = self.rid, "the queue of a sample is full: a fault of this worker, please report it");
        }
    }
}
