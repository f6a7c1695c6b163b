//! One GGUF file.
use std::path::Path;

use crate::{LoadOptions, Model, error::ModelError};

pub(crate) fn load(path: &Path, _: &LoadOptions) -> Result<Model, ModelError> {
    Err(ModelError::Unsupported { path: path.to_owned(), what: "GGUF".into() })
}
