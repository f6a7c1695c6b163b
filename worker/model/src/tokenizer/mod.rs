//! Text to token ids and back, and messages to text. A [`Tokenizer`] is shared by cloning and never changes.
//!
//! Encoding is the `tokenizers` library's. Decoding is our own table of each token's bytes, since a server decodes
//! one token at a time and must never cut a character: see [`StreamDecoder`].

mod bound;
mod bytes;
mod stream;
mod template;

use std::{collections::HashSet, path::Path, sync::Arc};

pub use minijinja::Value as ChatValue;
pub use stream::StreamDecoder;
pub use template::{ChatInput, SpecialTokens};

use crate::error::{ModelError, TokenizerError};
use bound::TokenBound;
use bytes::TokenBytes;
use template::ChatTemplate;

/// What a loader knows of a tokenizer; [`Tokenizer::new`] checks it.
pub(crate) struct TokenizerParts {
    pub tokenizer: tokenizers::Tokenizer,
    pub special_tokens: SpecialTokens,
    /// Source of the chat template, where the model has one.
    pub chat_template: Option<String>,
}

/// Why parts do not make a tokenizer.
pub(crate) enum TokenizerFault {
    Tokenizer(String),
    Template(String),
}

impl TokenizerFault {
    pub fn at(self, path: &Path) -> ModelError {
        let path = path.to_owned();
        match self {
            Self::Tokenizer(what) => ModelError::Tokenizer { path, what },
            Self::Template(what) => ModelError::Template { path, what },
        }
    }
}

#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    tokenizer: tokenizers::Tokenizer,
    bytes: TokenBytes,
    bound: TokenBound,
    special: HashSet<u32>,
    special_tokens: SpecialTokens,
    template: Option<ChatTemplate>,
}

impl Tokenizer {
    pub(crate) fn new(parts: TokenizerParts) -> Result<Self, TokenizerFault> {
        let TokenizerParts { mut tokenizer, special_tokens, chat_template } = parts;
        // A file may carry the truncation and padding of its training run; a server wants the text as it is.
        tokenizer.with_truncation(None).map_err(|error| TokenizerFault::Tokenizer(error.to_string()))?;
        tokenizer.with_padding(None);
        let bytes = TokenBytes::new(&tokenizer).map_err(TokenizerFault::Tokenizer)?;
        let bound = TokenBound::of(&tokenizer);
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let template = chat_template.map(ChatTemplate::compile).transpose().map_err(TokenizerFault::Template)?;
        Ok(Self(Arc::new(Inner { tokenizer, bytes, bound, special, special_tokens, template })))
    }

    /// Token ids of a text. `add_special` adds what the model wants around a plain prompt (a BOS token, say); a
    /// rendered chat has its special tokens already and is encoded without.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self
            .0
            .tokenizer
            .encode_fast(text, add_special)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// A lower bound of the text's tokens, found without tokenizing it; 0 for tokenizers of which nothing is known.
    pub fn tokens_min(&self, text: &str) -> usize {
        self.0.bound.tokens_min(text)
    }

    /// The text of a whole sequence; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut decoder = self.stream(skip_special);
        let mut text = String::new();
        for id in ids {
            text.push_str(decoder.push(*id));
        }
        text.push_str(&decoder.finish());
        if self.0.bytes.strips_leading_space() && text.starts_with(' ') {
            text.remove(0);
        }
        text
    }

    /// A decoder for tokens that continue a prompt; with `skip_special`, special tokens have no text.
    pub fn stream(&self, skip_special: bool) -> StreamDecoder {
        StreamDecoder::new(self.clone(), skip_special)
    }

    /// The bytes that a token adds to a text; empty for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.0.bytes.get(id)
    }

    /// The token's text for a listing; bytes that are no whole character show as U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.tokenizer.token_to_id(token)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.0.special.contains(&id)
    }

    /// One more than the largest id with a text. The model's vocabulary may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.0.bytes.len()
    }

    pub fn has_chat_template(&self) -> bool {
        self.0.template.is_some()
    }

    /// Source of the chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.0.template.as_ref().map(ChatTemplate::source)
    }

    /// Renders messages as the model's template wants them; encode the result without special tokens.
    pub fn apply_chat_template(&self, input: &ChatInput) -> Result<String, TokenizerError> {
        let template = self.0.template.as_ref().ok_or(TokenizerError::NoTemplate)?;
        template.render(input, &self.0.special_tokens).map_err(TokenizerError::Template)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}
