//! From prompts to samples: tokens, limits, tickets, and one [`SampleRequest`] per sample. *Pure.*

use std::sync::Arc;

use super::{
    App,
    error::ApiError,
    fields::{BootstrapFields, Prompts},
    params::{SAMPLES_MAX, Sampling, tickets},
};
use crate::{
    config::Role,
    request::{LogprobRequest, SampleRequest},
};

/// A prompt's tokens, shared by its samples.
pub type Tokens = Arc<[u32]>;

/// The samples of one request, prompt after prompt, and what its answer needs to know of them.
#[derive(Debug)]
pub struct Batch {
    /// `samples[i]` is sample `i % n` of prompt `i / n`.
    pub samples: Vec<SampleRequest>,
    pub n: usize,
    pub prompt_tokens: Vec<usize>,
}

impl Batch {
    /// OpenAI counts a prompt once, whatever `n`.
    pub fn prompt_tokens_total(&self) -> usize {
        self.prompt_tokens.iter().sum()
    }
}

/// What all samples of a request share.
pub struct Shared<'a> {
    /// One for all prompts, or one per prompt.
    pub rids: &'a [String],
    /// One for all prompts, or one per prompt with the same `n`.
    pub sampling: Vec<Sampling>,
    pub logprobs: LogprobRequest,
    pub bootstrap: BootstrapFields,
    /// The field to blame for a prompt that does not fit.
    pub prompt_field: &'static str,
}

/// Tokens of each prompt. Texts get the tokenizer's special tokens (BOS).
///
/// # Errors
/// 400 for an empty prompt or an id that the model does not have.
pub fn encode(app: &App, prompts: Prompts, field: &'static str) -> Result<Vec<Tokens>, ApiError> {
    let lists: Vec<Tokens> = match prompts {
        Prompts::Text(text) => vec![encode_text(app, &text, true, field)?],
        Prompts::Texts(texts) => {
            texts.iter().map(|text| encode_text(app, text, true, field)).collect::<Result<_, _>>()?
        }
        Prompts::Ids(ids) => vec![ids.into()],
        Prompts::IdLists(lists) => lists.into_iter().map(Into::into).collect(),
    };
    if lists.is_empty() || lists.iter().any(|tokens| tokens.is_empty()) {
        return Err(ApiError::invalid(field, format!("{field} is empty or has an empty entry")));
    }
    let vocab = app.tokenizer.vocab_size();
    match lists.iter().flat_map(|tokens| tokens.iter()).find(|&&token| token as usize >= vocab) {
        Some(token) => {
            Err(ApiError::invalid(field, format!("{field} has {token}, but token ids go from 0 to {}", vocab - 1)))
        }
        None => Ok(lists),
    }
}

/// `special`: whether the tokenizer adds its special tokens; a rendered chat has them already.
///
/// # Errors
/// 400 for an empty text, and for one that cannot fit, however it is tokenized.
pub fn encode_text(app: &App, text: &str, special: bool, field: &'static str) -> Result<Tokens, ApiError> {
    if text.is_empty() {
        return Err(ApiError::invalid(field, format!("{field} is empty or has an empty entry")));
    }
    // Known without the cost of tokenizing, so that a text far too long costs nothing.
    let at_least = app.tokenizer.tokens_min(text);
    if at_least >= app.facts.model_len_max() as usize {
        return Err(too_long(app, &format!("at least {at_least}"), field));
    }
    let tokens = app
        .tokenizer
        .encode(text, special)
        .map_err(|e| ApiError::invalid(field, format!("{field} cannot be tokenized: {e}")))?;
    Ok(tokens.into())
}

/// One sample for each prompt and each of its `n`.
///
/// # Errors
/// 400 when a prompt leaves no room for an answer, when there are too many samples, or when a role server gets no rooms.
pub fn batch(app: &App, prompts: Vec<Tokens>, shared: Shared<'_>) -> Result<Batch, ApiError> {
    let n = shared.sampling[0].n;
    let count = prompts.len() * n;
    if count > SAMPLES_MAX {
        let message = format!("{} prompts times n = {n} are {count} samples, at most {SAMPLES_MAX}", prompts.len());
        return Err(ApiError::invalid("n", message));
    }
    let tickets = match app.facts.role {
        Role::Null => None,
        Role::Prefill | Role::Decode => match tickets(shared.bootstrap, count, app.facts.bootstrap_port)? {
            None => return Err(role_server()),
            some => some,
        },
    };
    let mut tickets = tickets.map(Vec::into_iter);
    let mut samples = Vec::with_capacity(count);
    for (at, prompt) in prompts.iter().enumerate() {
        let sampling = &shared.sampling[at.min(shared.sampling.len() - 1)];
        let room_left = answer_tokens_max(app, prompt.len(), shared.prompt_field)?;
        fits(app, prompt.len(), sampling)?;
        for sample_index in 0..n as u32 {
            let mut sampling = sampling.params.clone();
            sampling.max_tokens = sampling.max_tokens.min(room_left);
            sampling.min_tokens = sampling.min_tokens.min(sampling.max_tokens);
            samples.push(SampleRequest {
                rid: shared.rids[at.min(shared.rids.len() - 1)].clone(),
                sample_index,
                prompt: prompt.clone(),
                sampling,
                logprobs: shared.logprobs,
                ticket: tickets.as_mut().and_then(Iterator::next),
            });
        }
    }
    Ok(Batch { samples, n, prompt_tokens: prompts.iter().map(|prompt| prompt.len()).collect() })
}

/// Tokens that fit after a prompt, at least one.
fn answer_tokens_max(app: &App, prompt: usize, field: &'static str) -> Result<u32, ApiError> {
    let limit = app.facts.model_len_max() as usize;
    if prompt < limit { Ok((limit - prompt) as u32) } else { Err(too_long(app, &prompt.to_string(), field)) }
}

fn too_long(app: &App, prompt: &str, field: &'static str) -> ApiError {
    let (what, flag) = limit_words(app);
    let limit = app.facts.model_len_max();
    let message = format!(
        "the prompt has {prompt} tokens, but {what} {limit} tokens ({flag}), of which the answer needs at least one: \
         shorten the prompt"
    );
    ApiError { code: "context_length_exceeded", ..ApiError::invalid(field, message) }
}

/// Whether the answer that the client asked for fits behind the prompt. As OpenAI and SGLang do, a number that was given
/// is not cut in silence; one that was not is.
///
/// # Errors
/// 400 with the numbers.
fn fits(app: &App, prompt: usize, sampling: &Sampling) -> Result<(), ApiError> {
    let Some(field) = sampling.max_tokens_field else { return Ok(()) };
    let limit = match app.facts.role {
        // It keeps the prompt only: the decode worker knows what fits into its pool.
        Role::Prefill => app.facts.context_length,
        Role::Null | Role::Decode => app.facts.model_len_max(),
    };
    let (asked, total) = (sampling.params.max_tokens, prompt as u64 + u64::from(sampling.params.max_tokens));
    if total <= u64::from(limit) {
        return Ok(());
    }
    let (what, flag) = limit_words(app);
    Err(ApiError {
        code: "context_length_exceeded",
        ..ApiError::invalid(
            field,
            format!(
                "the prompt's {prompt} tokens and {field} {asked} are {total}, but {what} {limit} tokens ({flag}): shorten \
                 the prompt, or ask for {} tokens at most",
                u64::from(limit).saturating_sub(prompt as u64)
            ),
        )
    })
}

/// What limits a prompt and its answer together, and the flag that sets it.
fn limit_words(app: &App) -> (&'static str, &'static str) {
    if app.facts.context_length <= app.facts.max_total_tokens || app.facts.role == Role::Prefill {
        ("the context length is", "--context-length")
    } else {
        ("the KV pool of this worker holds", "--max-total-tokens")
    }
}

fn role_server() -> ApiError {
    ApiError {
        code: "role_server",
        ..ApiError::invalid(
            "bootstrap_room",
            "this is a role server, send requests to the gateway: the request has no bootstrap_room",
        )
    }
}
