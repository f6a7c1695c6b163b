//! Stories of what is bounded, what is used again, and what is registered once.

use super::*;

#[test]
fn a_room_serves_again_after_its_delivery() {
    let mut pair = Pair::new();
    for id in 1..4 {
        pair.open(id, 5);
        pair.p_finish(id);
        pair.land();
        pair.deliver();
        assert!(pair.committed(id) && pair.delivered(id));
    }
}

#[test]
fn a_room_is_in_use_until_its_old_attempt_has_drained() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.p_chunk(1);
    pair.d_cancel(1);
    pair.deliver();
    assert_eq!(pair.source.state(RequestId(1)), Some(AttemptState::Draining));
    pair.p_request(2, 5);
    assert_eq!(pair.p_failure(2).expect("refused").kind, CauseKind::Refused);
    pair.land();
    pair.open(3, 5);
    assert_eq!(pair.source.state(RequestId(3)), Some(AttemptState::Open));
}

#[test]
fn a_second_reserve_that_waits_under_the_same_room_is_refused_and_the_first_is_unharmed() {
    let mut pair = Pair::new();
    pair.d_reserve(1, 5, &PROMPT, &[7, 3]);
    pair.d_reserve(2, 5, &PROMPT, &[8, 9]);
    pair.deliver();
    assert!(pair.d_failure(2).expect("refused").message().contains("bootstrap_room 5 is in use"));
    pair.p_request(1, 5);
    pair.p_finish(1);
    pair.land();
    pair.deliver();
    assert!(pair.committed(1) && pair.delivered(1));
}

#[test]
fn a_commit_survives_the_loss_of_its_channel_and_every_late_frame() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    let attempt = pair.channel().attempt(1);
    pair.p_finish(1);
    pair.land();
    pair.deliver();
    assert!(pair.committed(1));
    for frame in [Frame::Failed { attempt, cause: user() }, Frame::Drained { attempt }] {
        pair.sink.frame(pair.now, pair.channel(), frame);
    }
    pair.cut();
    assert_eq!(pair.d_failure(1), None, "after the commit nothing of the attempt changes anything");
    pair.assert_ended(&[&[7, 3]], Basis::Landed);
}

#[test]
fn a_channel_that_is_registered_twice_is_one_channel() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    let (channel, reserve) = (pair.channel(), 1);
    pair.source.channel_up(pair.now, channel, shape());
    pair.sink.channel_up(pair.now, ticket(0).address(), channel, shape());
    pair.act();
    assert!(pair.closed.is_empty() && pair.p_failure(1).is_none() && pair.d_failure(1).is_none());
    // Had the second registration begun to count anew, this number would pass for a new one (H3).
    pair.source.frame(
        pair.now,
        channel,
        Frame::Abort { attempt: channel.attempt(reserve + 1), room: room(6), cause: user() },
    );
    pair.source.channel_up(pair.now, channel, shape());
    let stale = Frame::Abort { attempt: channel.attempt(reserve + 1), room: room(7), cause: user() };
    pair.source.frame(pair.now, channel, stale);
    pair.p_request(2, 7);
    assert_eq!(pair.source.state(RequestId(2)), Some(AttemptState::Waiting), "an old number leaves no tombstone");
}

#[test]
fn both_sides_refuse_channels_over_their_limit() {
    let few = Limits { channels_max: 2, ..limits() };
    let mut pair = Pair::new();
    pair.source = Source::new(shape(), few);
    pair.sink = Sink::new(shape(), few);
    let of =
        |number: u64| Channel { prefill: Incarnation(number), decode: Incarnation(number), session: SessionId(number) };
    for number in 1..=3 {
        pair.source.channel_up(pair.now, of(number), shape());
    }
    pair.act();
    assert_eq!(pair.closed, [of(3)]);
    pair.closed.clear();
    let at = |number: u64| Ticket { host: format!("p{number}"), ..ticket(number) };
    for number in 1..=3 {
        let pages = PublishedPages::new(vec![7, 3]);
        pair.sink.reserve(pair.now, RequestId(number), &at(number), &PROMPT, 0, pages);
        pair.sink.channel_up(pair.now, at(number).address(), of(number), shape());
    }
    pair.act();
    assert_eq!(pair.closed, [of(3)]);
    assert_eq!(pair.d_failure(3).expect("refused").kind, CauseKind::Unavailable);
    assert_eq!((pair.d_failure(1), pair.d_failure(2)), (None, None));
}

#[test]
fn names_of_prefill_workers_over_the_limit_are_not_remembered_and_still_served() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sink = Sink::new(shape(), Limits { channels_max: 2, ..limits() });
    for number in 1..=4 {
        let called = Ticket { host: format!("name{number}"), ..ticket(number) };
        pair.sink.reserve(pair.now, RequestId(number), &called, &PROMPT, 0, PublishedPages::new(vec![7, 3]));
        pair.sink.channel_up(pair.now, called.address(), channel, shape());
        assert_eq!(pair.sink.state(RequestId(number)), Some(AttemptState::Offered));
    }
    let dials = |pair: &mut Pair, host: &str| {
        pair.sink.effects();
        let called = Ticket { host: host.into(), ..ticket(9) };
        pair.sink.reserve(pair.now, RequestId(9), &called, &PROMPT, 0, PublishedPages::new(vec![7, 3]));
        pair.sink.effects().iter().any(|effect| matches!(effect, SinkEffect::Dial { .. }))
    };
    assert!(dials(&mut pair, "name4") && !dials(&mut pair, "name1"));
}

#[test]
fn reserves_and_tombstones_over_their_limits_are_refused_or_forgotten() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.source = Source::new(shape(), Limits { held_reserves_max: 1, tombstones_max: 1, ..limits() });
    pair.source.channel_up(pair.now, channel, shape());
    pair.d_reserve(1, 5, &PROMPT, &[7, 3]);
    pair.d_reserve(2, 6, &PROMPT, &[8, 9]);
    pair.deliver();
    assert_eq!(pair.d_failure(1), None);
    assert_eq!(pair.d_failure(2).expect("refused").kind, CauseKind::Unavailable);
    for (id, room_value) in [(3, 7), (4, 8)] {
        pair.p_request(id, room_value);
        pair.source.cancel(pair.now, RequestId(id), user());
    }
    pair.act();
    // The first is remembered; of the second nothing is, so that the room is free and a deadline ends the other half.
    pair.p_request(5, 7);
    assert_eq!(pair.p_failure(5), Some(&user()));
    pair.p_request(6, 8);
    assert_eq!(pair.source.state(RequestId(6)), Some(AttemptState::Waiting));
}

#[test]
fn states_have_the_names_that_users_know() {
    use crate::state::KvPoll;
    let mut pair = Pair::new();
    pair.p_request(1, 5);
    assert_eq!(pair.source.state(RequestId(1)).map(AttemptState::poll), Some(KvPoll::Bootstrapping));
    pair.d_reserve(1, 5, &PROMPT, &[7, 3]);
    pair.deliver();
    assert_eq!(pair.source.state(RequestId(1)).map(AttemptState::poll), Some(KvPoll::WaitingForInput));
    pair.p_finish(1);
    assert_eq!(pair.source.state(RequestId(1)).map(AttemptState::poll), Some(KvPoll::Transferring));
    pair.d_cancel(1);
    assert_eq!(pair.sink.state(RequestId(1)), Some(AttemptState::Draining));
    pair.wait_ms(51);
    assert_eq!(pair.sink.state(RequestId(1)), Some(AttemptState::Quarantined));
    assert_eq!(pair.sink.state(RequestId(1)).map(AttemptState::poll), Some(KvPoll::Failed));
    pair.quiet();
    assert_eq!(pair.sink.state(RequestId(1)), None);
}
