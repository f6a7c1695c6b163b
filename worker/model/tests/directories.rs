//! Hugging Face directories: the golden checkpoints load, and each way of breaking one is refused by name.

use std::{fs, path::Path};

use tandem_model::{Architecture, ChatInput, ChatValue, LoadOptions, Model, ModelError, RopeScaling, load};

use serde_json::{Value, json};

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

/// A golden checkpoint copied, with its configuration changed.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> Result<Model, ModelError> {
    let directory = copy(name);
    let path = directory.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(&path, config.to_string()).unwrap();
    load(directory.path().to_str().unwrap(), &LoadOptions::default())
}

fn copy(name: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(Path::new(GOLDEN).join(name).join(file), directory.path().join(file)).unwrap();
    }
    directory
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let refused = |name: &str, key: &str, value: Value, expected: &str| {
        let error = changed(name, |config| config[key] = value).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(expected), "{text}\nlacks\n{expected}");
    };
    refused("llama-gqa", "architectures", json!(["MambaForCausalLM"]), "unsupported architecture MambaForCausalLM");
    refused("llama-gqa", "hidden_act", json!("gelu"), "unsupported activation gelu");
    refused("llama-gqa", "quantization_config", json!({"quant_method": "awq"}), "unsupported quantization awq");
    refused("llama-gqa", "rope_parameters", json!({"rope_type": "longrope"}), "unsupported rope type longrope");
    refused("llama-gqa", "rope_parameters", json!({"full": {"rope_type": "default"}}), "rope of its own for full");
    refused("llama-gqa", "rope_parameters", json!({"rope_type": "llama3"}), "rope factor is missing");
    refused("llama-gqa", "partial_rotary_factor", json!(0.5), "unsupported partial_rotary_factor 0.5");
    refused("llama-gqa", "num_key_value_heads", json!(3), "8 attention heads are no multiple of 3 KV heads");
    refused("llama-gqa", "num_hidden_layers", json!(-1), "num_hidden_layers is -1, no size");
    refused("llama-gqa", "hidden_size", Value::Null, "hidden_size is missing");
    refused("llama-gqa", "num_hidden_layers", json!(4), "tensor model.layers.3.input_layernorm.weight: missing");
    let shape = "tensor model.layers.0.mlp.gate_proj.weight: shape [160, 64], but the configuration wants [161, 64]";
    refused("llama-gqa", "intermediate_size", json!(161), shape);
    refused("llama-gqa", "attention_bias", json!(true), "tensor model.layers.0.self_attn.q_proj.bias: missing");
    refused("qwen2-bias", "architectures", json!(["LlamaForCausalLM"]), "the configuration announces no such bias");
}

#[test]
fn a_sliding_window_is_refused_only_where_it_matters() {
    let mistral = |window: Option<Value>| {
        changed("llama-gqa", |config| {
            config["architectures"] = json!(["MistralForCausalLM"]);
            config["max_position_embeddings"] = json!(8192);
            window.into_iter().for_each(|window| config["sliding_window"] = window);
        })
    };
    let error = mistral(None).unwrap_err().to_string();
    assert!(error.contains("unsupported sliding window of 4096 below its 8192 positions"), "{error}");
    assert!(mistral(Some(json!(4095))).is_err());
    assert!(mistral(Some(json!(8192))).is_ok());
    assert!(mistral(Some(Value::Null)).is_ok());
    let qwen = |enabled: bool, below: u64| {
        changed("qwen2-bias", |config| {
            config["sliding_window"] = json!(64);
            config["use_sliding_window"] = json!(enabled);
            config["max_window_layers"] = json!(below);
        })
    };
    assert!(qwen(false, 0).is_ok());
    assert!(qwen(true, 28).is_ok());
    assert!(qwen(true, 1).is_err());
}

#[test]
fn the_old_and_the_new_spelling_of_rope_mean_the_same() {
    let scaling = json!({
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
    });
    let new = golden("llama3-rope-tied").config.rope;
    for key in ["rope_type", "type"] {
        let old = changed("llama3-rope-tied", |config| {
            config.as_object_mut().unwrap().remove("rope_parameters");
            config["rope_theta"] = json!(500_000.0);
            config["rope_scaling"] = scaling.clone();
            config["rope_scaling"][key] = json!("llama3");
        });
        assert_eq!(old.unwrap().config.rope, new);
    }
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512});
    let model = changed("qwen2-bias", |config| {
        config["rope_parameters"] = Value::Null;
        config["rope_scaling"] = yarn;
    });
    let rope = model.unwrap().config.rope;
    assert_eq!(rope.theta, 10_000.0);
    assert!(matches!(rope.scaling, RopeScaling::Yarn { factor: 4.0, truncate: true, .. }), "{rope:?}");
    assert_ne!(rope.attention_scale(), 1.0);
}

#[test]
fn shards_are_put_together_and_a_missing_one_is_named() {
    let directory = copy("llama-gqa");
    let one = fs::read(directory.path().join("model.safetensors")).unwrap();
    fs::remove_file(directory.path().join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&one).unwrap();
    let mut index = serde_json::Map::new();
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for (at, (name, view)) in tensors.tensors().into_iter().enumerate() {
        let (shard, file) = if at % 2 == 0 { (&mut first, "a.safetensors") } else { (&mut second, "b.safetensors") };
        index.insert(name.clone(), json!(file));
        shard.push((name, view));
    }
    let save = |shard, file: &str| {
        fs::write(directory.path().join(file), safetensors::serialize(shard, None).unwrap()).unwrap();
    };
    save(first, "a.safetensors");
    save(second, "b.safetensors");
    let path = directory.path().join("model.safetensors.index.json");
    fs::write(&path, json!({"weight_map": index}).to_string()).unwrap();
    let open = || load(directory.path().to_str().unwrap(), &LoadOptions::default());
    let whole = load(&format!("{GOLDEN}/llama-gqa"), &LoadOptions::default()).unwrap();
    assert_eq!(open().unwrap().weights.layers[2].down.weight.bytes(), whole.weights.layers[2].down.weight.bytes());
    fs::remove_file(directory.path().join("b.safetensors")).unwrap();
    let error = open().unwrap_err().to_string();
    assert!(error.contains("names the shard b.safetensors, which is not there"), "{error}");
    fs::write(&path, json!({"weight_map": {"x": "../b.safetensors"}}).to_string()).unwrap();
    assert!(open().unwrap_err().to_string().contains("no plain file name"));
}

#[test]
fn a_changed_weight_or_template_changes_the_fingerprint() {
    let directory = copy("llama-gqa");
    let open = |options: &LoadOptions| load(directory.path().to_str().unwrap(), options).unwrap().fingerprint;
    let before = open(&LoadOptions::default());
    let template = LoadOptions { chat_template: Some("other".into()), ..LoadOptions::default() };
    assert_ne!(open(&template), before);
    let path = directory.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_ne!(open(&LoadOptions::default()), before);
}

#[test]
fn what_is_not_there_is_named() {
    let error = load("no/such/model", &LoadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("there is no model at no/such/model"), "{error}");
    let empty = tempfile::tempdir().unwrap();
    let error = load(empty.path().to_str().unwrap(), &LoadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("config.json: a model directory needs this file"), "{error}");
    let directory = copy("llama-gqa");
    fs::remove_file(directory.path().join("tokenizer.json")).unwrap();
    let error = load(directory.path().to_str().unwrap(), &LoadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("the file is missing"), "{error}");
}
