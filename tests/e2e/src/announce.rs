//! What workers announce in their logs: the states that attempts of the handoff enter. See the README on
//! `--log-level info,tandem::handoff=debug`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The setting with which a worker announces.
pub const LOG_LEVEL: &str = "--log-level info,tandem::handoff=debug";

const TARGET: &str = "tandem::handoff:";
/// Between two looks at a log: a state may be left again in a millisecond.
const LOOK_EVERY: Duration = Duration::from_micros(500);

/// One line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Announced {
    pub room: u64,
    pub state: String,
}

/// Reads a log from a place on.
pub struct Announcements {
    log: PathBuf,
    offset: u64,
    rest: String,
}

impl Announcements {
    /// What `log` will say from now on.
    pub fn from_now(log: &Path) -> Self {
        let offset = std::fs::metadata(log).map_or(0, |file| file.len());
        Self { log: log.to_owned(), offset, rest: String::new() }
    }

    /// Waits for an attempt to enter `state`; the room says which.
    ///
    /// # Errors
    /// What was announced instead within `limit`.
    pub async fn until(&mut self, state: &str, limit: Duration) -> Result<u64, String> {
        let start = Instant::now();
        let mut others = Vec::new();
        loop {
            for announced in self.read() {
                if announced.state == state {
                    return Ok(announced.room);
                }
                others.push(announced.state);
            }
            if start.elapsed() > limit {
                return Err(format!("no attempt entered {state} within {limit:?}, but: {others:?}"));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits for a line with this text in it.
    ///
    /// # Errors
    /// None came within `limit`.
    pub async fn until_line(&mut self, text: &str, limit: Duration) -> Result<(), String> {
        let start = Instant::now();
        while !self.read_lines().lines().any(|line| line.contains(text)) {
            if start.elapsed() > limit {
                return Err(format!("the log did not say {text:?} within {limit:?}"));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// What was announced since the last look.
    pub fn read(&mut self) -> Vec<Announced> {
        self.read_lines().lines().filter_map(parse).collect()
    }

    /// Whole lines.
    fn read_lines(&mut self) -> String {
        let mut bytes = Vec::new();
        // A log that does not exist yet says nothing yet.
        let read = File::open(&self.log).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.offset))?;
            file.read_to_end(&mut bytes)
        });
        self.offset += read.unwrap_or(0) as u64;
        self.rest.push_str(&String::from_utf8_lossy(&bytes));
        let whole = self.rest.rfind('\n').map_or(0, |end| end + 1);
        self.rest.drain(..whole).collect()
    }
}

fn parse(line: &str) -> Option<Announced> {
    let fields = line.split_once(TARGET)?.1;
    let field = |name: &str| fields.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Some(Announced { room: field("room")?.parse().ok()?, state: field("state")?.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[tokio::test]
    async fn lines_are_read_once_and_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, "old DEBUG tandem::handoff: an attempt entered a state room=1 state=open\n").unwrap();
        let mut announcements = Announcements::from_now(&path);
        let mut log = File::options().append(true).open(&path).unwrap();
        write!(log, "t INFO tandem_worker::run: ready\nt DEBUG tandem::handoff: an attempt room=7 sta").unwrap();
        assert_eq!(announcements.read(), []);
        writeln!(log, "te=draining kv_poll=Failed role=decode").unwrap();
        assert_eq!(announcements.until("draining", Duration::from_secs(5)).await, Ok(7));
        assert!(announcements.until("open", Duration::from_millis(5)).await.is_err());
    }
}
