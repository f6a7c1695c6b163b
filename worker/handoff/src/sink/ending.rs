//! From the end of an attempt that did not commit to proof of quiet (H2, H7). *Pure.*

use super::{Draining, Live, Sink, SinkEffect, SinkFact, State, Timer};
use crate::{
    cause::{Cause, CauseKind, Side},
    fence::{Basis, FenceProof, PublishedPages},
    ids::{Attempt, RequestId, Time},
    sabotage::Fault,
    wire::Frame,
};

impl Sink {
    /// The fabric proves that no write of the attempt is in progress or can begin.
    pub fn quiet(&mut self, attempt: Attempt) {
        if let Some(Draining { pages, publication, .. }) = self.draining.remove(&attempt) {
            self.deadlines.clear(Timer::Drain(attempt));
            let channel = attempt.channel();
            if self.channels.contains_key(&channel) {
                // Where D copies out of P's memory, P's source is quiet only now.
                self.effects.push(SinkEffect::Send { channel, frame: Frame::Settled { attempt } });
            }
            let proof = FenceProof::new(publication, Basis::Quiet);
            self.fact(SinkFact::Quiet { pages, proof });
        }
    }

    pub(super) fn request_expired(&mut self, now: Time, id: RequestId) {
        let Some(live) = self.live.get(&id) else {
            return;
        };
        let waited = self.limits.waiting_timeout_ms;
        let message = match &live.state {
            State::Dialling { address, .. } => {
                format!("the prefill worker {address} could not be reached within {waited} ms; a retry is safe")
            }
            State::Offered { landed, done, .. } => format!(
                "the prompt of bootstrap_room {} did not arrive within {waited} ms ({} of {} pieces, Done {}); a retry is safe",
                live.room,
                landed.landed(),
                landed.size(),
                if done.is_some() { "came" } else { "missing" },
            ),
            State::Verifying { .. } => format!(
                "the checksums of the prompt of bootstrap_room {} were not compared within {waited} ms; a retry is safe",
                live.room
            ),
        };
        self.end(now, id, Cause::new(Side::Decode, CauseKind::Timeout, message), true);
    }

    /// The fabric could not prove quiet in time. The pages stay where they are; the peer is fenced, again and again.
    pub(super) fn drain_expired(&mut self, now: Time, attempt: Attempt) {
        let Some(draining) = self.draining.get_mut(&attempt) else {
            return;
        };
        if self.limits.planted.is(Fault::FreesOnTimer) {
            self.quiet(attempt);
            return;
        }
        draining.quarantined = true;
        self.deadlines.set(Timer::Drain(attempt), now.after_ms(self.limits.drain_timeout_ms));
        self.effects.push(SinkEffect::Revoke { attempt });
        let why = format!("an ended attempt was not quiet within {} ms", self.limits.drain_timeout_ms);
        let channel = attempt.channel();
        self.effects.push(SinkEffect::CloseChannel { channel, why: why.clone() });
        self.channel_down(now, channel, &why);
    }

    /// P has settled everything it posted for an attempt that it, or we, ended.
    pub(super) fn drained(&mut self, now: Time, attempt: Attempt) {
        if let Some(&id) = self.attempts.get(&attempt) {
            let message = "the prefill worker ended the transfer without a reason";
            self.end(now, id, Cause::new(Side::Prefill, CauseKind::Internal, message), false);
        }
        let mut attempt = attempt;
        if self.limits.planted.is(Fault::ForgetsAttemptOnDrained) && !self.draining.contains_key(&attempt) {
            let other = self.draining.keys().find(|other| other.channel() == attempt.channel());
            attempt = other.copied().unwrap_or(attempt);
        }
        if self.draining.contains_key(&attempt) {
            self.effects.push(SinkEffect::PeerDrained { attempt });
        }
    }

    /// Ends a request that is neither committed nor failed: one Failed to the engine (H7); its pages stay with the
    /// attempt until quiet. `tell` is false when the peer knows already, or is gone.
    pub(super) fn end(&mut self, now: Time, id: RequestId, cause: Cause, tell: bool) {
        let Some(Live { room, pages, publication, state, .. }) = self.live.remove(&id) else {
            return;
        };
        self.deadlines.clear(Timer::Request(id));
        let untouched = matches!(&state, State::Offered { landed, .. } if landed.landed() == 0);
        match state {
            State::Dialling { .. } => {
                self.fact(SinkFact::Failed { request: id, cause });
                self.fact(SinkFact::Quiet { pages, proof: FenceProof::new(publication, Basis::NeverShown) });
            }
            State::Offered { attempt, .. } | State::Verifying { attempt, .. } => {
                self.attempts.remove(&attempt);
                if tell {
                    let frame = Frame::Abort { attempt, room, cause: cause.clone() };
                    self.effects.push(SinkEffect::Send { channel: attempt.channel(), frame });
                }
                self.fact(SinkFact::Failed { request: id, cause });
                self.draining.insert(attempt, Draining { request: id, pages, publication, quarantined: false });
                self.deadlines.set(Timer::Drain(attempt), now.after_ms(self.limits.drain_timeout_ms));
                self.effects.push(SinkEffect::Revoke { attempt });
                if untouched && self.limits.planted.is(Fault::FreesUntouchedPages) {
                    self.quiet(attempt);
                }
                if self.limits.planted.is(Fault::SettlesBeforeQuiet) {
                    let (channel, frame) = (attempt.channel(), Frame::Settled { attempt });
                    self.effects.push(SinkEffect::Send { channel, frame });
                }
            }
        }
    }

    /// What [`Fault::FreesTwice`] does.
    pub(super) fn free_once_more(&mut self, id: RequestId) {
        if let Some(draining) = self.draining.values().find(|draining| draining.request == id) {
            let publication = draining.publication;
            let mut pages = PublishedPages::new(draining.pages.numbers().to_vec());
            pages.bind(publication);
            self.fact(SinkFact::Quiet { pages, proof: FenceProof::new(publication, Basis::Quiet) });
        }
    }
}
