//! Model files: configuration, weights, tokenizer, chat template.
//!
//! [`load`] turns what a user names (a Hugging Face directory, one GGUF file, or the name `smollm2`) into a
//! [`Model`]. It promises that whatever it returns is whole: every tensor is there with the shape the configuration
//! demands, the tokenizer encodes and decodes, the template compiles. Everything else is refused with a
//! [`ModelError`] that names the file, the tensor or the type at fault. Weights stay in their file, mapped; nothing
//! is computed here.

mod assemble;
pub mod config;
pub mod dequant;
pub mod error;
mod fetch;
mod fingerprint;
mod gguf;
mod hf;
mod rope;
pub mod tokenizer;
pub mod weights;

use std::path::{Path, PathBuf};

pub use config::{Architecture, ModelConfig, Rope, RopeScaling};
pub use error::{ModelError, TokenizerError};
pub use fetch::{SMOLLM2, cache_directory, smollm2};
pub use fingerprint::Fingerprint;
pub use tokenizer::{ChatInput, ChatValue, StreamDecoder, Tokenizer};
pub use weights::Weights;

#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Source of a chat template to use instead of the model's own.
    pub chat_template: Option<String>,
    /// Where fetched models are kept; by default [`cache_directory`].
    pub cache: Option<PathBuf>,
    /// Say on standard error what a fetch is doing, with a bar if that is a terminal.
    pub show_progress: bool,
}

/// A model, whole and checked.
#[derive(Clone, Debug)]
pub struct Model {
    pub config: ModelConfig,
    pub weights: Weights,
    pub tokenizer: Tokenizer,
    pub generation: Generation,
    pub fingerprint: Fingerprint,
    /// The directory or file it came from.
    pub path: PathBuf,
}

/// What the model's authors say about generating with it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Generation {
    /// Each of these ends a sequence. May be empty.
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: Option<u32>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

impl Model {
    fn new(config: ModelConfig, weights: Weights, tokenizer: Tokenizer, generation: Generation, path: PathBuf) -> Self {
        let fingerprint = Fingerprint::of(&config, &weights, &tokenizer);
        Self { config, weights, tokenizer, generation, fingerprint, path }
    }
}

/// Loads a Hugging Face directory, a GGUF file, or a model known by name (`smollm2`), which is fetched once.
pub fn load(path_or_name: &str, options: &LoadOptions) -> Result<Model, ModelError> {
    match find(path_or_name, options)? {
        Files::Directory(path) => hf::load(&path, options),
        Files::Gguf(path) => gguf::load(&path, options),
    }
}

/// The configuration alone, without a look at weights and tokenizer: what does not fit it can be refused before minutes
/// of loading. A model known by name is fetched.
pub fn load_config(path_or_name: &str, options: &LoadOptions) -> Result<ModelConfig, ModelError> {
    match find(path_or_name, options)? {
        Files::Directory(path) => hf::load_config(&path),
        Files::Gguf(path) => gguf::load_config(&path),
    }
}

enum Files {
    Directory(PathBuf),
    Gguf(PathBuf),
}

fn find(path_or_name: &str, options: &LoadOptions) -> Result<Files, ModelError> {
    let path = Path::new(path_or_name);
    if path.is_dir() {
        return Ok(Files::Directory(path.to_owned()));
    }
    if path.is_file() {
        return Ok(Files::Gguf(path.to_owned()));
    }
    if path_or_name == SMOLLM2 {
        return fetch::smollm2(options).map(Files::Gguf);
    }
    Err(ModelError::NotFound { path: path_or_name.to_owned() })
}
