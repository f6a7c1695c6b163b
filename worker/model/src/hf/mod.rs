//! A Hugging Face directory: `config.json`, safetensors, `tokenizer.json` and the small files beside them.

mod config;
mod safetensors;
mod tokenizer;

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Generation, LoadOptions, Model, ModelConfig,
    assemble::{Extras, assemble},
    error::ModelError,
};
use safetensors::Shards;

/// Files of this kind are kilobytes; `tokenizer.json` of a large vocabulary has some 30 MB.
const JSON_BYTES_MAX: u64 = 256 << 20;

pub(crate) fn load(directory: &Path, options: &LoadOptions) -> Result<Model, ModelError> {
    let (json, config, extras) = read_config(directory)?;
    let weights = assemble(&Shards::open(directory)?, &config, extras)?;
    let tokenizer = tokenizer::load(directory, options)?;
    let generation = generation(&json, read_json(&directory.join("generation_config.json"))?.as_ref(), &tokenizer);
    Ok(Model::new(config, weights, tokenizer.tokenizer, generation, directory.to_owned()))
}

pub(crate) fn load_config(directory: &Path) -> Result<ModelConfig, ModelError> {
    read_config(directory).map(|(_, config, _)| config)
}

fn read_config(directory: &Path) -> Result<(Value, ModelConfig, Extras), ModelError> {
    let path = directory.join("config.json");
    let json = read_json(&path)?.ok_or_else(|| ModelError::Read {
        path: path.clone(),
        source: std::io::Error::new(std::io::ErrorKind::NotFound, "a model directory needs this file"),
    })?;
    let (config, extras) = config::parse(&path, &json)?;
    Ok((json, config, extras))
}

/// End tokens and defaults: `generation_config.json` wins over `config.json`, the tokenizer's own comes last.
fn generation(config: &Value, generation: Option<&Value>, tokenizer: &tokenizer::Loaded) -> Generation {
    let empty = Value::Null;
    let generation = generation.unwrap_or(&empty);
    let float = |key: &str| generation[key].as_f64().map(|value| value as f32);
    let ids = |value: &Value| -> Vec<u32> {
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        list.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
    };
    let first = |key: &str| [ids(&generation[key]), ids(&config[key])].into_iter().find(|ids| !ids.is_empty());
    Generation {
        eos_token_ids: first("eos_token_id").unwrap_or_else(|| tokenizer.eos.into_iter().collect()),
        bos_token_id: first("bos_token_id").map_or(tokenizer.bos, |ids| ids.first().copied()),
        temperature: float("temperature"),
        top_p: float("top_p"),
        top_k: generation["top_k"].as_u64().and_then(|k| u32::try_from(k).ok()),
        min_p: float("min_p"),
        repetition_penalty: float("repetition_penalty"),
    }
}

/// `None` if the file is not there.
fn read_json(path: &Path) -> Result<Option<Value>, ModelError> {
    let Some(bytes) = read_small(path)? else { return Ok(None) };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| ModelError::Malformed { path: path.to_owned(), what: format!("not JSON: {error}") })
}

fn read_small(path: &Path) -> Result<Option<Vec<u8>>, ModelError> {
    let read = |source| ModelError::Read { path: PathBuf::from(path), source };
    let size = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(read(error)),
    };
    if size > JSON_BYTES_MAX {
        let what = format!("{size} bytes, more than the {JSON_BYTES_MAX} this server reads");
        return Err(ModelError::Malformed { path: path.to_owned(), what });
    }
    fs::read(path).map(Some).map_err(read)
}
