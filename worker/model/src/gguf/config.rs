//! Metadata → [`ModelConfig`]. *Pure.*

use super::file::{GgufFile, Value};
use crate::{
    config::{Architecture, ModelConfig, Rope, RopeScaling, check_shape},
    dequant::dequantize_row,
    rope::yarn_mscale,
};

/// Whose fault a refusal is: the file breaks its format, or it is sound and not served.
pub(super) enum Refusal {
    Malformed(String),
    Unsupported(String),
}

impl From<String> for Refusal {
    fn from(what: String) -> Self {
        Self::Malformed(what)
    }
}

fn unsupported<T>(what: String) -> Result<T, Refusal> {
    Err(Refusal::Unsupported(format!("unsupported {what}")))
}

pub(super) fn parse(file: &GgufFile<'_>, bytes: &[u8]) -> Result<ModelConfig, Refusal> {
    if let Some(kind) = file.text("general.type")?.filter(|kind| *kind != "model") {
        return unsupported(format!("GGUF file of type {kind} (supported: model)"));
    }
    if let Some(parts) = file.integer("split.count")?.filter(|parts| *parts > 1) {
        return unsupported(format!("GGUF model split into {parts} files (supported: one file)"));
    }
    let name = file.text("general.architecture")?.ok_or("metadata general.architecture is missing".to_owned())?;
    let architecture = match name {
        "llama" => Architecture::Llama,
        "qwen2" => Architecture::Qwen2,
        "qwen3" => Architecture::Qwen3,
        other => return unsupported(format!("architecture {other} (supported in GGUF: llama, qwen2, qwen3)")),
    };
    Keys { file, name }.config(architecture, bytes)
}

/// Keys of one architecture: `llama.block_count` and its like.
struct Keys<'a> {
    file: &'a GgufFile<'a>,
    name: &'a str,
}

impl Keys<'_> {
    fn config(&self, architecture: Architecture, bytes: &[u8]) -> Result<ModelConfig, Refusal> {
        let hidden = self.size("embedding_length")?;
        let heads = self.heads("attention.head_count")?.ok_or_else(|| self.missing("attention.head_count"))?;
        let head_dim = match self.optional_size("attention.key_length")? {
            Some(head_dim) => head_dim,
            None => hidden / heads,
        };
        let max_positions = self.size("context_length")?;
        self.refuse_what_is_not_computed(head_dim, max_positions)?;
        let embedding = self.file.tensor("token_embd.weight").ok_or("tensor token_embd.weight: missing".to_owned())?;
        let epsilon = "attention.layer_norm_rms_epsilon";
        let config = ModelConfig {
            architecture,
            layers: self.size("block_count")?,
            hidden,
            intermediate: self.size("feed_forward_length")?,
            heads,
            kv_heads: self.heads("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            vocab: embedding.rows,
            rms_eps: self.number(epsilon)?.ok_or_else(|| self.missing(epsilon))? as f32,
            rope: self.rope(head_dim, max_positions, bytes)?,
            max_positions,
            tied_head: self.file.tensor("output.weight").is_none(),
        };
        check_shape(&config)?;
        Ok(config)
    }

    fn refuse_what_is_not_computed(&self, head_dim: usize, max_positions: usize) -> Result<(), Refusal> {
        if let Some(experts) = self.integer("expert_count")?.filter(|experts| *experts > 0) {
            return unsupported(format!("mixture of {experts} experts (supported: dense models)"));
        }
        if let Some(values) = self.optional_size("attention.value_length")?.filter(|values| *values != head_dim) {
            return unsupported(format!("value heads of {values} beside key heads of {head_dim}"));
        }
        if let Some(rotated) = self.optional_size("rope.dimension_count")?.filter(|rotated| *rotated != head_dim) {
            return unsupported(format!("partial rotation of {rotated} out of {head_dim} dimensions"));
        }
        match self.integer("attention.sliding_window")? {
            Some(window) if window > 0 && window < max_positions as u64 => {
                unsupported(format!("sliding window of {window} below its {max_positions} positions"))
            }
            _ => Ok(()),
        }
    }

    fn rope(&self, head_dim: usize, max_positions: usize, bytes: &[u8]) -> Result<Rope, Refusal> {
        let theta = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        if theta <= 1.0 {
            return Err(Refusal::Malformed(format!("metadata {}.rope.freq_base is {theta}", self.name)));
        }
        let legacy_factor = self.number("rope.scale_linear")?;
        let factor = self.number("rope.scaling.factor")?.or(legacy_factor).unwrap_or(1.0);
        if factor <= 0.0 {
            return Err(Refusal::Malformed(format!("the rope scaling factor is {factor}")));
        }
        let kind = match self.file.text(&self.key("rope.scaling.type"))? {
            Some(kind) => kind,
            None if factor != 1.0 => "linear",
            None => "none",
        };
        let factors = self.rope_factors(head_dim, bytes)?;
        let scaling = match (kind, factors) {
            ("none", None) => RopeScaling::Default,
            ("none", Some(factors)) => RopeScaling::Factors(factors),
            ("linear", None) if factor == 1.0 => RopeScaling::Default,
            ("linear", None) => RopeScaling::Linear { factor },
            ("linear", Some(factors)) => {
                RopeScaling::Factors(factors.into_iter().map(|divisor| divisor * factor as f32).collect())
            }
            ("yarn", None) => self.yarn(factor, max_positions)?,
            ("yarn", Some(_)) => return unsupported("rope type yarn together with rope_freqs.weight".into()),
            (other, _) => return unsupported(format!("rope type {other} (supported in GGUF: none, linear, yarn)")),
        };
        Ok(Rope { theta, scaling })
    }

    fn yarn(&self, factor: f64, max_positions: usize) -> Result<RopeScaling, Refusal> {
        let original = self.number("rope.scaling.original_context_length")?.unwrap_or(max_positions as f64);
        if original <= 0.0 {
            return Err(Refusal::Malformed(format!("the original context length is {original}")));
        }
        let attention_factor = self.number("rope.scaling.attn_factor")?.unwrap_or(1.0);
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            attention_factor: attention_factor * yarn_mscale(factor, 1.0),
            original_max_positions: original,
            truncate: true,
        })
    }

    /// `rope_freqs.weight`: Llama 3's scaling, worked out by the converter as one divisor per pair.
    fn rope_factors(&self, head_dim: usize, bytes: &[u8]) -> Result<Option<Vec<f32>>, Refusal> {
        let Some(tensor) = self.file.tensor("rope_freqs.weight") else { return Ok(None) };
        if (tensor.rows, tensor.cols) != (1, head_dim / 2) {
            let (rows, cols, want) = (tensor.rows, tensor.cols, head_dim / 2);
            return Err(Refusal::Malformed(format!(
                "tensor rope_freqs.weight: shape [{rows}, {cols}], not [1, {want}]"
            )));
        }
        let mut factors = vec![0.0; tensor.cols];
        dequantize_row(tensor.dtype, &bytes[tensor.range.clone()], &mut factors);
        match factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
            Some(factor) => Err(Refusal::Malformed(format!("tensor rope_freqs.weight holds {factor}"))),
            None => Ok(Some(factors)),
        }
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    fn missing(&self, key: &str) -> String {
        format!("metadata {} is missing", self.key(key))
    }

    fn integer(&self, key: &str) -> Result<Option<u64>, String> {
        self.file.integer(&self.key(key))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, String> {
        self.file.number(&self.key(key))
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, String> {
        match self.integer(key)? {
            Some(size @ 1..=0x4000_0000) => Ok(Some(size as usize)),
            Some(size) => Err(format!("metadata {} is {size}, no size", self.key(key))),
            None => Ok(None),
        }
    }

    fn size(&self, key: &str) -> Result<usize, String> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A head count is one number or, in some files, one per layer; layers that differ are not served.
    fn heads(&self, key: &str) -> Result<Option<usize>, Refusal> {
        let Some(Value::Array(items)) = self.file.get(&self.key(key)) else { return Ok(self.optional_size(key)?) };
        match items.first() {
            Some(Value::Integer(first)) if items.iter().all(|item| *item == items[0]) => {
                let heads = usize::try_from(*first).ok().filter(|heads| (1..1 << 24).contains(heads));
                Ok(Some(heads.ok_or_else(|| format!("metadata {} holds {first}", self.key(key)))?))
            }
            _ => unsupported(format!("{} that differs between layers", self.key(key))),
        }
    }
}
