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
mod tests;
