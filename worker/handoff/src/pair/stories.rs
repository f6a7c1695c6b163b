//! One test per story; the fault it stands for is in its name.

use proptest::{collection::vec, prelude::*};

use super::*;

#[test]
fn request_before_reserve_is_delivered() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    assert_eq!(pair.p_facts, [SourceFact::Reserved { request: RequestId(1), held_tokens: 0, checksums: false }]);
    pair.p_finish(1);
    pair.deliver();
    assert!(!pair.committed(1), "H4: Done alone commits nothing");
    pair.land();
    assert!(pair.committed(1));
    assert!(pair.delivered(1) && pair.p_is_quiet(1));
    pair.assert_ended(&[&[7, 3]], Basis::Landed);
}

#[test]
fn reserve_before_request_is_delivered() {
    let mut pair = Pair::new();
    pair.d_reserve(1, 5, &PROMPT, &[7, 3]);
    pair.deliver();
    pair.p_request(1, 5);
    pair.p_finish(1);
    pair.land();
    assert!(!pair.committed(1), "H4: pieces without Done commit nothing");
    pair.deliver();
    assert!(pair.committed(1));
    pair.assert_ended(&[&[7, 3]], Basis::Landed);
}

#[test]
fn a_request_that_ended_early_is_remembered_and_the_late_reserve_fails_at_once() {
    let mut pair = Pair::new();
    pair.p_request(1, 5);
    pair.source.cancel(pair.now, RequestId(1), user());
    pair.act();
    pair.d_reserve(1, 5, &PROMPT, &[7, 3]);
    pair.deliver();
    assert_eq!(pair.d_failure(1).expect("failed").message(), "the client left");
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
    // The tombstone was consumed: the room serves again.
    pair.open(2, 5);
    assert!(pair.p_facts.contains(&SourceFact::Reserved { request: RequestId(2), held_tokens: 0, checksums: false }));
}

#[test]
fn an_abort_before_the_request_is_remembered_and_drained_at_once() {
    let mut pair = Pair::new();
    pair.d_reserve(1, 5, &PROMPT, &[7, 3]);
    pair.deliver();
    pair.d_cancel(1);
    pair.deliver();
    pair.quiet();
    pair.p_request(1, 5);
    assert_eq!(pair.p_failure(1), Some(&user()));
    assert!(pair.p_is_quiet(1));
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

#[test]
fn a_tombstone_expires() {
    let mut pair = Pair::new();
    pair.p_request(1, 5);
    pair.source.cancel(pair.now, RequestId(1), user());
    pair.act();
    pair.wait_ms(101);
    pair.open(2, 5);
    assert_eq!(pair.p_failure(2), None);
}

#[test]
fn a_reserve_without_request_and_a_request_without_reserve_end_by_their_deadlines() {
    let mut pair = Pair::new();
    pair.d_reserve(1, 5, &PROMPT, &[7, 3]);
    pair.p_request(2, 6);
    pair.deliver();
    pair.wait_ms(101);
    pair.deliver();
    assert_eq!(pair.d_failure(1).expect("failed").kind, CauseKind::Timeout);
    assert_eq!(pair.p_failure(2).expect("failed").kind, CauseKind::Timeout);
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

#[test]
fn prompts_that_differ_by_one_token_are_refused_by_name_on_both_sides() {
    let mut pair = Pair::new();
    pair.p_request(1, 5);
    let mut other = PROMPT;
    other[3] += 1;
    pair.d_reserve(1, 5, &other, &[7, 3]);
    pair.deliver();
    for cause in [pair.p_failure(1), pair.d_failure(1)] {
        let cause = cause.expect("failed");
        assert!(cause.kind == CauseKind::Refused && cause.message().contains("prompts differ"), "{cause}");
    }
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

#[test]
fn a_second_live_use_of_a_room_is_refused_and_the_first_is_unharmed() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_request(2, 5);
    pair.d_reserve(3, 5, &PROMPT, &[8, 9]);
    pair.deliver();
    assert!(pair.p_failure(2).expect("refused").message().contains("bootstrap_room 5 is in use"));
    assert!(pair.d_failure(3).expect("refused").message().contains("bootstrap_room 5 is in use"));
    pair.quiet();
    pair.p_finish(1);
    pair.land();
    pair.deliver();
    assert!(pair.committed(1) && pair.p_failure(1).is_none());
    assert!(pair.source.is_idle() && pair.sink.is_idle());
}

#[test]
fn a_cancelled_transfer_pins_both_sides_until_its_writes_have_settled() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_chunk(1);
    pair.d_cancel(1);
    pair.deliver();
    assert_eq!(pair.p_failure(1), Some(&user()));
    assert!(!pair.p_is_quiet(1) && !pair.source.is_idle(), "H5: a write names the source pages");
    assert!(!pair.sink.is_idle(), "H2: no proof, no pages");
    pair.land();
    assert!(pair.p_is_quiet(1));
    pair.quiet();
    pair.deliver();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
    pair.open(2, 5);
    assert_eq!(pair.p_failure(2), None, "the room is free again once its attempt drained");
}

#[test]
fn a_cancel_after_done_stops_no_post_for_d_may_commit_what_is_under_way() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_finish(1);
    pair.source.cancel(pair.now, RequestId(1), user());
    let effects = pair.source.effects();
    assert!(!effects.iter().any(|effect| matches!(effect, SourceEffect::Stop { .. })), "{effects:?}");
    assert!(!pair.source.is_idle(), "H5: its posts have not settled");
}

#[test]
fn a_failure_of_p_reaches_the_client_of_d_with_its_root_cause() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    let root = Cause::new(Side::Prefill, CauseKind::Internal, "NaN in layer 3");
    pair.source.cancel(pair.now, RequestId(1), root.clone());
    pair.source.cancel(pair.now, RequestId(1), user());
    pair.act();
    pair.deliver();
    assert_eq!(pair.d_failure(1), Some(&root));
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

#[test]
fn a_lost_channel_ends_open_attempts_on_both_sides() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_chunk(1);
    pair.cut();
    assert_eq!(pair.p_failure(1).expect("failed").kind, CauseKind::Lost);
    assert_eq!(pair.d_failure(1).expect("failed").kind, CauseKind::Lost);
    assert!(pair.p_is_quiet(1));
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

#[test]
fn a_done_that_is_lost_with_its_channel_is_a_failed_attempt_though_p_delivered() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_finish(1);
    pair.land();
    assert!(pair.delivered(1));
    pair.cut();
    assert!(!pair.committed(1));
    assert_eq!(pair.d_failure(1).expect("failed").kind, CauseKind::Lost);
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

#[test]
fn a_restarted_prefill_worker_is_another_peer_and_old_frames_change_nothing() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    let old = pair.channel().attempt(1);
    pair.cut();
    pair.quiet();
    pair.source = Source::new(shape(), limits());
    pair.connect(77, 1);
    pair.open(2, 6);
    let channel = pair.channel();
    for channel in [channel, old.channel()] {
        pair.sink.frame(pair.now, channel, Frame::Failed { attempt: old, cause: user() });
        pair.source.frame(pair.now, channel, Frame::Abort { attempt: old, room: room(6), cause: user() });
    }
    pair.act();
    assert_eq!(pair.d_failure(2), None);
    assert_eq!(pair.p_failure(2), None);
    pair.p_finish(2);
    pair.land();
    pair.deliver();
    assert!(pair.committed(2));
}

#[test]
fn a_poisoned_attempt_gets_no_drained() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_chunk(1);
    let (attempt, _) = pair.posted.pop_front().expect("posted");
    pair.source.settled(pair.now, attempt, 1, Settlement::Unknown);
    pair.act();
    assert!(pair.to_d.iter().all(|frame| !matches!(frame, Frame::Drained { .. })));
    assert!(pair.to_d.iter().any(|frame| matches!(frame, Frame::Failed { .. })));
    assert!(pair.p_is_quiet(1));
}

#[test]
fn an_abort_that_crosses_the_end_of_a_poisoned_attempt_gets_no_drained_either() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_chunk(1);
    pair.d_cancel(1);
    let (attempt, _) = pair.posted.pop_front().expect("posted");
    pair.source.settled(pair.now, attempt, 1, Settlement::Unknown);
    pair.act();
    assert!(pair.p_is_quiet(1) && pair.source.is_idle(), "P has forgotten the attempt");
    assert!(pair.to_p.iter().any(|frame| matches!(frame, Frame::Abort { .. })), "and D's Abort is under way");
    while let Some(frame) = pair.to_p.pop_front() {
        pair.source.frame(pair.now, pair.channel(), frame);
    }
    pair.act();
    assert!(pair.to_d.iter().all(|frame| !matches!(frame, Frame::Drained { .. })));
}

#[test]
fn a_channel_with_too_many_poisoned_attempts_is_closed() {
    let mut pair = Pair::new();
    pair.source = Source::new(shape(), Limits { poisoned_max: 1, ..limits() });
    pair.connect(1, 2);
    for id in [1, 2] {
        pair.open(id, id);
        pair.p_chunk(id);
        let (attempt, _) = pair.posted.pop_front().expect("posted");
        pair.source.settled(pair.now, attempt, 1, Settlement::Unknown);
        let closed = pair.source.effects().iter().any(|effect| matches!(effect, SourceEffect::CloseChannel { .. }));
        assert_eq!(closed, id == 2, "attempt {id}");
    }
}

#[test]
fn pages_that_are_not_quiet_in_time_are_quarantined_and_never_freed_by_time() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.d_cancel(1);
    for _ in 0..100 {
        pair.wait_ms(51);
    }
    assert_eq!(pair.sink.draining_pages(), (2, 2));
    pair.quiet();
    assert_eq!(pair.sink.draining_pages(), (0, 0));
}

#[test]
fn source_pages_whose_writes_do_not_settle_in_time_are_quarantined_until_they_do() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.source.chunk_written(pair.now, RequestId(1), &[1, 2], 0..1, &[]);
    pair.source.cancel(pair.now, RequestId(1), user());
    pair.act();
    assert_eq!(pair.source.quarantined_pages(), 0, "the drain deadline has not passed");
    for _ in 0..100 {
        pair.wait_ms(51);
    }
    assert_eq!(pair.source.quarantined_pages(), 1, "the second page was never posted");
    assert!(!pair.p_is_quiet(1), "H5: time frees nothing");
    for (attempt, _) in std::mem::take(&mut pair.posted) {
        pair.source.settled(pair.now, attempt, 1, Settlement::Dropped);
    }
    pair.act();
    assert!(pair.p_is_quiet(1));
    assert_eq!(pair.source.quarantined_pages(), 0);
}

#[test]
fn a_reserve_that_was_never_shown_gives_its_pages_back_at_once() {
    let mut sink = Sink::new(shape(), limits());
    sink.reserve(Time(0), RequestId(1), &ticket(5), &PROMPT, 0, PublishedPages::new(vec![7, 3]));
    assert!(matches!(&sink.effects()[..], [SinkEffect::Dial { .. }]));
    sink.dial_failed(Time(1), &ticket(5).address(), user());
    let effects = sink.effects();
    let [SinkEffect::Fact(SinkFact::Failed { .. }), SinkEffect::Fact(SinkFact::Quiet { proof, .. })] = &effects[..]
    else {
        panic!("{effects:?}");
    };
    assert_eq!(proof.basis(), Basis::NeverShown);
}

#[test]
fn doubled_and_late_frames_of_an_ended_attempt_change_nothing() {
    let mut pair = Pair::new();
    pair.p_request(1, 5);
    pair.d_reserve(1, 5, &PROMPT, &[7, 3]);
    let reserve = pair.to_p.front().cloned().expect("a Reserve is under way");
    pair.deliver();
    pair.p_finish(1);
    pair.land();
    let done = pair.to_d.front().cloned().expect("a Done is under way");
    pair.deliver();
    let facts = (pair.p_facts.len(), pair.d_facts.len());
    let channel = pair.channel();
    pair.source.frame(pair.now, channel, reserve);
    pair.sink.frame(pair.now, channel, done);
    pair.act();
    assert_eq!((pair.p_facts.len(), pair.d_facts.len()), facts);
    assert!(pair.source.is_idle() && pair.sink.is_idle());
}

/// What may happen next in the property below.
#[derive(Clone, Copy, Debug)]
enum Step {
    Request,
    Reserve,
    Chunk,
    Finish,
    CancelP,
    CancelD,
    ToP,
    ToD,
    Land,
    Quiet,
    Wait,
    Cut,
}

proptest! {
    /// Whatever happens in whatever order, then a cut and time: both sides end, with one outcome each, and every page
    /// comes back once.
    #[test]
    fn every_order_of_events_comes_to_its_end(
        steps in vec(prop::sample::select(vec![
            Step::Request, Step::Reserve, Step::Chunk, Step::Finish, Step::CancelP, Step::CancelD, Step::ToP, Step::ToD,
            Step::ToP, Step::ToD, Step::Land, Step::Quiet, Step::Wait, Step::Cut,
        ]), 0..40),
    ) {
        let mut pair = Pair::new();
        let (mut requested, mut reserved, mut written) = (false, false, 0);
        for step in steps {
            let now = pair.now;
            match step {
                Step::Request if !requested => {
                    requested = true;
                    pair.p_request(1, 5);
                }
                Step::Reserve if !reserved => {
                    reserved = true;
                    pair.d_reserve(1, 5, &PROMPT, &[7, 3]);
                }
                Step::Chunk if written == 0 && pair.p_facts.iter().any(|f| matches!(f, SourceFact::Reserved { .. })) => {
                    written = 1;
                    pair.source.chunk_written(now, RequestId(1), &[1, 2], 0..1, &[]);
                }
                Step::Finish if written == 1 => {
                    written = 2;
                    pair.source.finish(now, RequestId(1), &[1, 2], 1..2, &[], first());
                }
                Step::CancelP => pair.source.cancel(now, RequestId(1), user()),
                Step::CancelD => pair.sink.cancel(now, RequestId(1), user()),
                Step::ToP => if let (Some(channel), Some(frame)) = (pair.channel, pair.to_p.pop_front()) {
                    pair.source.frame(now, channel, frame);
                },
                Step::ToD => if let (Some(channel), Some(frame)) = (pair.channel, pair.to_d.pop_front()) {
                    pair.sink.frame(now, channel, frame);
                },
                Step::Land => pair.land(),
                Step::Quiet => pair.quiet(),
                Step::Wait => pair.wait_ms(40),
                Step::Cut if pair.channel.is_some() => pair.cut(),
                _ => {}
            }
            pair.act();
        }
        if pair.channel.is_some() {
            pair.cut();
        }
        pair.wait_ms(2000);
        pair.quiet();
        prop_assert!(pair.source.is_idle() && pair.sink.is_idle());
        let delivered = pair.delivered(1);
        prop_assert_eq!(u32::from(delivered) + u32::from(pair.p_failure(1).is_some()), u32::from(requested));
        prop_assert_eq!(pair.p_is_quiet(1), requested);
        let committed = pair.committed(1);
        prop_assert_eq!(u32::from(committed) + u32::from(pair.d_failure(1).is_some()), u32::from(reserved));
        let mut back = 0;
        for fact in std::mem::take(&mut pair.d_facts) {
            if let SinkFact::Committed { pages, proof, .. } | SinkFact::Quiet { pages, proof } = fact {
                prop_assert_eq!(pages.redeem(proof).expect("its own proof"), vec![7, 3]);
                back += 1;
            }
        }
        prop_assert_eq!(back, u32::from(reserved));
    }
}
