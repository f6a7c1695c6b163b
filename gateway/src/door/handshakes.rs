//! Failed TLS handshakes in the log: anybody who can connect causes them, so that a port scan must not fill it. One line of
//! pingora's about them goes through in a while, the others are counted in the next of ours.

use std::fmt::{self, Write as _};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// The time from one line to the next.
const PAUSE: Duration = Duration::from_secs(60);
/// How pingora's lines about a failed handshake begin.
const SUBJECT: &str = "Downstream handshake";

/// Lets a line about a failed handshake through once in a while.
#[derive(Debug, Default)]
pub struct Handshakes(Mutex<Shown>);

#[derive(Debug, Default)]
struct Shown {
    last: Option<Instant>,
    dropped: u64,
}

impl Shown {
    /// How many lines were dropped before this one, if it goes through.
    fn passes(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < PAUSE) {
            self.dropped += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.dropped))
    }
}

impl<S: Subscriber> Layer<S> for Handshakes {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        // Pingora's lines come from the log crate, all with the same metadata.
        if event.metadata().target() != "log" {
            return true;
        }
        let mut begins = Begins(String::new());
        event.record(&mut begins);
        if !begins.0.starts_with(SUBJECT) {
            return true;
        }
        let passes = self.0.lock().expect("no panic under this lock").passes(Instant::now());
        if let Some(dropped @ 1..) = passes {
            tracing::warn!(dropped, "more TLS handshakes failed since the last line about one");
        }
        passes.is_some()
    }
}

/// The first bytes of an event's message.
struct Begins(String);

impl Visit for Begins {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self, "{value:?}");
        }
    }
}

impl fmt::Write for Begins {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        self.0.push_str(piece);
        // What follows is not looked at.
        if self.0.len() < SUBJECT.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::Arc;
    use tracing_subscriber::layer::SubscriberExt as _;

    #[test]
    fn a_line_passes_once_a_minute_and_tells_how_many_did_not() {
        let (mut shown, t0) = (Shown::default(), Instant::now());
        assert_eq!(shown.passes(t0), Some(0));
        assert_eq!((shown.passes(t0), shown.passes(t0 + PAUSE / 2)), (None, None));
        assert_eq!(shown.passes(t0 + PAUSE), Some(2));
        assert_eq!(shown.passes(t0 + 2 * PAUSE), Some(0));
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_lines_about_handshakes_are_held_back() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::registry()
            .with(Handshakes::default())
            .with(tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || writer.clone()));
        tracing::subscriber::with_default(subscriber, || {
            for n in 0..3 {
                tracing::error!(target: "log", "{}", format_args!("Downstream handshake error from 10.0.0.{n}: x"));
                tracing::error!(target: "log", "Accept() failed {n}");
            }
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert_eq!((text.matches("handshake").count(), text.matches("Accept").count()), (1, 3), "{text}");
    }
}
