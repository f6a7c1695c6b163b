//! The access log: one line of JSON per request, written by a thread of its own. Requests never wait for it: where its queue is
//! full a line is lost and counted. A file that was moved away is opened anew, so that it can be rotated.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use prometheus::IntCounter;
use serde::Serialize;

use crate::error::StartError;

/// Lines that may wait to be written.
const LINES_MAX: usize = 8192;
/// Of a path or a model's name at most.
const TEXT_CHARS_MAX: usize = 256;
/// How often the file is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What one line says. Neither bodies nor keys nor queries are in it.
#[derive(Serialize, Debug)]
pub struct Line<'a> {
    /// Seconds since 1970, to the millisecond.
    pub ts: f64,
    pub id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    pub method: &'a str,
    pub path: &'a str,
    pub status: u16,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub code: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_byte_ms: Option<f64>,
    pub total_ms: f64,
    pub request_bytes: usize,
    pub response_bytes: usize,
}

/// Milliseconds, to the microsecond.
pub fn ms(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

/// The beginning of a text that a client made up.
pub fn short(text: &str) -> &str {
    text.char_indices().nth(TEXT_CHARS_MAX).map_or(text, |(end, _)| &text[..end])
}

pub fn now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as f64 / 1000.0
}

/// Where lines go.
#[derive(Debug)]
pub struct AccessLog {
    lines: SyncSender<Vec<u8>>,
    lost: IntCounter,
}

impl AccessLog {
    /// Opens the file (`-` is standard output) and starts the thread that writes it; it ends with this log.
    pub fn open(path: &Path, lost: IntCounter) -> Result<Self, StartError> {
        let failed = |source: io::Error| StartError::Config(format!("--access-log {}: {source}", path.display()));
        let target = Target::open(path).map_err(failed)?;
        let (lines, written) = sync_channel(LINES_MAX);
        let spawned = std::thread::Builder::new().name("access log".into()).spawn(move || write(target, &written));
        spawned.map_err(failed)?;
        Ok(AccessLog { lines, lost })
    }

    pub fn write(&self, line: &Line) {
        let Ok(mut text) = serde_json::to_vec(line) else { return };
        text.push(b'\n');
        if self.lines.try_send(text).is_err() {
            self.lost.inc();
        }
    }
}

enum Target {
    Stdout,
    File { path: PathBuf, file: File, looked: Instant },
}

impl Target {
    fn open(path: &Path) -> io::Result<Self> {
        if path == Path::new("-") {
            return Ok(Target::Stdout);
        }
        Ok(Target::File { path: path.to_owned(), file: append(path)?, looked: Instant::now() })
    }

    fn write(&mut self, text: &[u8]) -> io::Result<()> {
        match self {
            Target::Stdout => io::stdout().write_all(text),
            Target::File { path, file, looked } => {
                if looked.elapsed() >= LOOK {
                    *looked = Instant::now();
                    let same =
                        std::fs::metadata(&*path).is_ok_and(|now| file.metadata().is_ok_and(|m| m.ino() == now.ino()));
                    if !same {
                        *file = append(path)?;
                    }
                }
                file.write_all(text)
            }
        }
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// Writes what has come in one piece, until all senders are gone.
fn write(mut target: Target, lines: &Receiver<Vec<u8>>) {
    const PIECE_BYTES: usize = 64 * 1024;
    let mut told = false;
    loop {
        let mut piece = match lines.recv_timeout(Duration::from_secs(3600)) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        while piece.len() < PIECE_BYTES
            && let Ok(line) = lines.try_recv()
        {
            piece.extend_from_slice(&line);
        }
        match target.write(&piece) {
            Ok(()) => told = false,
            Err(error) if !told => {
                told = true;
                tracing::warn!(%error, "the access log cannot be written");
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(path: &str) -> Line<'_> {
        Line {
            ts: 1.5,
            id: "r",
            key: Some("team"),
            client: None,
            method: "GET",
            path,
            status: 200,
            code: "",
            model: None,
            prefill: None,
            decode: Some("http://d:1"),
            queue_ms: None,
            first_byte_ms: Some(0.25),
            total_ms: 2.0,
            request_bytes: 0,
            response_bytes: 2,
        }
    }

    fn until(what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !what() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
    }

    #[test]
    fn lines_are_json_and_a_moved_file_is_opened_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (path, moved) = (dir.path().join("log"), dir.path().join("log.1"));
        let lost = IntCounter::new("lost", "lost").unwrap();
        let log = AccessLog::open(&path, lost.clone()).unwrap();
        log.write(&line("/a\"b"));
        until(|| std::fs::read_to_string(&path).is_ok_and(|text| text.ends_with('\n')));
        let value: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(
            (&value["path"], &value["decode"], &value["status"]),
            (&"/a\"b".into(), &"http://d:1".into(), &200.into())
        );
        assert_eq!(lost.get(), 0);
        std::fs::rename(&path, &moved).unwrap();
        until(|| {
            log.write(&line("/c"));
            path.exists()
        });
        assert!(AccessLog::open(dir.path(), lost).unwrap_err().to_string().contains("--access-log"));
    }
}
