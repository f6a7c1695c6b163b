//! What one decoder needs to know of a model: shapes, norms, positions. *Pure.*

/// The architectures that one decoder serves. They differ in [`ModelConfig`]'s fields only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

#[derive(Clone, PartialEq, Debug)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub rms_eps: f32,
    pub rope: Rope,
    pub max_positions: usize,
    /// The output head is the embedding table.
    pub tied_head: bool,
}

/// Rotary embedding: frequencies are computed once, by [`Rope::inverse_frequencies`]; halves are rotated
/// (NeoX style), loaders permute rows of files that store interleaved pairs.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

#[derive(Clone, PartialEq, Debug)]
pub enum RopeScaling {
    Default,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_positions: f64,
    },
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        attention_factor: f64,
        original_max_positions: f64,
        truncate: bool,
    },
    /// Divisors per frequency, out of a GGUF `rope_freqs.weight` tensor.
    Factors(Vec<f32>),
}

/// Sizes beyond these are a damaged file, not a model; within them no product of two sizes overflows.
const LAYERS_MAX: usize = 1 << 10;
const SIZE_MAX: usize = 1 << 24;
const HEAD_DIM_MAX: usize = 1 << 12;

/// Checks what the decoder relies on; loaders call it before they look at a tensor.
pub(crate) fn check_shape(config: &ModelConfig) -> Result<(), String> {
    let sizes = [
        ("layers", config.layers, LAYERS_MAX),
        ("hidden size", config.hidden, SIZE_MAX),
        ("intermediate size", config.intermediate, SIZE_MAX),
        ("attention heads", config.heads, SIZE_MAX),
        ("KV heads", config.kv_heads, SIZE_MAX),
        ("head dimension", config.head_dim, HEAD_DIM_MAX),
        ("vocabulary", config.vocab, SIZE_MAX),
        ("positions", config.max_positions, 1 << 30),
    ];
    for (name, size, max) in sizes {
        if size == 0 || size > max {
            return Err(format!("{name}: {size} is outside 1 to {max}"));
        }
    }
    if !config.heads.is_multiple_of(config.kv_heads) {
        return Err(format!("{} attention heads are no multiple of {} KV heads", config.heads, config.kv_heads));
    }
    if !config.head_dim.is_multiple_of(2) {
        return Err(format!("head dimension {} is odd, RoPE rotates pairs", config.head_dim));
    }
    if !(config.rms_eps.is_finite() && config.rms_eps >= 0.0) {
        return Err(format!("rms_norm_eps is {}", config.rms_eps));
    }
    let sound = |number: &f32| number.is_finite() && *number > 0.0;
    let frequencies = config.rope.inverse_frequencies(config.head_dim);
    if !(frequencies.iter().all(sound) && sound(&config.rope.attention_scale())) {
        return Err(format!("its RoPE gives no finite frequencies: {:?}", config.rope));
    }
    Ok(())
}
