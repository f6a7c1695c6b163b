//! Model files: any bytes are a model or an error that says what is wrong, in memory and time in proportion to the file.
//! The seeds are whole models of a few kilobytes, in `corpus/`.

use std::{fs, path::Path};

use tandem_model::{LoadOptions, Model, ModelError};
use tempfile::TempDir;

use crate::Target;

type Load = fn(&str) -> Result<Model, ModelError>;

/// Tries this loading of a file that stands in a folder of its own.
pub struct Models {
    format: Format,
    pub load: Load,
    folder: TempDir,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Gguf,
    Safetensors,
}

fn real(path: &str) -> Result<Model, ModelError> {
    tandem_model::load(path, &LoadOptions::default())
}

impl Models {
    pub fn gguf() -> Self {
        Self::new(Format::Gguf)
    }

    /// The weights' file; configuration and tokenizer stand beside it.
    pub fn safetensors() -> Self {
        Self::new(Format::Safetensors)
    }

    fn new(format: Format) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        if format == Format::Safetensors {
            for from in ["model/config.json", "../golden/data/llama-gqa/tokenizer.json"] {
                let from = Path::new(env!("CARGO_MANIFEST_DIR")).join(from);
                let name = from.file_name().expect("a file");
                fs::copy(&from, folder.path().join(name)).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
            }
        }
        Self { format, load: real, folder }
    }

    pub fn with(self, load: Load) -> Self {
        Self { load, ..self }
    }
}

impl Target for Models {
    fn name(&self) -> &'static str {
        match self.format {
            Format::Gguf => "gguf",
            Format::Safetensors => "safetensors",
        }
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        Vec::new()
    }

    fn words(&self) -> &'static [&'static str] {
        match self.format {
            Format::Gguf => {
                &["GGUF", "llama.block_count", "general.alignment", "blk.0.attn_q.weight", "token_embd.weight"]
            }
            Format::Safetensors => {
                &["\"dtype\":\"F16\"", "\"shape\":[", "\"data_offsets\":[0,", "\"__metadata__\":{", "{", "}"]
            }
        }
    }

    fn input_bytes_max(&self) -> usize {
        64 << 10
    }

    /// A metadata value takes some 40 bytes in memory, of which one may stand in the file; and a tokenizer.
    fn memory_bytes_max(&self, input_bytes: usize) -> usize {
        (16 << 20) + 256 * input_bytes
    }

    fn run(&self, input: &[u8]) -> String {
        let (file, path) = match self.format {
            Format::Gguf => (self.folder.path().join("m.gguf"), self.folder.path().join("m.gguf")),
            Format::Safetensors => (self.folder.path().join("model.safetensors"), self.folder.path().to_owned()),
        };
        fs::write(&file, input).expect("the temporary folder takes a file");
        match (self.load)(path.to_str().expect("a plain path")) {
            Ok(model) => {
                assert_eq!(model.weights.layers.len(), model.config.layers, "a model is whole");
                format!("a model: {:?}", model.config.architecture)
            }
            Err(error) => {
                let text = error.to_string();
                assert!(!text.is_empty());
                text
            }
        }
    }
}
