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
