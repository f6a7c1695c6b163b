//! Logprobs in OpenAI's two shapes: a list of objects for chats, parallel lists for completions. *Pure.*

use serde::{Serialize, Serializer, ser::SerializeMap};
use tandem_model::Tokenizer;

use crate::{http::answers::PromptLogprobs, request::TokenLogprob};

/// What stands for minus infinity, which JSON cannot say; OpenAI's value.
const LEAST: f32 = -9999.0;

/// A logprob that JSON can carry.
pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LEAST }
}

#[derive(Serialize)]
pub struct ChatLogprobs<'a> {
    content: Vec<ChatToken<'a>>,
    refusal: Option<&'a str>,
}

#[derive(Serialize)]
struct ChatToken<'a> {
    #[serde(flatten)]
    token: ChatAlternative<'a>,
    top_logprobs: Vec<ChatAlternative<'a>>,
}

#[derive(Serialize)]
struct ChatAlternative<'a> {
    token: String,
    logprob: f32,
    bytes: &'a [u8],
}

pub fn chat<'a>(tokenizer: &'a Tokenizer, logprobs: &[TokenLogprob]) -> ChatLogprobs<'a> {
    let alternative = |token: u32, logprob: f32| ChatAlternative {
        token: tokenizer.token_text(token),
        logprob: finite(logprob),
        bytes: tokenizer.token_bytes(token),
    };
    let content = logprobs
        .iter()
        .map(|chosen| ChatToken {
            token: alternative(chosen.token, chosen.logprob),
            top_logprobs: chosen.top.iter().map(|&(token, logprob)| alternative(token, logprob)).collect(),
        })
        .collect();
    ChatLogprobs { content, refusal: None }
}

/// The completions' shape. `text_offset` counts characters from the start of the choice's text.
#[derive(Serialize, Default)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Alternatives>>,
    text_offset: Vec<usize>,
}

/// An object from token text to logprob, most likely first. Tokens with the same text keep the more likely value.
pub struct Alternatives(Vec<(String, f32)>);

impl Serialize for Alternatives {
    fn serialize<S: Serializer>(&self, target: S) -> Result<S::Ok, S::Error> {
        let mut map = target.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
}

impl CompletionLogprobs {
    /// Adds the prompt's tokens; the first has no logprob.
    pub fn prompt(&mut self, tokenizer: &Tokenizer, prompt: &PromptLogprobs, offset: &mut usize) {
        for (token, logprob) in prompt {
            self.push(tokenizer, *token, logprob.as_ref(), offset);
        }
    }

    pub fn outputs(&mut self, tokenizer: &Tokenizer, outputs: &[TokenLogprob], offset: &mut usize) {
        for logprob in outputs {
            self.push(tokenizer, logprob.token, Some(logprob), offset);
        }
    }

    fn push(&mut self, tokenizer: &Tokenizer, token: u32, logprob: Option<&TokenLogprob>, offset: &mut usize) {
        let text = tokenizer.token_text(token);
        self.text_offset.push(*offset);
        *offset += text.chars().count();
        self.tokens.push(text);
        self.token_logprobs.push(logprob.map(|l| finite(l.logprob)));
        self.top_logprobs.push(logprob.filter(|l| !l.top.is_empty()).map(|l| {
            let mut list: Vec<(String, f32)> = Vec::with_capacity(l.top.len());
            for &(token, logprob) in &l.top {
                let text = tokenizer.token_text(token);
                if list.iter().all(|(known, _)| *known != text) {
                    list.push((text, finite(logprob)));
                }
            }
            Alternatives(list)
        }));
    }
}
