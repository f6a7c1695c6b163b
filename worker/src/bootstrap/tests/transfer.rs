//! What carries the pages of a channel: the choice, its refusals by name, and the way back to TCP.

use super::*;

fn by_shm(pair: &Pair) -> u64 {
    pair.stats.channels_by_shm.load(Ordering::Relaxed)
}

/// The two settings, and whether P's pools can be mapped.
fn pair_of(p: Backend, d: Backend, shared_pools: bool) -> Pair {
    let (mut prefill, decode) = (Setup::over(p, 1), Setup::over(d, 1));
    if !shared_pools {
        prefill.memories = vec![Arc::new(PoolMemory::new(shape(1).pool_bytes()).expect("memory"))];
    }
    Pair::new(prefill, decode)
}

#[test]
fn workers_of_one_host_share_memory_unless_a_side_says_tcp() {
    for (p, d, shared) in [
        (Backend::Auto, Backend::Auto, true),
        (Backend::Auto, Backend::Shm, true),
        (Backend::Shm, Backend::Auto, true),
        (Backend::Tcp, Backend::Auto, false),
        (Backend::Auto, Backend::Tcp, false),
    ] {
        let mut pair = pair_of(p, d, true);
        pair.assert_serves(1, 7);
        assert_eq!(by_shm(&pair) > 0, shared, "{p:?}, {d:?}");
    }
}

#[test]
fn private_pools_move_by_tcp_unless_shared_memory_is_demanded() {
    let mut pair = pair_of(Backend::Auto, Backend::Auto, false);
    pair.assert_serves(1, 7);
    assert_eq!(by_shm(&pair), 0);
    let mut pair = pair_of(Backend::Auto, Backend::Shm, false);
    pair.ask(1, 7, &[3, 0, 6]);
    let (kind, message) = pair.d_failure(1);
    assert_eq!(kind, SampleErrorKind::Peer, "no fault of the request");
    assert!(message.contains("serves no shared memory"), "{message}");
    pair.until_d_quiet();
}

#[test]
fn a_demand_that_the_other_side_will_not_meet_is_refused_by_name() {
    for (p, d) in [(Backend::Tcp, Backend::Shm), (Backend::Shm, Backend::Tcp)] {
        let mut pair = pair_of(p, d, true);
        pair.ask(1, 7, &[3, 0, 6]);
        let (kind, message) = pair.d_failure(1);
        assert_eq!(kind, SampleErrorKind::Peer);
        let named = format!("transfer-backend (prefill {}, decode {})", p.name(), d.name());
        assert!(message.contains(&named), "{message}");
        pair.until_d_quiet();
    }
}

#[test]
fn a_prefill_worker_that_must_share_and_cannot_does_not_start() {
    let mut setup = Setup::over(Backend::Shm, 1);
    setup.memories = vec![Arc::new(PoolMemory::new(shape(1).pool_bytes()).expect("memory"))];
    let runtime = Runtime::new().expect("runtime");
    let error = setup.start_prefill(&runtime, &Arc::default()).err().expect("no shared memory").to_string();
    assert!(error.contains("--disaggregation-transfer-backend shm"), "{error}");
}

#[test]
fn a_key_binds_the_pools_to_their_channel() {
    let directory = tempfile::tempdir().expect("directory");
    let key = key_file(&directory, "key", "0123456789abcdef0123456789abcdef\n");
    let (mut p, mut d) = (Setup::over(Backend::Shm, 1), Setup::over(Backend::Shm, 1));
    p.config.key_file = key.clone();
    d.config.key_file = key;
    let mut pair = Pair::new(p, d);
    pair.assert_serves(1, 7);
    assert!(by_shm(&pair) > 0);
}

#[test]
fn pools_that_are_not_what_the_handshake_says_are_not_mapped() {
    for (d, serves) in [(Backend::Auto, true), (Backend::Shm, false)] {
        let mut prefill = Setup::over(Backend::Auto, 1);
        prefill.memories = vec![Arc::new(PoolMemory::shared(2 * shape(1).pool_bytes()).expect("memory"))];
        let mut pair = Pair::new(prefill, Setup::over(d, 1));
        if serves {
            pair.assert_serves(1, 7);
        } else {
            pair.ask(1, 7, &[3, 0, 6]);
            let (_, message) = pair.d_failure(1);
            assert!(message.contains("no shared memory") && message.contains("bytes, by the handshake"), "{message}");
        }
        assert_eq!(by_shm(&pair), 0);
    }
}
