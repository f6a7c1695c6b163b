//! The saved inputs: `corpus/<target>/<name>`, small files with telling names, every fixed finding among them.

use std::{fs, path::PathBuf};

/// A saved input with its name.
pub struct Saved {
    pub name: String,
    pub bytes: Vec<u8>,
}

/// The inputs of a target in the order of their names; none where it has no folder.
///
/// # Panics
/// When a file cannot be read.
pub fn saved(target: &str) -> Vec<Saved> {
    let Ok(entries) = fs::read_dir(folder().join(target)) else { return Vec::new() };
    let read = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Saved { name, bytes }
    };
    let mut inputs: Vec<Saved> = entries.flatten().map(|entry| read(entry.path())).collect();
    inputs.sort_by(|a, b| a.name.cmp(&b.name));
    inputs
}

/// The bytes of one saved input.
///
/// # Panics
/// When there is none of that name.
pub fn named(target: &str, name: &str) -> Vec<u8> {
    let path = folder().join(target).join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/corpus"))
}
