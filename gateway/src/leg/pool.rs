//! The idle connections of one worker: last in first out, a non-blocking read at checkout finds those that the worker
//! closed, and none idles longer than its bound, which is below the worker's own keep-alive so that the worker never
//! closes a connection in the moment in which we use it.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use pingora::protocols::Stream;
use tokio::io::AsyncReadExt;

/// The shortest keep-alive among the workers we front is 5 s.
pub const IDLE_TIME_MAX: Duration = Duration::from_secs(4);
/// How much earlier than the worker a connection is given up.
const IDLE_MARGIN: Duration = Duration::from_secs(1);
const IDLE_CONNECTIONS_MAX: usize = 512;

/// How long a connection may idle: `setting`, at most [`IDLE_TIME_MAX`], and a second less than the worker's
/// `Keep-Alive: timeout`, where it told one.
pub fn idle_bound(setting: Duration, keep_alive_secs: Option<u64>) -> Duration {
    let told = keep_alive_secs.map_or(Duration::MAX, |secs| Duration::from_secs(secs).saturating_sub(IDLE_MARGIN));
    setting.min(IDLE_TIME_MAX).min(told)
}

/// The connections to one worker that wait for their next request, each with the moment at which it is given up.
#[derive(Debug, Default)]
pub struct Idle(Mutex<VecDeque<(Stream, Instant)>>);

impl Idle {
    pub fn checkout(&self) -> Option<Stream> {
        loop {
            let (mut stream, until) = self.0.lock().expect("no panic under this lock").pop_back()?;
            if Instant::now() < until && is_quiet(&mut stream) {
                return Some(stream);
            }
        }
    }

    /// Keeps a connection for `bound` at most.
    pub fn put(&self, stream: Stream, bound: Duration) {
        let now = Instant::now();
        let mut idle = self.0.lock().expect("no panic under this lock");
        while idle.front().is_some_and(|(_, until)| now >= *until) {
            idle.pop_front();
        }
        if !bound.is_zero() && idle.len() < IDLE_CONNECTIONS_MAX {
            idle.push_back((stream, now + bound));
        }
    }

    pub fn clear(&self) {
        self.0.lock().expect("no panic under this lock").clear();
    }
}

/// Nothing to read and not closed. Bytes that nobody asked for make a connection unusable, too.
fn is_quiet(stream: &mut Stream) -> bool {
    let mut byte = [0u8; 1];
    tokio::task::unconstrained(stream.read(&mut byte)).now_or_never().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_the_least_of_setting_ours_and_the_workers() {
        let secs = Duration::from_secs;
        for (setting, told, bound) in [
            (secs(30), None, secs(4)),
            (secs(3), None, secs(3)),
            (secs(30), Some(3), secs(2)),
            (secs(30), Some(5), secs(4)),
            (secs(1), Some(60), secs(1)),
            (secs(30), Some(1), secs(0)),
            (secs(30), Some(0), secs(0)),
        ] {
            assert_eq!(idle_bound(setting, told), bound, "{setting:?} {told:?}");
        }
    }
}
