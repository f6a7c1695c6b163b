//! From a row of logits to a token. *Pure*: the same row, state and position always give the same token, so that a
//! recomputed, re-batched or split sequence samples what it would have sampled alone (H9).
//!
//! The order: repetition, frequency and presence penalties, logit bias, the ban of ending tokens below `min_tokens`;
//! then the greatest (ties to the lowest id), or at a temperature: top-k, top-p and min-p, all three judged on the
//! distribution at that temperature, and one draw from [`random`].
pub mod logprobs;
pub mod random;

use std::collections::{HashMap, HashSet};

use crate::request::SamplingParams;

/// What sampling knows of a sequence. It is built from the prompt and then told each output token once.
#[derive(Clone, Debug)]
pub struct SamplerState {
    params: SamplingParams,
    sample_index: u32,
    /// Tokens of the prompt; filled only where a repetition penalty asks for them.
    prompt: HashSet<u32>,
    /// How often each token was put out; filled only where a penalty asks for it.
    counts: HashMap<u32, u32>,
    /// Tokens that end the answer, banned below `min_tokens`.
    ending: Vec<u32>,
    position: u32,
}

impl SamplerState {
    pub fn new(params: &SamplingParams, sample_index: u32, prompt: &[u32], eos: &[u32]) -> Self {
        let prompt = match params.repetition_penalty == 1.0 {
            true => HashSet::new(),
            false => prompt.iter().copied().collect(),
        };
        let mut ending: Vec<u32> = eos.iter().chain(&params.stop_token_ids).copied().collect();
        ending.sort_unstable();
        ending.dedup();
        Self { params: params.clone(), sample_index, prompt, counts: HashMap::new(), ending, position: 0 }
    }

    /// The next output position, from 0.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Records that `token` was put out.
    pub fn apply(&mut self, token: u32) {
        if self.has_penalty() {
            *self.counts.entry(token).or_default() += 1;
        }
        self.position += 1;
    }

    fn has_penalty(&self) -> bool {
        let p = &self.params;
        p.repetition_penalty != 1.0 || p.frequency_penalty != 0.0 || p.presence_penalty != 0.0
    }

    fn bans_endings(&self) -> bool {
        self.position < self.params.min_tokens
    }

    fn changes_logits(&self) -> bool {
        self.has_penalty() || !self.params.logit_bias.is_empty() || self.bans_endings()
    }

    /// Penalties, bias and bans. Ids beyond the row are ignored: a tokenizer may know fewer or more tokens than the head.
    fn adjust(&self, row: &mut [f32]) {
        let p = &self.params;
        if p.repetition_penalty != 1.0 {
            let put_out = self.counts.keys().filter(|token| !self.prompt.contains(token));
            for &token in self.prompt.iter().chain(put_out) {
                if let Some(logit) = row.get_mut(token as usize) {
                    let divide = *logit > 0.0;
                    *logit = if divide { *logit / p.repetition_penalty } else { *logit * p.repetition_penalty };
                }
            }
        }
        if p.frequency_penalty != 0.0 || p.presence_penalty != 0.0 {
            for (&token, &count) in &self.counts {
                if let Some(logit) = row.get_mut(token as usize) {
                    *logit -= p.frequency_penalty * count as f32 + p.presence_penalty;
                }
            }
        }
        for &(token, bias) in &p.logit_bias {
            if let Some(logit) = row.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if self.bans_endings() {
            for &token in &self.ending {
                if let Some(logit) = row.get_mut(token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// Why no token could be sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplingFault {
    #[error("the model's logits at output position {0} are not numbers")]
    NotANumber(u32),
    #[error("the model's logits at output position {0} leave no token")]
    NothingLeft(u32),
    /// The request's fault.
    #[error(
        "min_tokens forbids every token that is left at output position {0}: stop_token_ids and the model's own end \
         tokens may not be had below min_tokens; ask for a smaller min_tokens or fewer stop_token_ids"
    )]
    AllBanned(u32),
}

/// Buffers that live across tokens, so that sampling allocates nothing per token.
#[derive(Debug, Default)]
pub struct Scratch {
    row: Vec<f32>,
    candidates: Vec<(f32, u32)>,
}

/// Samples the token at `state.position()` from raw logits `[vocab]`.
pub fn sample(logits: &[f32], state: &SamplerState, scratch: &mut Scratch) -> Result<u32, SamplingFault> {
    if logits.iter().any(|logit| logit.is_nan()) {
        return Err(SamplingFault::NotANumber(state.position));
    }
    let greedy = state.params.temperature == 0.0;
    if greedy && !state.changes_logits() {
        return greatest(logits, state.position).map(|(token, _)| token);
    }
    let Scratch { row, candidates } = scratch;
    row.clear();
    row.extend_from_slice(logits);
    state.adjust(row);
    let (token, max) = greatest(row, state.position).map_err(|fault| match fault {
        SamplingFault::NothingLeft(position) if greatest(logits, position).is_ok() => {
            SamplingFault::AllBanned(position)
        }
        other => other,
    })?;
    if greedy {
        return Ok(token);
    }
    let inverse = 1.0 / state.params.temperature.max(f32::MIN_POSITIVE);
    let mut total = 0f64;
    for logit in row.iter_mut() {
        // The greatest weighs 1 whatever the temperature: 0 * infinity must not become a NaN.
        *logit = if *logit == max { 1.0 } else { ((*logit - max) * inverse).exp() };
        total += f64::from(*logit);
    }
    let draw = random::unit(state.params.seed, state.sample_index, state.position);
    if state.params.top_k.is_none() && state.params.top_p >= 1.0 {
        return Ok(draw_by_id(row, state.params.min_p, draw));
    }
    let kept = leading(row, &state.params, total, candidates);
    Ok(draw_from(kept, draw))
}

/// The greatest logit and its lowest id.
fn greatest(row: &[f32], position: u32) -> Result<(u32, f32), SamplingFault> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::INFINITY {
        return Err(SamplingFault::NotANumber(position));
    }
    match row.iter().position(|&logit| logit == max) {
        Some(token) if max > f32::NEG_INFINITY => Ok((token as u32, max)),
        _ => Err(SamplingFault::NothingLeft(position)),
    }
}

/// Draws among all weights of at least `min_p` (the greatest weight is 1), in the order of ids.
fn draw_by_id(weights: &[f32], min_p: f32, draw: f64) -> u32 {
    let kept = || weights.iter().enumerate().filter(|&(_, &weight)| weight > 0.0 && weight >= min_p);
    let total: f64 = kept().map(|(_, &weight)| f64::from(weight)).sum();
    let mut left = draw * total;
    let mut last = 0;
    for (token, &weight) in kept() {
        last = token as u32;
        left -= f64::from(weight);
        if left < 0.0 {
            break;
        }
    }
    last
}

fn draw_from(kept: &[(f32, u32)], draw: f64) -> u32 {
    let total: f64 = kept.iter().map(|&(weight, _)| f64::from(weight)).sum();
    let mut left = draw * total;
    for &(weight, token) in kept {
        left -= f64::from(weight);
        if left < 0.0 {
            return token;
        }
    }
    kept.last().map_or(0, |&(_, token)| token)
}

/// The weights that survive top-k, top-p and min-p: heaviest first, ties by lower id. Sorts no more than it must.
fn leading<'a>(
    weights: &[f32],
    params: &SamplingParams,
    total: f64,
    candidates: &'a mut Vec<(f32, u32)>,
) -> &'a [(f32, u32)] {
    candidates.clear();
    let kept = weights.iter().enumerate().filter(|&(_, &weight)| weight > 0.0 && weight >= params.min_p);
    candidates.extend(kept.map(|(token, &weight)| (weight, token as u32)));
    let limit = params.top_k.map_or(candidates.len(), |k| candidates.len().min(k.max(1) as usize));
    let heavier = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    let mut take = limit.min(256);
    loop {
        if take < candidates.len() {
            candidates.select_nth_unstable_by(take - 1, heavier);
        }
        candidates[..take].sort_unstable_by(heavier);
        let mut mass = 0f64;
        let enough = candidates[..take].iter().position(|&(weight, _)| {
            mass += f64::from(weight);
            mass >= f64::from(params.top_p) * total
        });
        match enough {
            Some(last) => return &candidates[..=last],
            None if take == limit => return &candidates[..limit],
            None => take = (take * 8).min(limit),
        }
    }
}

#[cfg(test)]
mod tests;
