//! From offered pages to a commit: pieces that land, Done, and checksums (H4). *Pure.*

use super::{Live, Sink, SinkEffect, SinkFact, State, Timer};
use crate::{
    cause::{Cause, CauseKind, Side},
    checksum::Corrupt,
    fence::{Basis, FenceProof},
    ids::{Attempt, RequestId, Time},
    layout::PieceSet,
    sabotage::{Fault, Planted},
    wire::{Done, FirstToken},
};

impl Sink {
    /// The request of exactly this attempt (H3), unless the fault that forgets attempts here is planted.
    pub(super) fn request_of(&self, attempt: Attempt, forgets: Fault) -> Option<RequestId> {
        let exact = self.attempts.get(&attempt).copied();
        if !self.limits.planted.is(forgets) {
            return exact;
        }
        let of_channel = || self.attempts.iter().find(|(other, _)| other.channel() == attempt.channel());
        exact.or_else(|| of_channel().map(|(_, id)| *id))
    }

    pub(super) fn has_done(&self, id: RequestId) -> bool {
        matches!(self.live.get(&id), Some(Live { state: State::Offered { done: Some(_), .. }, .. }))
    }

    /// Pieces of the attempt are in its pages, and visible to the device.
    pub fn landed(&mut self, attempt: Attempt, pieces: &[u32]) {
        let Some(&id) = self.attempts.get(&attempt) else {
            return;
        };
        if let Some(Live { state: State::Offered { landed, .. }, .. }) = self.live.get_mut(&id) {
            for &piece in pieces {
                let new = landed.insert(piece as usize);
                if !new && self.limits.planted.is(Fault::CountsPieces) {
                    landed.missing().map(|missing| landed.insert(missing));
                }
            }
        }
        self.commit_if_complete(id);
    }

    pub(super) fn done(&mut self, now: Time, done: Done) {
        let Some(id) = self.request_of(done.attempt, Fault::ForgetsAttemptOnDone) else {
            return;
        };
        let Some(Live { pages, state: State::Offered { landed, done: known, .. }, .. }) = self.live.get_mut(&id) else {
            return;
        };
        if known.is_some() {
            return;
        }
        let sent: u64 = done.account.iter().fold(0, |sum, sent| sum.saturating_add(sent.pieces));
        let checksums = if self.checksums { pages.len() * self.shape.kv_heads as usize } else { done.checksums.len() };
        let cut = self.limits.planted.is(Fault::TruncatesPages) && sent < landed.size() as u64;
        let wrong = if sent != landed.size() as u64 && !cut {
            Some(format!("it sent {sent} pieces of the prompt, it has {}", landed.size()))
        } else if done.checksums.len() != checksums {
            Some(format!("the prompt has {} checksums, it has {checksums}", done.checksums.len()))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            let message = format!("the prefill worker says {wrong}; a retry is safe");
            self.end(now, id, Cause::new(Side::Decode, CauseKind::Internal, message), true);
            return;
        }
        *known = Some(done);
        self.commit_if_complete(id);
    }

    /// The answer to `Verify`. Nothing changes when the attempt has ended since (H3, H4).
    pub fn verified(&mut self, now: Time, attempt: Attempt, outcome: Result<(), Corrupt>) {
        let Some(&id) = self.attempts.get(&attempt) else {
            return;
        };
        if !matches!(self.live.get(&id), Some(Live { state: State::Verifying { .. }, .. })) {
            return;
        }
        match outcome {
            Ok(()) => self.commit(id),
            Err(_) if self.limits.planted.is(Fault::SkipsChecksums) => self.commit(id),
            Err(corrupt) => {
                let message = format!(
                    "the KV cache arrived damaged: the checksum of {corrupt} is not the prefill worker's; a retry is safe"
                );
                self.end(now, id, Cause::new(Side::Decode, CauseKind::Internal, message), true);
            }
        }
    }

    /// H4: each piece of the set landed, and Done came; then the checksums are compared, where they are asked for.
    fn commit_if_complete(&mut self, id: RequestId) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        let State::Offered { attempt, landed, done } = &mut live.state else {
            return;
        };
        if !landed.is_full() && !commits_early(self.limits.planted, landed, done.as_ref()) {
            return;
        }
        let attempt = *attempt;
        if done.is_none() && self.limits.planted.is(Fault::CommitsBeforeDone) {
            let first = FirstToken { token: 0, logprob: None, cached_tokens: 0 };
            live.state = State::Verifying { attempt, first };
            self.commit(id);
            return;
        }
        let Some(Done { first, checksums, .. }) = done.take() else {
            return;
        };
        live.state = State::Verifying { attempt, first };
        if self.checksums {
            let held = (live.held_tokens / self.shape.page_size) as usize;
            let pages = live.pages.numbers().to_vec();
            self.effects.push(SinkEffect::Verify { attempt, pages, held, checksums });
        } else {
            self.commit(id);
        }
    }

    pub(super) fn commit(&mut self, id: RequestId) {
        let Some(Live { pages, publication, state: State::Verifying { attempt, first }, .. }) = self.live.remove(&id)
        else {
            return;
        };
        self.attempts.remove(&attempt);
        self.deadlines.clear(Timer::Request(id));
        self.effects.push(SinkEffect::Release { attempt });
        let proof = FenceProof::new(publication, Basis::Landed);
        self.fact(SinkFact::Committed { request: id, pages, proof, first });
    }
}

/// What [`Fault::CommitsBeforeLanded`] and [`Fault::TruncatesPages`] take for a full set.
fn commits_early(planted: Planted, landed: &PieceSet, done: Option<&Done>) -> bool {
    let Some(done) = done else {
        return false;
    };
    let sent: u64 = done.account.iter().map(|sent| sent.pieces).sum();
    planted.is(Fault::CommitsBeforeLanded) || planted.is(Fault::TruncatesPages) && landed.landed() as u64 >= sent
}
