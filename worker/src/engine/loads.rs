//! What the engine tells about itself, for `/v1/loads`, `/health` and metrics. *Pure.*

use tandem_handoff::ids::Time;

use super::quarantine::Excess;

/// A snapshot after a turn. The `_total` counts only grow.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loads {
    /// Samples that hold pages and are computed.
    pub running: u32,
    /// Samples that wait for their first pages, and preempted ones.
    pub waiting: u32,
    /// Preempted samples that wait to return; part of `waiting`.
    pub retracted: u32,
    /// P: samples whose decode worker has not reserved yet.
    pub bootstrap_queue: u32,
    /// P: samples after their prefill, or ended, whose pages are pinned.
    pub inflight_queue: u32,
    /// D: samples that wait for pages, or for a channel to their prefill worker.
    pub prealloc_queue: u32,
    /// D: samples whose pages have been offered to a prefill worker.
    pub transfer_queue: u32,
    /// Prompt and output tokens of all live samples.
    pub total_tokens: u64,
    /// Tokens whose KV lies in the pool, of running samples.
    pub used_tokens: u64,
    pub page_size: u32,
    pub total_pages: u32,
    pub free_pages: u32,
    /// Pages that a sequence, a lease or an attempt holds.
    pub used_pages: u32,
    /// Pages of ended attempts that are not proven quiet yet; part of `used_pages`.
    pub draining_pages: u32,
    /// Of these, pages past the drain deadline.
    pub quarantined_pages: u32,
    /// With more quarantined pages the worker ends.
    pub quarantine_pages_max: u32,
    /// The quarantine was over its limit: nothing more is admitted.
    pub excess: Option<Excess>,
    pub running_max: u32,
    pub queue_max: u32,
    /// Output tokens per second over the last second of work; 0 when idle.
    pub gen_throughput: f32,
    pub retracted_total: u64,
    pub steps_total: u64,
    /// Prompt tokens computed, recomputed ones included.
    pub prompt_tokens_total: u64,
    pub generated_tokens_total: u64,
    pub finished_total: u64,
    pub failed_total: u64,
    pub aborted_total: u64,
}

/// Microseconds of work that a rate is taken over at least.
const RATE_WINDOW: u64 = 1_000_000;

/// Tokens per second, from a count that only grows.
#[derive(Debug, Default)]
pub(super) struct Rate {
    since: Time,
    count: u64,
    rate: f32,
}

impl Rate {
    /// Takes in the count after a step.
    pub fn worked(&mut self, now: Time, count: u64) {
        let elapsed = now.micros_since(self.since);
        if elapsed >= RATE_WINDOW {
            self.rate = ((count - self.count) as f64 * 1e6 / elapsed as f64) as f32;
            (self.since, self.count) = (now, count);
        }
    }

    /// Nothing is being computed.
    pub fn idle(&mut self, now: Time, count: u64) {
        *self = Rate { since: now, count, rate: 0.0 };
    }

    pub fn per_second(&self) -> f32 {
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_taken_over_a_second_of_work_and_ends_with_it() {
        let mut rate = Rate::default();
        rate.idle(Time(5_000_000), 100);
        rate.worked(Time(5_500_000), 150);
        assert_eq!(rate.per_second(), 0.0);
        rate.worked(Time(7_000_000), 300);
        assert_eq!(rate.per_second(), 100.0);
        rate.idle(Time(7_100_000), 300);
        assert_eq!(rate.per_second(), 0.0);
    }
}
