//! From a file's tensors to [`Weights`]: every tensor of the decoder is asked for by its role, its shape is checked
//! against the configuration, and what is missing is named. *Pure.*

use std::path::{Path, PathBuf};

use crate::{
    config::{Architecture, ModelConfig},
    error::ModelError,
    weights::{DType, LayerWeights, Linear, Tensor, Weights},
};

/// Which tensors of a layer a role names; a file format spells them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Embedding,
    FinalNorm,
    Head,
    AttentionNorm(usize),
    Q(usize),
    K(usize),
    V(usize),
    O(usize),
    QNorm(usize),
    KNorm(usize),
    MlpNorm(usize),
    Gate(usize),
    Up(usize),
    Down(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    Weight,
    Bias,
}

/// A file or a set of shards: looks tensors up by role and says what it calls them.
pub(crate) trait TensorSource {
    fn path(&self) -> &Path;
    fn name(&self, role: Role, part: Part) -> String;
    /// The tensor, if the file has it; a vector has one row. An error is a type that is not served.
    fn tensor(&self, role: Role, part: Part) -> Result<Option<Tensor>, ModelError>;
}

/// Where biases and per-head norms are found. Files that carry more (or less) are refused, not half read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extras {
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    pub qk_norm: bool,
}

impl Extras {
    /// What the architecture itself has; configurations may add biases.
    pub fn of(architecture: Architecture) -> Self {
        Self {
            qkv_bias: architecture == Architecture::Qwen2,
            qk_norm: architecture == Architecture::Qwen3,
            ..Self::default()
        }
    }
}

pub(crate) fn assemble(
    source: &impl TensorSource,
    config: &ModelConfig,
    extras: Extras,
) -> Result<Weights, ModelError> {
    let assembly = Assembly { source };
    let embedding = assembly.matrix(Role::Embedding, config.vocab, config.hidden)?;
    let head = match config.tied_head {
        true => embedding.clone(),
        false => assembly.matrix(Role::Head, config.vocab, config.hidden)?,
    };
    let final_norm = assembly.vector(Role::FinalNorm, Part::Weight, config.hidden)?;
    let layers = (0..config.layers).map(|layer| assembly.layer(layer, config, extras)).collect::<Result<_, _>>()?;
    Ok(Weights { embedding, layers, final_norm, head })
}

struct Assembly<'a, S> {
    source: &'a S,
}

impl<S: TensorSource> Assembly<'_, S> {
    fn layer(&self, layer: usize, config: &ModelConfig, extras: Extras) -> Result<LayerWeights, ModelError> {
        let (hidden, inner) = (config.hidden, config.intermediate);
        let (q_rows, kv_rows) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let norm = |role: Role| match extras.qk_norm {
            true => self.vector(role, Part::Weight, config.head_dim).map(Some),
            false => Ok(None),
        };
        Ok(LayerWeights {
            attention_norm: self.vector(Role::AttentionNorm(layer), Part::Weight, hidden)?,
            q: self.linear(Role::Q(layer), q_rows, hidden, extras.qkv_bias)?,
            k: self.linear(Role::K(layer), kv_rows, hidden, extras.qkv_bias)?,
            v: self.linear(Role::V(layer), kv_rows, hidden, extras.qkv_bias)?,
            o: self.linear(Role::O(layer), hidden, q_rows, extras.o_bias)?,
            q_norm: norm(Role::QNorm(layer))?,
            k_norm: norm(Role::KNorm(layer))?,
            mlp_norm: self.vector(Role::MlpNorm(layer), Part::Weight, hidden)?,
            gate: self.linear(Role::Gate(layer), inner, hidden, extras.mlp_bias)?,
            up: self.linear(Role::Up(layer), inner, hidden, extras.mlp_bias)?,
            down: self.linear(Role::Down(layer), hidden, inner, extras.mlp_bias)?,
        })
    }

    fn linear(&self, role: Role, rows: usize, cols: usize, bias: bool) -> Result<Linear, ModelError> {
        let weight = self.matrix(role, rows, cols)?;
        let bias = match bias {
            true => Some(self.vector(role, Part::Bias, rows)?),
            // A bias that the configuration does not announce would change every result if it were skipped.
            false if self.source.tensor(role, Part::Bias)?.is_some() => {
                return Err(self.fault(role, Part::Bias, "the configuration announces no such bias".into()));
            }
            false => None,
        };
        Ok(Linear { weight, bias })
    }

    fn matrix(&self, role: Role, rows: usize, cols: usize) -> Result<Tensor, ModelError> {
        self.checked(role, Part::Weight, rows, cols)
    }

    /// Vectors are small and added or multiplied element by element: only plain element types are served.
    fn vector(&self, role: Role, part: Part, len: usize) -> Result<Tensor, ModelError> {
        let tensor = self.checked(role, part, 1, len)?;
        match tensor.dtype {
            DType::F32 | DType::F16 | DType::BF16 => Ok(tensor),
            other => Err(self.fault(role, part, format!("a vector stored as {other:?}; F32, F16, BF16 are served"))),
        }
    }

    fn checked(&self, role: Role, part: Part, rows: usize, cols: usize) -> Result<Tensor, ModelError> {
        let tensor = self.source.tensor(role, part)?.ok_or_else(|| self.fault(role, part, "missing".into()))?;
        if (tensor.rows, tensor.cols) != (rows, cols) {
            let what =
                format!("shape [{}, {}], but the configuration wants [{rows}, {cols}]", tensor.rows, tensor.cols);
            return Err(self.fault(role, part, what));
        }
        Ok(tensor)
    }

    fn fault(&self, role: Role, part: Part, what: String) -> ModelError {
        let path = PathBuf::from(self.source.path());
        ModelError::Tensor { path, name: self.source.name(role, part), what }
    }
}
