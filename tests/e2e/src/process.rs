//! One child process: its log in a file, its exit waited for with a limit, its life ended by its own id.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::binary;

/// Lines of each log that a failing test shows.
const SHOWN_LINES: usize = 60;

/// What must never stand in a log of the product.
const PANIC_MARK: &str = "panicked at";

/// A folder for the logs of one test, removed when the test passed, kept and named when it failed.
pub struct LogFolder {
    path: PathBuf,
}

impl LogFolder {
    pub fn new(test: &str) -> Self {
        let path = binary::profile_folder().join("e2e-logs").join(format!("{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the target folder is writable");
        Self { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LogFolder {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("logs are kept in {}", self.path.display());
        } else {
            // A folder that cannot be removed does no harm.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// A running child. Dropping it kills it, shows the end of its log if the test is failing, and fails a passing test
/// whose log holds a panic.
pub struct Process {
    name: String,
    log: PathBuf,
    child: Child,
}

impl Process {
    /// Starts `command` with both outputs appended to `<folder>/<name>.log`.
    pub fn spawn(name: &str, command: &mut Command, folder: &Path) -> Self {
        let log = folder.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log).expect("the log folder is writable");
        let copy = file.try_clone().expect("a file handle can be copied");
        let child = command
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(copy)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        Self { name: name.to_owned(), log, child }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The last lines of the log, for a message.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
    }

    /// `Some` once the child has ended.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the child is ours")
    }

    /// Ends the child as `kill -9` does and waits until it is gone.
    pub fn kill(&mut self) {
        // An error means that it ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends a signal by name, such as `INT` or `STOP`, to this child alone.
    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill").arg(format!("-{signal}")).arg(self.id().to_string()).status();
        assert!(status.is_ok_and(|status| status.success()), "kill -{signal} {} failed", self.name);
    }

    /// Waits for the child to end by itself.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.exit_status() {
                return status;
            }
            assert!(start.elapsed() < limit, "{} still runs after {limit:?}\n{}", self.name, self.log_tail());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        let log = self.log();
        if std::thread::panicking() {
            eprintln!("--- {} ---\n{}", self.log.display(), self.log_tail());
        } else if log.contains(PANIC_MARK) {
            panic!("{} logged a panic:\n{}", self.name, self.log_tail());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, folder: &Path) -> Process {
        Process::spawn("shell", Command::new("sh").args(["-c", script]), folder)
    }

    #[test]
    fn a_child_is_killed_when_its_owner_goes() {
        let folder = tempfile::tempdir().unwrap();
        let child = shell("echo up; sleep 600", folder.path());
        let id = child.id();
        drop(child);
        assert!(!Path::new(&format!("/proc/{id}")).exists());
    }

    #[test]
    fn the_log_holds_both_outputs_and_the_status_is_the_childs() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = shell("echo out; echo err >&2; exit 3", folder.path());
        assert_eq!(child.wait(Duration::from_secs(10)).code(), Some(3));
        assert!(child.log().contains("out") && child.log().contains("err"));
    }

    #[test]
    fn a_logged_panic_fails_a_passing_test() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = shell("echo \"thread 'x' panicked at src/lib.rs\"", folder.path());
        child.wait(Duration::from_secs(10));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(child)));
        assert!(caught.is_err());
    }
}
