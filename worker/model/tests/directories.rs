//! Hugging Face directories: the golden checkpoints load, and each way of breaking one is refused by name.

use std::{fs, path::Path};

use tandem_model::{Architecture, ChatInput, ChatValue, LoadOptions, Model, ModelError, RopeScaling, load};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/data");

fn golden(name: &str) -> Model {
    load(&format!("{GOLDEN}/{name}"), &LoadOptions::default()).unwrap()
}

#[test]
fn every_golden_checkpoint_loads() {
    let expected = [
        ("llama-gqa", Architecture::Llama, 8, false),
        ("llama3-rope-tied", Architecture::Llama, 32, true),
        ("qwen2-bias", Architecture::Qwen2, 8, true),
        ("qwen2-d64-g7", Architecture::Qwen2, 64, true),
        ("qwen3-d128-g4", Architecture::Qwen3, 128, true),
        ("qwen3-qknorm", Architecture::Qwen3, 24, true),
    ];
    let mut fingerprints = Vec::new();
    for (name, architecture, head_dim, tied) in expected {
        let model = golden(name);
        assert_eq!(model.config.architecture, architecture, "{name}");
        assert_eq!((model.config.head_dim, model.config.tied_head), (head_dim, tied), "{name}");
        assert_eq!(model.config.layers, model.weights.layers.len(), "{name}");
        let layer = &model.weights.layers[0];
        assert_eq!(layer.q.bias.is_some(), architecture == Architecture::Qwen2, "{name}");
        assert_eq!(layer.q_norm.is_some(), architecture == Architecture::Qwen3, "{name}");
        assert_eq!(model.generation.eos_token_ids, [2], "{name}");
        assert_eq!(model.fingerprint, golden(name).fingerprint, "{name}");
        fingerprints.push(model.fingerprint.to_string());
    }
    fingerprints.sort_unstable();
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), expected.len(), "each model has its own fingerprint");
    assert!(matches!(golden("llama3-rope-tied").config.rope.scaling, RopeScaling::Llama3 { .. }));
}

#[test]
fn a_golden_tokenizer_and_template_work() {
    let tokenizer = golden("llama-gqa").tokenizer;
    let text = "Grüße, 東京 🚀 <s>";
    let ids = tokenizer.encode(text, true).unwrap();
    assert_eq!(tokenizer.decode(&ids, false), text);
    assert_eq!(tokenizer.decode(&ids, true), "Grüße, 東京 🚀 ");
    let messages = serde_json::json!([{"role": "user", "content": "hi"}]);
    let input = ChatInput {
        messages: ChatValue::from_serialize(&messages),
        add_generation_prompt: true,
        ..ChatInput::default()
    };
    assert_eq!(tokenizer.apply_chat_template(&input).unwrap(), "<s>user: hi\n<s>assistant:");
}
