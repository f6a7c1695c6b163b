//! One exchange, one outcome: what to do about each thing that happens to a request's legs. *Pure*: facts in, actions out;
//! [`crate::exchange::drive`] carries them out.
//!
//! ```text
//!  Prefilling ─ PrefillEnded ─▶ Running            (prefill first; with parallel legs and with one leg: Running at once)
//!
//!             PrefillFailed / DecodeFailed / TimedOut / ClientGone / DecodeEnded
//!  Running ────────────────────────────────────────────────────────────────────▶ Over
//!     │                                                                            ▲
//!     ├─ DecodeFailed, reported by D itself while P still works ──▶ Accused ───────┤
//!     │                             (P's verdict: its failure is the root cause, else D's)
//!     └─ DecodeEnded, a whole answer while P still works ─────────▶ Held ──────────┘
//!                                   (P's verdict: its failure, else D's answer)
//! ```
//! Once D has shown a token of the only sample it has committed: a later failure of P changes nothing for the client
//! and is only counted, unless the answer needs P's part. `Over` absorbs everything (H7).

use crate::backend::Order;
use crate::error::{Blame, Failure, Retry, Side};

/// What is fixed about an exchange when it starts.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub order: Order,
    pub samples: usize,
    /// The answer is incomplete without something that only P can tell.
    pub needs_prefill: bool,
}

#[derive(Clone, Debug)]
pub enum Fact {
    /// P's leg ended well.
    PrefillEnded,
    PrefillFailed(Failure),
    /// D showed its first token.
    DecodeToken,
    /// The first bytes of an answer went to the client.
    AnswerOpened,
    /// D's answer is complete and good.
    DecodeEnded {
        streamed: bool,
    },
    DecodeFailed(Failure),
    TimedOut(Deadline),
    ClientGone,
    /// The gateway's grace is over.
    GatewayStops,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deadline {
    Prefill,
    FirstToken,
    Silence,
    Whole,
    /// P had its moment to tell how it went.
    Verdict,
    /// The client took nothing for too long.
    ClientWrite,
}

impl Deadline {
    pub fn name(self) -> &'static str {
        match self {
            Deadline::Prefill => "prefill",
            Deadline::FirstToken => "first_token",
            Deadline::Silence => "silence",
            Deadline::Whole => "whole",
            Deadline::Verdict => "verdict",
            Deadline::ClientWrite => "client_write",
        }
    }

    pub fn failure(self) -> Failure {
        let (code, side, what) = match self {
            Deadline::Prefill => ("prefill_timeout", Side::Prefill, "the prefill worker did not end in time"),
            Deadline::FirstToken => ("first_token_timeout", Side::Decode, "no first token came in time"),
            Deadline::Silence => {
                ("silence_timeout", Side::Decode, "the decode worker fell silent in the middle of its answer")
            }
            Deadline::Whole | Deadline::Verdict | Deadline::ClientWrite => {
                ("request_timeout", Side::Decode, "the request took longer than the gateway allows")
            }
        };
        Failure::new(504, code, Blame::Worker(side), what)
    }
}

#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// Close the connection of this leg.
    Cancel(Side),
    /// P ended, D may begin.
    SendDecode,
    /// P's leg goes on without the client: drain it and give its connection back.
    DetachPrefill,
    /// Wait this moment for P's verdict.
    AwaitVerdict,
    /// Nothing was sent yet: answer with the failure's status.
    Answer(Failure),
    /// Bytes were sent: say it as an event if the answer is a stream of events, and end.
    BreakOff(Failure),
    /// Nothing was sent and the failure allows another attempt, with another pair and new rooms; without one: answer.
    StartOver(Failure),
    /// The rest of D's answer may go to the client, which then has all of it.
    Finish,
    /// The client is gone; nobody is left to be told.
    Leave,
    /// P failed after D had committed.
    CountLatePrefillFailure(Failure),
}

#[derive(Clone, Debug)]
enum State {
    Prefilling,
    Running,
    Accused(Failure),
    Held,
    Over,
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Exchange {
    plan: Plan,
    state: State,
    prefill_running: bool,
    committed: bool,
    opened: bool,
}

impl Exchange {
    pub fn new(plan: Plan) -> Self {
        let state = match plan.order {
            Order::PrefillFirst => State::Prefilling,
            Order::DecodeOnly | Order::Parallel => State::Running,
        };
        Exchange { plan, state, prefill_running: plan.order != Order::DecodeOnly, committed: false, opened: false }
    }

    /// P's leg is one that the outcome may still depend on.
    pub fn waits_for_prefill(&self) -> bool {
        self.prefill_running && !self.is_over()
    }

    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    pub fn on(&mut self, fact: Fact) -> Vec<Action> {
        if matches!(fact, Fact::PrefillEnded | Fact::PrefillFailed(_)) {
            self.prefill_running = false;
        }
        match (std::mem::replace(&mut self.state, State::Over), fact) {
            (State::Over, _) => vec![],
            (_, Fact::ClientGone | Fact::TimedOut(Deadline::ClientWrite)) => {
                self.over([Side::Prefill, Side::Decode], Action::Leave)
            }
            (State::Prefilling, fact) => self.prefilling(fact),
            (State::Running, fact) => self.running(fact),
            (State::Accused(accused), fact) => self.accused(accused, fact),
            (State::Held, fact) => self.held(fact),
        }
    }

    fn prefilling(&mut self, fact: Fact) -> Vec<Action> {
        match fact {
            Fact::PrefillEnded => self.stay(State::Running, vec![Action::SendDecode]),
            Fact::PrefillFailed(failure) => self.fail(failure),
            Fact::TimedOut(deadline) if deadline != Deadline::Verdict => self.fail(deadline.failure()),
            Fact::GatewayStops => self.fail(Failure::stopping()),
            _ => self.stay(State::Prefilling, vec![]),
        }
    }

    fn running(&mut self, fact: Fact) -> Vec<Action> {
        match fact {
            Fact::PrefillFailed(failure) if self.committed && self.plan.samples == 1 && !self.plan.needs_prefill => {
                self.stay(State::Running, vec![Action::CountLatePrefillFailure(failure)])
            }
            Fact::PrefillFailed(failure) => self.fail(failure),
            Fact::DecodeToken => {
                self.committed = true;
                self.stay(State::Running, vec![])
            }
            Fact::AnswerOpened => {
                self.opened = true;
                self.stay(State::Running, vec![])
            }
            Fact::DecodeEnded { streamed: false } if self.prefill_running && !self.opened => {
                self.stay(State::Held, vec![Action::AwaitVerdict])
            }
            Fact::DecodeEnded { .. } => self.finish(),
            Fact::DecodeFailed(failure) if self.prefill_running && may_be_prefills_fault(&failure) => {
                self.stay(State::Accused(failure), vec![Action::Cancel(Side::Decode), Action::AwaitVerdict])
            }
            Fact::DecodeFailed(failure) => self.over_with([Side::Prefill], failure),
            Fact::TimedOut(Deadline::Prefill) if self.prefill_running => {
                self.state = State::Running;
                let mut actions = vec![Action::Cancel(Side::Prefill)];
                actions.extend(self.on(Fact::PrefillFailed(Deadline::Prefill.failure())));
                actions
            }
            Fact::TimedOut(deadline @ (Deadline::FirstToken | Deadline::Silence | Deadline::Whole)) => {
                self.fail(deadline.failure())
            }
            Fact::GatewayStops => self.fail(Failure::stopping()),
            Fact::PrefillEnded | Fact::TimedOut(_) | Fact::ClientGone => self.stay(State::Running, vec![]),
        }
    }

    fn accused(&mut self, accused: Failure, fact: Fact) -> Vec<Action> {
        match fact {
            Fact::PrefillFailed(root) => self.over_with([], root),
            Fact::PrefillEnded | Fact::TimedOut(_) | Fact::GatewayStops => self.over_with([Side::Prefill], accused),
            _ => self.stay(State::Accused(accused), vec![]),
        }
    }

    fn held(&mut self, fact: Fact) -> Vec<Action> {
        match fact {
            Fact::PrefillFailed(root) => self.over_with([], root),
            Fact::PrefillEnded | Fact::TimedOut(_) | Fact::GatewayStops => self.finish(),
            _ => self.stay(State::Held, vec![]),
        }
    }

    fn finish(&mut self) -> Vec<Action> {
        match self.prefill_running {
            true => vec![Action::DetachPrefill, Action::Finish],
            false => vec![Action::Finish],
        }
    }

    fn fail(&mut self, failure: Failure) -> Vec<Action> {
        self.over_with([Side::Prefill, Side::Decode], failure)
    }

    fn over_with<const N: usize>(&mut self, cancelled: [Side; N], failure: Failure) -> Vec<Action> {
        let outcome = match (self.opened, failure.retry) {
            (true, _) => Action::BreakOff(failure),
            (false, Retry::Never) => Action::Answer(failure),
            (false, Retry::StaleConnection | Retry::OtherPair) => Action::StartOver(failure),
        };
        self.over(cancelled, outcome)
    }

    /// Ends: these legs are closed, but a P that ended has none.
    fn over<const N: usize>(&mut self, cancelled: [Side; N], last: Action) -> Vec<Action> {
        let open = |side: &Side| *side == Side::Decode || self.prefill_running;
        let cancels = cancelled.into_iter().filter(open).map(Action::Cancel);
        cancels.chain([last]).collect()
    }

    fn stay(&mut self, state: State, actions: Vec<Action>) -> Vec<Action> {
        self.state = state;
        actions
    }
}

/// D itself says that it could not go on: perhaps because P failed, whose own word comes a moment later.
fn may_be_prefills_fault(failure: &Failure) -> bool {
    failure.blame == Blame::Worker(Side::Decode) && matches!(failure.code, "decode_refused" | "decode_reported_error")
}

#[cfg(test)]
mod tests {
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
            (
                vec![Fact::AnswerOpened, Fact::DecodeFailed(stale.clone())],
                vec![cancel_p.clone(), Action::BreakOff(stale)],
            ),
            (vec![Fact::ClientGone], vec![cancel_p.clone(), cancel_d.clone(), Action::Leave]),
            (vec![Fact::TimedOut(Deadline::ClientWrite)], vec![cancel_p.clone(), cancel_d.clone(), Action::Leave]),
            (
                vec![Fact::TimedOut(Deadline::FirstToken)],
                vec![cancel_p.clone(), cancel_d.clone(), Action::Answer(late)],
            ),
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
        matches!(
            action,
            Action::Answer(_) | Action::BreakOff(_) | Action::StartOver(_) | Action::Finish | Action::Leave
        )
    }

    /// H7: whatever the order, at most one outcome, and after it nothing; each plan, each five facts.
    #[test]
    fn every_order_of_facts_has_at_most_one_outcome() {
        let facts = facts();
        for (order, samples, needs_prefill) in
            ORDERS.into_iter().flat_map(|l| [(l, 1, false), (l, 2, false), (l, 1, true)])
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
}
