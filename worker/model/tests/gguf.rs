//! A GGUF file made of a golden checkpoint is the same model; and a SentencePiece vocabulary works from scores alone.

mod common;

use std::{fs, path::Path};

use common::{GOLDEN, Meta, Writer, gguf_of};
use proptest::prelude::*;
use tandem_model::{LoadOptions, Model, ModelError, RopeScaling, Tokenizer, load};

fn golden(name: &str) -> (Model, Vec<u8>) {
    let directory = format!("{GOLDEN}/{name}");
    let model = load(&directory, &LoadOptions::default()).unwrap();
    let bytes = gguf_of(&model, Path::new(&directory));
    (model, bytes)
}

fn load_bytes(bytes: &[u8]) -> Result<Model, ModelError> {
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    fs::write(file.path(), bytes).unwrap();
    load(file.path().to_str().unwrap(), &LoadOptions::default())
}

#[test]
fn the_same_model_in_both_formats() {
    for name in ["llama-gqa", "llama3-rope-tied", "qwen2-bias", "qwen3-qknorm"] {
        let (directory, bytes) = golden(name);
        let file = load_bytes(&bytes).unwrap();
        if let RopeScaling::Factors(factors) = &file.config.rope.scaling {
            assert_eq!(factors.len(), directory.config.head_dim / 2, "{name}");
            let frequencies = |model: &Model| model.config.rope.inverse_frequencies(model.config.head_dim);
            for (a, b) in frequencies(&directory).into_iter().zip(frequencies(&file)) {
                assert!((a - b).abs() <= a * 2e-7, "{name}: {a} and {b}");
            }
        } else {
            assert_eq!(file.config, directory.config, "{name}");
        }
        for (a, b) in directory.weights.layers.iter().zip(&file.weights.layers) {
            assert_eq!(a.q.weight.bytes(), b.q.weight.bytes(), "{name}");
            assert_eq!(a.k.weight.bytes(), b.k.weight.bytes(), "{name}");
            assert_eq!(a.down.weight.bytes(), b.down.weight.bytes(), "{name}");
            assert_eq!(a.v.bias.as_ref().map(|bias| bias.bytes()), b.v.bias.as_ref().map(|bias| bias.bytes()));
            assert_eq!(a.q_norm.as_ref().map(|norm| norm.bytes()), b.q_norm.as_ref().map(|norm| norm.bytes()));
        }
        assert_eq!(directory.weights.head.bytes(), file.weights.head.bytes(), "{name}");
        assert_eq!(directory.generation.eos_token_ids, file.generation.eos_token_ids, "{name}");
        let text = "One café, 123 — 東京 🚀\n\n  <s>two</s>";
        assert_eq!(directory.tokenizer.encode(text, true).unwrap(), file.tokenizer.encode(text, true).unwrap());
    }
}

/// Replaces the value of a text key in place; both values have the same length.
fn patched(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    let mut bytes = bytes.to_vec();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    bytes
}

fn refusal(bytes: &[u8]) -> String {
    load_bytes(bytes).unwrap_err().to_string()
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let (_, bytes) = golden("llama-gqa");
    let phony = refusal(&patched(&bytes, "llama", "phony"));
    assert!(phony.contains("unsupported architecture phony (supported in GGUF: llama, qwen2, qwen3)"), "{phony}");
    let split = refusal(&patched(&bytes, "gpt-2", "gpt-9"));
    assert!(split.contains("unsupported tokenizer.ggml.pre gpt-9"), "{split}");
    let model = refusal(&patched(&bytes, "gpt2", "bert"));
    assert!(model.contains("unsupported tokenizer model bert"), "{model}");
    let missing = refusal(&patched(&bytes, "blk.1.attn_v.weight", "blk.9.attn_v.weight"));
    assert!(missing.contains("tensor blk.1.attn_v.weight: missing"), "{missing}");
}

#[test]
fn versions_and_truncation_are_named() {
    let (_, bytes) = golden("llama-gqa");
    let mut other = bytes.clone();
    other[4] = 1;
    assert!(refusal(&other).contains("GGUF version 1 is unsupported"));
    other[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(refusal(&other).contains("big-endian"));
    other[4..8].copy_from_slice(&2u32.to_le_bytes());
    assert!(load_bytes(&other).is_ok(), "version 2 has the same layout");
    let cut = refusal(&bytes[..bytes.len() - 1]);
    assert!(cut.contains("tensor") && cut.contains("truncated or damaged"), "{cut}");
    let cut = refusal(&bytes[..100]);
    assert!(cut.contains("the file is truncated"), "{cut}");
    assert!(refusal(b"").contains("truncated"));
    let mut absurd = bytes.clone();
    absurd[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(refusal(&absurd).contains("18446744073709551615 tensors"));
}

#[test]
fn an_unsupported_tensor_type_is_named() {
    let mut writer = Writer::default();
    writer.meta("general.architecture", Meta::Text("llama".into()));
    writer.tensor("token_embd.weight", &[256, 4], 10, &[0; 4 * 84]);
    let error = refusal(&writer.finish());
    assert!(error.contains("tensor token_embd.weight: unsupported type 10 (Q2_K)"), "{error}");
}

/// A byte-fallback vocabulary over a few pieces, inside an otherwise golden model.
fn sentencepiece() -> Tokenizer {
    let pieces = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "▁abc", "é"];
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(pieces.map(String::from));
    let types = (0..tokens.len()).map(|id| match id {
        0 => 2,
        1 | 2 => 3,
        3..=258 => 6,
        _ => 1,
    });
    let scores = (0..tokens.len()).map(|id| if id < 259 { 0.0 } else { -(id as f32) });
    let mut writer = Writer::default();
    let sizes = [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 4),
        ("feed_forward_length", 4),
        ("attention.head_count", 1),
    ];
    writer.meta("general.architecture", Meta::Text("llama".into()));
    for (key, size) in sizes {
        writer.meta(&format!("llama.{key}"), Meta::U32(size));
    }
    writer
        .meta("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5))
        .meta("tokenizer.ggml.model", Meta::Text("llama".into()))
        .meta("tokenizer.ggml.token_type", Meta::I32s(types.collect()))
        .meta("tokenizer.ggml.scores", Meta::F32s(scores.collect()))
        .meta("tokenizer.ggml.bos_token_id", Meta::U32(1))
        .meta("tokenizer.ggml.eos_token_id", Meta::U32(2));
    let square = [0; 64];
    writer.tensor("token_embd.weight", &[4, tokens.len() as u64], 0, &vec![0; tokens.len() * 16]);
    writer.tensor("output_norm.weight", &[4], 0, &[0; 16]);
    for name in ["attn_norm", "ffn_norm"] {
        writer.tensor(&format!("blk.0.{name}.weight"), &[4], 0, &[0; 16]);
    }
    for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
        writer.tensor(&format!("blk.0.{name}.weight"), &[4, 4], 0, &square);
    }
    writer.meta("tokenizer.ggml.tokens", Meta::Texts(tokens));
    load_bytes(&writer.finish()).unwrap().tokenizer
}

#[test]
fn scores_merge_the_best_piece_and_bytes_fall_back() {
    let tokenizer = sentencepiece();
    let texts = |ids: &[u32]| ids.iter().map(|id| tokenizer.token_text(*id)).collect::<Vec<_>>();
    let ids = tokenizer.encode("abc é", true).unwrap();
    assert_eq!(ids[0], 1, "the file wants a BOS token");
    assert_eq!(texts(&ids[1..]), [" abc", " ", "é"]);
    assert_eq!(tokenizer.decode(&ids, true), "abc é");
    let ids = tokenizer.encode("東", false).unwrap();
    assert_eq!(ids.len(), 4, "a space and three bytes");
    let mut stream = tokenizer.stream(true);
    assert_eq!(ids.iter().map(|id| stream.push(*id).to_owned()).collect::<Vec<_>>(), [" ", "", "", "東"]);
    let mut cut = tokenizer.stream(true);
    assert_eq!(cut.push(ids[1]), "");
    assert_eq!(cut.push(ids[1]), "\u{FFFD}", "a new beginning ends the old character");
    assert_eq!(cut.finish(), "\u{FFFD}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_text_survives_a_sentencepiece_round_trip(text in "[abcé東🚀 \n]{0,40}") {
        let tokenizer = sentencepiece();
        let ids = tokenizer.encode(&text, true).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, true), text);
    }
}
