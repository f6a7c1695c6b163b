//! Counters of the handoff: plain atomics, each only grows. A worker's own also feed its `/metrics`.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use tandem_handoff::{source::Piece, wire::transfer::Backend};

use crate::metrics::TransferMetrics;

/// Each transfer counts once: completed, or failed before or after its rendezvous.
#[derive(Default)]
pub struct HandoffStats {
    /// Bytes of pages that P posted.
    pub bytes_posted: AtomicU64,
    /// Bytes of pages that D committed.
    pub bytes_received: AtomicU64,
    pub transfers_completed: AtomicU64,
    pub transfers_failed: AtomicU64,
    /// P: requests that ended before a Reserve met them.
    pub bootstrap_failed: AtomicU64,
    /// Control channels that passed Hello.
    pub channels_opened: AtomicU64,
    /// Of these, channels whose pages go by shared memory.
    pub channels_by_shm: AtomicU64,
    /// Connections refused: unauthenticated ones over the cap, wrong keys, workers that differ.
    pub handshakes_refused: AtomicU64,
    /// D: attempts whose pages arrived damaged.
    pub checksums_failed: AtomicU64,
    metrics: Option<TransferMetrics>,
}

impl HandoffStats {
    /// Counters that feed these series too.
    pub fn feeding(metrics: TransferMetrics) -> Self {
        Self { metrics: Some(metrics), ..Self::default() }
    }

    pub(crate) fn posted(&self, pieces: &[Piece]) {
        self.bytes_posted.fetch_add(pieces.iter().map(|piece| piece.bytes as u64).sum(), Relaxed);
    }

    /// P: an attempt was handed over whole, `transfer_us` after its first post.
    pub(crate) fn delivered(&self, bytes: u64, bootstrap_us: u64, transfer_us: u64) {
        self.transfers_completed.fetch_add(1, Relaxed);
        if let Some(metrics) = &self.metrics {
            metrics.delivered(bytes, Duration::from_micros(bootstrap_us), Duration::from_micros(transfer_us));
        }
    }

    /// D: a prompt has pages, so long after it came.
    pub(crate) fn allocated(&self, waited_us: u64) {
        if let Some(metrics) = &self.metrics {
            metrics.allocated(Duration::from_micros(waited_us));
        }
    }

    /// D: an attempt's pages have landed and are a sequence's now.
    pub(crate) fn committed(&self, bytes: u64) {
        self.transfers_completed.fetch_add(1, Relaxed);
        self.bytes_received.fetch_add(bytes, Relaxed);
    }

    /// D: pages arrived damaged.
    pub(crate) fn checksum_failed(&self) {
        self.checksums_failed.fetch_add(1, Relaxed);
        if let Some(metrics) = &self.metrics {
            metrics.checksum_failed();
        }
    }

    pub(crate) fn transfer_failed(&self) {
        self.transfers_failed.fetch_add(1, Relaxed);
        if let Some(metrics) = &self.metrics {
            metrics.transfer_failed();
        }
    }

    pub(crate) fn bootstrap_failed(&self) {
        self.bootstrap_failed.fetch_add(1, Relaxed);
        if let Some(metrics) = &self.metrics {
            metrics.bootstrap_failed();
        }
    }

    pub(crate) fn channel_opened(&self) {
        self.channels_opened.fetch_add(1, Relaxed);
    }

    /// What carries a channel's pages is settled.
    pub(crate) fn carried_by(&self, backend: Backend) {
        if backend == Backend::Shm {
            self.channels_by_shm.fetch_add(1, Relaxed);
        }
        if let Some(metrics) = &self.metrics {
            metrics.channel_opened(backend);
        }
    }

    pub(crate) fn handshake_refused(&self) {
        self.handshakes_refused.fetch_add(1, Relaxed);
        if let Some(metrics) = &self.metrics {
            metrics.handshake_refused();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tandem_handoff::{
        fence::PublishedPages,
        ids::{Room, Time},
        layout::PoolShape,
        limits::Limits,
        ticket::Ticket,
        wire::{Cause, CauseKind, FirstToken, Side},
    };

    use super::*;
    use crate::{
        decode_role::{DecodeHandoff, scripted as decode},
        engine::Loads,
        metrics::Metrics,
        prefill_role::{PrefillHandoff, scripted as prefill},
        request::SeqId,
    };

    const SHAPE: PoolShape =
        PoolShape { layers: 1, kv_heads: 2, head_dim: 2, page_size: 4, element_bytes: 2, tp: 1, pages: 8 };
    const PROMPT: [u32; 5] = [1, 2, 3, 4, 5];

    fn ticket(room: u64) -> Ticket {
        Ticket { host: "p".into(), port: 1, room: Room::new(room).expect("in range") }
    }

    fn first() -> FirstToken {
        FirstToken { token: 7, logprob: None, cached_tokens: 0 }
    }

    fn counted() -> (Metrics, Arc<HandoffStats>) {
        let metrics = Metrics::new("m", "x");
        let stats = Arc::new(HandoffStats::feeding(metrics.transfer.clone()));
        (metrics, stats)
    }

    /// The value of one series as a scrape shows it.
    fn shown(metrics: &Metrics, name: &str) -> f64 {
        let text = String::from_utf8(metrics.render(&Loads::default())).expect("text");
        let line = text.lines().find(|line| line.starts_with(&format!("sglang:{name}{{")));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{text}"))
    }

    fn assert_shown(metrics: &Metrics, expected: &[(&str, f64)]) {
        for (name, value) in expected {
            let got = shown(metrics, name);
            assert!((got - value).abs() <= 1e-9 * value.abs(), "{name} is {got}, not {value}");
        }
    }

    #[test]
    fn speed_and_latency_of_a_transfer_are_exact_and_every_transfer_counts_once() {
        let (metrics, stats) = counted();
        let (mut role, script) = prefill::counted(SHAPE, Limits::default(), stats);
        role.request(Time(1_000), SeqId(1), &ticket(1), &PROMPT);
        script.reserve(ticket(1).room, &PROMPT, vec![6, 2]);
        role.poll(Time(4_000));
        // The first page is posted at 10 ms, and everything has left at 14 ms.
        role.chunk_written(Time(10_000), SeqId(1), &[4, 0], 0..1);
        role.finish(Time(12_000), SeqId(1), &[4, 0], 1..2, first());
        role.poll(Time(14_000));
        // One ends before its Reserve, one after it.
        role.request(Time(20_000), SeqId(2), &ticket(2), &PROMPT);
        role.cancel(Time(21_000), SeqId(2), Cause::new(Side::Prefill, CauseKind::Aborted, "the client left"));
        role.request(Time(30_000), SeqId(3), &ticket(3), &PROMPT);
        script.reserve(ticket(3).room, &PROMPT, vec![6, 2]);
        role.poll(Time(31_000));
        role.cancel(Time(32_000), SeqId(3), Cause::new(Side::Prefill, CauseKind::Aborted, "the client left"));
        role.poll(Time(33_000));
        let bytes = 2.0 * SHAPE.page_bytes() as f64;
        assert_shown(
            &metrics,
            &[
                ("kv_transfer_bootstrap_ms_sum", 3.0),
                ("kv_transfer_bootstrap_ms_count", 1.0),
                ("kv_transfer_latency_ms_sum", 4.0),
                ("kv_transfer_latency_ms_count", 1.0),
                ("kv_transfer_total_mb_sum", bytes / 1e6),
                ("kv_transfer_total_mb_count", 1.0),
                ("kv_transfer_speed_gb_s_sum", bytes / 1e9 / 0.004),
                ("kv_transfer_speed_gb_s_count", 1.0),
                ("num_bootstrap_failed_reqs_total", 1.0),
                ("num_transfer_failed_reqs_total", 1.0),
            ],
        );
    }

    #[test]
    fn the_wait_for_pages_is_never_negative_and_landed_bytes_count_once() {
        let (metrics, stats) = counted();
        let (mut role, script) = decode::counted(SHAPE, Limits::default(), stats.clone());
        let pages = || PublishedPages::new(vec![6, 2]);
        role.reserve(Time(9_000), Time(2_000), SeqId(1), &ticket(1), &PROMPT, pages());
        // A clock that was read twice in the wrong order.
        role.reserve(Time(9_000), Time(9_500), SeqId(2), &ticket(2), &PROMPT, pages());
        role.poll(Time(10_000));
        script.deliver(ticket(1).room, first());
        script.fail(ticket(2).room, Cause::new(Side::Prefill, CauseKind::Internal, "out of paper"));
        role.poll(Time(11_000));
        assert_shown(
            &metrics,
            &[
                ("kv_transfer_alloc_ms_sum", 7.0),
                ("kv_transfer_alloc_ms_count", 2.0),
                ("num_transfer_failed_reqs_total", 1.0),
            ],
        );
        assert_eq!((stats.transfers_completed.load(Relaxed), stats.transfers_failed.load(Relaxed)), (1, 1));
        // The scripted role counts a byte per page.
        assert_eq!(stats.bytes_received.load(Relaxed), 2);
        assert_eq!(role.queues(), Default::default());
    }
}
