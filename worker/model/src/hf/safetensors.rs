//! Tensors of one or many safetensors files, mapped and never copied.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use safetensors::{Dtype, SafeTensors};
use tandem_fabric::memory::FileMap;

use super::read_json;
use crate::{
    assemble::{Part, Role, TensorSource},
    error::ModelError,
    weights::{DType, Tensor, TensorData},
};

const ONE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All tensors of a directory by name.
pub(super) struct Shards {
    directory: PathBuf,
    tensors: HashMap<String, Entry>,
}

struct Entry {
    map: Arc<FileMap>,
    range: std::ops::Range<usize>,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl Shards {
    pub fn open(directory: &Path) -> Result<Self, ModelError> {
        let mut shards = Self { directory: directory.to_owned(), tensors: HashMap::new() };
        for path in shard_paths(directory)? {
            shards.add(&path)?;
        }
        Ok(shards)
    }

    fn add(&mut self, path: &Path) -> Result<(), ModelError> {
        let map = FileMap::open(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
        let map = Arc::new(map);
        let entries = entries(map.bytes()).map_err(|what| ModelError::Malformed { path: path.to_owned(), what })?;
        for (name, dtype, shape, range) in entries {
            self.tensors.insert(name, Entry { map: map.clone(), range, dtype, shape });
        }
        Ok(())
    }
}

/// The shards that the index names, or the one file. A missing shard is named.
fn shard_paths(directory: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index = directory.join(INDEX);
    let Some(json) = read_json(&index)? else { return Ok(vec![directory.join(ONE_FILE)]) };
    let malformed = |what: String| ModelError::Malformed { path: index.clone(), what };
    let map = json["weight_map"].as_object().ok_or_else(|| malformed("weight_map is missing".into()))?;
    let mut shards = Vec::new();
    for (tensor, shard) in map {
        let shard = shard.as_str().ok_or_else(|| malformed(format!("the shard of {tensor} is no file name")))?;
        // A name with a folder in it could point anywhere on the machine.
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(malformed(format!("the shard {shard:?} of {tensor} is no plain file name")));
        }
        shards.push(shard);
    }
    shards.sort_unstable();
    shards.dedup();
    let missing = |shard: &str| ModelError::MissingShard { index: index.clone(), shard: shard.to_owned() };
    let existing = |shard: &str| {
        let path = directory.join(shard);
        if path.is_file() { Ok(path) } else { Err(missing(shard)) }
    };
    shards.into_iter().map(existing).collect()
}

type NamedTensor = (String, Dtype, Vec<usize>, std::ops::Range<usize>);

/// Reads the header; the library checks that offsets are in order and cover the file.
fn entries(bytes: &[u8]) -> Result<Vec<NamedTensor>, String> {
    let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| format!("safetensors: {error}"))?;
    let data = header + std::mem::size_of::<u64>();
    let place = |(start, end): (usize, usize)| -> Option<std::ops::Range<usize>> {
        let range = data.checked_add(start)?..data.checked_add(end)?;
        (range.start <= range.end && range.end <= bytes.len()).then_some(range)
    };
    metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let range = place(info.data_offsets).ok_or_else(|| format!("tensor {name} lies outside the file"))?;
            Ok((name, info.dtype, info.shape.clone(), range))
        })
        .collect()
}

impl TensorSource for Shards {
    fn path(&self) -> &Path {
        &self.directory
    }

    fn name(&self, role: Role, part: Part) -> String {
        let layer = |layer: usize, module: &str| format!("model.layers.{layer}.{module}");
        let module = match role {
            Role::Embedding => "model.embed_tokens".into(),
            Role::FinalNorm => "model.norm".into(),
            Role::Head => "lm_head".into(),
            Role::AttentionNorm(i) => layer(i, "input_layernorm"),
            Role::Q(i) => layer(i, "self_attn.q_proj"),
            Role::K(i) => layer(i, "self_attn.k_proj"),
            Role::V(i) => layer(i, "self_attn.v_proj"),
            Role::O(i) => layer(i, "self_attn.o_proj"),
            Role::QNorm(i) => layer(i, "self_attn.q_norm"),
            Role::KNorm(i) => layer(i, "self_attn.k_norm"),
            Role::MlpNorm(i) => layer(i, "post_attention_layernorm"),
            Role::Gate(i) => layer(i, "mlp.gate_proj"),
            Role::Up(i) => layer(i, "mlp.up_proj"),
            Role::Down(i) => layer(i, "mlp.down_proj"),
        };
        match part {
            Part::Weight => module + ".weight",
            Part::Bias => module + ".bias",
        }
    }

    fn tensor(&self, role: Role, part: Part) -> Result<Option<Tensor>, ModelError> {
        let name = self.name(role, part);
        let Some(entry) = self.tensors.get(&name) else { return Ok(None) };
        let fault = |what: String| ModelError::Tensor { path: self.directory.clone(), name: name.clone(), what };
        let dtype = match entry.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => return Err(fault(format!("unsupported type {other:?} (supported: F32, F16, BF16)"))),
        };
        let (rows, cols) = match entry.shape[..] {
            [cols] => (1, cols),
            [rows, cols] => (rows, cols),
            _ => return Err(fault(format!("shape {:?} is neither a matrix nor a vector", entry.shape))),
        };
        let bytes = rows.checked_mul(cols).and_then(|elements| elements.checked_mul(dtype.block().1));
        if bytes != Some(entry.range.len()) {
            return Err(fault(format!("shape {:?} does not fit its {} bytes", entry.shape, entry.range.len())));
        }
        let data = TensorData::Mapped(entry.map.clone(), entry.range.clone());
        Ok(Some(Tensor { name, dtype, rows, cols, data }))
    }
}
