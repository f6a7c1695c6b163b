//! Whether a watched file is another version of itself. A look is one `stat`, which follows links. Promises: a version counts
//! only once two looks saw the same one, so that a half-written file is not taken for a whole one.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// What differs between two versions of a file: device, inode, size, and both times in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stamp([i128; 5]);

impl Stamp {
    /// `None` where there is no file.
    fn of(path: &Path) -> Option<Stamp> {
        let m = std::fs::metadata(path).ok()?;
        let nanos = |secs: i64, nanos: i64| i128::from(secs) * 1_000_000_000 + i128::from(nanos);
        let [modified, changed] = [nanos(m.mtime(), m.mtime_nsec()), nanos(m.ctime(), m.ctime_nsec())];
        Some(Stamp([m.dev().into(), m.ino().into(), m.size().into(), modified, changed]))
    }
}

/// A look: a stamp, or that there is no file.
type Look = Option<Stamp>;

/// The versions of one file, as looks find them.
#[derive(Debug)]
pub struct Versions {
    path: PathBuf,
    taken: Option<Look>,
    last: Option<Look>,
}

impl Versions {
    /// The first version is new.
    pub fn new(path: PathBuf) -> Self {
        Versions { path, taken: None, last: None }
    }

    /// The version that is there now was taken already.
    pub fn after_now(path: PathBuf) -> Self {
        let now = Some(Stamp::of(&path));
        Versions { path, taken: now, last: now }
    }

    /// Looks once; true once per version, at the second look that sees it.
    pub fn is_new(&mut self) -> bool {
        let look = Some(Stamp::of(&self.path));
        let steady = self.last == look;
        self.last = look;
        if !steady || self.taken == look {
            return false;
        }
        self.taken = look;
        true
    }
}
