//! One GGUF file: tensors stay where they are in the mapped file, but for the rows of q and k of `llama` files.
//!
//! Their converter stores rotated pairs side by side (0, 1), (2, 3) ...; this decoder rotates halves (i, i + d/2), as
//! the original checkpoints do. The rows are put back at load; blocks run along a row, so quantised rows move whole.

mod config;
mod file;
mod tokenizer;

use std::{path::Path, sync::Arc};

use tandem_fabric::memory::FileMap;

use crate::{
    Architecture, LoadOptions, Model, ModelConfig,
    assemble::{Extras, Part, Role, TensorSource, assemble},
    error::ModelError,
    weights::{Tensor, TensorData},
};
use config::Refusal;
use file::GgufFile;

pub(crate) fn load(path: &Path, options: &LoadOptions) -> Result<Model, ModelError> {
    let map = Arc::new(open(path)?);
    let (file, config) = parse(path, &map)?;
    let source = Source { path, map: &map, file: &file, config: &config };
    let weights = assemble(&source, &config, source.extras())?;
    let (tokenizer, generation) = tokenizer::load(path, &file, options)?;
    if tokenizer.vocab_size() > config.vocab {
        let (tokens, rows) = (tokenizer.vocab_size(), config.vocab);
        return Err(malformed(path, format!("{tokens} tokens, but token_embd.weight has {rows} rows")));
    }
    Ok(Model::new(config, weights, tokenizer, generation, path.to_owned()))
}

pub(crate) fn load_config(path: &Path) -> Result<ModelConfig, ModelError> {
    let map = open(path)?;
    parse(path, &map).map(|(_, config)| config)
}

fn open(path: &Path) -> Result<FileMap, ModelError> {
    FileMap::open(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })
}

fn parse<'a>(path: &Path, map: &'a FileMap) -> Result<(GgufFile<'a>, ModelConfig), ModelError> {
    let file = GgufFile::parse(map.bytes()).map_err(|what| malformed(path, what))?;
    let config = config::parse(&file, map.bytes()).map_err(|refusal| match refusal {
        Refusal::Malformed(what) => malformed(path, what),
        Refusal::Unsupported(what) => ModelError::Unsupported { path: path.to_owned(), what },
    })?;
    Ok((file, config))
}

fn malformed(path: &Path, what: String) -> ModelError {
    ModelError::Malformed { path: path.to_owned(), what }
}

struct Source<'a> {
    path: &'a Path,
    map: &'a Arc<FileMap>,
    file: &'a GgufFile<'a>,
    config: &'a ModelConfig,
}

impl Source<'_> {
    /// GGUF has no switches for biases: the tensors of the first layer tell.
    fn extras(&self) -> Extras {
        let has_bias = |role: Role| self.file.tensor(&self.name(role, Part::Bias)).is_some();
        let base = Extras::of(self.config.architecture);
        Extras {
            qkv_bias: base.qkv_bias || has_bias(Role::Q(0)),
            o_bias: has_bias(Role::O(0)),
            mlp_bias: has_bias(Role::Gate(0)),
            qk_norm: base.qk_norm,
        }
    }

    /// Heads whose rows are stored in pairs.
    fn paired_heads(&self, role: Role) -> Option<usize> {
        match (self.config.architecture, role) {
            (Architecture::Llama, Role::Q(_)) => Some(self.config.heads),
            (Architecture::Llama, Role::K(_)) => Some(self.config.kv_heads),
            _ => None,
        }
    }
}

impl TensorSource for Source<'_> {
    fn path(&self) -> &Path {
        self.path
    }

    fn name(&self, role: Role, part: Part) -> String {
        let layer = |layer: usize, module: &str| format!("blk.{layer}.{module}");
        let module = match role {
            Role::Embedding => "token_embd".into(),
            Role::FinalNorm => "output_norm".into(),
            Role::Head => "output".into(),
            Role::AttentionNorm(i) => layer(i, "attn_norm"),
            Role::Q(i) => layer(i, "attn_q"),
            Role::K(i) => layer(i, "attn_k"),
            Role::V(i) => layer(i, "attn_v"),
            Role::O(i) => layer(i, "attn_output"),
            Role::QNorm(i) => layer(i, "attn_q_norm"),
            Role::KNorm(i) => layer(i, "attn_k_norm"),
            Role::MlpNorm(i) => layer(i, "ffn_norm"),
            Role::Gate(i) => layer(i, "ffn_gate"),
            Role::Up(i) => layer(i, "ffn_up"),
            Role::Down(i) => layer(i, "ffn_down"),
        };
        match part {
            Part::Weight => module + ".weight",
            Part::Bias => module + ".bias",
        }
    }

    fn tensor(&self, role: Role, part: Part) -> Result<Option<Tensor>, ModelError> {
        let name = self.name(role, part);
        let Some(info) = self.file.tensor(&name) else { return Ok(None) };
        let head_dim = self.config.head_dim;
        // A bias is one row in the file, one element per output here.
        let (outputs, output_bytes) = match part {
            Part::Weight => (info.rows, info.range.len() / info.rows),
            Part::Bias => (info.cols, info.range.len() / info.cols),
        };
        // Another shape is left as it is, and refused by the check that follows.
        let whole = |heads: &usize| heads * head_dim == outputs && output_bytes > 0;
        let data = match self.paired_heads(role).filter(whole) {
            Some(_) => {
                let stored = &self.map.bytes()[info.range.clone()];
                TensorData::Owned(halves_from_pairs(stored, head_dim, output_bytes))
            }
            None => TensorData::Mapped(self.map.clone(), info.range.clone()),
        };
        Ok(Some(Tensor { name, dtype: info.dtype, rows: info.rows, cols: info.cols, data }))
    }
}

/// Reorders the outputs of each head: stored 2i + half, wanted half * d/2 + i.
fn halves_from_pairs(stored: &[u8], head_dim: usize, output_bytes: usize) -> Arc<[u8]> {
    let mut out = Vec::with_capacity(stored.len());
    for head in stored.chunks_exact(head_dim * output_bytes) {
        for half in 0..2 {
            for pair in 0..head_dim / 2 {
                out.extend_from_slice(&head[(2 * pair + half) * output_bytes..][..output_bytes]);
            }
        }
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_become_halves_in_each_head() {
        let stored: Vec<u8> = vec![0, 4, 1, 5, 2, 6, 3, 7, 10, 14, 11, 15, 12, 16, 13, 17];
        let halves = halves_from_pairs(&stored, 8, 1);
        assert_eq!(halves[..], [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17]);
        let wide: Vec<u8> = [0u16, 2, 1, 3].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(halves_from_pairs(&wide, 4, 2)[..], [0, 0, 1, 0, 2, 0, 3, 0]);
    }
}
