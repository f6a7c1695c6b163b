//! How few tokens a text can possibly have, known without tokenizing it. *Pure.*
//!
//! A BPE token stands for as many bytes as its own text has, and a text of n bytes needs at least n / (the longest
//! token's bytes) tokens. That holds only where no byte can vanish or share a token without limit: every byte has a
//! token of its own (nothing is unknown), no added token swallows the spaces around it, and normalizer and splitter are
//! among those known to keep all text. For any other tokenizer nothing is promised.

use serde_json::Value;
use tokenizers::{ModelWrapper, Tokenizer};

/// Canonical composition shortens UTF-8 by no more than this: decomposing shortens it by 3 at most (U+1FEF to U+0060),
/// and composing what is decomposed by 3 again (U+0390).
const COMPOSITION_FACTOR_MAX: usize = 9;

pub(super) struct TokenBound {
    /// Bytes of the longest token; `None` when a token may stand for any number of bytes.
    token_bytes_max: Option<usize>,
    composes: bool,
}

impl TokenBound {
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let unbounded = Self { token_bytes_max: None, composes: false };
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return unbounded };
        let (Ok(normalizer), Ok(splitter)) =
            (serde_json::to_value(tokenizer.get_normalizer()), serde_json::to_value(tokenizer.get_pre_tokenizer()))
        else {
            return unbounded;
        };
        let added = tokenizer.get_added_tokens_decoder();
        let swallows = added.values().any(|token| token.lstrip || token.rstrip);
        let byte_level = has_type(&normalizer, "ByteLevel") || has_type(&splitter, "ByteLevel");
        if swallows || !normalizer_keeps_text(&normalizer) || !splitter_keeps_text(&splitter) {
            return unbounded;
        }
        let vocabulary = tokenizer.get_vocab(false);
        let every_byte = match byte_level {
            true => super::bytes::alphabet_characters().all(|c| vocabulary.contains_key(c.encode_utf8(&mut [0; 4]))),
            false => model.byte_fallback && (0..=255u8).all(|b| vocabulary.contains_key(&format!("<0x{b:02X}>"))),
        };
        if !every_byte {
            return unbounded;
        }
        // In a byte-level vocabulary one character stands for one byte.
        let bytes = |text: &String| if byte_level { text.chars().count() } else { text.len() };
        let added = added.values().map(|token| token.content.len());
        let token_bytes_max = vocabulary.keys().map(bytes).chain(added).max();
        Self { token_bytes_max, composes: has_type(&normalizer, "NFC") }
    }

    /// Never more than the text's tokens; 0 where nothing is known.
    pub fn tokens_min(&self, text: &str) -> usize {
        let Some(bytes_max) = self.token_bytes_max else { return 0 };
        let factor = if self.composes && !text.is_ascii() { COMPOSITION_FACTOR_MAX } else { 1 };
        text.len().div_ceil(bytes_max.max(1) * factor)
    }
}

/// The parts of a normalizer or a splitter, which is one itself, a sequence of them, or none.
fn parts(value: &Value) -> Vec<&Value> {
    let list = value.get("normalizers").or_else(|| value.get("pretokenizers")).and_then(Value::as_array);
    match list {
        Some(list) => list.iter().flat_map(parts).collect(),
        None if value.is_null() => Vec::new(),
        None => vec![value],
    }
}

fn has_type(value: &Value, name: &str) -> bool {
    parts(value).iter().any(|part| part["type"] == name)
}

fn normalizer_keeps_text(value: &Value) -> bool {
    parts(value).iter().all(|part| match part["type"].as_str() {
        Some("NFC" | "Prepend" | "ByteLevel") => true,
        Some("Replace") => match (part["pattern"]["String"].as_str(), part["content"].as_str()) {
            (Some(pattern), Some(content)) => content.len() >= pattern.len(),
            _ => false,
        },
        _ => false,
    })
}

fn splitter_keeps_text(value: &Value) -> bool {
    parts(value).iter().all(|part| {
        let known = ["ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"];
        part["type"].as_str().is_some_and(|kind| known.contains(&kind)) && part["behavior"] != "Removed"
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn sentencepiece(normalizer: Value, added: Value, bytes: u32) -> Tokenizer {
        let mut vocabulary = serde_json::Map::new();
        vocabulary.insert("<unk>".into(), 0.into());
        for byte in 0..bytes {
            vocabulary.insert(format!("<0x{byte:02X}>"), (byte + 1).into());
        }
        for (at, text) in ["a", "▁", "▁a", "▁▁", "▁▁▁▁"].into_iter().enumerate() {
            vocabulary.insert(text.into(), (300 + at).into());
        }
        let model = json!({"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary,
            "merges": [["▁", "a"], ["▁", "▁"], ["▁▁", "▁▁"]]});
        let file = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": normalizer, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model});
        Tokenizer::from_bytes(file.to_string()).unwrap()
    }

    fn usual() -> Value {
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "NFC"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]})
    }

    fn added(rstrip: bool) -> Value {
        json!([{"id": 400, "content": "<|end of turn|>", "single_word": false, "lstrip": false, "rstrip": rstrip,
            "normalized": false, "special": true}])
    }

    #[test]
    fn nothing_is_promised_where_a_token_can_swallow_any_length() {
        let bounded = |tokenizer: &Tokenizer| TokenBound::of(tokenizer).token_bytes_max;
        assert_eq!(bounded(&sentencepiece(usual(), added(false), 256)), Some(15), "the added token's own text");
        assert_eq!(bounded(&sentencepiece(usual(), added(true), 256)), None, "spaces around an added token");
        assert_eq!(bounded(&sentencepiece(usual(), added(false), 255)), None, "a byte without a token");
        for normalizer in [
            json!({"type": "Strip", "strip_left": true, "strip_right": true}),
            json!({"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"}),
            json!({"type": "Replace", "pattern": {"String": "  "}, "content": " "}),
        ] {
            assert_eq!(bounded(&sentencepiece(normalizer.clone(), added(false), 256)), None, "{normalizer}");
        }
    }

    #[test]
    fn text_that_composing_shortens_has_no_fewer_tokens_than_promised() {
        let tokenizer = sentencepiece(usual(), added(false), 256);
        let bound = TokenBound::of(&tokenizer);
        for text in ["\u{1fef}".repeat(90), "\u{3b9}\u{308}\u{301}".repeat(90), "    ".repeat(90)] {
            let tokens = tokenizer.encode_fast(text.as_str(), false).unwrap().len();
            assert!((1..=tokens).contains(&bound.tokens_min(&text)), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn the_promise_is_kept(text in "([ a▁é\u{1fef}]|<\\|end of turn\\|>|\\PC){0,60}") {
            let tokenizer = sentencepiece(usual(), added(false), 256);
            let tokens = tokenizer.encode_fast(text.as_str(), false).unwrap().len();
            prop_assert!(TokenBound::of(&tokenizer).tokens_min(&text) <= tokens);
        }
    }
}
