//! From tokens to text that may be shown, and the judgement when an answer ends. *Pure.*
//!
//! Promises: a character is never cut; a stop string never leaks, not even its beginning while it may still become one;
//! every token is judged before another is sampled. The order of the rules: EOS, stop token ids, stop strings, length.

mod model_text;

use crate::request::{FinishReason, SamplingParams};

/// Makes an incremental detokenizer for each sample.
pub trait Detokenizers: Send + Sync {
    fn start(&self, skip_special_tokens: bool) -> Box<dyn Detokenize>;
}

/// Turns one sample's tokens into text, holding back bytes that are no whole character yet.
pub trait Detokenize: Send {
    /// Appends the text that `token` completes.
    fn push(&mut self, token: u32, text: &mut String);

    /// Appends what is held back, however incomplete.
    fn finish(&mut self, text: &mut String);
}

/// The text of one sample and its rules for the end.
pub struct Output {
    detokenizer: Box<dyn Detokenize>,
    /// Text that may be the beginning of a stop string.
    held: String,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    /// Empty with `ignore_eos`.
    eos: Vec<u32>,
    include_stop: bool,
    min_tokens: u32,
    max_tokens: u32,
    count: u32,
}

/// What one token adds.
#[derive(Debug, PartialEq)]
pub struct Said {
    /// Text that may be shown now.
    pub text: String,
    pub end: Option<End>,
}

#[derive(Debug, PartialEq)]
pub struct End {
    pub reason: FinishReason,
    /// Text that was held back and turned out to belong to the answer.
    pub text: String,
}

impl Output {
    /// `max_tokens` is the request's, already capped by context and pool.
    pub fn new(detokenizer: Box<dyn Detokenize>, params: &SamplingParams, eos: &[u32], max_tokens: u32) -> Self {
        Self {
            detokenizer,
            held: String::new(),
            stop: params.stop.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            stop_token_ids: params.stop_token_ids.clone(),
            eos: if params.ignore_eos { Vec::new() } else { eos.to_vec() },
            include_stop: params.include_stop,
            min_tokens: params.min_tokens,
            max_tokens,
            count: 0,
        }
    }

    /// Tokens put out so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Judges the next output token.
    pub fn push(&mut self, token: u32) -> Said {
        self.count += 1;
        // Up to `min_tokens` nothing but the length ends an answer, and text is not searched.
        let may_stop = self.count > self.min_tokens;
        if may_stop && (self.eos.contains(&token) || self.stop_token_ids.contains(&token)) {
            if self.include_stop {
                self.detokenizer.push(token, &mut self.held);
            }
            return self.end(String::new(), FinishReason::StopToken(token));
        }
        self.detokenizer.push(token, &mut self.held);
        if may_stop && let Some(said) = self.stop_string() {
            return said;
        }
        let shown = if may_stop { self.held.len() - self.possible_stop() } else { self.held.len() };
        let rest = self.held.split_off(shown);
        let text = std::mem::replace(&mut self.held, rest);
        if self.count >= self.max_tokens {
            return self.end(text, FinishReason::Length);
        }
        Said { text, end: None }
    }

    fn end(&mut self, text: String, reason: FinishReason) -> Said {
        self.detokenizer.finish(&mut self.held);
        Said { text, end: Some(End { reason, text: std::mem::take(&mut self.held) }) }
    }

    /// The stop string that begins first, if one is complete.
    fn stop_string(&mut self) -> Option<Said> {
        let found = self.stop.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        let (start, stop) = found.min_by_key(|&(start, _)| start)?;
        let stop = stop.clone();
        let end = if self.include_stop { start + stop.len() } else { start };
        let mut text = std::mem::take(&mut self.held);
        text.truncate(end);
        Some(Said { text, end: Some(End { reason: FinishReason::StopString(stop), text: String::new() }) })
    }

    /// Bytes at the end of the held text that may be the beginning of a stop string. Both are whole characters, so a
    /// match begins and ends between characters.
    fn possible_stop(&self) -> usize {
        let longest = |stop: &String| {
            let most = self.held.len().min(stop.len() - 1);
            (1..=most).rev().find(|&n| self.held.as_bytes().ends_with(&stop.as_bytes()[..n]))
        };
        self.stop.iter().filter_map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
