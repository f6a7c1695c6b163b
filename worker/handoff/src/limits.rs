//! The deadlines and table limits of both machines. *Pure.*

use crate::sabotage::Planted;

/// Every non-terminal state has one of these deadlines (H6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// P: a request without Reserve, a Reserve without request, and the life of a tombstone.
    pub bootstrap_timeout_ms: u64,
    /// From Reserve to commit on D, from Reserve to the end on P.
    pub waiting_timeout_ms: u64,
    /// From the end of an attempt to proof of quiet. After it the channel is closed and the pages count as quarantined;
    /// it frees nothing.
    pub drain_timeout_ms: u64,
    /// P: Reserves that wait for their request, over all channels.
    pub held_reserves_max: usize,
    /// P: rooms that ended before their other half came.
    pub tombstones_max: usize,
    /// P: ended attempts of one channel with a write of unknown outcome, which are remembered; with more it is closed.
    pub poisoned_max: usize,
    /// Channels at once, and on D also names of prefill workers that are remembered.
    pub channels_max: usize,
    /// A fault for the simulator to find; none in any other build.
    pub planted: Planted,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bootstrap_timeout_ms: 300_000,
            waiting_timeout_ms: 300_000,
            drain_timeout_ms: 5_000,
            held_reserves_max: 4096,
            tombstones_max: 16_384,
            poisoned_max: 1024,
            channels_max: 1024,
            planted: Planted::default(),
        }
    }
}
