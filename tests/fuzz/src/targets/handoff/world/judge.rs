//! What the machines want is done, and judged by the ledger.

use tandem_handoff::{
    fence::{Basis, FenceProof, PublishedPages},
    ids::{Attempt, Channel, RequestId},
    sink::{SinkEffect, SinkFact},
    source::{Piece, Settlement, SourceEffect, SourceFact},
    wire::Frame,
};

use super::{Decode, Posted, SHAPE_D, SHAPE_P, Shown, World};

/// Frames under way in one direction; the oldest are lost beyond it.
const FRAMES_MAX: usize = 64;

impl World {
    /// Does what the machines want, and judges it. `by` is the request whose call it was.
    pub(super) fn act(&mut self, by: Option<RequestId>) {
        for effect in self.source.effects() {
            match effect {
                SourceEffect::Send { channel, frame } => self.sent_by_p(channel, frame),
                SourceEffect::Post { attempt, pieces } => {
                    let request = by.expect("only a call of the engine posts");
                    self.post(attempt, request, pieces);
                }
                SourceEffect::Fact(fact) => self.p_fact(fact),
                SourceEffect::Stop { attempt } => {
                    self.stopped.insert(attempt);
                }
                SourceEffect::CloseChannel { .. } | SourceEffect::PeerSettled { .. } => {}
            }
        }
        for effect in self.sink.effects() {
            self.d_effect(effect);
        }
    }

    fn post(&mut self, attempt: Attempt, request: RequestId, pieces: Vec<Piece>) {
        let known = &self.p[&request];
        assert!(known.reserved && !known.ended, "{request:?} posts before its Reserve or after its end");
        for piece in pieces {
            assert!(piece.source_offset + piece.bytes <= SHAPE_P.pool_bytes(), "{piece:?} is outside of P's pool");
            assert!(piece.target_offset + piece.bytes <= SHAPE_D.pool_bytes(), "{piece:?} is outside of D's pool");
            let again = |posted: &Posted| posted.attempt == attempt && posted.piece.index == piece.index;
            assert!(!self.posted.iter().any(again), "{piece:?} is posted twice");
            self.posted.push(Posted { attempt, request, piece });
        }
    }

    fn sent_by_p(&mut self, channel: Channel, frame: Frame) {
        assert_eq!(Frame::decode(&frame.encode()).as_ref(), Ok(&frame));
        if let Frame::Drained { attempt } = &frame {
            let writing = self.posted.iter().any(|posted| posted.attempt == *attempt);
            assert!(!writing, "Drained of {attempt:?} while a write is under way");
            assert!(!self.poisoned.contains(attempt), "Drained of {attempt:?} though a write's outcome is unknown");
        }
        push(&mut self.to_d, (channel, frame));
    }

    fn p_fact(&mut self, fact: SourceFact) {
        let (SourceFact::Reserved { request, .. }
        | SourceFact::Delivered { request, .. }
        | SourceFact::Failed { request, .. }
        | SourceFact::Quiet { request }) = fact;
        let writing = self.posted.iter().any(|posted| posted.request == request);
        let known = self.p.get_mut(&request).expect("a fact of a request that was made");
        match fact {
            SourceFact::Reserved { checksums, .. } => {
                assert!(!known.reserved && !known.ended, "{request:?} is reserved twice or after its end");
                (known.reserved, known.wants_sums) = (true, checksums);
            }
            SourceFact::Delivered { .. } => {
                assert!(
                    known.reserved && !known.ended,
                    "H7: {request:?} is delivered before its Reserve or after its end"
                );
                assert!(!writing, "{request:?} is delivered while a write is under way");
                known.ended = true;
            }
            SourceFact::Failed { .. } => {
                assert!(!known.ended, "H7: {request:?} ends twice");
                known.ended = true;
            }
            SourceFact::Quiet { .. } => {
                assert!(known.ended && !known.quiet, "{request:?} is quiet before its end or twice");
                assert!(!writing, "H5: {request:?} is quiet while a write is under way");
                known.quiet = true;
            }
        }
    }

    fn d_effect(&mut self, effect: SinkEffect) {
        match effect {
            SinkEffect::Dial { .. } => self.dialling = true,
            SinkEffect::Send { channel, frame } => {
                assert_eq!(Frame::decode(&frame.encode()).as_ref(), Ok(&frame));
                if let Frame::Reserve(reserve) = &frame {
                    assert!(self.shown.contains_key(&reserve.attempt), "a Reserve before its Expect");
                }
                push(&mut self.to_p, (channel, frame));
            }
            SinkEffect::Expect { attempt, pages, mapping } => {
                let mine = |decode: &Decode| !decode.ended && decode.pages == pages;
                let request = self.d.iter().find(|(_, decode)| mine(decode)).map(|(&id, _)| id);
                let request = request.expect("pages of a live request");
                let pieces = mapping.pieces(pages.len());
                let shown = Shown { request: Some(request), pieces, ..Shown::default() };
                let known = self.shown.insert(attempt, shown);
                assert!(known.is_none(), "{attempt:?} is shown twice");
            }
            SinkEffect::Revoke { attempt } => {
                // Asked again past the drain deadline.
                if !self.revoked.contains(&attempt) && self.shown.get(&attempt).is_some_and(|shown| !shown.quiet) {
                    self.revoked.push(attempt);
                }
            }
            SinkEffect::Verify { attempt, .. } => self.verifying.push(attempt),
            SinkEffect::PeerDrained { .. } | SinkEffect::CloseChannel { .. } | SinkEffect::Release { .. } => {}
            SinkEffect::Fact(fact) => self.d_fact(fact),
        }
    }

    fn d_fact(&mut self, fact: SinkFact) {
        match fact {
            SinkFact::Committed { request, pages, proof, .. } => {
                self.d_ends(request);
                let shown = self.shown.values().find(|shown| shown.request == Some(request)).expect("it was offered");
                assert!(shown.landed.len() == shown.pieces && shown.done, "H4: {request:?} commits too early");
                assert!(!shown.filled || shown.forged, "H4: {request:?} commits a piece that was filled up");
                assert!(shown.verified || !self.sums, "H4: {request:?} commits unverified");
                assert_eq!(proof.basis(), Basis::Landed);
                self.give_back(request, pages, proof);
            }
            SinkFact::Failed { request, .. } => self.d_ends(request),
            SinkFact::Quiet { pages, proof } => {
                let mine = |decode: &Decode| !decode.back && decode.pages == pages.numbers();
                let request = self.d.iter().find(|(_, decode)| mine(decode)).map(|(&id, _)| id);
                let request = request.expect("H2: pages come back that are not out");
                assert!(self.d[&request].ended, "pages of a live request come back");
                match self.shown.values().find(|shown| shown.request == Some(request)) {
                    Some(shown) => assert!(shown.quiet && proof.basis() == Basis::Quiet, "H2: {request:?}"),
                    None => assert_eq!(proof.basis(), Basis::NeverShown),
                }
                self.give_back(request, pages, proof);
            }
        }
    }

    fn d_ends(&mut self, request: RequestId) {
        let decode = self.d.get_mut(&request).expect("a fact of a request that was made");
        assert!(!decode.ended, "H7: {request:?} ends twice");
        decode.ended = true;
    }

    fn give_back(&mut self, request: RequestId, pages: PublishedPages, proof: FenceProof) {
        let decode = self.d.get_mut(&request).expect("known");
        let pages = pages.redeem(proof).expect("H2: the proof of its own attempt");
        assert!(!decode.back && pages == decode.pages, "H2: pages of {request:?} come back twice or wrong");
        decode.back = true;
        self.free.extend(pages);
    }

    /// The network and the fabric come to their end, and every deadline passes.
    pub fn end(&mut self) {
        for prefill in [true, false] {
            self.cut(prefill);
            self.act(None);
        }
        for Posted { attempt, .. } in std::mem::take(&mut self.posted) {
            self.source.settled(self.now, attempt, 1, Settlement::Dropped);
            self.act(None);
        }
        for _ in 0..4 {
            while !self.revoked.is_empty() {
                self.quiet(0);
                self.act(None);
            }
            self.now = self.now.after_ms(2000);
            self.source.tick(self.now);
            self.sink.tick(self.now);
            self.act(None);
        }
        assert!(self.source.is_idle(), "H6: something is left at P");
        assert!(self.sink.is_idle(), "H6: something is left at D");
        for (id, request) in &self.p {
            assert!(request.ended && request.quiet, "H7: {id:?} has no end at P");
        }
        for (id, request) in &self.d {
            assert!(request.ended && request.back, "H7: {id:?} has no end at D, or its pages are out");
        }
        assert_eq!(self.free.len(), SHAPE_D.pages as usize, "H1: every page is free again");
    }
}

fn push(queue: &mut Vec<(Channel, Frame)>, frame: (Channel, Frame)) {
    queue.push(frame);
    if queue.len() > FRAMES_MAX {
        queue.remove(0);
    }
}
