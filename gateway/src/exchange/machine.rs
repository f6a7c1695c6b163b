//! One exchange, one outcome: what to do about each thing that happens to a request's legs. *Pure*: facts in, actions out;
//! [`crate::exchange::drive`] carries them out.
//!
//! ```text
//!             PrefillFailed / DecodeFailed / TimedOut / ClientGone / DecodeEnded
//!  Running ────────────────────────────────────────────────────────────────────▶ Over
//!     │                                                                            ▲
//!     └─ DecodeFailed, reported by D itself while P still works ─▶ Accused ────────┘
//!                                    (P's verdict: its failure is the root cause, else D's)
//! ```
//! Once D has shown a token of the only sample it has committed: a later failure of P changes nothing for the client
//! and is only counted. `Over` absorbs everything (H7).

use crate::error::{Blame, Failure, Retry, Side};

/// What is fixed about an exchange when it starts.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Two legs; a plain worker's exchange has only the decode leg.
    pub split: bool,
    pub samples: usize,
    /// Another attempt may follow a stale connection.
    pub may_retry: bool,
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
    DecodeEnded,
    DecodeFailed(Failure),
    TimedOut(Deadline),
    ClientGone,
    /// The gateway's grace is over.
    GatewayStops,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deadline {
    FirstToken,
    Silence,
    Whole,
    /// P had its moment to name the root cause.
    Verdict,
}

#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// Close the connection of this leg.
    Cancel(Side),
    /// P's leg goes on without the client: drain it and give its connection back.
    DetachPrefill,
    /// Wait this moment for P's verdict.
    AwaitVerdict,
    /// Nothing was sent yet: answer with the failure's status.
    Answer(Failure),
    /// Bytes were sent: say it as an event if the answer is a stream of events, and end.
    BreakOff(Failure),
    /// Nothing was sent and the failure allows it: start over with another pair and new rooms.
    StartOver(Failure),
    /// The client has its whole answer.
    Finish,
    /// The client is gone; nobody is left to be told.
    Leave,
    /// P failed after D had committed.
    CountLatePrefillFailure(Failure),
}

#[derive(Clone, Debug)]
enum State {
    Running,
    Accused(Failure),
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
        let prefill_running = plan.split;
        Exchange { plan, state: State::Running, prefill_running, committed: false, opened: false }
    }

    #[cfg(test)]
    fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    pub fn on(&mut self, fact: Fact) -> Vec<Action> {
        match (std::mem::replace(&mut self.state, State::Over), fact) {
            (State::Over, _) => vec![],
            (_, Fact::ClientGone) => {
                self.over(vec![Action::Cancel(Side::Prefill), Action::Cancel(Side::Decode)], Action::Leave)
            }
            (State::Running, fact) => self.running(fact),
            (State::Accused(accused), fact) => self.accused(accused, fact),
        }
    }

    fn running(&mut self, fact: Fact) -> Vec<Action> {
        match fact {
            Fact::PrefillFailed(failure) if self.committed && self.plan.samples == 1 => {
                self.prefill_running = false;
                self.stay(vec![Action::CountLatePrefillFailure(failure)])
            }
            Fact::PrefillFailed(failure) => {
                self.prefill_running = false;
                let outcome = self.outcome(failure);
                self.over(vec![Action::Cancel(Side::Decode)], outcome)
            }
            Fact::PrefillEnded => {
                self.prefill_running = false;
                self.stay(vec![])
            }
            Fact::DecodeToken => {
                self.committed = true;
                self.stay(vec![])
            }
            Fact::AnswerOpened => {
                self.opened = true;
                self.stay(vec![])
            }
            Fact::DecodeEnded => {
                let rest = if self.prefill_running { vec![Action::DetachPrefill] } else { vec![] };
                self.over(rest, Action::Finish)
            }
            Fact::DecodeFailed(failure) if self.prefill_running && may_be_prefills_fault(&failure) => {
                self.state = State::Accused(failure);
                vec![Action::Cancel(Side::Decode), Action::AwaitVerdict]
            }
            Fact::DecodeFailed(failure) => {
                let outcome = self.outcome(failure);
                self.over(vec![Action::Cancel(Side::Prefill)], outcome)
            }
            Fact::TimedOut(Deadline::Verdict) => self.stay(vec![]),
            Fact::TimedOut(deadline) => {
                let outcome = self.outcome(timeout(deadline));
                self.over(vec![Action::Cancel(Side::Prefill), Action::Cancel(Side::Decode)], outcome)
            }
            Fact::GatewayStops => {
                let outcome = self.outcome(Failure::stopping());
                self.over(vec![Action::Cancel(Side::Prefill), Action::Cancel(Side::Decode)], outcome)
            }
            Fact::ClientGone => unreachable!("handled for every state"),
        }
    }

    fn accused(&mut self, accused: Failure, fact: Fact) -> Vec<Action> {
        match fact {
            Fact::PrefillFailed(root) => {
                let outcome = self.outcome(root);
                self.over(vec![], outcome)
            }
            Fact::PrefillEnded | Fact::TimedOut(_) | Fact::GatewayStops => {
                let outcome = self.outcome(accused);
                self.over(vec![Action::Cancel(Side::Prefill)], outcome)
            }
            _ => {
                self.state = State::Accused(accused);
                vec![]
            }
        }
    }

    fn outcome(&self, failure: Failure) -> Action {
        match (self.opened, failure.retry) {
            (true, _) => Action::BreakOff(failure),
            (false, Retry::StaleConnection) if self.plan.may_retry => Action::StartOver(failure),
            (false, _) => Action::Answer(failure),
        }
    }

    fn stay(&mut self, actions: Vec<Action>) -> Vec<Action> {
        self.state = State::Running;
        actions
    }

    fn over(&mut self, mut actions: Vec<Action>, last: Action) -> Vec<Action> {
        self.state = State::Over;
        if !self.prefill_running {
            actions.retain(|a| *a != Action::Cancel(Side::Prefill));
        }
        actions.push(last);
        actions
    }
}

/// D itself says that it could not go on: perhaps because P failed, whose own word comes a moment later.
fn may_be_prefills_fault(failure: &Failure) -> bool {
    failure.blame == Blame::Worker(Side::Decode) && matches!(failure.code, "decode_refused" | "decode_reported_error")
}

fn timeout(deadline: Deadline) -> Failure {
    let (code, what) = match deadline {
        Deadline::FirstToken => ("first_token_timeout", "no first token came in time"),
        Deadline::Silence => ("silence_timeout", "the decode worker fell silent in the middle of its answer"),
        Deadline::Whole | Deadline::Verdict => ("request_timeout", "the request took longer than the gateway allows"),
    };
    Failure::new(504, code, Blame::Worker(Side::Decode), what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split() -> Exchange {
        Exchange::new(Plan { split: true, samples: 1, may_retry: true })
    }

    fn broken(side: Side) -> Failure {
        Failure::transport(side, "http://w", "connection reset", false)
    }

    fn reported() -> Failure {
        Failure::reported(Side::Decode, Some(500), Some("prefill failed".into()))
    }

    #[test]
    fn a_good_exchange_finishes_and_leaves_p_to_its_end() {
        let mut x = split();
        assert_eq!(x.on(Fact::DecodeToken), []);
        assert_eq!(x.on(Fact::AnswerOpened), []);
        assert_eq!(x.on(Fact::DecodeEnded), [Action::DetachPrefill, Action::Finish]);
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
        let first_token = timeout(Deadline::FirstToken);
        let cases: Vec<(Vec<Fact>, Vec<Action>)> = vec![
            (vec![Fact::PrefillFailed(p.clone())], vec![cancel_d.clone(), Action::Answer(p.clone())]),
            (vec![Fact::DecodeFailed(d.clone())], vec![cancel_p.clone(), Action::Answer(d.clone())]),
            (vec![Fact::PrefillEnded, Fact::DecodeFailed(d.clone())], vec![Action::Answer(d.clone())]),
            (
                vec![Fact::AnswerOpened, Fact::DecodeFailed(d.clone())],
                vec![cancel_p.clone(), Action::BreakOff(d.clone())],
            ),
            (vec![Fact::DecodeFailed(stale.clone())], vec![cancel_p.clone(), Action::StartOver(stale.clone())]),
            (
                vec![Fact::AnswerOpened, Fact::DecodeFailed(stale.clone())],
                vec![cancel_p.clone(), Action::BreakOff(stale)],
            ),
            (vec![Fact::ClientGone], vec![cancel_p.clone(), cancel_d.clone(), Action::Leave]),
            (
                vec![Fact::TimedOut(Deadline::FirstToken)],
                vec![cancel_p.clone(), cancel_d.clone(), Action::Answer(first_token)],
            ),
            (vec![Fact::GatewayStops], vec![cancel_p.clone(), cancel_d.clone(), Action::Answer(Failure::stopping())]),
            (
                vec![Fact::PrefillEnded, Fact::AnswerOpened, Fact::GatewayStops],
                vec![cancel_d.clone(), Action::BreakOff(Failure::stopping())],
            ),
            (vec![Fact::DecodeFailed(reported())], vec![cancel_d.clone(), Action::AwaitVerdict]),
            (vec![Fact::DecodeToken, Fact::PrefillFailed(p.clone())], vec![Action::CountLatePrefillFailure(p.clone())]),
        ];
        for (facts, expected) in cases {
            let mut x = split();
            let actions = facts.iter().cloned().map(|f| x.on(f)).next_back().unwrap_or_default();
            let mut again = split();
            let last = facts.iter().cloned().fold(vec![], |_, f| again.on(f));
            assert_eq!(last, expected, "{facts:?}");
            drop(actions);
        }
    }

    #[test]
    fn ps_verdict_is_the_root_cause() {
        let p = Failure::refused(Side::Prefill, 400, bytes::Bytes::from_static(b"too long"), None);
        let mut x = split();
        x.on(Fact::DecodeFailed(reported()));
        assert_eq!(x.on(Fact::PrefillFailed(p.clone())), [Action::Answer(p)]);

        for fact in [Fact::PrefillEnded, Fact::TimedOut(Deadline::Verdict)] {
            let mut x = split();
            x.on(Fact::DecodeFailed(reported()));
            let actions = x.on(fact);
            assert_eq!(actions.last(), Some(&Action::Answer(reported())));
        }
    }

    #[test]
    fn a_late_failure_of_p_ends_a_request_of_several_samples() {
        let mut x = Exchange::new(Plan { split: true, samples: 2, may_retry: true });
        x.on(Fact::DecodeToken);
        x.on(Fact::AnswerOpened);
        let p = broken(Side::Prefill);
        assert_eq!(x.on(Fact::PrefillFailed(p.clone())), [Action::Cancel(Side::Decode), Action::BreakOff(p)]);
    }

    #[test]
    fn one_leg_knows_no_prefill() {
        let mut x = Exchange::new(Plan { split: false, samples: 1, may_retry: false });
        assert_eq!(x.on(Fact::DecodeFailed(reported())), [Action::Answer(reported())]);
    }

    /// H7: whatever the order, exactly one outcome.
    #[test]
    fn every_order_of_facts_has_at_most_one_outcome() {
        let facts = [
            Fact::PrefillEnded,
            Fact::PrefillFailed(broken(Side::Prefill)),
            Fact::DecodeToken,
            Fact::AnswerOpened,
            Fact::DecodeEnded,
            Fact::DecodeFailed(reported()),
            Fact::DecodeFailed(broken(Side::Decode)),
            Fact::TimedOut(Deadline::Whole),
            Fact::TimedOut(Deadline::Verdict),
            Fact::ClientGone,
            Fact::GatewayStops,
        ];
        let ends = |a: &Action| {
            matches!(a, Action::Answer(_) | Action::BreakOff(_) | Action::StartOver(_) | Action::Finish | Action::Leave)
        };
        for code in 0..facts.len().pow(4) {
            let mut x = split();
            let mut outcomes = 0;
            for step in 0..4 {
                let fact = facts[code / facts.len().pow(step) % facts.len()].clone();
                outcomes += x.on(fact).iter().filter(|a| ends(a)).count();
                assert_eq!(outcomes == 1, x.is_over());
            }
            assert!(outcomes <= 1);
        }
    }
}
