//! That this crate is pure: its sources name no part of std that does I/O, reads clocks or has threads, no unsafe code,
//! and no other crate but a few that are pure themselves. `clippy.toml` bans the same by name; here whole modules are
//! allowed or not, so that what nobody thought of is found too.
#![allow(clippy::disallowed_methods)]

use std::{collections::BTreeSet, fs, path::Path};

/// The modules of std that the sources may name.
const STD: [&str; 12] =
    ["array", "borrow", "cmp", "collections", "convert", "error", "fmt", "iter", "mem", "num", "ops", "str"];
/// The crates that the sources may name, their tests' included; `crate`, `self` and `super` are this one.
const CRATES: [&str; 7] = ["crate", "self", "super", "std", "thiserror", "xxhash_rust", "proptest"];
/// What Cargo.toml may list.
const DEPENDENCIES: [&str; 2] = ["thiserror", "xxhash-rust"];
const DEV_DEPENDENCIES: [&str; 1] = ["proptest"];
/// Words that must not stand in the code at all.
const WORDS: [&str; 12] = [
    "unsafe",
    "static",
    "HashMap",
    "HashSet",
    "RandomState",
    "Instant",
    "SystemTime",
    "extern",
    "println",
    "eprintln",
    "thread_local",
    "async",
];

/// The code without comments, without the texts in quotes, and without the lifetime that is called as a bad word is.
fn bare(text: &str) -> String {
    let mut out = String::new();
    for line in text.replace("'static", "").lines() {
        let mut quoted = false;
        let mut chars = line.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '\\' if quoted => drop(chars.next()),
                '"' => quoted = !quoted,
                '/' if !quoted && chars.peek() == Some(&'/') => break,
                _ if quoted => {}
                _ => out.push(c),
            }
        }
        out.push('\n');
    }
    out
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// The first names below each `root::`, in paths and in groups of imports.
fn below<'a>(code: &'a str, root: &str) -> Vec<&'a str> {
    let mark = format!("{root}::");
    let mut names = Vec::new();
    for (at, _) in code.match_indices(&mark) {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = code[at + mark.len()..].trim_start();
        match rest.strip_prefix('{') {
            None => names.extend(words(rest).next()),
            Some(group) => names.extend(members(group)),
        }
    }
    names
}

/// The first name of each member of a group, up to its closing brace.
fn members(group: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, c) in group.char_indices() {
        let ends = depth == 0 && matches!(c, ',' | '}');
        if ends {
            names.extend(words(&group[start..at]).next());
            start = at + 1;
        }
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    names
}

/// What of `text`, a source file, is not pure.
fn impurities(text: &str) -> BTreeSet<String> {
    let code = bare(text);
    let mut found = BTreeSet::new();
    found.extend(words(&code).filter(|word| WORDS.contains(word)).map(str::to_owned));
    found.extend(below(&code, "std").into_iter().filter(|name| !STD.contains(name)).map(|name| format!("std::{name}")));
    for line in code.lines() {
        let mut tokens = words(line).skip_while(|word| *word == "pub");
        if tokens.next() == Some("use")
            && let Some(root) = tokens.next()
            && line.contains(&format!("{root}::"))
            && !CRATES.contains(&root)
            && !root.starts_with(char::is_uppercase)
        {
            found.insert(format!("the crate or module {root}"));
        }
    }
    for root in ["core", "alloc", "tokio", "rand", "libc"] {
        if !below(&code, root).is_empty() {
            found.insert(format!("the crate {root}"));
        }
    }
    found
}

/// Names in a section of Cargo.toml.
fn dependencies<'a>(manifest: &'a str, section: &str) -> Vec<&'a str> {
    let lines = manifest.lines().skip_while(|line| *line != section).skip(1).take_while(|line| !line.starts_with('['));
    lines.filter_map(|line| line.split(['.', '=', ' ']).next().filter(|name| !name.is_empty())).collect()
}

fn each_source(folder: &Path, see: &mut impl FnMut(&Path, &str)) {
    for entry in fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            each_source(&path, see);
        } else {
            see(&path, &fs::read_to_string(&path).expect("a source is text"));
        }
    }
}

#[test]
fn the_sources_are_pure() {
    let mut seen = 0;
    each_source(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut |path, text| {
        seen += 1;
        let mut found = impurities(text);
        // Names of modules that `use` reaches without `crate::` beside their `mod` line.
        found.retain(|what| !what.strip_prefix("the crate or module ").is_some_and(|name| declares(text, name)));
        assert!(found.is_empty(), "{}: {found:?}", path.display());
    });
    assert!(seen > 15, "only {seen} sources were found");
}

fn declares(text: &str, module: &str) -> bool {
    text.lines().any(|line| line.trim_start_matches("pub ").trim_end_matches(';') == format!("mod {module}"))
}

#[test]
fn the_crate_leans_on_pure_crates_only() {
    let manifest = include_str!("../Cargo.toml");
    assert_eq!(dependencies(manifest, "[dependencies]"), DEPENDENCIES);
    assert_eq!(dependencies(manifest, "[dev-dependencies]"), DEV_DEPENDENCIES);
    assert_eq!(manifest.matches("dependencies").count(), 2, "each list of dependencies is known");
}

#[test]
fn what_is_not_pure_is_found_wherever_it_stands() {
    for (line, what) in [
        ("use std::time::Duration;", "std::time"),
        ("    let now = std::time::Instant::now();", "Instant"),
        ("use std::{collections::BTreeMap, fs::{self, File}, mem};", "std::fs"),
        ("use std::{\n    mem,\n    thread,\n};", "std::thread"),
        ("fn f() { ::std::process::exit(1) }", "std::process"),
        ("use std::net::TcpStream as Wire;", "std::net"),
        ("let home = std::env::var(\"HOME\");", "std::env"),
        ("use std::sync::Mutex;", "std::sync"),
        ("use tokio::net::TcpStream;", "the crate tokio"),
        ("let x = rand::random::<u64>();", "the crate rand"),
        ("use libc::mmap;", "the crate or module libc"),
        ("use core::arch::x86_64::_rdtsc;", "the crate core"),
        ("let seen: HashMap<u64, u64> = Default::default();", "HashMap"),
        ("unsafe { std::mem::zeroed() }", "unsafe"),
        ("static COUNT: u64 = 0;", "static"),
        ("println!(\"{x}\");", "println"),
    ] {
        let found = impurities(line);
        assert!(found.contains(what), "{line}: {found:?} lacks {what}");
    }
    let pure = "//! Uses std::fs and HashMap.\nuse std::{mem, ops::Range};\nuse crate::ids::Time; // unsafe\nlet x = \"std::net\";";
    assert!(impurities(pure).is_empty(), "{:?}", impurities(pure));
    let manifest = "[dependencies]\nthiserror.workspace = true\ntokio = \"1\"\n\n[features]\nx = []\n";
    assert_eq!(dependencies(manifest, "[dependencies]"), ["thiserror", "tokio"]);
}
