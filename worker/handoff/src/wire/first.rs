//! What Done carries for the decode worker: the first token of the answer. *Pure.*

/// Alternatives per token that a Done carries at most (SGLang's row holds as many).
pub const TOP_LOGPROBS_MAX: usize = 128;

/// The token that P sampled at output position 0. It has no finish reason: D alone judges finish.
#[derive(Clone, PartialEq, Debug)]
pub struct FirstToken {
    pub token: u32,
    pub logprob: Option<FirstLogprob>,
    /// Prompt tokens that P took from its prefix cache.
    pub cached_tokens: u32,
}

/// Natural logs, before any sampling transform.
#[derive(Clone, PartialEq, Debug)]
pub struct FirstLogprob {
    pub logprob: f32,
    /// Most likely first; at most [`TOP_LOGPROBS_MAX`].
    pub top: Vec<(u32, f32)>,
}
