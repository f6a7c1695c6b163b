//! A request's deadlines: how long each part may take, by settings and by the client's own wish, and which deadline
//! comes next. *Pure*: moments come in.

use std::time::{Duration, Instant};

use http::HeaderMap;

use crate::config::Deadlines;
use crate::error::Failure;
use crate::exchange::machine::Deadline;

/// How long a client may take for what is pending once its exchange is over without success.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// The time that the parts of one request have, from its arrival on.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub whole: Duration,
    pub prefill: Duration,
    pub first_token: Duration,
    pub silence: Duration,
    pub verdict: Duration,
    pub client_write: Duration,
    /// The client asked for less than the settings allow: a worker that needs longer is not at fault.
    pub shortened: bool,
}

impl Limits {
    /// The settings, and what the client's headers say instead. A client may not ask for more than the maximum, nor for
    /// what is no time.
    pub fn new(settings: &Deadlines, headers: &HeaderMap) -> Result<Limits, Failure> {
        let wish = |name: &'static str| wished(headers, name, settings.override_max);
        let whole = wish("x-tandem-timeout-ms")?;
        let prefill = wish("x-tandem-prefill-timeout-ms")?;
        let first_token = wish("x-tandem-first-token-timeout-ms")?;
        let silence = wish("x-tandem-silence-timeout-ms")?;
        let less = |wish: Option<Duration>, setting: Duration| wish.is_some_and(|wish| wish < setting);
        let shortened = less(whole, settings.whole)
            || less(prefill, settings.prefill)
            || less(first_token, settings.first_token)
            || less(silence, settings.silence);
        let whole = whole.unwrap_or(settings.whole);
        // A client that asks for more time for the request asks for it on behalf of both legs.
        let prefill_setting = if settings.short_prefill { settings.prefill } else { settings.prefill.max(whole) };
        Ok(Limits {
            whole,
            prefill: prefill.unwrap_or(prefill_setting),
            first_token: first_token.unwrap_or(settings.first_token),
            silence: silence.unwrap_or(settings.silence),
            verdict: settings.verdict,
            client_write: settings.client_write,
            shortened,
        })
    }
}

fn wished(headers: &HeaderMap, name: &'static str, max: Duration) -> Result<Option<Duration>, Failure> {
    let mut values = headers.get_all(name).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return match headers.contains_key(name) {
            false => Ok(None),
            true => Err(Failure::client(400, "invalid_timeout", format!("the header {name} is given twice"))),
        };
    };
    let millis = value.to_str().ok().and_then(|v| v.trim().parse::<u64>().ok());
    match millis.map(Duration::from_millis) {
        Some(wish) if !wish.is_zero() && wish <= max => Ok(Some(wish)),
        _ => {
            let what = format!("the header {name} must be a number of milliseconds from 1 to {}", max.as_millis());
            Err(Failure::client(400, "invalid_timeout", what))
        }
    }
}

/// Where an exchange stands in time.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    limits: Limits,
    arrived: Instant,
    streams: bool,
    token_seen: bool,
    last_piece: Instant,
    verdict_at: Option<Instant>,
    write_since: Option<Instant>,
    /// D is not read, since it waits for P.
    held: bool,
    over: Option<Over>,
}

#[derive(Clone, Copy, Debug)]
enum Over {
    /// The client only has to take the rest.
    Finished,
    Failed(Instant),
}

impl Clock {
    pub fn new(limits: Limits, arrived: Instant, streams: bool, now: Instant) -> Self {
        Clock {
            limits,
            arrived,
            streams,
            token_seen: false,
            last_piece: now,
            verdict_at: None,
            write_since: None,
            held: false,
            over: None,
        }
    }

    pub fn token(&mut self) {
        self.token_seen = true;
    }

    /// A piece of D's answer came.
    pub fn piece(&mut self, now: Instant) {
        self.last_piece = now;
    }

    pub fn await_verdict(&mut self, now: Instant) {
        self.verdict_at = Some(now + self.limits.verdict);
    }

    /// D waits for P, or goes on: meanwhile its silence is not its own.
    pub fn hold(&mut self, held: bool, now: Instant) {
        self.held = held;
        self.last_piece = now;
    }

    pub fn write_begins(&mut self, now: Instant) {
        self.write_since = Some(now);
    }

    /// The time that a slow client takes is not D's silence.
    pub fn write_ended(&mut self, now: Instant) {
        self.write_since = None;
        self.last_piece = now;
    }

    pub fn finished(&mut self) {
        self.over = Some(Over::Finished);
    }

    pub fn failed(&mut self, now: Instant) {
        self.over = Some(Over::Failed(now));
    }

    /// What ends the exchange next if nothing happens. `prefill`: P's leg still matters.
    pub fn next(&self, prefill: bool) -> (Instant, Deadline) {
        let limits = &self.limits;
        let write = self.write_since.map(|since| (since + limits.client_write, Deadline::ClientWrite));
        match self.over {
            Some(Over::Finished) => return write.unwrap_or((self.arrived + limits.whole, Deadline::Whole)),
            Some(Over::Failed(at)) => return (at + LAST_WORDS, Deadline::ClientWrite),
            None => {}
        }
        let candidates = [
            write,
            prefill.then(|| (self.arrived + limits.prefill, Deadline::Prefill)),
            (self.streams && !self.token_seen).then(|| (self.arrived + limits.first_token, Deadline::FirstToken)),
            // While the client takes a piece, or P is waited for, nothing is read from D.
            (self.streams && self.token_seen && write.is_none() && !self.held)
                .then(|| (self.last_piece + limits.silence, Deadline::Silence)),
            self.verdict_at.map(|at| (at, Deadline::Verdict)),
        ];
        let whole = (self.arrived + limits.whole, Deadline::Whole);
        candidates.into_iter().flatten().fold(whole, |next, other| if other.0 < next.0 { other } else { next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    fn settings(flags: &str) -> Deadlines {
        config(&format!("--worker-urls http://x:1 {flags}")).unwrap().deadlines
    }

    fn headers(given: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in given {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn clients_choose_within_the_maximum() {
        let settings = settings("--request-timeout-secs 60 --timeout-override-max-secs 120");
        let limits = Limits::new(&settings, &headers(&[])).unwrap();
        assert_eq!((limits.whole, limits.prefill, limits.shortened), (MS(60_000), MS(60_000), false));
        let longer = Limits::new(&settings, &headers(&[("x-tandem-timeout-ms", "120000")])).unwrap();
        assert_eq!((longer.whole, longer.prefill, longer.shortened), (MS(120_000), MS(120_000), false));
        let all = [
            ("x-tandem-timeout-ms", "9"),
            ("x-tandem-prefill-timeout-ms", "8"),
            ("x-tandem-first-token-timeout-ms", "7"),
            ("x-tandem-silence-timeout-ms", "6"),
        ];
        let limits = Limits::new(&settings, &headers(&all)).unwrap();
        let chosen = (limits.whole, limits.prefill, limits.first_token, limits.silence, limits.shortened);
        assert_eq!(chosen, (MS(9), MS(8), MS(7), MS(6), true));
    }

    #[test]
    fn what_is_no_time_is_the_clients_mistake() {
        let settings = settings("");
        for value in ["", "0", "-1", "1.5", "1s", "99999999999999999999", "1800001"] {
            let failure = Limits::new(&settings, &headers(&[("x-tandem-silence-timeout-ms", value)])).unwrap_err();
            assert_eq!((failure.status, failure.code), (400, "invalid_timeout"), "{value}");
            assert!(failure.message.contains("x-tandem-silence-timeout-ms"), "{}", failure.message);
        }
        let twice = headers(&[("x-tandem-timeout-ms", "1"), ("x-tandem-timeout-ms", "2")]);
        assert!(Limits::new(&settings, &twice).is_err());
    }

    #[test]
    fn a_short_prefill_deadline_stays_short_only_where_it_is_meant() {
        let meant = settings("--prefill-timeout-secs 5 --allow-short-prefill-timeout");
        assert_eq!(Limits::new(&meant, &headers(&[])).unwrap().prefill, MS(5000));
    }

    #[test]
    fn the_next_deadline_follows_what_happened() {
        let settings = settings("--request-timeout-secs 100 --first-token-timeout-secs 30 --silence-timeout-secs 10");
        let limits = Limits::new(&settings, &headers(&[("x-tandem-prefill-timeout-ms", "20000")])).unwrap();
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let mut clock = Clock::new(limits, start, true, start);
        assert_eq!(clock.next(true), (at(20), Deadline::Prefill));
        assert_eq!(clock.next(false), (at(30), Deadline::FirstToken));
        clock.token();
        clock.piece(at(5));
        assert_eq!(clock.next(false), (at(15), Deadline::Silence));
        clock.write_begins(at(5));
        assert_eq!(clock.next(false), (at(100), Deadline::Whole), "a slow client is not D's silence");
        clock.write_ended(at(60));
        assert_eq!(clock.next(false), (at(70), Deadline::Silence));
        clock.hold(true, at(60));
        assert_eq!(clock.next(false), (at(100), Deadline::Whole), "nor is a slow prefill");
        clock.hold(false, at(60));
        clock.await_verdict(at(61));
        assert_eq!(clock.next(true).1, Deadline::Prefill);
        assert_eq!(clock.next(false), (at(61) + MS(5), Deadline::Verdict));
        clock.write_begins(at(62));
        clock.failed(at(63));
        assert_eq!(clock.next(false), (at(68), Deadline::ClientWrite));
        clock.finished();
        assert_eq!(clock.next(false), (at(62 + 120), Deadline::ClientWrite));
        let whole = Clock::new(limits, start, false, start);
        assert_eq!(whole.next(false), (at(100), Deadline::Whole));
    }
}
