//! What is logged of connections that could not be accepted. Promises one line a second at most: without free file
//! descriptors accept fails many times a second, for as long as the shortage lasts.

use std::{
    io,
    time::{Duration, Instant},
};

const PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct AcceptLog {
    /// Which listener.
    listener: &'static str,
    last: Option<Instant>,
    /// Failures since the last line.
    untold: u64,
}

impl AcceptLog {
    pub fn new(listener: &'static str) -> Self {
        Self { listener, last: None, untold: 0 }
    }

    pub fn failed(&mut self, now: Instant, error: &io::Error) {
        if self.last.is_some_and(|last| now.duration_since(last) < PAUSE) {
            self.untold += 1;
            return;
        }
        let (listener, untold) = (self.listener, std::mem::take(&mut self.untold));
        self.last = Some(now);
        tracing::warn!(listener, %error, untold, "a connection could not be accepted");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log_lines::logged;

    #[test]
    fn a_flood_is_one_line_a_second_and_its_size_is_told() {
        let lines = logged("info", || {
            let mut log = AcceptLog::new("http");
            let began = Instant::now();
            let error = io::Error::other("Too many open files");
            for tenth in 0..15 {
                log.failed(began + Duration::from_millis(100 * tenth), &error);
            }
        });
        assert_eq!(lines.len(), 2, "{lines:#?}");
        assert!(lines[0].contains("Too many open files untold=0"), "{lines:#?}");
        assert!(lines[1].contains("listener=\"http\"") && lines[1].contains("untold=9"), "{lines:#?}");
    }
}
