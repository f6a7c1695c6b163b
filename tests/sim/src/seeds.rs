//! The seeds of found bugs, each in a file of `seeds/` with its name and one sentence. *Pure* but for reading them.
//!
//! ```text
//! # What went wrong, in one sentence.
//! seed = 9
//! world = faithful
//! fabric = tcp
//! calm = true
//! ```
//!
//! What a file proves: the world that a number and its options give *today* is sound. It is the world that met its bug only
//! as long as the generator of setups draws as it did then; a new draw makes it another one. What keeps a mended fault
//! mended is a test of the machine beside its code, and a planted fault that the simulator must find.

use std::{fs, io, path::Path};

use crate::{fabric::Kind, network::Manners, setup::Options};

#[derive(Clone, Debug)]
pub struct Found {
    pub name: String,
    pub story: String,
    pub seed: u64,
    pub options: Options,
}

/// All files of a folder, in the order of their names.
///
/// # Errors
/// When the folder or a file cannot be read, or a line is none of the known ones.
pub fn read(folder: &Path) -> io::Result<Vec<Found>> {
    let mut files: Vec<_> = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    files.sort_by_key(|file| file.file_name());
    let read = |file: &fs::DirEntry| {
        let name = file.path().file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(file.path())?;
        parse(&name, &text).map_err(|line| io::Error::other(format!("{name}: {line:?} is no line of a seed's file")))
    };
    files.iter().map(read).collect()
}

fn parse(name: &str, text: &str) -> Result<Found, String> {
    let mut found = Found { name: name.to_owned(), story: String::new(), seed: 0, options: Options::default() };
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let wrong = || line.to_owned();
        if let Some(words) = line.strip_prefix('#') {
            found.story.push_str(words);
            continue;
        }
        let (key, value) = line.split_once('=').ok_or_else(wrong)?;
        let value = value.trim();
        match key.trim() {
            "seed" => found.seed = value.parse().map_err(|_| wrong())?,
            "calm" => found.options.calm = value.parse().map_err(|_| wrong())?,
            "world" => found.options.manners = Some(Manners::named(value).ok_or_else(wrong)?),
            "fabric" => found.options.fabric = Some(Kind::named(value).ok_or_else(wrong)?),
            _ => return Err(wrong()),
        }
    }
    Ok(found)
}
