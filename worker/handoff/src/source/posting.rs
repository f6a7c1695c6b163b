//! From finished pages to posted pieces, and their settlement (H5). *Pure.*

use std::{mem, ops::Range};

use super::{Notice, Peer, Piece, Request, Settlement, Source, SourceEffect, State, Transfer};
use crate::{
    cause::{Cause, CauseKind, Side},
    ids::{Attempt, RequestId, Time},
    layout::PoolShape,
    sabotage::Fault,
    wire::{Done, FirstToken, Frame, Phases, Sent},
};

impl Source {
    /// The device finished `pages[range]`, whole pages, contiguous from the last call's end; `pages` are the sequence's
    /// pages from token 0. `sums` are the checksums of these pages, `[page in range][kv head of the whole model]`, where
    /// D asked for them, and empty elsewhere.
    pub fn chunk_written(&mut self, now: Time, id: RequestId, pages: &[u32], range: Range<usize>, sums: &[u32]) {
        let Some(Request { state: State::Open(transfer), .. }) = self.requests.get_mut(&id) else {
            return;
        };
        let range = match self.limits.planted.is(Fault::TruncatesPages) {
            true => range.start.min(transfer.pages)..range.end.min(transfer.pages),
            false => range,
        };
        if let Err(cause) = transfer.write(&range, pages.len(), sums, self.shape.kv_heads as usize) {
            self.end(now, id, cause, Notice::Failed);
            return;
        }
        let attempt = transfer.attempt;
        let Some(peer) = self.peers.get(&attempt.channel()) else {
            return;
        };
        let fresh = range.start.max(transfer.held)..range.end;
        let pieces = pieces_of(&self.shape, peer, transfer, pages, fresh);
        for piece in &pieces {
            let sent = transfer.account.entry(piece.target_rank).or_insert(Sent {
                rank: piece.target_rank,
                rail: 0,
                pieces: 0,
                bytes: 0,
            });
            sent.pieces += 1;
            sent.bytes += piece.bytes as u64;
        }
        transfer.outstanding += pieces.len() as u64;
        if !pieces.is_empty() {
            transfer.first_post.get_or_insert(now);
            self.effects.push(SourceEffect::Post { attempt, pieces });
        }
    }

    /// The device finished the last pages, perhaps none: posts them and sends Done.
    pub fn finish(
        &mut self,
        now: Time,
        id: RequestId,
        pages: &[u32],
        range: Range<usize>,
        sums: &[u32],
        first: FirstToken,
    ) {
        self.chunk_written(now, id, pages, range, sums);
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let State::Open(transfer) = &mut request.state else {
            return;
        };
        if transfer.written != transfer.pages {
            let message = format!(
                "the engine finished a prompt after {} of {} pages; please report this",
                transfer.written, transfer.pages
            );
            self.end(now, id, Cause::new(Side::Prefill, CauseKind::Internal, message), Notice::Failed);
            return;
        }
        let done = Done {
            attempt: transfer.attempt,
            first,
            account: transfer.account.values().copied().collect(),
            phases: Phases {
                rendezvous_us: transfer.opened.micros_since(request.arrived),
                prefill_us: now.micros_since(transfer.opened),
            },
            checksums: transfer.checksums.take().unwrap_or_default(),
        };
        let channel = transfer.attempt.channel();
        self.effects.push(SourceEffect::Send { channel, frame: Frame::Done(done) });
        let placeholder = State::Waiting { prompt: Box::default() };
        if let State::Open(transfer) = mem::replace(&mut request.state, placeholder) {
            request.state = State::Pushed(transfer);
        }
        self.conclude(id);
    }

    /// Posted pieces of `attempt` came to their end.
    pub fn settled(&mut self, now: Time, attempt: Attempt, pieces: u64, how: Settlement) {
        let Some(id) = self.settling(attempt) else {
            return;
        };
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let (State::Open(transfer) | State::Pushed(transfer) | State::Draining { transfer, .. }) = &mut request.state
        else {
            return;
        };
        debug_assert!(transfer.outstanding >= pieces, "H5: more pieces settled than were posted");
        transfer.outstanding = transfer.outstanding.saturating_sub(pieces);
        transfer.poisoned |= how == Settlement::Unknown;
        let draining = matches!(request.state, State::Draining { .. });
        if how != Settlement::Sent && pieces > 0 && !draining {
            let cause = Cause::new(
                Side::Prefill,
                CauseKind::Lost,
                "the transfer of the prompt's pages broke off; a retry is safe",
            );
            self.end(now, id, cause, Notice::Failed);
            return;
        }
        self.conclude(id);
    }

    /// The request of exactly this attempt (H3), unless the fault that settles another one is planted.
    fn settling(&self, attempt: Attempt) -> Option<RequestId> {
        let exact = self.attempts.get(&attempt).copied();
        if !self.limits.planted.is(Fault::SettlesAnother) {
            return exact;
        }
        let waits = |id: &RequestId| match self.requests.get(id).map(|request| &request.state) {
            Some(State::Pushed(transfer) | State::Draining { transfer, .. }) => transfer.outstanding > 0,
            _ => false,
        };
        let mut others = self.attempts.iter().filter(|(other, id)| other.channel() == attempt.channel() && waits(id));
        others.next().map(|(_, id)| *id).or(exact)
    }
}

impl Transfer {
    /// Books `pages[range]` as written, with their checksums.
    fn write(&mut self, range: &Range<usize>, pages: usize, sums: &[u32], kv_heads: usize) -> Result<(), Cause> {
        let internal = |message| Err(Cause::new(Side::Prefill, CauseKind::Internal, message));
        let bounds = self.written == range.start && range.end >= range.start;
        if !bounds || range.end > self.pages || range.end > pages {
            return internal(format!(
                "the engine reported pages {range:?} after {} of {}, which is out of order; please report this",
                self.written, self.pages
            ));
        }
        if let Some(checksums) = &mut self.checksums {
            if sums.len() != range.len() * kv_heads {
                return internal(format!(
                    "the decode worker wants a checksum per page and KV head, and the backend of the prefill worker \
                     gave {} for {} pages of {kv_heads} heads; start the decode worker without --enable-kv-checksum",
                    sums.len(),
                    range.len()
                ));
            }
            let held = self.held.clamp(range.start, range.end) - range.start;
            checksums.extend_from_slice(&sums[held * kv_heads..]);
        }
        self.written = range.end;
        Ok(())
    }
}

/// The pieces of `fresh`, indices into the prompt's pages, each route of each page once.
fn pieces_of(shape: &PoolShape, peer: &Peer, transfer: &Transfer, pages: &[u32], fresh: Range<usize>) -> Vec<Piece> {
    let mapping = &peer.mapping;
    let mut pieces = Vec::with_capacity(mapping.pieces(fresh.len()));
    for page in fresh {
        let in_set = page - transfer.held;
        for (route_index, route) in mapping.routes().iter().enumerate() {
            pieces.push(Piece {
                index: mapping.piece(in_set, route_index) as u32,
                source_rank: route.prefill_rank,
                source_offset: route.source_offset(shape, pages[page]),
                target_rank: route.decode_rank,
                target_offset: route.target_offset(&peer.shape, transfer.targets[in_set]),
                bytes: mapping.bytes(route),
            });
        }
    }
    pieces
}
