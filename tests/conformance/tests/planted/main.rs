//! Each case can fail: a fault is planted into a good backend, and the case that is there to find it does.

use std::{collections::BTreeSet, sync::Mutex, thread};

use broken::{Broken, Fault};
use tandem_conformance::{Backend, CASES, run, shm::Shm, tcp::Tcp};

mod broken;

/// Which case must find which fault, and a word of what it says then.
const TABLE: &[(Fault, &str, &str)] = &[
    (Fault::LandsTwice, "every_pair_of_tp_with_a_held_prefix", "landed"),
    (Fault::LandsEarly, "every_pair_of_tp_with_a_held_prefix", "H4"),
    (Fault::LandsInWrongPage, "every_pair_of_tp_with_a_held_prefix", "H4"),
    (Fault::SettlesBeforeCopying, "every_pair_of_tp_with_a_held_prefix", "H4"),
    (Fault::SettlesTwice, "every_pair_of_tp_with_a_held_prefix", "H5"),
    (Fault::DropsAPiece, "replicated_heads_arrive_on_every_rank", "the commit"),
    (Fault::QuietWithoutRevoking, "the_client_aborts", "after its quiet"),
    (Fault::ForgetsQuiet, "a_deadline_passes", "quiet"),
    (Fault::ForgetsSettlement, "the_prefill_worker_fails", "quiet"),
    (Fault::QuietWithoutRevoking, "the_decode_worker_fails", "after its quiet"),
    (Fault::SettlesBeforeCopying, "interleaved_attempts_end_at_every_point", "H4"),
    (Fault::QuietPerRevoke, "a_second_completion_changes_nothing", "was not revoked"),
    (Fault::QuietPerRevoke, "a_second_cancel_changes_nothing", "quiet twice"),
    (Fault::QuietPerRevoke, "a_delayed_drain_frees_once", "quiet twice"),
    (Fault::BlursAttempts, "callbacks_of_an_old_attempt_after_its_room_is_reused", "is reported quiet"),
    (Fault::ScribblesOnSource, "an_allocation_that_fails_midway_is_rolled_back", "KV changed"),
    (Fault::ForgetsSettlement, "a_cancel_while_preempted_pins_until_drained", "P's quiet"),
    (Fault::ForgetsQuiet, "a_missing_acknowledgement_frees_nothing", ""),
    (Fault::ForgetsQuiet, "the_drain_deadline_recovers", "D's own proof"),
    (Fault::CloseIsQuiet, "a_reader_in_mid_read_gives_its_borrow_back", ""),
    (Fault::BlocksInPost, "a_peer_that_stops_reading", "waited"),
    (Fault::CloseIsQuiet, "a_prefill_worker_restarts_on_the_same_address", ""),
    (Fault::ForgetsSettlement, "a_decode_worker_restarts_on_the_same_address", "P's quiet"),
    (Fault::SilentBreak, "a_cut_in_the_middle_of_a_piece", "broken"),
    (Fault::DropsAPiece, "ten_thousand_small_writes", "the commit"),
    (Fault::ScribblesOnTarget, "one_large_transfer", "H4"),
    (Fault::SettlesBeforeCopying, "a_slow_peer_bounds_memory", "H5"),
];

/// On shared memory P needs D's word: what a peer that reads nothing shows there.
const SHM: &[(Fault, &str, &str)] = &[
    (Fault::SettlesAtStop, "a_peer_that_stops_reading", "H5"),
    (Fault::QuietWithoutRevoking, "after_quiet_no_byte_changes_for_two_seconds", "after its quiet"),
];
/// On TCP P's own end is enough.
const TCP: &[(Fault, &str, &str)] = &[
    (Fault::IgnoresStop, "a_peer_that_stops_reading", "P's quiet"),
    // By a late piece or by a changed byte of the refilled page, whichever is seen first.
    (Fault::QuietWithoutRevoking, "after_quiet_no_byte_changes_for_two_seconds", ""),
];

/// Runs the table over one backend, some rows at a time since most of them wait, and prints it.
fn caught<B: Backend>(backend: impl Fn() -> B + Sync, own: &[(Fault, &str, &str)]) {
    let (rows, missed) = (Mutex::new(TABLE.iter().chain(own)), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(&(fault, case, word)) = next(&rows) {
                    let saw = match run(case, &Broken { inner: backend(), fault }) {
                        Err(failure) if failure.to_string().contains(word) => {
                            println!("{fault:?} is found by {case}: {failure}");
                            continue;
                        }
                        Err(failure) => format!("{case} failed on {fault:?} by another reason: {failure}"),
                        Ok(()) => format!("{case} missed {fault:?}"),
                    };
                    missed.lock().expect("no row panics").push(saw);
                }
            });
        }
    });
    let missed = missed.into_inner().expect("no row panics");
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

fn next<T: Iterator>(rows: &Mutex<T>) -> Option<T::Item> {
    rows.lock().expect("no row panics").next()
}

#[test]
fn planted_faults_are_found_on_tcp() {
    caught(Tcp::relayed, TCP);
}

#[test]
fn planted_faults_are_found_on_shm() {
    caught(Shm::relayed, SHM);
}

#[test]
fn every_case_has_a_fault_that_it_finds() {
    let cases: BTreeSet<&str> = CASES.iter().map(|case| case.name).collect();
    for own in [TCP, SHM] {
        let shown: BTreeSet<&str> = TABLE.iter().chain(own).map(|(_, case, _)| *case).collect();
        assert_eq!(cases, shown);
    }
}
