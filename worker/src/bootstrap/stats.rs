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
    }
}
