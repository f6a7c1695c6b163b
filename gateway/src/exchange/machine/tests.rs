//! Each way an exchange may go, fact by fact.

use super::*;

const ORDERS: [Order; 3] = [Order::DecodeOnly, Order::Parallel, Order::PrefillFirst];
const STREAMED: Fact = Fact::DecodeEnded { streamed: true };
const WHOLE: Fact = Fact::DecodeEnded { streamed: false };

fn with(order: Order) -> Exchange {
    Exchange::new(Plan { order, samples: 1, needs_prefill: false })
}

fn split() -> Exchange {
    with(Order::Parallel)
}

fn broken(side: Side) -> Failure {
    Failure { retry: Retry::Never, ..Failure::transport(side, "http://w", "connection reset", false) }
}

fn reported() -> Failure {
    Failure { retry: Retry::Never, ..Failure::reported(Side::Decode, Some(500), Some("prefill failed".into())) }
}

/// What the last of these facts leads to.
fn last(mut x: Exchange, facts: &[Fact]) -> Vec<Action> {
    facts.iter().cloned().fold(vec![], |_, fact| x.on(fact))
}

#[test]
fn a_good_exchange_finishes_and_leaves_p_to_its_end() {
    let mut x = split();
    assert_eq!(x.on(Fact::DecodeToken), []);
    assert_eq!(x.on(Fact::AnswerOpened), []);
    assert_eq!(x.on(STREAMED), [Action::DetachPrefill, Action::Finish]);
    assert!(x.is_over());
    assert_eq!(x.on(Fact::PrefillFailed(broken(Side::Prefill))), [], "over absorbs");
}

#[test]
fn table_of_first_failures() {
    let p = broken(Side::Prefill);
    let d = broken(Side::Decode);
    let cancel_d = Action::Cancel(Side::Decode);
    let cancel_p = Action::Cancel(Side::Prefill);
    let stale = Failure::transport(Side::Decode, "w", "closed", true);
    let late = Deadline::FirstToken.failure();
    let slow = Deadline::Prefill.failure();
    let stops = Failure::stopping();
    let cases: Vec<(Vec<Fact>, Vec<Action>)> = vec![
        (vec![Fact::PrefillFailed(p.clone())], vec![cancel_d.clone(), Action::Answer(p.clone())]),
        (vec![Fact::DecodeFailed(d.clone())], vec![cancel_p.clone(), Action::Answer(d.clone())]),
        (vec![Fact::PrefillEnded, Fact::DecodeFailed(d.clone())], vec![Action::Answer(d.clone())]),
        (vec![Fact::AnswerOpened, Fact::DecodeFailed(d.clone())], vec![cancel_p.clone(), Action::BreakOff(d)]),
        (vec![Fact::DecodeFailed(stale.clone())], vec![cancel_p.clone(), Action::StartOver(stale.clone())]),
        (vec![Fact::AnswerOpened, Fact::DecodeFailed(stale.clone())], vec![cancel_p.clone(), Action::BreakOff(stale)]),
        (vec![Fact::ClientGone], vec![cancel_p.clone(), cancel_d.clone(), Action::Leave]),
        (vec![Fact::TimedOut(Deadline::ClientWrite)], vec![cancel_p.clone(), cancel_d.clone(), Action::Leave]),
        (vec![Fact::TimedOut(Deadline::FirstToken)], vec![cancel_p.clone(), cancel_d.clone(), Action::Answer(late)]),
        (
            vec![Fact::TimedOut(Deadline::Prefill)],
            vec![cancel_p.clone(), cancel_d.clone(), Action::Answer(slow.clone())],
        ),
        (
            vec![Fact::DecodeToken, Fact::TimedOut(Deadline::Prefill)],
            vec![cancel_p.clone(), Action::CountLatePrefillFailure(slow)],
        ),
        (vec![Fact::GatewayStops], vec![cancel_p.clone(), cancel_d.clone(), Action::Answer(stops.clone())]),
        (
            vec![Fact::PrefillEnded, Fact::AnswerOpened, Fact::GatewayStops],
            vec![cancel_d.clone(), Action::BreakOff(stops)],
        ),
        (vec![Fact::DecodeFailed(reported())], vec![cancel_d, Action::AwaitVerdict]),
        (vec![Fact::DecodeToken, Fact::PrefillFailed(p.clone())], vec![Action::CountLatePrefillFailure(p)]),
        (vec![WHOLE], vec![Action::AwaitVerdict]),
        (vec![Fact::PrefillEnded, WHOLE], vec![Action::Finish]),
        (vec![Fact::AnswerOpened, WHOLE], vec![Action::DetachPrefill, Action::Finish]),
    ];
    for (facts, expected) in cases {
        assert_eq!(last(split(), &facts), expected, "{facts:?}");
    }
}

#[test]
fn ps_verdict_is_the_root_cause() {
    let p = Failure::refused(Side::Prefill, 400, bytes::Bytes::from_static(b"too long"), None);
    let accused = Fact::DecodeFailed(reported());
    assert_eq!(last(split(), &[accused.clone(), Fact::PrefillFailed(p.clone())]), [Action::Answer(p)]);
    for fact in [Fact::PrefillEnded, Fact::TimedOut(Deadline::Verdict)] {
        assert_eq!(last(split(), &[accused.clone(), fact]).last(), Some(&Action::Answer(reported())));
    }
}

#[test]
fn a_whole_answer_waits_for_ps_verdict_but_not_long() {
    let p = broken(Side::Prefill);
    assert_eq!(last(split(), &[WHOLE, Fact::PrefillEnded]), [Action::Finish]);
    assert_eq!(last(split(), &[WHOLE, Fact::PrefillFailed(p.clone())]), [Action::Answer(p)]);
    for fact in [Fact::TimedOut(Deadline::Verdict), Fact::TimedOut(Deadline::Whole), Fact::GatewayStops] {
        assert_eq!(last(split(), &[WHOLE, fact]), [Action::DetachPrefill, Action::Finish]);
    }
    let gone = last(split(), &[WHOLE, Fact::ClientGone]);
    assert_eq!(gone, [Action::Cancel(Side::Prefill), Action::Cancel(Side::Decode), Action::Leave]);
}

#[test]
fn a_late_failure_of_p_ends_a_request_of_several_samples_and_one_that_needs_p() {
    let p = broken(Side::Prefill);
    for (samples, needs_prefill) in [(2, false), (1, true)] {
        let x = Exchange::new(Plan { order: Order::Parallel, samples, needs_prefill });
        let actions = last(x, &[Fact::DecodeToken, Fact::AnswerOpened, Fact::PrefillFailed(p.clone())]);
        assert_eq!(actions, [Action::Cancel(Side::Decode), Action::BreakOff(p.clone())]);
    }
}

#[test]
fn one_leg_knows_no_prefill() {
    assert_eq!(last(with(Order::DecodeOnly), &[Fact::DecodeFailed(reported())]), [Action::Answer(reported())]);
    assert_eq!(last(with(Order::DecodeOnly), &[WHOLE]), [Action::Finish]);
}

#[test]
fn prefill_first_sends_decode_once_and_only_after_prefill() {
    let p = broken(Side::Prefill);
    let x = || with(Order::PrefillFirst);
    assert_eq!(last(x(), &[Fact::PrefillEnded]), [Action::SendDecode]);
    assert_eq!(last(x(), &[Fact::PrefillFailed(p.clone())]).last(), Some(&Action::Answer(p)));
    assert_eq!(last(x(), &[Fact::PrefillEnded, WHOLE]), [Action::Finish], "P's word is known");
    let accused = last(x(), &[Fact::PrefillEnded, Fact::DecodeFailed(reported())]);
    assert_eq!(accused, [Action::Answer(reported())]);
}

fn facts() -> Vec<Fact> {
    vec![
        Fact::PrefillEnded,
        Fact::PrefillFailed(broken(Side::Prefill)),
        Fact::DecodeToken,
        Fact::AnswerOpened,
        STREAMED,
        WHOLE,
        Fact::DecodeFailed(reported()),
        Fact::DecodeFailed(broken(Side::Decode)),
        Fact::DecodeFailed(Failure::transport(Side::Decode, "w", "closed", true)),
        Fact::TimedOut(Deadline::Prefill),
        Fact::TimedOut(Deadline::Whole),
        Fact::TimedOut(Deadline::Verdict),
        Fact::TimedOut(Deadline::ClientWrite),
        Fact::ClientGone,
        Fact::GatewayStops,
    ]
}

fn is_outcome(action: &Action) -> bool {
    matches!(action, Action::Answer(_) | Action::BreakOff(_) | Action::StartOver(_) | Action::Finish | Action::Leave)
}

/// H7: whatever the order, at most one outcome, and after it nothing; each plan, each five facts.
#[test]
fn every_order_of_facts_has_at_most_one_outcome() {
    let facts = facts();
    for (order, samples, needs_prefill) in ORDERS.into_iter().flat_map(|l| [(l, 1, false), (l, 2, false), (l, 1, true)])
    {
        let mut walk = vec![(Exchange::new(Plan { order, samples, needs_prefill }), 0, 0)];
        while let Some((x, depth, outcomes)) = walk.pop() {
            for fact in &facts {
                let mut x = x.clone();
                let actions = x.on(fact.clone());
                let now = outcomes + actions.iter().filter(|a| is_outcome(a)).count();
                assert!(now <= 1, "{fact:?}");
                assert_eq!(now == 1, x.is_over(), "{fact:?}");
                assert!(outcomes == 0 || actions.is_empty(), "over absorbs {fact:?}");
                if depth < 4 && !x.is_over() {
                    walk.push((x, depth + 1, now));
                } else if x.is_over() {
                    assert!(facts.iter().all(|f| x.clone().on(f.clone()).is_empty()));
                }
            }
        }
    }
}

/// A leg that ended is not cancelled, bytes that were sent are not followed by a status, and nothing is retried then.
#[test]
fn outcomes_fit_what_was_sent() {
    let facts = facts();
    for order in ORDERS {
        for code in 0..facts.len().pow(4) {
            let mut x = with(order);
            let (mut opened, mut p_over) = (false, order == Order::DecodeOnly);
            for step in 0..4 {
                let fact = facts[code / facts.len().pow(step) % facts.len()].clone();
                let was_over = x.is_over();
                opened |= matches!(fact, Fact::AnswerOpened) && matches!(x.state, State::Running);
                p_over |= matches!(fact, Fact::PrefillEnded | Fact::PrefillFailed(_)) && !was_over;
                for action in x.on(fact) {
                    assert!(!(p_over && action == Action::Cancel(Side::Prefill)));
                    assert!(!opened || !matches!(action, Action::Answer(_) | Action::StartOver(_)));
                    assert!(opened || !matches!(action, Action::BreakOff(_)));
                    p_over |= action == Action::Cancel(Side::Prefill);
                }
            }
        }
    }
}
