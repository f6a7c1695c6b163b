//! Stories of checksums, of prefixes that D holds, and of what P hears when D is quiet.

use super::*;
use crate::checksum::Corrupt;

const SUMS: [u32; 4] = [90, 91, 92, 93];
const CORRUPT: Corrupt = Corrupt { prompt_page: 1, page: 3, head: 1, rank: 0 };

/// A pair whose D asks for checksums, with one prompt pushed, landed and done.
fn landed() -> Pair {
    let mut pair = Pair::new();
    pair.sink.ask_checksums();
    pair.open(1, 5);
    assert!(pair.source.wants_checksums(RequestId(1)));
    pair.source.chunk_written(pair.now, RequestId(1), &[1, 2], 0..1, &SUMS[..2]);
    pair.source.finish(pair.now, RequestId(1), &[1, 2], 1..2, &SUMS[2..], first());
    pair.act();
    pair.land();
    pair.deliver();
    pair
}

impl Pair {
    fn verified(&mut self, outcome: Result<(), Corrupt>) {
        let (attempt, checksums) = self.verifies.pop().expect("D asks for the comparison");
        assert_eq!(checksums, SUMS);
        self.sink.verified(self.now, attempt, outcome);
        self.act();
        self.deliver();
    }
}

#[test]
fn checksums_that_agree_commit_and_nothing_commits_before() {
    let mut pair = landed();
    assert!(!pair.committed(1), "H4: landed and done, and not compared");
    assert_eq!(pair.sink.state(RequestId(1)), Some(AttemptState::Verifying));
    pair.verified(Ok(()));
    assert!(pair.committed(1));
    pair.assert_ended(&[&[7, 3]], Basis::Landed);
}

#[test]
fn a_damaged_page_is_named_fails_the_attempt_and_drains_as_any_other() {
    let mut pair = landed();
    pair.verified(Err(CORRUPT));
    let message = pair.d_failure(1).expect("failed").message();
    for part in ["page 1 of the prompt", "page 3 of the pool", "KV head 1", "rank 0"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!pair.sink.is_idle(), "H2: failed is not quiet");
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

#[test]
fn a_failure_while_checksums_are_compared_wins_over_their_agreement() {
    let mut pair = landed();
    pair.d_cancel(1);
    pair.verified(Ok(()));
    assert!(!pair.committed(1), "H4: the failure was recorded first");
    assert_eq!(pair.d_failure(1), Some(&user()));
    pair.quiet();
    pair.assert_ended(&[&[7, 3]], Basis::Quiet);
}

#[test]
fn a_comparison_that_never_ends_ends_by_the_deadline() {
    let mut pair = landed();
    pair.wait_ms(1001);
    assert_eq!(pair.d_failure(1).expect("failed").kind, CauseKind::Timeout);
    pair.verified(Ok(()));
    assert!(!pair.committed(1));
}

#[test]
fn a_done_with_too_few_checksums_is_refused_by_name() {
    let mut pair = Pair::new();
    pair.sink.ask_checksums();
    pair.open(1, 5);
    pair.source.chunk_written(pair.now, RequestId(1), &[1, 2], 0..1, &SUMS[..2]);
    pair.source.finish(pair.now, RequestId(1), &[1, 2], 1..2, &SUMS[2..], first());
    pair.act();
    let Some(Frame::Done(mut done)) = pair.to_d.pop_front() else { panic!("no Done") };
    done.checksums.pop();
    pair.to_d.push_back(Frame::Done(done));
    pair.deliver();
    let message = pair.d_failure(1).expect("failed").message();
    assert!(message.contains("has 3 checksums, it has 4"), "{message}");
}

#[test]
fn an_engine_that_gives_too_few_checksums_fails_its_own_request() {
    let mut pair = Pair::new();
    pair.sink.ask_checksums();
    pair.open(1, 5);
    pair.source.chunk_written(pair.now, RequestId(1), &[1, 2], 0..1, &SUMS[..1]);
    pair.act();
    assert!(pair.p_failure(1).expect("failed").message().contains("1 for 1 pages of 2 heads"));
    assert!(pair.posted.is_empty());
}

#[test]
fn a_prefix_that_d_holds_is_computed_and_neither_offered_nor_sent() {
    let mut pair = Pair::new();
    pair.sink.ask_checksums();
    pair.p_request(1, 5);
    pair.sink.reserve(pair.now, RequestId(1), &ticket(5), &PROMPT, 4, PublishedPages::new(vec![3]));
    pair.act();
    pair.deliver();
    assert_eq!(pair.p_facts, [SourceFact::Reserved { request: RequestId(1), held_tokens: 4, checksums: true }]);
    pair.source.chunk_written(pair.now, RequestId(1), &[1, 2], 0..1, &SUMS[..2]);
    pair.source.finish(pair.now, RequestId(1), &[1, 2], 1..2, &SUMS[2..], first());
    pair.act();
    assert_eq!(pair.posted.len(), 1);
    assert_eq!(pair.posted[0].1.index, 0, "pieces cover the offered pages only");
    pair.land();
    pair.deliver();
    assert_eq!(pair.verifies, [(pair.channel().attempt(1), SUMS[2..].to_vec())]);
    let (attempt, _) = pair.verifies.remove(0);
    pair.sink.verified(pair.now, attempt, Ok(()));
    pair.act();
    pair.assert_ended(&[&[3]], Basis::Landed);
}

#[test]
fn a_prompt_that_d_holds_whole_still_gets_its_done() {
    let mut pair = Pair::new();
    pair.source.request(pair.now, RequestId(1), room(5), &PROMPT[..4]);
    pair.sink.reserve(pair.now, RequestId(1), &ticket(5), &PROMPT[..4], 4, PublishedPages::new(vec![]));
    pair.act();
    pair.deliver();
    pair.source.finish(pair.now, RequestId(1), &[1], 0..1, &[], first());
    pair.act();
    assert!(pair.posted.is_empty() && pair.delivered(1));
    pair.deliver();
    assert!(pair.committed(1));
    pair.assert_ended(&[&[]], Basis::Landed);
}

#[test]
fn a_held_prefix_that_is_no_whole_page_or_too_long_is_a_fault_of_the_engine() {
    for (held, pages) in [(3, vec![3]), (8, vec![]), (4, vec![7, 3])] {
        let mut pair = Pair::new();
        pair.sink.reserve(pair.now, RequestId(1), &ticket(5), &PROMPT, held, PublishedPages::new(pages.clone()));
        pair.act();
        assert_eq!(pair.d_failure(1).expect("failed").kind, CauseKind::Internal, "{held}");
        pair.assert_ended(&[&pages], Basis::NeverShown);
    }
}

#[test]
fn p_hears_that_d_is_quiet_while_it_still_waits_and_nothing_else() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    let attempt = pair.channel().attempt(1);
    pair.p_chunk(1);
    pair.d_cancel(1);
    pair.deliver();
    assert!(pair.peer_settled.is_empty(), "D is not quiet yet");
    pair.quiet();
    pair.deliver();
    assert_eq!(pair.peer_settled, [attempt]);
    pair.land();
    assert!(pair.source.is_idle());
    let late = [attempt, pair.channel().attempt(99)];
    for attempt in late {
        pair.source.frame(pair.now, pair.channel(), Frame::Settled { attempt });
    }
    pair.act();
    assert_eq!(pair.peer_settled, [attempt], "H3: an attempt that is over, and one that never was");
}

#[test]
fn a_d_whose_channel_is_lost_says_nothing_when_it_is_quiet() {
    let mut pair = Pair::new();
    pair.open(1, 5);
    pair.cut();
    pair.connect(1, 2);
    pair.quiet();
    assert!(pair.to_p.is_empty(), "{:?}", pair.to_p);
}
