//! Owns the leash between `tandem up` and its children: a pipe on the child's stdin that only `up` holds open.
//! Promises that a child stops in order, and soon, once the pipe closes, whether `up` closed it on purpose or died of
//! SIGKILL. The kernel closes the pipe in every case, and unlike `PR_SET_PDEATHSIG` this needs no `unsafe`, has no race
//! at the start, and does not depend on which thread of `up` started the child.

use std::{io::Read, thread, time::Duration};

use rustix::process::{Signal, getpid, kill_process};

/// Set by `up` for its children; anything else leaves stdin alone.
pub const LEASH_VARIABLE: &str = "TANDEM_LEASH";
pub const LEASH_STDIN: &str = "stdin";

/// From the request to stop in order to the hard exit of a process whose supervisor is gone. `up` itself, if it lives,
/// kills earlier.
const ORDERLY_STOP: Duration = Duration::from_secs(25);

/// Watches stdin if this process is a child of `tandem up`; otherwise does nothing.
pub fn hold() {
    if std::env::var_os(LEASH_VARIABLE).is_some_and(|value| value == LEASH_STDIN) {
        thread::spawn(|| {
            wait_for_end(std::io::stdin().lock());
            stop_this_process();
        });
    }
}

fn wait_for_end(mut pipe: impl Read) {
    let mut byte = [0; 1];
    // Nothing is ever sent: a read returns only at the end, or with an error, and both mean that the holder is gone.
    while let Ok(1) = pipe.read(&mut byte) {}
}

/// Takes the way of a SIGTERM from outside, so that there is one orderly stop to get right.
fn stop_this_process() {
    if kill_process(getpid(), Signal::TERM).is_ok() {
        thread::sleep(ORDERLY_STOP);
    }
    std::process::exit(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leash_ends_with_the_pipe_and_not_with_bytes() {
        let (reader, writer) = std::io::pipe().expect("pipe");
        let watcher = thread::spawn(move || wait_for_end(reader));
        std::io::Write::write_all(&mut &writer, b"noise").expect("write");
        assert!(!watcher.is_finished());
        drop(writer);
        watcher.join().expect("the watcher ends once the pipe is closed");
    }
}
