//! The bytes of each token, as the tokenizer's decoder defines them. *Pure.*
//!
//! Two families exist among the models served: byte-level BPE (GPT-2's printable stand-ins for bytes) and
//! SentencePiece-like BPE (`▁` for a space, `<0x0A>` for a byte). Another decoder is refused by name.

use serde_json::Value;
use tokenizers::Tokenizer;

/// All tokens' bytes in one block; `ends[i]` is where token i ends.
pub(super) struct TokenBytes {
    block: Vec<u8>,
    ends: Vec<u32>,
    strips_leading_space: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Family {
    ByteLevel,
    SentencePiece { strips_leading_space: bool },
}

/// Ids beyond this are a damaged file: the largest public vocabularies have some 300,000 tokens.
const VOCABULARY_TOKENS_MAX: u32 = 1 << 22;

impl TokenBytes {
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, String> {
        let family = Family::of(tokenizer)?;
        let vocabulary = tokenizer.get_vocab(true);
        let Some(last) = vocabulary.values().copied().max() else { return Err("the vocabulary is empty".into()) };
        if last >= VOCABULARY_TOKENS_MAX {
            return Err(format!("token id {last} is beyond the {VOCABULARY_TOKENS_MAX} ids this server accepts"));
        }
        let mut texts: Vec<&str> = vec![""; last as usize + 1];
        for (text, id) in &vocabulary {
            texts[*id as usize] = text;
        }
        let added = tokenizer.get_added_tokens_decoder();
        for (id, token) in &added {
            if let Some(text) = texts.get_mut(*id as usize) {
                *text = &token.content;
            }
        }
        let alphabet = byte_alphabet();
        let mut block = Vec::with_capacity(texts.len() * 8);
        let mut ends = Vec::with_capacity(texts.len());
        for text in texts {
            match family {
                Family::ByteLevel => push_byte_level(text, &alphabet, &mut block),
                Family::SentencePiece { .. } => push_sentencepiece(text, &mut block),
            }
            ends.push(u32::try_from(block.len()).map_err(|_| "the vocabulary holds more than 4 GiB of text")?);
        }
        let strips_leading_space = family == Family::SentencePiece { strips_leading_space: true };
        Ok(Self { block, ends, strips_leading_space })
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.block[start as usize..*end as usize]
    }

    /// Whether a text that starts with a space loses it, as a SentencePiece decoder takes back the one it added.
    pub fn strips_leading_space(&self) -> bool {
        self.strips_leading_space
    }
}

impl Family {
    fn of(tokenizer: &Tokenizer) -> Result<Self, String> {
        let decoder = tokenizer.get_decoder().ok_or("it has no decoder")?;
        let decoder = serde_json::to_value(decoder).map_err(|error| error.to_string())?;
        let parts = match decoder.get("decoders").and_then(Value::as_array) {
            Some(parts) => parts.clone(),
            None => vec![decoder],
        };
        let kinds: Vec<&str> = parts.iter().filter_map(|part| part.get("type")?.as_str()).collect();
        if kinds.contains(&"ByteLevel") {
            return Ok(Self::ByteLevel);
        }
        let replaces_spaces = parts
            .iter()
            .any(|part| part["type"] == "Metaspace" || part["type"] == "Replace" && part["pattern"]["String"] == "▁");
        if !replaces_spaces {
            return Err(format!("its decoder is {kinds:?}; byte-level and SentencePiece decoders are known"));
        }
        let strips_leading_space = parts.iter().any(|part| {
            part["type"] == "Strip" && part["start"].as_u64() >= Some(1)
                || part["type"] == "Metaspace" && part["prepend_scheme"] != "never"
        });
        Ok(Self::SentencePiece { strips_leading_space })
    }
}

/// GPT-2's table: each byte has a printable character, the unprintable ones from U+0100 on, in order.
fn byte_alphabet() -> [Option<u8>; 0x144] {
    let mut bytes = [None; 0x144];
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let at = if printable { usize::from(byte) } else { next };
        next += usize::from(!printable);
        bytes[at] = Some(byte);
    }
    bytes
}

/// The characters of the table, one for each byte.
pub(super) fn alphabet_characters() -> impl Iterator<Item = char> {
    let table = byte_alphabet();
    (0u32..).zip(table).filter_map(|(at, byte)| byte.and_then(|_| char::from_u32(at)))
}

/// A token with a character outside the alphabet (an added one) stands for its own text.
fn push_byte_level(text: &str, alphabet: &[Option<u8>; 0x144], block: &mut Vec<u8>) {
    let start = block.len();
    for character in text.chars() {
        match alphabet.get(character as usize).copied().flatten() {
            Some(byte) => block.push(byte),
            None => {
                block.truncate(start);
                block.extend_from_slice(text.as_bytes());
                return;
            }
        }
    }
}

fn push_sentencepiece(text: &str, block: &mut Vec<u8>) {
    let byte = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => block.push(byte),
        None => block.extend_from_slice(text.replace('▁', " ").as_bytes()),
    }
}
