//! Owns the child processes: starts them on a leash, sees the first that ends, stops all. Promises that no child
//! outlives [`Children::stop`], and that each ends by itself if `up` is gone (see [`crate::leash`]).

use std::{
    future::poll_fn,
    io,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    pin::pin,
    process::{ExitStatus, Stdio},
    task::Poll,
    time::{Duration, Instant},
};

use tokio::{
    process::{Child as Process, ChildStdin, Command},
    task::JoinHandle,
    time::timeout,
};

use super::{
    logs::{Sink, Terminal},
    plan::{ChildPlan, ChildRole},
};
use crate::leash::{LEASH_STDIN, LEASH_VARIABLE};

/// The output of a dead process is read to its end, unless a grandchild holds the pipe.
const LAST_LINES_WAIT: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("cannot start {name}: {source}")]
    Start { name: String, source: io::Error },
    #[error("cannot write the log file {path}: {source}; choose another folder with --log-dir")]
    LogFile { path: PathBuf, source: io::Error },
}

struct Child {
    plan: ChildPlan,
    pid: u32,
    process: Process,
    leash: Option<ChildStdin>,
    sink: Sink,
    pumps: Vec<JoinHandle<()>>,
    started: Instant,
}

impl Child {
    /// Of a process that has ended.
    async fn show_last_lines(&mut self) {
        for pump in self.pumps.drain(..) {
            timeout(LAST_LINES_WAIT, pump).await.ok();
        }
    }
}

/// All children, in the order in which they were started.
pub struct Children {
    program: PathBuf,
    terminal: Terminal,
    log_folder: Option<PathBuf>,
    running: Vec<Child>,
}

/// How a child ended that nobody asked to end.
#[derive(Debug)]
pub struct Death {
    pub name: String,
    pub pid: u32,
    pub how: String,
    pub after: Duration,
    pub last_lines: Vec<String>,
}

impl Children {
    pub fn new(program: PathBuf, terminal: Terminal, log_folder: Option<PathBuf>) -> Self {
        Self { program, terminal, log_folder, running: Vec::new() }
    }

    pub fn spawn(&mut self, plan: ChildPlan) -> Result<(), SpawnError> {
        let folder: Option<&Path> = self.log_folder.as_deref();
        let sink = Sink::open(&plan.name, self.terminal.clone(), folder)
            .map_err(|(path, source)| SpawnError::LogFile { path, source })?;
        let start = |source| SpawnError::Start { name: plan.name.clone(), source };
        let mut process = Command::new(&self.program)
            .args(&plan.arguments)
            .env(LEASH_VARIABLE, LEASH_STDIN)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C of the terminal reaches `up` alone, which then stops all in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(start)?;
        let pid = process.id().ok_or_else(|| start(io::Error::other("it ended at once")))?;
        let leash = process.stdin.take();
        let mut pumps = Vec::new();
        pumps.extend(process.stdout.take().map(|stream| sink.pump(stream)));
        pumps.extend(process.stderr.take().map(|stream| sink.pump(stream)));
        self.running.push(Child { plan, pid, process, leash, sink, pumps, started: Instant::now() });
        Ok(())
    }

    /// Plans and process ids.
    pub fn list(&self) -> Vec<(&ChildPlan, u32)> {
        self.running.iter().map(|child| (&child.plan, child.pid)).collect()
    }

    /// Waits until any child ends; forever if there is none. Safe to drop and call again.
    pub async fn first_death(&mut self) -> Death {
        let (index, status) = poll_fn(|context| {
            for (index, child) in self.running.iter_mut().enumerate() {
                if let Poll::Ready(status) = pin!(child.process.wait()).poll(context) {
                    return Poll::Ready((index, status));
                }
            }
            Poll::Pending
        })
        .await;
        let child = &mut self.running[index];
        child.show_last_lines().await;
        Death {
            name: child.plan.name.clone(),
            pid: child.pid,
            how: status.map_or_else(|error| format!("cannot be waited for: {error}"), describe),
            after: child.started.elapsed(),
            last_lines: child.sink.tail().lines(),
        }
    }

    /// Asks all to stop by letting go of the leash: the gateway first, so that its requests end with their workers still
    /// there, then the workers. Kills those of a stage that still run after `grace`, and all once `hurry` completes; waits
    /// for all and their last lines. Returns the names of the killed.
    pub async fn stop(&mut self, grace: Duration, hurry: impl Future<Output = ()>) -> Vec<String> {
        let mut hurry = pin!(hurry);
        let mut killed = Vec::new();
        let mut hurried = false;
        for gateway in [true, false] {
            if !hurried {
                tokio::select! {
                    () = self.ended(gateway) => {}
                    () = tokio::time::sleep(grace) => {}
                    () = &mut hurry => hurried = true,
                }
            }
            killed.extend(self.kill(gateway).await);
        }
        killed
    }

    /// Lets go of the leash of the gateway, or of the workers, and waits until they end by themselves.
    async fn ended(&mut self, gateway: bool) {
        for child in self.stage(gateway) {
            child.leash = None;
        }
        for child in self.stage(gateway) {
            child.process.wait().await.ok();
            child.show_last_lines().await;
        }
    }

    fn stage(&mut self, gateway: bool) -> impl Iterator<Item = &mut Child> {
        self.running.iter_mut().filter(move |child| (child.plan.role == ChildRole::Gateway) == gateway)
    }

    /// Kills what still runs of a stage. Returns the names.
    async fn kill(&mut self, gateway: bool) -> Vec<String> {
        let mut killed = Vec::new();
        for child in self.stage(gateway) {
            if matches!(child.process.try_wait(), Ok(None)) {
                child.process.kill().await.ok();
                killed.push(child.plan.name.clone());
            }
        }
        killed
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}{}", signal_name(signal)),
        (None, None) => format!("ended: {status}"),
    }
}

/// The signals that end a server in the field.
fn signal_name(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL: built for another processor?)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        9 => " (SIGKILL: by hand, or for want of memory)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::{super::plan::tests::fleet, *};

    /// A child that runs `script` in a shell.
    fn plan(name: &str, script: &str) -> ChildPlan {
        let mut plan = fleet("1p1d").remove(0);
        plan.name = name.to_owned();
        plan.arguments = vec!["-c".into(), script.into()];
        plan
    }

    fn children(plans: &[(&str, &str)]) -> Children {
        let mut children = Children::new("/bin/sh".into(), Terminal::new([]), None);
        for (name, script) in plans {
            children.spawn(plan(name, script)).expect("starts");
        }
        children
    }

    const LIMIT: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn the_first_death_is_told_with_its_reason_and_last_lines() {
        let mut children = children(&[("a", "read hold"), ("b", "echo out; echo bad luck >&2; exit 3")]);
        let death = timeout(LIMIT, children.first_death()).await.expect("in time");
        assert_eq!((death.name.as_str(), death.how.as_str()), ("b", "exited with status 3"));
        assert_eq!(death.pid, children.list()[1].1);
        let mut lines = death.last_lines;
        lines.sort();
        assert_eq!(lines, ["bad luck", "out"]);
        assert!(children.stop(LIMIT, std::future::pending()).await.is_empty(), "a ends once its stdin closes");
    }

    #[tokio::test]
    async fn a_signal_is_named() {
        let mut children = children(&[("a", "kill -9 $$")]);
        let death = timeout(LIMIT, children.first_death()).await.expect("in time");
        assert!(death.how.starts_with("was killed by signal 9 (SIGKILL"), "{}", death.how);
    }

    #[tokio::test]
    async fn a_child_that_will_not_stop_is_killed() {
        let stubborn = "trap '' TERM; while :; do sleep 1 <&-; done";
        let mut children = children(&[("good", "read hold"), ("bad", stubborn)]);
        let grace = Duration::from_millis(100);
        let killed = timeout(LIMIT, children.stop(grace, std::future::pending())).await.expect("in time");
        assert_eq!(killed, ["bad"]);
    }

    #[tokio::test]
    async fn the_gateway_is_gone_before_a_worker_is_asked_to_stop_and_last_lines_are_whole() {
        let folder = tempfile::tempdir().expect("folder");
        let gone = folder.path().join("gone");
        let mut children = children(&[("worker", &format!("read hold; test -e {}; echo saw $?", gone.display()))]);
        let mut gateway = plan("gateway", &format!("read hold; sleep 0.2; touch {}", gone.display()));
        gateway.role = ChildRole::Gateway;
        children.spawn(gateway).expect("starts");
        assert!(children.stop(LIMIT, std::future::pending()).await.is_empty());
        assert_eq!(children.running[0].sink.tail().lines(), ["saw 0"]);
    }

    #[tokio::test]
    async fn hurry_does_not_wait_for_the_grace_period() {
        let mut children = children(&[("bad", "while :; do sleep 1 <&-; done")]);
        let killed = timeout(LIMIT, children.stop(LIMIT * 10, std::future::ready(()))).await.expect("in time");
        assert_eq!(killed, ["bad"]);
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        let mut children = Children::new("/nonexistent/tandem".into(), Terminal::new([]), None);
        let error = children.spawn(plan("a", "")).expect_err("no such program");
        assert!(error.to_string().starts_with("cannot start a: "), "{error}");
    }
}
