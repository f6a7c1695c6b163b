//! One test per kind of fault that systems of this sort have had in the field; its name says which.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::{
    layout::Mapping,
    wire::{Done, Phases, Reserve, Sent, hello::Identity, prompt_hash, transfer::Transfer},
};

fn drained(frames: &VecDeque<Frame>, of: Attempt) -> usize {
    frames.iter().filter(|frame| **frame == Frame::Drained { attempt: of }).count()
}

#[test]
fn two_ranks_of_a_decode_worker_get_one_drained_for_both_and_a_later_attempt_its_own() {
    let mut pair = Pair::between(shape(), PoolShape { tp: 2, ..shape() });
    for (id, number) in [(1, 1), (2, 2)] {
        pair.open(id, 5);
        let attempt = pair.channel().attempt(number);
        pair.p_chunk(id);
        assert_eq!(pair.posted.len(), 2, "a piece for each rank");
        pair.d_cancel(id);
        // P hears of it and forgets whom it served; the writes of both ranks are still under way.
        let abort = pair.to_p.pop_front().expect("an Abort");
        pair.source.frame(pair.now, pair.channel(), abort);
        for left in [1, 0] {
            pair.act();
            assert_eq!(drained(&pair.to_d, attempt), 0);
            pair.posted.pop_front();
            pair.source.settled(pair.now, attempt, 1, Settlement::Sent);
            assert_eq!(pair.posted.len(), left);
        }
        pair.act();
        assert_eq!(drained(&pair.to_d, attempt), 1);
        assert_eq!(pair.to_d.len(), 1);
        pair.deliver();
        pair.quiet();
    }
    pair.assert_ended(&[&[7, 3], &[7, 3]], Basis::Quiet);
}

#[test]
fn a_transport_that_gave_up_and_still_delivers_frees_no_page_before_quiet() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_chunk(1);
    let (attempt, piece) = pair.posted.pop_front().expect("posted");
    pair.source.settled(pair.now, attempt, 1, Settlement::Unknown);
    pair.act();
    pair.deliver();
    assert_eq!(pair.d_failure(1).expect("failed").kind, CauseKind::Lost);
    for _ in 0..10 {
        pair.wait_ms(51);
        // The write lands all the same, whenever it likes.
        pair.sink.landed(attempt, &[piece.index]);
        pair.act();
        assert!(!pair.committed(1) && pair.sink.draining_pages().0 == 2, "H2: nothing proves the pages quiet");
    }
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

#[test]
fn timeouts_free_nothing_under_a_running_write() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_chunk(1);
    for _ in 0..50 {
        pair.wait_ms(2000);
        if pair.channel.is_some() {
            pair.deliver();
        }
        assert!(!pair.p_is_quiet(1) && !pair.source.is_idle(), "H5: a write names the source page");
        assert_eq!(pair.sink.draining_pages().0, 2, "H2: a write may reach the target pages");
    }
    assert_eq!(pair.p_failure(1).expect("failed").kind, CauseKind::Timeout);
    assert_eq!(pair.d_failure(1).expect("failed").kind, CauseKind::Timeout);
    pair.land();
    assert!(pair.p_is_quiet(1));
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

/// One transfer in steps, so that a test can end it after any of them.
fn transfer_step(pair: &mut Pair, step: usize) {
    match step {
        0 => pair.p_request(1, 5),
        1 => pair.d_reserve(1, 5, &PROMPT, &[7, 3]),
        3 => pair.source.chunk_written(pair.now, RequestId(1), &[1, 2], 0..1, &[]),
        5 => pair.source.finish(pair.now, RequestId(1), &[1, 2], 1..2, &[], first()),
        4 | 6 => pair.land(),
        _ => pair.deliver(),
    }
    pair.act();
}

#[test]
fn a_cancel_in_any_state_ends_once_and_every_late_message_changes_nothing() {
    for steps in 0..=8 {
        for at_prefill in [true, false] {
            let mut pair = Pair::new();
            let (mut sent_to_p, mut sent_to_d, mut pieces) = (Vec::new(), Vec::new(), BTreeSet::new());
            for step in 0..steps + 2 {
                if step == steps {
                    match at_prefill {
                        true => pair.source.cancel(pair.now, RequestId(1), user()),
                        false => pair.sink.cancel(pair.now, RequestId(1), user()),
                    }
                    pair.act();
                } else {
                    transfer_step(&mut pair, step.min(7));
                }
                sent_to_p.extend(pair.to_p.iter().cloned());
                sent_to_d.extend(pair.to_d.iter().cloned());
                pieces.extend(pair.posted.iter().map(|(attempt, piece)| (*attempt, piece.index)));
            }
            pair.deliver();
            pair.land();
            pair.wait_ms(2000);
            pair.deliver();
            pair.quiet();
            let facts = (pair.p_facts.len(), pair.d_facts.len());
            let channel = pair.channel();
            for frame in sent_to_p {
                pair.source.frame(pair.now, channel, frame);
            }
            for frame in sent_to_d {
                pair.sink.frame(pair.now, channel, frame);
            }
            for (attempt, piece) in pieces {
                pair.sink.landed(attempt, &[piece]);
                pair.sink.quiet(attempt);
            }
            pair.act();
            assert_eq!((pair.p_facts.len(), pair.d_facts.len()), facts, "after {steps} steps");
            let ends = |committed: bool, failed: Option<&Cause>| usize::from(committed) + usize::from(failed.is_some());
            let requested = pair.p_facts.iter().any(|fact| matches!(fact, SourceFact::Quiet { .. }));
            assert_eq!(ends(pair.delivered(1), pair.p_failure(1)), usize::from(requested), "H7 after {steps} steps");
            let offered = !pair.d_facts.is_empty();
            assert_eq!(ends(pair.committed(1), pair.d_failure(1)), usize::from(offered), "H7 after {steps} steps");
            assert!(pair.source.is_idle() && pair.sink.is_idle(), "something is left after {steps} steps");
        }
    }
}

#[test]
fn success_without_its_first_token_and_a_first_token_of_the_rooms_earlier_attempt_commit_nothing() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_finish(1);
    let stale = pair.to_d.pop_front().expect("the Done of the first attempt, which stays under way");
    pair.land();
    pair.d_cancel(1);
    pair.deliver();
    pair.quiet();
    pair.open(2, 5);
    let own = FirstToken { token: 43, ..first() };
    pair.source.finish(pair.now, RequestId(2), &[1, 2], 0..2, &[], own.clone());
    pair.act();
    pair.land();
    pair.sink.frame(pair.now, pair.channel(), stale);
    pair.act();
    assert!(!pair.committed(2), "H4: every piece is there, but no first token of its own");
    pair.deliver();
    let landed = |fact: &SinkFact| matches!(fact, SinkFact::Committed { first, .. } if *first == own);
    assert!(pair.d_facts.iter().any(landed), "{:?}", pair.d_facts);
}

#[test]
fn late_acks_of_a_rooms_earlier_attempt_are_ignored() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    let old = pair.channel().attempt(1);
    pair.d_cancel(1);
    pair.deliver();
    pair.quiet();
    pair.deliver();
    pair.open(2, 5);
    let channel = pair.channel();
    for frame in [Frame::Drained { attempt: old }, Frame::Failed { attempt: old, cause: user() }] {
        pair.sink.frame(pair.now, channel, frame);
    }
    for frame in [Frame::Abort { attempt: old, room: room(5), cause: user() }, Frame::Settled { attempt: old }] {
        pair.source.frame(pair.now, channel, frame);
    }
    pair.sink.quiet(old);
    pair.act();
    assert_eq!((pair.p_failure(2), pair.d_failure(2)), (None, None));
    pair.p_finish(2);
    pair.land();
    pair.deliver();
    assert!(pair.committed(2) && pair.delivered(2));
}

#[test]
fn numbers_beyond_the_rooms_own_plan_take_no_memory_and_change_nothing() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    let attempt = pair.channel().attempt(1);
    pair.sink.landed(attempt, &[2, 3, u32::MAX]);
    let claims = |pieces| Sent { rank: u32::MAX, rail: u32::MAX, pieces, bytes: u64::MAX };
    let account = vec![claims(u64::MAX), claims(u64::MAX)];
    let done = Done { attempt, first: first(), account, phases: Phases::default(), checksums: Vec::new() };
    pair.sink.frame(pair.now, pair.channel(), Frame::Done(done));
    pair.act();
    assert!(!pair.committed(1));
    assert!(pair.d_failure(1).expect("refused").message().contains("pieces of the prompt"));
    // An offer of more pages than the prompt has, or of a page beyond the decode worker's pool.
    for (id, pages) in [(2, vec![1; 1000]), (3, vec![1, 16])] {
        pair.p_request(id, id);
        let reserve = Reserve {
            attempt: pair.channel().attempt(10 + id),
            room: room(id),
            prompt_tokens: PROMPT.len() as u32,
            prompt_hash: prompt_hash(&PROMPT),
            held_tokens: 0,
            held_hash: prompt_hash(&[]),
            checksums: false,
            pages,
        };
        pair.source.frame(pair.now, pair.channel(), Frame::Reserve(reserve));
        pair.act();
        assert_eq!(pair.p_failure(id).expect("refused").kind, CauseKind::Unfit);
    }
}

#[test]
fn pools_that_hold_k_and_v_apart_are_refused_by_name_before_any_page_moves() {
    let ours = Identity::new([1; 16], shape(), "test", Transfer::default());
    let apart = Identity { order: "kv-page-head-layer-token-dim".into(), ..ours.clone() };
    let differences = ours.differences(&apart);
    assert_eq!(differences.len(), 1);
    assert!(differences[0].starts_with("order (prefill page-head-layer-kv"), "{differences:?}");
    let half = Identity { shape: PoolShape { element_bytes: 4, ..shape() }, ..ours.clone() };
    assert!(ours.differences(&half)[0].contains("KV bytes per element"));
}

/// The byte at `[layer][kv][token][dim]` of a head, as a function of where it belongs.
fn filled(shape: &PoolShape, rank: u32) -> Vec<u8> {
    let mut pool = vec![0; shape.pool_bytes()];
    for page in 0..shape.pages {
        for (slot, head) in shape.heads_of_rank(rank).enumerate() {
            let at = shape.head_offset(page, slot as u32);
            for (offset, byte) in pool[at..at + shape.head_bytes()].iter_mut().enumerate() {
                *byte = (offset as u32 * 7 + head * 61 + page * 17 + 1) as u8;
            }
        }
    }
    pool
}

#[test]
fn heads_keep_their_bytes_between_any_two_tps_for_few_and_many_kv_heads() {
    for kv_heads in [1, 2, 8] {
        for (p_tp, d_tp) in [1, 2, 4].into_iter().flat_map(|p| [1, 2, 4].map(|d| (p, d))) {
            let p = PoolShape { layers: 2, kv_heads, tp: p_tp, pages: 4, ..shape() };
            let d = PoolShape { tp: d_tp, ..p };
            let sources: Vec<_> = (0..p_tp).map(|rank| filled(&p, rank)).collect();
            let mut targets: Vec<_> = (0..d_tp).map(|_| vec![0; d.pool_bytes()]).collect();
            // P's pages 3, 0, 1 go into D's pages 2, 3, 1; D's page 0 is somebody else's.
            let (from, to) = ([3, 0, 1], [2, 3, 1]);
            let mapping = Mapping::new(&p, &d);
            for piece in 0..mapping.pieces(from.len()) {
                let (page, route) = mapping.split(piece);
                let source = route.source_offset(&p, from[page]);
                let target = route.target_offset(&d, to[page]);
                let bytes = mapping.bytes(route);
                targets[route.decode_rank as usize][target..target + bytes]
                    .copy_from_slice(&sources[route.prefill_rank as usize][source..source + bytes]);
            }
            for rank in 0..d_tp {
                let own = PoolShape { tp: d_tp, ..d };
                let pool = &targets[rank as usize];
                for (page, &place) in to.iter().enumerate() {
                    for (slot, head) in own.heads_of_rank(rank).enumerate() {
                        let at = own.head_offset(place, slot as u32);
                        let want = |offset: usize| (offset as u32 * 7 + head * 61 + from[page] * 17 + 1) as u8;
                        let got = &pool[at..at + own.head_bytes()];
                        let right = got.iter().enumerate().all(|(offset, &byte)| byte == want(offset));
                        assert!(right, "{kv_heads} heads, {p_tp} to {d_tp}: page {place}, head {head} of rank {rank}");
                    }
                }
                assert!(pool[..own.page_bytes()].iter().all(|&byte| byte == 0), "page 0 was not offered");
            }
        }
    }
}

proptest! {
    /// Any page size, chunk, length and held prefix: the pieces sent are each page once, in order, none twice.
    #[test]
    fn partial_pages_in_any_chunks_are_sent_once_each_and_in_order(
        page_size in prop::sample::select(vec![1u32, 3, 4, 16]),
        tokens in 1usize..70,
        chunk_pages in 1usize..6,
        held_pages in 0usize..4,
    ) {
        let p = PoolShape { page_size, pages: 80, ..shape() };
        let mut pair = Pair::between(p, PoolShape { tp: 2, ..p });
        let prompt: Vec<u32> = (0..tokens as u32).collect();
        let pages = p.pages_for(tokens);
        let held = held_pages.min(tokens / page_size as usize);
        pair.source.request(pair.now, RequestId(1), room(5), &prompt);
        let targets: Vec<u32> = (0..(pages - held) as u32).rev().collect();
        let held_tokens = held as u32 * page_size;
        let offered = PublishedPages::new(targets.clone());
        pair.sink.reserve(pair.now, RequestId(1), &ticket(5), &prompt, held_tokens, offered);
        pair.act();
        pair.deliver();
        let own: Vec<u32> = (0..pages as u32).collect();
        let mut written = 0;
        while written + chunk_pages < pages {
            pair.source.chunk_written(pair.now, RequestId(1), &own, written..written + chunk_pages, &[]);
            written += chunk_pages;
        }
        pair.source.finish(pair.now, RequestId(1), &own, written..pages, &[], first());
        pair.act();
        let sent: Vec<usize> = pair.posted.iter().map(|(_, piece)| piece.index as usize).collect();
        let mapping = Mapping::new(&pair.shapes[0], &pair.shapes[1]);
        prop_assert_eq!(sent, (0..mapping.pieces(pages - held)).collect::<Vec<_>>());
        for (_, piece) in &pair.posted {
            let (page, route) = mapping.split(piece.index as usize);
            prop_assert_eq!(piece.source_offset, route.source_offset(&pair.shapes[0], own[held + page]));
            prop_assert_eq!(piece.target_offset, route.target_offset(&pair.shapes[1], targets[page]));
        }
        pair.land();
        pair.deliver();
        prop_assert!(pair.committed(1));
    }
}
