//! What can be wrong with a model: the file or the directory it came from, and what to do. A retry without a change
//! never helps, [`ModelError::Fetch`] apart.

use std::{io, path::PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },

    /// The file breaks its own format.
    #[error("{} is damaged or not what its name says: {what}", path.display())]
    Malformed { path: PathBuf, what: String },

    /// The file is sound, and this server does not serve it.
    #[error("{} cannot be served: {what}", path.display())]
    Unsupported { path: PathBuf, what: String },

    #[error("{} names the shard {shard}, which is not there: fetch the model again", index.display())]
    MissingShard { index: PathBuf, shard: String },

    /// A tensor is absent or has another shape or type than the configuration demands.
    #[error("{}: tensor {name}: {what}", path.display())]
    Tensor { path: PathBuf, name: String, what: String },

    #[error("the tokenizer of {} cannot be used: {what}", path.display())]
    Tokenizer { path: PathBuf, what: String },

    #[error("the chat template of {} does not compile: {what}", path.display())]
    Template { path: PathBuf, what: String },

    #[error("there is no model at {path}: give a Hugging Face directory, a .gguf file or the name smollm2")]
    NotFound { path: String },

    #[error("fetching the model {name} failed: {what}")]
    Fetch { name: String, what: String },
}

/// Why a text or a list of messages did not become tokens. The request is at fault, the worker is not.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
    #[error("this model has no chat template: use /v1/completions or /generate")]
    NoTemplate,
    /// The template called `raise_exception`, or the messages lack what it needs.
    #[error("the chat template refuses these messages: {0}")]
    Template(String),
}
