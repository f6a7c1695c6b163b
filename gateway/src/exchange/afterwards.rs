//! What goes on without the client: legs that are read to their end, so that their connections can serve again and a
//! worker counts as busy until its part really ended, and workers that are told that nobody waits any more.

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::time::timeout;

use crate::error::Side;
use crate::fleet::Outcome;
use crate::gateway::Gateway;
use crate::leg::{Leg, LegEvent};
use crate::stream::{Answer, Expected, Meaning};

/// A worker may take this long to end an answer whose last event was seen, for its connection to be kept.
const TIDY_WAIT: Duration = Duration::from_secs(1);

/// Reads a leg whose answer is complete to its framing's end and keeps the connection, if that comes soon.
pub fn tidy(mut leg: Leg) {
    // Mostly all of it is there already.
    match tokio::task::unconstrained(ends(&mut leg)).now_or_never() {
        Some(true) => leg.release(),
        Some(false) => {}
        None => drop(tokio::spawn(async move {
            if timeout(TIDY_WAIT, ends(&mut leg)).await == Ok(true) {
                leg.release();
            }
        })),
    }
}

/// Reads to the end; false where there is none.
pub async fn ends(leg: &mut Leg) -> bool {
    loop {
        match leg.next().await {
            LegEvent::Head(_) | LegEvent::Data(_) => {}
            LegEvent::End { .. } => return true,
            LegEvent::Broken(_) => return false,
        }
    }
}

/// P goes on without the client until `deadline`; a failure is counted.
pub fn detach(gateway: &Gateway, leg: Leg, answer: Option<Answer>, expected: Expected, deadline: Instant) {
    let late = gateway.metrics.exchange.late_prefill_failures.clone();
    tokio::spawn(async move {
        let worker = leg.worker().clone();
        if let Ok(false) =
            timeout(deadline.saturating_duration_since(Instant::now()), drain(leg, answer, expected)).await
        {
            tracing::warn!(worker = worker.url(), "prefill failed after decode had ended");
            late.inc();
        }
    });
}

/// Reads a leg to its end and gives the connection back; false when it failed.
async fn drain(mut leg: Leg, mut answer: Option<Answer>, expected: Expected) -> bool {
    loop {
        let meaning = match leg.next().await {
            LegEvent::Head(head) => {
                answer = Some(Answer::new(Side::Prefill, leg.worker().url(), &head, expected));
                Meaning::None
            }
            LegEvent::Data(data) => answer.as_mut().map_or(Meaning::None, |a| a.push(data).meaning),
            LegEvent::End { clean } => {
                let meaning = answer.as_mut().map_or(Meaning::Complete, |a| a.end(clean).meaning);
                if !matches!(meaning, Meaning::Failed(_)) {
                    leg.report(Outcome::Good);
                }
                leg.release();
                return !matches!(meaning, Meaning::Failed(_));
            }
            LegEvent::Broken(_) => return false,
        };
        if matches!(meaning, Meaning::Failed(_)) {
            return false;
        }
    }
}
