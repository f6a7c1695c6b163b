//! Tokenizer, chat template and end tokens out of GGUF metadata. *Pure.*
//!
//! Two models exist among the architectures served: `gpt2`, byte-level BPE with merges, whose splitting rule is known
//! by a name in `tokenizer.ggml.pre`; and `llama`, SentencePiece with scores, expressed as BPE merges in score order
//! with byte fallback, as `transformers` converts it.

use std::{collections::HashSet, path::Path};

use serde_json::{Value as Json, json};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    models::bpe::{BPE, Merges, Vocab},
};

use super::file::{GgufFile, Value};
use crate::{
    Generation, LoadOptions,
    error::ModelError,
    tokenizer::{SpecialTokens, Tokenizer, TokenizerParts},
};

/// `tokenizer.ggml.token_type`.
const NORMAL: i128 = 1;
const UNKNOWN: i128 = 2;
const CONTROL: i128 = 3;
const USER_DEFINED: i128 = 4;
const BYTE: i128 = 6;

/// Control tokens that end an answer whatever the file names as its end token (as llama.cpp does).
const END_TEXTS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>"];

pub(super) fn load(
    path: &Path,
    file: &GgufFile<'_>,
    options: &LoadOptions,
) -> Result<(Tokenizer, Generation), ModelError> {
    let fault = |what: String| ModelError::Tokenizer { path: path.to_owned(), what };
    let vocabulary = Vocabulary::read(file).map_err(fault)?;
    let tokenizer = vocabulary.build().map_err(fault)?;
    let chat_template = match &options.chat_template {
        Some(source) => Some(source.clone()),
        None => file.text("tokenizer.chat_template").map_err(fault)?.map(str::to_owned),
    };
    let generation = vocabulary.generation().map_err(fault)?;
    let special_tokens = vocabulary.special_tokens().map_err(fault)?;
    let parts = TokenizerParts { tokenizer, special_tokens, chat_template };
    let tokenizer = Tokenizer::new(parts).map_err(|error| error.at(path))?;
    Ok((tokenizer, generation))
}

struct Vocabulary<'a> {
    file: &'a GgufFile<'a>,
    tokens: Vec<&'a str>,
    /// One per token.
    types: Vec<i128>,
}

impl<'a> Vocabulary<'a> {
    fn read(file: &'a GgufFile<'a>) -> Result<Self, String> {
        let tokens = file.texts("tokenizer.ggml.tokens")?.ok_or("tokenizer.ggml.tokens is missing")?;
        let types = match file.array("tokenizer.ggml.token_type")? {
            None => vec![NORMAL; tokens.len()],
            Some(types) => types
                .iter()
                .map(|kind| match kind {
                    Value::Integer(kind) => Ok(*kind),
                    _ => Err("tokenizer.ggml.token_type holds something else than integers"),
                })
                .collect::<Result<_, _>>()?,
        };
        if types.len() != tokens.len() {
            return Err(format!("{} tokens, but {} token types", tokens.len(), types.len()));
        }
        Ok(Self { file, tokens, types })
    }

    fn build(&self) -> Result<tokenizers::Tokenizer, String> {
        let (mut tokenizer, adds_bos) = match self.file.text("tokenizer.ggml.model")? {
            Some("gpt2") => self.byte_level()?,
            Some("llama") => (self.sentencepiece()?, true),
            Some(other) => return Err(format!("unsupported tokenizer model {other} (supported: gpt2, llama)")),
            None => return Err("tokenizer.ggml.model is missing".into()),
        };
        let added = |kind: i128| self.tokens.iter().zip(&self.types).filter(move |(_, is)| **is == kind);
        let token = |text: &str, special: bool| AddedToken::from(text, special).normalized(false);
        let control: Vec<AddedToken> = added(CONTROL).map(|(text, _)| token(text, true)).collect();
        tokenizer.add_special_tokens(&control);
        let defined: Vec<AddedToken> = added(USER_DEFINED).map(|(text, _)| token(text, false)).collect();
        tokenizer.add_tokens(&defined);
        let bos = self.wanted("add_bos_token", "bos_token_id", adds_bos)?;
        let eos = self.wanted("add_eos_token", "eos_token_id", false)?;
        tokenizer.with_post_processor(frame(bos, eos)?);
        Ok(tokenizer)
    }

    fn byte_level(&self) -> Result<(tokenizers::Tokenizer, bool), String> {
        let split = Split::named(self.file.text("tokenizer.ggml.pre")?.unwrap_or("default"))?;
        let merges = self.file.texts("tokenizer.ggml.merges")?.ok_or("tokenizer.ggml.merges is missing")?;
        // The separator is the first space after the first character: a piece never begins with one otherwise.
        let pair = |merge: &str| {
            let first = merge.chars().next()?.len_utf8();
            let at = first + merge[first..].find(' ')?;
            Some((merge[..at].to_owned(), merge[at + 1..].to_owned()))
        };
        let pairs: Merges = merges
            .iter()
            .map(|merge| pair(merge).ok_or_else(|| format!("the merge {merge:?} is no pair")))
            .collect::<Result<_, _>>()?;
        let model = BPE::builder().vocab_and_merges(self.vocab(), pairs).ignore_merges(split.ignore_merges);
        let mut tokenizer = tokenizers::Tokenizer::new(model.build().map_err(|error| error.to_string())?);
        let prefix = self.file.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(false);
        tokenizer.with_pre_tokenizer(Some(split.pre_tokenizer(prefix)?));
        if split.nfc {
            tokenizer.with_normalizer(Some(part::<NormalizerWrapper>(json!({"type": "NFC"}))?));
        }
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        tokenizer.with_decoder(Some(part::<DecoderWrapper>(byte_level)?));
        Ok((tokenizer, split.adds_bos))
    }

    fn sentencepiece(&self) -> Result<tokenizers::Tokenizer, String> {
        let mut builder = BPE::builder()
            .vocab_and_merges(self.vocab(), self.merges_by_score()?)
            .fuse_unk(true)
            .byte_fallback(self.types.contains(&BYTE));
        let unknown = self.types.iter().position(|kind| *kind == UNKNOWN);
        let unknown = self.id("unknown_token_id")?.map(|id| id as usize).or(unknown);
        if let Some(text) = unknown.and_then(|id| self.tokens.get(id)) {
            builder = builder.unk_token((*text).to_owned());
        }
        let mut tokenizer = tokenizers::Tokenizer::new(builder.build().map_err(|error| error.to_string())?);
        let prefix = self.file.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let normalizer = json!({"type": "Sequence", "normalizers": normalizers});
        tokenizer.with_normalizer(Some(part::<NormalizerWrapper>(normalizer)?));
        tokenizer.with_decoder(Some(part::<DecoderWrapper>(json!({"type": "Sequence", "decoders": decoders}))?));
        Ok(tokenizer)
    }

    /// Every way to put a piece together from two others, best piece first (`generate_merges` of `transformers`).
    fn merges_by_score(&self) -> Result<Merges, String> {
        let scores = self.file.array("tokenizer.ggml.scores")?.ok_or("tokenizer.ggml.scores is missing")?;
        if scores.len() != self.tokens.len() {
            return Err(format!("{} tokens, but {} scores", self.tokens.len(), scores.len()));
        }
        let vocab = self.vocab();
        let mut merges = Vec::new();
        for ((token, score), kind) in self.tokens.iter().zip(scores).zip(&self.types) {
            let Value::Float(score) = score else { return Err("tokenizer.ggml.scores holds no floats".into()) };
            if !matches!(*kind, NORMAL | USER_DEFINED) || token.len() > PIECE_BYTES_MAX {
                continue;
            }
            let mut ways: Vec<_> = token
                .char_indices()
                .skip(1)
                .map(|(at, _)| token.split_at(at))
                .filter_map(|(left, right)| Some((*vocab.get(left)?, *vocab.get(right)?, left, right)))
                .collect();
            ways.sort_unstable();
            merges.extend(ways.into_iter().map(|(_, _, left, right)| (*score, left, right)));
        }
        // Characters are counted as Python does. The sort is stable: equal keys keep the order of the vocabulary.
        let length = |text: &str| text.chars().count();
        merges.sort_by(|a, b| {
            b.0.total_cmp(&a.0).then(length(b.1).cmp(&length(a.1))).then(length(b.2).cmp(&length(a.2)))
        });
        Ok(merges.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect())
    }

    fn vocab(&self) -> Vocab {
        self.tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id as u32)).collect()
    }

    /// An id that the metadata names; one outside the vocabulary is a damaged file.
    fn id(&self, key: &str) -> Result<Option<u32>, String> {
        match self.file.integer(&format!("tokenizer.ggml.{key}"))? {
            // Some converters write -1 as an unsigned number for "none".
            None | Some(0xFFFF_FFFF) => Ok(None),
            Some(id) if id < self.tokens.len() as u64 => Ok(Some(id as u32)),
            Some(id) => Err(format!("tokenizer.ggml.{key} is {id}, beyond {} tokens", self.tokens.len())),
        }
    }

    /// The token to put around a text, if the file (or its kind, by default) wants one.
    fn wanted(&self, flag: &str, key: &str, default: bool) -> Result<Option<(u32, &'a str)>, String> {
        let wanted = self.file.flag(&format!("tokenizer.ggml.{flag}"))?.unwrap_or(default);
        let id = self.id(key)?.filter(|_| wanted);
        Ok(id.map(|id| (id, self.tokens[id as usize])))
    }

    fn special_tokens(&self) -> Result<SpecialTokens, String> {
        let names = [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("sep", "seperator")];
        let mut tokens = SpecialTokens::new();
        for (name, key) in names {
            if let Some(id) = self.id(&format!("{key}_token_id"))? {
                tokens.push((format!("{name}_token"), self.tokens[id as usize].to_owned()));
            }
        }
        Ok(tokens)
    }

    fn generation(&self) -> Result<Generation, String> {
        let mut ends: Vec<u32> = Vec::new();
        ends.extend(self.id("eos_token_id")?);
        ends.extend(self.id("eot_token_id")?);
        let known = |id: &usize| self.types[*id] == CONTROL && END_TEXTS.contains(&self.tokens[*id]);
        ends.extend((0..self.tokens.len()).filter(known).map(|id| id as u32));
        let mut seen = HashSet::new();
        ends.retain(|id| seen.insert(*id));
        Ok(Generation { eos_token_ids: ends, bos_token_id: self.id("bos_token_id")?, ..Generation::default() })
    }
}

/// A longer piece would be a damaged file; its splits would cost quadratic time.
const PIECE_BYTES_MAX: usize = 1024;

/// How a `gpt2` vocabulary cuts a text before merging.
struct Split {
    patterns: &'static [&'static str],
    /// Cut by GPT-2's own pattern, after `patterns`.
    gpt2: bool,
    nfc: bool,
    ignore_merges: bool,
    adds_bos: bool,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

impl Split {
    /// The names that converters write; an unknown one would tokenize wrongly without a sign, so it is refused.
    fn named(name: &str) -> Result<Self, String> {
        let plain = Self { patterns: &[], gpt2: true, nfc: false, ignore_merges: false, adds_bos: false };
        Ok(match name {
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" => {
                Self { patterns: &[LLAMA3], gpt2: false, ignore_merges: true, adds_bos: true, ..plain }
            }
            "qwen2" | "deepseek-r1-qwen" => Self { patterns: &[QWEN2], gpt2: false, nfc: true, ..plain },
            "tekken" => Self { patterns: &[TEKKEN], gpt2: false, ignore_merges: true, adds_bos: true, ..plain },
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => Self { patterns: &[r"\p{N}"], ..plain },
            "gpt-2" | "phi-2" | "olmo" | "mpt" => plain,
            "default" => {
                Self { patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"], gpt2: false, ..plain }
            }
            other => {
                return Err(format!(
                    "unsupported tokenizer.ggml.pre {other} (supported: llama-bpe, qwen2, smollm, tekken, starcoder, \
                     refact, command-r, codeshell, gpt-2, phi-2, olmo, mpt, deepseek-r1-qwen, falcon3, default)"
                ));
            }
        })
    }

    fn pre_tokenizer(&self, space_prefix: bool) -> Result<PreTokenizerWrapper, String> {
        let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": space_prefix, "trim_offsets": true, "use_regex": self.gpt2,
        });
        let steps: Vec<Json> = self.patterns.iter().map(split).chain([byte_level]).collect();
        part(json!({"type": "Sequence", "pretokenizers": steps}))
    }
}

/// A step of the pipeline in the words of `tokenizer.json`.
fn part<T: serde::de::DeserializeOwned>(description: Json) -> Result<T, String> {
    serde_json::from_value(description).map_err(|error| error.to_string())
}

fn frame(bos: Option<(u32, &str)>, eos: Option<(u32, &str)>) -> Result<Option<PostProcessorWrapper>, String> {
    if bos.is_none() && eos.is_none() {
        return Ok(None);
    }
    let special =
        |token: Option<(u32, &str)>| token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}}));
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let single: Vec<Json> = special(bos).into_iter().chain([sequence("A")]).chain(special(eos)).collect();
    let pair: Vec<Json> = single.iter().cloned().chain([sequence("B")]).collect();
    let described: serde_json::Map<String, Json> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|(id, text)| (text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]})))
        .collect();
    part(json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": described})).map(Some)
}
