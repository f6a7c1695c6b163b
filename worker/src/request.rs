//! One sample as the engine sees it: tokens in, events out. HTTP parses into these types once, at the edge. *Pure.*

use std::sync::Arc;

use tandem_handoff::ticket::Ticket;

/// Names a sequence inside one engine; never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SeqId(pub u64);

/// One sample of one prompt. `n` samples and prompt lists are several of these.
#[derive(Clone, Debug)]
pub struct SampleRequest {
    /// The request's id, shared by its samples; `POST /abort_request` names it.
    pub rid: String,
    /// Which of the request's `n` samples this is; part of the randomness key.
    pub sample_index: u32,
    pub prompt: Arc<[u32]>,
    pub sampling: SamplingParams,
    pub logprobs: LogprobRequest,
    /// Present on prefill and decode workers, absent on plain ones.
    pub ticket: Option<Ticket>,
}

/// Checked sampling parameters: every value is finite and in range.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Output tokens at most; HTTP caps it by the context length.
    pub max_tokens: u32,
    pub min_tokens: u32,
    /// 0 means greedy.
    pub temperature: f32,
    pub top_p: f32,
    /// `None` for no limit.
    pub top_k: Option<u32>,
    pub min_p: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub repetition_penalty: f32,
    pub logit_bias: Vec<(u32, f32)>,
    /// Drawn by the worker that receives the request when the client gave none. Split: drawn by each side, P's draw only
    /// matters for token 0.
    pub seed: u64,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    /// Keep the stop string or stop token's text in the output.
    pub include_stop: bool,
    pub skip_special_tokens: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogprobRequest {
    /// Report the chosen token's logprob for output tokens.
    pub output: bool,
    /// How many alternatives, for output and prompt tokens alike.
    pub top: u32,
    /// Report prompt logprobs from this position on (SGLang's `logprob_start_len`, OpenAI's `echo` is 0).
    pub prompt_from: Option<u32>,
}

/// The logprob of one token, natural log, after temperature 1 and before any sampling transform.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    pub token: u32,
    pub logprob: f32,
    /// Most likely first; ties by lower id.
    pub top: Vec<(u32, f32)>,
}

/// What a sample's stream carries, in order: at most one `Prompt`, then tokens, then exactly one `Finished` or `Failed`
/// (H7).
#[derive(Clone, Debug, PartialEq)]
pub enum SampleEvent {
    /// Prompt logprobs from `prompt_from` on; the very first token of the prompt has `None`.
    Prompt(Vec<(u32, Option<TokenLogprob>)>),
    Token {
        token: u32,
        /// Text that may be shown now: whole UTF-8, never part of a possible stop string. Often empty.
        text: String,
        logprob: Option<TokenLogprob>,
    },
    Finished {
        reason: FinishReason,
        /// Text that was held back and turned out to be part of the answer.
        text: String,
        cached_tokens: u32,
    },
    Failed(SampleError),
}

#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// `max_tokens` or the context length.
    Length,
    /// EOS or a stop token id.
    StopToken(u32),
    StopString(String),
}

/// Why a sample ended without an answer. `kind` decides the HTTP status.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct SampleError {
    pub kind: SampleErrorKind,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleErrorKind {
    /// 400: the request can never be served here (too long, duplicate room, prompts differ).
    BadRequest,
    /// 499-like: the client or `/abort_request` ended it.
    Aborted,
    /// 503: full or shutting down; a retry elsewhere is safe.
    Unavailable,
    /// 504: a deadline of the handoff passed.
    Timeout,
    /// 502: the other worker of the pair failed or was lost.
    Peer,
    /// 500: a fault of this worker.
    Internal,
}

#[cfg(test)]
impl SamplingParams {
    /// One greedy sample without any rule but its length.
    pub fn greedy(max_tokens: u32) -> Self {
        Self {
            max_tokens,
            min_tokens: 0,
            temperature: 0.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: vec![],
            seed: 7,
            stop: vec![],
            stop_token_ids: vec![],
            ignore_eos: false,
            include_stop: false,
            skip_special_tokens: true,
        }
    }
}
