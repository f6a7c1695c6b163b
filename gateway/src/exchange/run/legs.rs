//! What an attempt makes of what its legs say: each event judged, its worker blamed or praised, and told to the machine.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Failure, Side};
use crate::exchange::afterwards;
use crate::exchange::machine::{Deadline, Fact};
use crate::exchange::open::Opener;
use crate::exchange::run::{DecodeNext, Run};
use crate::fleet::{Outcome, Worker};
use crate::leg::{ConnectLimits, Leg, LegEvent};
use crate::stream::{Answer, Meaning, Merge, Step};

impl Run<'_> {
    pub(super) fn blame_slow_worker(&self, deadline: Deadline) {
        let leg = match deadline {
            Deadline::Prefill => &self.prefill,
            Deadline::FirstToken if self.prefill.is_some() => &self.prefill,
            Deadline::FirstToken | Deadline::Silence => &self.decode,
            Deadline::Whole | Deadline::Verdict | Deadline::ClientWrite => &None,
        };
        if !self.shortened {
            report(leg, Outcome::Failed);
        }
    }

    /// P's bytes go nowhere; they are only judged.
    pub(super) fn on_prefill(&mut self, event: LegEvent) {
        let meaning = match event {
            LegEvent::Head(head) => {
                let worker = self.prefill_worker.as_ref().map_or("", |worker| worker.url());
                let answer = Answer::new(Side::Prefill, worker, &head, self.request.expected());
                self.prefill_answer = Some(if self.needs_part() { answer.keeping() } else { answer });
                return;
            }
            LegEvent::Data(data) => self.prefill_answer.as_mut().map(|answer| answer.push(data).meaning),
            LegEvent::End { clean } => self.prefill_answer.as_mut().map(|answer| answer.end(clean).meaning),
            LegEvent::Broken(failure) => Some(Meaning::Failed(failure)),
        };
        match meaning {
            Some(Meaning::Complete) => {
                report(&self.prefill, Outcome::Good);
                if let Some(leg) = self.prefill.take() {
                    afterwards::tidy(leg);
                }
                let needs_part = self.needs_part();
                self.part = self.prefill_answer.as_mut().filter(|_| needs_part).map(Answer::take_prefill);
                self.on(Fact::PrefillEnded);
                self.hand_part_over();
            }
            Some(Meaning::Failed(failure)) => {
                let failure = of_worker(failure, self.prefill_worker.as_ref());
                self.gateway.metrics.exchange.leg_failed(Side::Prefill, &failure);
                report(&self.prefill, Outcome::of(&failure));
                self.culprit = self.prefill_worker.as_ref().map(|worker| worker.id());
                self.forget_engine();
                self.accused = None;
                self.prefill = None;
                self.on(Fact::PrefillFailed(failure));
            }
            Some(Meaning::None | Meaning::Token) | None => {}
        }
    }

    /// D's answer, or its body, is made with P's.
    fn needs_part(&self) -> bool {
        self.merge != Merge::default() || self.decode_next.is_some()
    }

    /// What waited for P's answer goes on.
    pub(super) fn hand_part_over(&mut self) {
        let Some(answer) = self.decode_answer.as_mut().filter(|_| self.part.is_some()) else { return };
        let step = answer.prefill(self.part.take().unwrap_or_default());
        self.clock.hold(false, Instant::now());
        self.on_step(step);
    }

    pub(super) fn on_decode(&mut self, event: LegEvent) {
        self.clock.piece(Instant::now());
        let step = match event {
            LegEvent::Head(head) => {
                let expected = self.request.expected();
                let answer = Answer::new(Side::Decode, self.decode_worker.url(), &head, expected);
                self.decode_answer = Some(answer.merging(self.merge));
                self.decode_head = Some(Box::new(head));
                return self.hand_part_over();
            }
            LegEvent::Data(data) => self.decode_answer.as_mut().map(|answer| answer.push(data)),
            LegEvent::End { clean } => self.decode_answer.as_mut().map(|answer| answer.end(clean)),
            LegEvent::Broken(failure) => return self.decode_failed(failure),
        };
        if let Some(step) = step {
            self.on_step(step);
        }
        if self.decode_answer.as_ref().is_some_and(Answer::waits_for_prefill) {
            self.clock.hold(true, Instant::now());
        }
    }

    fn on_step(&mut self, step: Step) {
        match step.meaning {
            Meaning::Complete => {
                report(&self.decode, Outcome::Good);
                self.rest = step.forward;
                let streamed = self.decode_head.as_ref().is_some_and(|head| head.is_event_stream());
                self.on(Fact::DecodeEnded { streamed });
            }
            Meaning::Failed(failure) => {
                self.send(step.forward);
                self.decode_failed(failure);
            }
            Meaning::Token => {
                self.clock.token();
                report(&self.decode, Outcome::Good);
                self.on(Fact::DecodeToken);
                self.send(step.forward);
            }
            Meaning::None => self.send(step.forward),
        }
    }

    /// D may have looked for an engine that is gone.
    fn forget_engine(&self) {
        if let Some(worker) = self.prefill_worker.as_ref().filter(|_| self.request.backend().needs_engine_id()) {
            self.gateway.engines.forget(worker.id());
        }
    }

    pub(super) fn decode_failed(&mut self, failure: Failure) {
        let failure = of_worker(failure, Some(&self.decode_worker));
        self.gateway.metrics.exchange.leg_failed(Side::Decode, &failure);
        self.culprit = Some(self.decode_worker.id());
        self.forget_engine();
        self.accused = self.decode.take().map(|leg| (leg.into_picked(), Outcome::of(&failure)));
        self.on(Fact::DecodeFailed(failure));
    }

    /// Closes a leg that its worker still works at.
    pub(super) fn abort(&self, leg: Option<Leg>) {
        let Some(worker) = leg.map(|leg| leg.worker().clone()) else { return };
        if self.request.config.fleet.backend.aborts_by_rid()
            && let Some(rid) = self.request.scanned.rid()
        {
            let limits = ConnectLimits::of(&self.request.config.deadlines);
            self.gateway.aborts.send(&self.gateway.connector, &worker, &rid, limits);
        }
    }

    /// P ended: D's body can be made of its answer.
    pub(super) fn send_decode(&mut self) {
        let Some(DecodeNext { picked, fresh }) = self.decode_next.take() else { return };
        let part = self.part.get_or_insert_default();
        let body = self.request.backend().decode_after(&self.request.scanned, part);
        let opener = Opener::new(self.gateway, self.request);
        self.opening = Some(Box::pin(opener.open_decode(picked, body, fresh)));
    }
}

fn report(leg: &Option<Leg>, outcome: Outcome) {
    if let Some(leg) = leg {
        leg.report(outcome);
    }
}

/// The log names the worker that failed.
fn of_worker(failure: Failure, worker: Option<&Arc<Worker>>) -> Failure {
    match worker {
        Some(worker) => failure.with_detail(worker.url()),
        None => failure,
    }
}
