//! Models for the tests: the tiny checkpoints of `tests/golden/data`, and damaged ones for start-up errors.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// The checkpoint that nearly every test uses: Llama, two KV heads, a vocabulary of 512, a context of 2048.
pub const TINY: &str = "llama-gqa";

/// A tiny checkpoint by its name.
///
/// # Panics
/// When the repository lacks it.
pub fn golden(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data").join(name);
    path.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A copy of [`TINY`] in `folder`, for a test to damage.
pub fn copy(folder: &Path) -> PathBuf {
    let target = folder.join("checkpoint");
    std::fs::create_dir_all(&target).expect("a temporary folder is writable");
    for entry in std::fs::read_dir(golden(TINY)).expect("a checkpoint is a folder") {
        let file = entry.expect("a readable folder").path();
        let name = file.file_name().expect("an entry has a name");
        // Written anew, since a copy would keep the source's read-only mode.
        std::fs::write(target.join(name), std::fs::read(&file).expect("a readable file")).expect("writable");
    }
    target
}

/// Changes fields of `config.json`.
pub fn edit_config(checkpoint: &Path, edit: impl FnOnce(&mut Value)) {
    let path = checkpoint.join("config.json");
    let text = std::fs::read_to_string(&path).expect("a checkpoint has a config");
    let mut config: Value = serde_json::from_str(&text).expect("a config is JSON");
    edit(&mut config);
    std::fs::write(path, config.to_string()).expect("writable");
}

/// Makes the checkpoint name a second shard that does not exist.
pub fn lose_shard(checkpoint: &Path) {
    let first = "model-00001-of-00002.safetensors";
    std::fs::rename(checkpoint.join("model.safetensors"), checkpoint.join(first)).expect("a checkpoint has weights");
    let index = serde_json::json!({"metadata": {}, "weight_map": {
        "model.embed_tokens.weight": first,
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }});
    std::fs::write(checkpoint.join("model.safetensors.index.json"), index.to_string()).expect("writable");
}

/// A file with GGUF's magic, version 3 and counts that its bytes do not hold.
pub fn truncated_gguf(folder: &Path) -> PathBuf {
    let path = folder.join("cut.gguf");
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(291u64.to_le_bytes());
    bytes.extend(24u64.to_le_bytes());
    bytes.extend(20u64.to_le_bytes());
    bytes.extend(b"general.arch");
    std::fs::write(&path, bytes).expect("writable");
    path
}
