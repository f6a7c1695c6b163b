//! Where the product is: the binary `tandem` in the target folder of the running test, refused when it is older than a
//! source that it was built from. Reads the file system only.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Overrides the search; the freshness check is skipped.
const OVERRIDE: &str = "TANDEM_BIN";

const BUILD_IT: &str = "build it first: cargo build --release -p tandem";

/// The path of a product binary that is as new as its sources.
///
/// # Panics
/// With the command to run when there is none, or an old one: a test against an old binary proves nothing.
pub fn tandem() -> PathBuf {
    if let Some(path) = std::env::var_os(OVERRIDE) {
        return PathBuf::from(path);
    }
    let path = profile_folder().join("tandem");
    match newer_source(&path) {
        Ok(None) => path,
        Ok(Some(source)) => panic!("{} is older than {}; {BUILD_IT}", path.display(), source.display()),
        Err(error) => panic!("{}: {error}; {BUILD_IT}", path.display()),
    }
}

/// `target/<profile>`, seen from `target/<profile>/deps/<test>-<hash>`.
pub fn profile_folder() -> PathBuf {
    let test = std::env::current_exe().expect("a running test knows its own path");
    let deps = test.parent().expect("a test executable lies in a folder");
    if deps.ends_with("deps") { deps.parent().unwrap_or(deps).to_owned() } else { deps.to_owned() }
}

/// A source of `binary`, as cargo's `.d` file beside it lists them, that changed after the binary was linked.
fn newer_source(binary: &Path) -> std::io::Result<Option<PathBuf>> {
    let built = modified(binary)?;
    let listing = std::fs::read_to_string(binary.with_extension("d"))?;
    Ok(sources(&listing).into_iter().find(|source| modified(source).is_ok_and(|time| time > built)))
}

fn modified(path: &Path) -> std::io::Result<SystemTime> {
    std::fs::metadata(path)?.modified()
}

/// The right side of a make rule: paths divided by spaces, a space inside a path written as `\ `.
fn sources(listing: &str) -> Vec<PathBuf> {
    const ESCAPED_SPACE: &str = "\u{0}";
    let Some((_, right)) = listing.lines().next().and_then(|rule| rule.split_once(": ")) else { return Vec::new() };
    right.replace("\\ ", ESCAPED_SPACE).split_whitespace().map(|path| path.replace(ESCAPED_SPACE, " ").into()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_make_rule_is_read_with_its_escaped_spaces() {
        let listing = "/t/release/tandem: /a/src/main.rs /a/my\\ dir/lib.rs\n\n/a/src/main.rs:\n";
        assert_eq!(sources(listing), [PathBuf::from("/a/src/main.rs"), PathBuf::from("/a/my dir/lib.rs")]);
        assert!(sources("").is_empty());
    }

    #[test]
    fn a_source_newer_than_the_binary_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (binary, source) = (folder.path().join("tandem"), folder.path().join("main.rs"));
        std::fs::write(&binary, "").unwrap();
        std::fs::write(&source, "").unwrap();
        std::fs::write(binary.with_extension("d"), format!("{}: {}\n", binary.display(), source.display())).unwrap();
        let now = SystemTime::now();
        let set = |path: &Path, age_s: u64| {
            let time = now - std::time::Duration::from_secs(age_s);
            std::fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
        };
        set(&binary, 10);
        set(&source, 20);
        assert_eq!(newer_source(&binary).unwrap(), None);
        set(&source, 5);
        assert_eq!(newer_source(&binary).unwrap(), Some(source));
        assert!(newer_source(&folder.path().join("absent")).is_err());
    }
}
