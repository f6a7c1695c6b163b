//! Owns the way of a child's output: each line goes to the terminal with the child's name before it, to
//! `DIR/NAME.log` if there is a log folder, and into a short tail that tells why a child died. Promises bounded memory:
//! a longer line than [`LINE_BYTES_MAX`] is cut into several.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader},
    task::JoinHandle,
};

const LINE_BYTES_MAX: u64 = 16 * 1024;
/// Enough for a panic with its message, short enough to read.
pub const TAIL_LINES_MAX: usize = 20;

/// Writes whole lines to stderr, so that lines of several children never mix.
#[derive(Clone)]
pub struct Terminal {
    name_width: usize,
}

impl Terminal {
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        Self { name_width: names.into_iter().map(str::len).max().unwrap_or(0) }
    }

    /// A terminal that went away is no reason to stop serving: the line is lost, and in the log file if there is one.
    pub fn line(&self, name: &str, line: &str) {
        let text = format!("{name:width$} | {line}\n", width = self.name_width);
        io::stderr().lock().write_all(text.as_bytes()).ok();
    }
}

/// The last lines of one child.
#[derive(Clone, Default)]
pub struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    fn push(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES_MAX {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Where the lines of one child go.
#[derive(Clone)]
pub struct Sink {
    name: String,
    terminal: Terminal,
    file: Option<Arc<Mutex<File>>>,
    tail: Tail,
}

impl Sink {
    /// # Errors
    /// The log file cannot be opened; a log of an earlier run is appended to.
    pub fn open(name: &str, terminal: Terminal, folder: Option<&Path>) -> Result<Self, (PathBuf, io::Error)> {
        let file = folder.map(|folder| {
            let path = folder.join(format!("{name}.log"));
            let file = File::options().create(true).append(true).open(&path);
            file.map(|file| Arc::new(Mutex::new(file))).map_err(|error| (path, error))
        });
        Ok(Self { name: name.to_owned(), terminal, file: file.transpose()?, tail: Tail::default() })
    }

    pub fn tail(&self) -> &Tail {
        &self.tail
    }

    fn line(&self, line: String) {
        self.terminal.line(&self.name, &line);
        if let Some(file) = &self.file {
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            writeln!(file, "{line}").ok();
        }
        self.tail.push(line);
    }

    /// Moves everything from `stream` here until its end.
    pub fn pump(&self, stream: impl AsyncRead + Unpin + Send + 'static) -> JoinHandle<()> {
        let sink = self.clone();
        tokio::spawn(async move {
            let mut reader = BufReader::new(stream);
            let mut bytes = Vec::new();
            // A broken pipe ends the log like its end does; the child's exit is reported by its own wait.
            while (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes).await.unwrap_or(0) > 0 {
                sink.line(String::from_utf8_lossy(&bytes).trim_end().to_owned());
                bytes.clear();
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_log_is_cut_into_lines_kept_in_a_file_and_its_end_remembered() {
        let folder = tempfile::tempdir().expect("folder");
        let sink = Sink::open("decode-0", Terminal::new(["decode-0"]), Some(folder.path())).expect("opens");
        let mut text = vec![b'x'; LINE_BYTES_MAX as usize + 1];
        for number in 0..TAIL_LINES_MAX {
            text.extend_from_slice(format!("\nline {number}").as_bytes());
        }
        sink.pump(io::Cursor::new(text)).await.expect("pump ends");
        let tail = sink.tail().lines();
        assert_eq!(tail.len(), TAIL_LINES_MAX);
        assert_eq!(tail[TAIL_LINES_MAX - 1], format!("line {}", TAIL_LINES_MAX - 1));
        let file = std::fs::read_to_string(folder.path().join("decode-0.log")).expect("log");
        assert_eq!(file.lines().count(), TAIL_LINES_MAX + 2, "the long line became two");
    }

    #[test]
    fn a_log_folder_that_is_none_is_named() {
        let Err((path, _)) = Sink::open("a", Terminal::new([]), Some(Path::new("/nonexistent"))) else {
            panic!("opened");
        };
        assert_eq!(path, Path::new("/nonexistent/a.log"));
    }
}
