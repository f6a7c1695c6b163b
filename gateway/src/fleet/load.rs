//! How busy a worker is, rank by rank: what it reported last, what was sent to it since, and the legs of this gateway that
//! have not ended. *Pure* but for atomics.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};

use serde_json::Value;

use crate::pair::Load;

/// A rough size of a token in a request's body, for what was sent since the last report.
const BODY_BYTES_PER_TOKEN: u64 = 4;
/// No report.
const NONE: i64 = -1;

/// What one rank holds. A worker without data parallelism has one.
#[derive(Debug)]
pub struct Slot {
    reported_tokens: AtomicI64,
    sent_bytes_since: AtomicU64,
    legs: AtomicU32,
}

impl Slot {
    pub fn new() -> Self {
        Slot { reported_tokens: AtomicI64::new(NONE), sent_bytes_since: AtomicU64::new(0), legs: AtomicU32::new(0) }
    }

    pub fn begin_leg(&self) {
        self.legs.fetch_add(1, Relaxed);
    }

    pub fn end_leg(&self) {
        self.legs.fetch_sub(1, Relaxed);
    }

    pub fn sent(&self, bytes: usize) {
        self.sent_bytes_since.fetch_add(bytes as u64, Relaxed);
    }

    pub fn report(&self, tokens: Option<u64>) {
        self.sent_bytes_since.store(0, Relaxed);
        self.reported_tokens.store(tokens.map_or(NONE, |t| i64::try_from(t).unwrap_or(i64::MAX)), Relaxed);
    }

    pub fn load(&self) -> Load {
        let sent = self.sent_bytes_since.load(Relaxed) / BODY_BYTES_PER_TOKEN;
        let reported = u64::try_from(self.reported_tokens.load(Relaxed)).ok();
        Load { tokens: reported.map(|r| r.saturating_add(sent)), legs: self.legs.load(Relaxed) }
    }
}

/// Tokens held per rank: `/v1/loads` says `loads[].{dp_rank, num_total_tokens}`, `/get_load` a list of objects with
/// `num_tokens` and perhaps `dp_rank`. Empty where neither is there; a negative number is no load.
pub fn reported(loads: &Value) -> Vec<(usize, u64)> {
    let entries = loads["loads"].as_array().or(loads.as_array());
    let of = |(place, entry): (usize, &Value)| {
        let tokens = entry["num_total_tokens"].as_u64().or(entry["num_tokens"].as_u64())?;
        Some((entry["dp_rank"].as_u64().map_or(place, |rank| rank as usize), tokens))
    };
    // One rank that reports nothing makes the others' sum a wrong one.
    entries.and_then(|all| all.iter().enumerate().map(of).collect()).unwrap_or_default()
}

/// The sum over all ranks; `None` where nothing was reported.
pub fn total(reported: &[(usize, u64)]) -> Option<u64> {
    (!reported.is_empty()).then(|| reported.iter().fold(0u64, |sum, (_, tokens)| sum.saturating_add(*tokens)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn loads_of_both_schemas() {
        let new = json!({"loads": [{"dp_rank": 1, "num_total_tokens": 5}, {"dp_rank": 0, "num_total_tokens": 7}]});
        assert_eq!(reported(&new), [(1, 5), (0, 7)]);
        assert_eq!(total(&reported(&new)), Some(12));
        assert_eq!(reported(&json!([{"num_tokens": 3}, {"num_tokens": 4}])), [(0, 3), (1, 4)]);
    }

    #[test]
    fn a_negative_number_is_no_load() {
        for nothing in [json!([{"num_tokens": -1}]), json!([{"num_tokens": 1}, {"num_tokens": -1}]), json!({"load": 1})]
        {
            assert_eq!(total(&reported(&nothing)), None, "{nothing}");
        }
    }

    #[test]
    fn what_was_sent_since_the_report_counts_until_the_next() {
        let slot = Slot::new();
        slot.report(Some(100));
        slot.begin_leg();
        slot.sent(40);
        assert_eq!(slot.load(), Load { tokens: Some(110), legs: 1 });
        slot.end_leg();
        assert_eq!(slot.load(), Load { tokens: Some(110), legs: 0 });
        slot.report(Some(20));
        assert_eq!(slot.load(), Load { tokens: Some(20), legs: 0 });
        slot.report(None);
        assert_eq!(slot.load(), Load { tokens: None, legs: 0 });
    }
}
