//! Writes GGUF files for tests, as the public converters do: metadata, tensors, llama's rows in rotated pairs.

use std::path::Path;

use serde_json::Value;
use tandem_model::{
    Architecture, Model, ModelConfig, RopeScaling,
    weights::{DType, Linear, Tensor},
};

pub const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/data");

#[allow(dead_code, reason = "each test file compiles this module and uses a part of it")]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

#[derive(Default)]
pub struct Writer {
    metadata: Vec<u8>,
    keys: u64,
    infos: Vec<u8>,
    tensors: u64,
    data: Vec<u8>,
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Writer {
    pub fn meta(&mut self, key: &str, value: Meta) -> &mut Self {
        let out = &mut self.metadata;
        put_text(out, key);
        let array = |out: &mut Vec<u8>, kind: u32, len: usize| {
            out.extend(9u32.to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend((len as u64).to_le_bytes());
        };
        match value {
            Meta::U32(x) => out.extend([4u32.to_le_bytes(), x.to_le_bytes()].concat()),
            Meta::F32(x) => out.extend([6u32.to_le_bytes(), x.to_le_bytes()].concat()),
            Meta::Bool(x) => out.extend([&7u32.to_le_bytes()[..], &[u8::from(x)]].concat()),
            Meta::Text(x) => {
                out.extend(8u32.to_le_bytes());
                put_text(out, &x);
            }
            Meta::Texts(items) => {
                array(out, 8, items.len());
                items.iter().for_each(|item| put_text(out, item));
            }
            Meta::I32s(items) => {
                array(out, 5, items.len());
                items.iter().for_each(|item| out.extend(item.to_le_bytes()));
            }
            Meta::F32s(items) => {
                array(out, 6, items.len());
                items.iter().for_each(|item| out.extend(item.to_le_bytes()));
            }
        }
        self.keys += 1;
        self
    }

    pub fn tensor(&mut self, name: &str, dimensions: &[u64], type_id: u32, bytes: &[u8]) {
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        put_text(&mut self.infos, name);
        self.infos.extend((dimensions.len() as u32).to_le_bytes());
        dimensions.iter().for_each(|size| self.infos.extend(size.to_le_bytes()));
        self.infos.extend(type_id.to_le_bytes());
        self.infos.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
        self.tensors += 1;
    }

    pub fn finish(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensors.to_le_bytes());
        out.extend(self.keys.to_le_bytes());
        out.extend(&self.metadata);
        out.extend(&self.infos);
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}

/// A loaded directory as one GGUF file.
pub fn gguf_of(model: &Model, directory: &Path) -> Vec<u8> {
    let mut writer = Writer::default();
    put_config(&mut writer, &model.config);
    let json: Value = serde_json::from_slice(&std::fs::read(directory.join("tokenizer.json")).unwrap()).unwrap();
    put_byte_level_tokenizer(&mut writer, &json);
    put_weights(&mut writer, model);
    writer.finish()
}

fn put_config(writer: &mut Writer, config: &ModelConfig) {
    let name = match config.architecture {
        Architecture::Llama | Architecture::Mistral => "llama",
        Architecture::Qwen2 => "qwen2",
        Architecture::Qwen3 => "qwen3",
    };
    writer.meta("general.architecture", Meta::Text(name.into()));
    let sizes = [
        ("block_count", config.layers),
        ("context_length", config.max_positions),
        ("embedding_length", config.hidden),
        ("feed_forward_length", config.intermediate),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
    ];
    for (key, size) in sizes {
        writer.meta(&format!("{name}.{key}"), Meta::U32(size as u32));
    }
    writer.meta(&format!("{name}.attention.layer_norm_rms_epsilon"), Meta::F32(config.rms_eps));
    writer.meta(&format!("{name}.rope.freq_base"), Meta::F32(config.rope.theta as f32));
    if config.rope.scaling != RopeScaling::Default {
        // The converter works the scaling out as one divisor per pair.
        let plain = tandem_model::Rope { theta: config.rope.theta, scaling: RopeScaling::Default };
        let pairs = plain.inverse_frequencies(config.head_dim).into_iter();
        let scaled = config.rope.inverse_frequencies(config.head_dim);
        let bytes: Vec<u8> = pairs.zip(scaled).flat_map(|(plain, scaled)| (plain / scaled).to_le_bytes()).collect();
        writer.tensor("rope_freqs.weight", &[config.head_dim as u64 / 2], 0, &bytes);
    }
}

fn put_byte_level_tokenizer(writer: &mut Writer, json: &Value) {
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    for (text, id) in vocab {
        tokens[id.as_u64().unwrap() as usize] = text.clone();
    }
    let mut types = vec![1; tokens.len()];
    for added in json["added_tokens"].as_array().unwrap() {
        types[added["id"].as_u64().unwrap() as usize] = 3;
    }
    let merge = |merge: &Value| match merge.as_array() {
        Some(pair) => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
        None => merge.as_str().unwrap().to_owned(),
    };
    let merges = json["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    writer
        .meta("tokenizer.ggml.model", Meta::Text("gpt2".into()))
        .meta("tokenizer.ggml.pre", Meta::Text("gpt-2".into()))
        .meta("tokenizer.ggml.tokens", Meta::Texts(tokens))
        .meta("tokenizer.ggml.token_type", Meta::I32s(types))
        .meta("tokenizer.ggml.merges", Meta::Texts(merges))
        .meta("tokenizer.ggml.bos_token_id", Meta::U32(1))
        .meta("tokenizer.ggml.eos_token_id", Meta::U32(2))
        .meta("tokenizer.ggml.add_bos_token", Meta::Bool(false));
}

fn put_weights(writer: &mut Writer, model: &Model) {
    let config = &model.config;
    let paired = matches!(config.architecture, Architecture::Llama | Architecture::Mistral).then_some(config.head_dim);
    put(writer, "token_embd.weight", &model.weights.embedding, None);
    put(writer, "output_norm.weight", &model.weights.final_norm, None);
    if !config.tied_head {
        put(writer, "output.weight", &model.weights.head, None);
    }
    for (i, layer) in model.weights.layers.iter().enumerate() {
        put(writer, &format!("blk.{i}.attn_norm.weight"), &layer.attention_norm, None);
        put(writer, &format!("blk.{i}.ffn_norm.weight"), &layer.mlp_norm, None);
        let linears = [
            ("attn_q", &layer.q, paired),
            ("attn_k", &layer.k, paired),
            ("attn_v", &layer.v, None),
            ("attn_output", &layer.o, None),
            ("ffn_gate", &layer.gate, None),
            ("ffn_up", &layer.up, None),
            ("ffn_down", &layer.down, None),
        ];
        for (name, Linear { weight, bias }, paired) in linears {
            put(writer, &format!("blk.{i}.{name}.weight"), weight, paired);
            bias.iter().for_each(|bias| put(writer, &format!("blk.{i}.{name}.bias"), bias, None));
        }
        layer.q_norm.iter().for_each(|norm| put(writer, &format!("blk.{i}.attn_q_norm.weight"), norm, None));
        layer.k_norm.iter().for_each(|norm| put(writer, &format!("blk.{i}.attn_k_norm.weight"), norm, None));
    }
}

fn put(writer: &mut Writer, name: &str, tensor: &Tensor, paired_head_dim: Option<usize>) {
    let type_id = match tensor.dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 30,
        other => panic!("{other:?} in a golden checkpoint"),
    };
    let bytes = match paired_head_dim {
        Some(head_dim) => pairs_from_halves(tensor, head_dim),
        None => tensor.bytes().to_vec(),
    };
    let matrix = [tensor.cols as u64, tensor.rows as u64];
    let dimensions = if tensor.rows == 1 { &matrix[..1] } else { &matrix[..] };
    writer.tensor(name, dimensions, type_id, &bytes);
}

/// `permute` of the converter: row half * d/2 + i of a head goes to row 2i + half.
fn pairs_from_halves(tensor: &Tensor, head_dim: usize) -> Vec<u8> {
    let row = tensor.dtype.row_bytes(tensor.cols);
    let mut out = Vec::new();
    for head in tensor.bytes().chunks_exact(head_dim * row) {
        for pair in 0..head_dim / 2 {
            for half in 0..2 {
                out.extend(&head[(half * head_dim / 2 + pair) * row..][..row]);
            }
        }
    }
    out
}
