//! `config.json` → [`ModelConfig`]: the defaults are those of the `transformers` classes, and what this decoder
//! does not compute is refused by name. *Pure.*

use std::path::Path;

use serde_json::Value;

use crate::{
    assemble::Extras,
    config::{Architecture, ModelConfig, Rope, RopeScaling, check_shape},
    error::ModelError,
    rope::yarn_mscale,
};

pub(super) fn parse(path: &Path, json: &Value) -> Result<(ModelConfig, Extras), ModelError> {
    Parser { path, json }.parse()
}

struct Parser<'a> {
    path: &'a Path,
    json: &'a Value,
}

impl Parser<'_> {
    fn parse(&self) -> Result<(ModelConfig, Extras), ModelError> {
        let architecture = self.architecture()?;
        self.refuse_what_is_not_computed()?;
        let heads = self.size("num_attention_heads", None)?;
        let hidden = self.size("hidden_size", None)?;
        let (kv_default, head_dim_default, positions_default) = match architecture {
            Architecture::Llama => (heads, hidden / heads, 2048),
            Architecture::Mistral => (8, hidden / heads, 4096 * 32),
            Architecture::Qwen2 => (32, hidden / heads, 32768),
            Architecture::Qwen3 => (32, 128, 32768),
        };
        let max_positions = self.size("max_position_embeddings", Some(positions_default))?;
        let config = ModelConfig {
            architecture,
            layers: self.size("num_hidden_layers", None)?,
            hidden,
            intermediate: self.size("intermediate_size", None)?,
            heads,
            kv_heads: self.size("num_key_value_heads", Some(kv_default))?,
            head_dim: self.size("head_dim", Some(head_dim_default))?,
            vocab: self.size("vocab_size", None)?,
            rms_eps: self.number(self.json, "rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope: self.rope(max_positions)?,
            max_positions,
            tied_head: self.flag("tie_word_embeddings").unwrap_or(false),
        };
        check_shape(&config).map_err(|what| self.malformed(what))?;
        self.refuse_sliding_window(&config)?;
        let attention_bias = self.flag("attention_bias").unwrap_or(false);
        let base = Extras::of(architecture);
        let biased = matches!(architecture, Architecture::Llama | Architecture::Qwen3) && attention_bias;
        let extras = Extras {
            qkv_bias: base.qkv_bias || biased,
            o_bias: biased,
            mlp_bias: architecture == Architecture::Llama && self.flag("mlp_bias").unwrap_or(false),
            qk_norm: base.qk_norm,
        };
        Ok((config, extras))
    }

    fn architecture(&self) -> Result<Architecture, ModelError> {
        let class = self.json["architectures"][0].as_str();
        let name = class.or(self.json["model_type"].as_str()).unwrap_or("of no name");
        match name {
            "LlamaForCausalLM" | "llama" => Ok(Architecture::Llama),
            "MistralForCausalLM" | "mistral" => Ok(Architecture::Mistral),
            "Qwen2ForCausalLM" | "qwen2" => Ok(Architecture::Qwen2),
            "Qwen3ForCausalLM" | "qwen3" => Ok(Architecture::Qwen3),
            other => Err(self.unsupported(format!(
                "architecture {other} (supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)"
            ))),
        }
    }

    fn refuse_what_is_not_computed(&self) -> Result<(), ModelError> {
        let activation = self.json["hidden_act"].as_str().unwrap_or("silu");
        if !matches!(activation, "silu" | "swish") {
            return Err(self.unsupported(format!("activation {activation} (supported: silu)")));
        }
        if let Some(quantization) = self.json.get("quantization_config").filter(|value| !value.is_null()) {
            let method = quantization["quant_method"].as_str().unwrap_or("of no name");
            return Err(self.unsupported(format!(
                "quantization {method} of safetensors (supported: the quantised types of GGUF files)"
            )));
        }
        match self.number(self.json, "partial_rotary_factor")? {
            Some(factor) if factor != 1.0 => {
                Err(self.unsupported(format!("partial_rotary_factor {factor} (supported: 1)")))
            }
            _ => Ok(()),
        }
    }

    /// A window that no sequence of the model's length can reach changes nothing, and is accepted.
    fn refuse_sliding_window(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let window = match self.json.get("sliding_window") {
            // The class default applies where the key is absent; `null` switches it off.
            None if config.architecture == Architecture::Mistral => Some(4096),
            None => None,
            Some(value) => value.as_u64(),
        };
        let enabled = match config.architecture {
            Architecture::Llama => false,
            Architecture::Mistral => true,
            Architecture::Qwen2 | Architecture::Qwen3 => {
                let full_below = self.json["max_window_layers"].as_u64().unwrap_or(28);
                self.flag("use_sliding_window").unwrap_or(false) && full_below < config.layers as u64
            }
        };
        let sliding_layer = self.json["layer_types"]
            .as_array()
            .is_some_and(|layers| layers.iter().any(|layer| layer.as_str() != Some("full_attention")));
        match window {
            Some(window) if (enabled || sliding_layer) && window < config.max_positions as u64 => {
                let positions = config.max_positions;
                Err(self.unsupported(format!("sliding window of {window} below its {positions} positions")))
            }
            _ => Ok(()),
        }
    }

    /// Reads the new `rope_parameters` or the old `rope_theta` and `rope_scaling`; theta is taken where it stands.
    fn rope(&self, max_positions: usize) -> Result<Rope, ModelError> {
        let null = Value::Null;
        let present = |key: &str| self.json.get(key).filter(|value| !value.is_null());
        let fields = present("rope_parameters").or_else(|| present("rope_scaling")).unwrap_or(&null);
        if !(fields.is_null() || fields.is_object()) {
            return Err(self.malformed("rope parameters are not an object".into()));
        }
        let theta = match self.number(fields, "rope_theta")? {
            Some(theta) => theta,
            None => self.number(self.json, "rope_theta")?.unwrap_or(10_000.0),
        };
        if !(theta.is_finite() && theta > 1.0) {
            return Err(self.malformed(format!("rope_theta is {theta}")));
        }
        if let Some((layer_type, _)) = fields.as_object().into_iter().flatten().find(|(_, value)| value.is_object()) {
            return Err(self.unsupported(format!("rope of its own for {layer_type} layers")));
        }
        if let Some(factor) = self.number(fields, "partial_rotary_factor")?.filter(|factor| *factor != 1.0) {
            return Err(self.unsupported(format!("partial_rotary_factor {factor} (supported: 1)")));
        }
        let kind = fields["rope_type"].as_str().or(fields["type"].as_str()).unwrap_or("default");
        let scaling = match kind {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: self.required(fields, "factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: self.required(fields, "factor")?,
                low_freq_factor: self.required(fields, "low_freq_factor")?,
                high_freq_factor: self.required(fields, "high_freq_factor")?,
                original_max_positions: self.required(fields, "original_max_position_embeddings")?,
            },
            "yarn" => self.yarn(fields, max_positions as f64)?,
            other => {
                return Err(self.unsupported(format!("rope type {other} (supported: default, linear, llama3, yarn)")));
            }
        };
        Ok(Rope { theta, scaling })
    }

    fn yarn(&self, fields: &Value, max_positions: f64) -> Result<RopeScaling, ModelError> {
        let original = self.number(fields, "original_max_position_embeddings")?;
        let factor = match self.number(fields, "factor")? {
            Some(factor) => factor,
            None => max_positions / self.required(fields, "original_max_position_embeddings")?,
        };
        let mscale = self.number(fields, "mscale")?.filter(|value| *value != 0.0);
        let mscale_all = self.number(fields, "mscale_all_dim")?.filter(|value| *value != 0.0);
        let attention_factor = match (self.number(fields, "attention_factor")?, mscale, mscale_all) {
            (Some(attention_factor), ..) => attention_factor,
            (None, Some(one), Some(all)) => yarn_mscale(factor, one) / yarn_mscale(factor, all),
            (None, ..) => yarn_mscale(factor, 1.0),
        };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: self.number(fields, "beta_fast")?.unwrap_or(32.0),
            beta_slow: self.number(fields, "beta_slow")?.unwrap_or(1.0),
            attention_factor,
            original_max_positions: original.unwrap_or(max_positions),
            truncate: fields["truncate"].as_bool().unwrap_or(true),
        })
    }

    fn size(&self, key: &str, default: Option<usize>) -> Result<usize, ModelError> {
        match (self.json.get(key).filter(|value| !value.is_null()), default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(self.malformed(format!("{key} is missing"))),
            (Some(value), _) => value
                .as_u64()
                .filter(|size| (1..=1 << 30).contains(size))
                .map(|size| size as usize)
                .ok_or_else(|| self.malformed(format!("{key} is {value}, no size"))),
        }
    }

    fn number(&self, object: &Value, key: &str) -> Result<Option<f64>, ModelError> {
        match object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) => Ok(Some(number)),
                None => Err(self.malformed(format!("{key} is {value}, no number"))),
            },
        }
    }

    fn required(&self, object: &Value, key: &str) -> Result<f64, ModelError> {
        let number = self.number(object, key)?.ok_or_else(|| self.malformed(format!("rope {key} is missing")))?;
        if number > 0.0 { Ok(number) } else { Err(self.malformed(format!("rope {key} is {number}"))) }
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.json[key].as_bool()
    }

    fn malformed(&self, what: String) -> ModelError {
        ModelError::Malformed { path: self.path.to_owned(), what }
    }

    fn unsupported(&self, what: String) -> ModelError {
        ModelError::Unsupported { path: self.path.to_owned(), what: format!("unsupported {what}") }
    }
}
