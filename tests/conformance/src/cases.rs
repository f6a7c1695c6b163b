//! The cases, in the order of what they are about. Each is a function from a backend to what it saw.

use tandem_handoff::layout::PoolShape;

use crate::{Backend, Failure};

mod abort;
mod allocation;
mod duplicates;
mod fence;
mod layouts;
mod peers;
mod recovery;
mod volume;

/// One case, callable without a test harness.
pub struct Case {
    pub name: &'static str,
    pub run: fn(&dyn Backend) -> Result<(), Failure>,
}

/// The table of cases, and the macro that makes a test of each.
macro_rules! cases {
    ($dollar:tt $($module:ident: $($name:ident)+;)+) => {
        pub const CASES: &[Case] = &[$($(Case { name: stringify!($name), run: $module::$name },)+)+];

        /// One test per case: `tandem_conformance::suite!(backend)`.
        #[macro_export]
        macro_rules! suite {
            ($dollar backend:expr) => {
                $($(
                    #[test]
                    fn $name() {
                        if let Err(failure) = $crate::run(stringify!($name), &$dollar backend) {
                            panic!("{failure}");
                        }
                    }
                )+)+
            };
        }
    };
}

cases! { $
    layouts: every_pair_of_tp_with_a_held_prefix replicated_heads_arrive_on_every_rank;
    abort: the_client_aborts a_deadline_passes the_prefill_worker_fails the_decode_worker_fails
        interleaved_attempts_end_at_every_point;
    duplicates: a_second_completion_changes_nothing a_second_cancel_changes_nothing a_delayed_drain_frees_once
        callbacks_of_an_old_attempt_after_its_room_is_reused;
    allocation: an_allocation_that_fails_midway_is_rolled_back a_cancel_while_preempted_pins_until_drained;
    recovery: a_missing_acknowledgement_frees_nothing the_drain_deadline_recovers;
    fence: after_quiet_no_byte_changes_for_two_seconds a_reader_in_mid_read_gives_its_borrow_back;
    peers: a_peer_that_stops_reading a_prefill_worker_restarts_on_the_same_address
        a_decode_worker_restarts_on_the_same_address a_cut_in_the_middle_of_a_piece;
    volume: ten_thousand_small_writes one_large_transfer a_slow_peer_bounds_memory;
}

/// Pages of 2 KiB, in four heads.
fn small(tp: u32, pages: u32) -> PoolShape {
    PoolShape { layers: 2, kv_heads: 4, head_dim: 8, page_size: 4, element_bytes: 4, tp, pages }
}

/// Pages of 1 MiB: a piece of one takes several reads.
fn large(pages: u32) -> PoolShape {
    PoolShape { layers: 32, kv_heads: 4, head_dim: 64, page_size: 16, element_bytes: 4, tp: 1, pages }
}

const MIB: u64 = 1 << 20;
