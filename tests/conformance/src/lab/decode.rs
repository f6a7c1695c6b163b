//! D's side of the lab: requests with offered pages, a held prefix, and the sink machine over the fabric's end.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tandem_fabric::{SinkFabric, SinkReport, memory::PoolMemory};
use tandem_handoff::{
    cause::Cause,
    fence::{Basis, FenceProof, PublishedPages},
    ids::{Attempt, Incarnation, RequestId, Time},
    layout::PoolShape,
    limits::Limits,
    sink::{Sink, SinkEffect, SinkFact},
    wire::FirstToken,
};

use super::{Out, ticket};
use crate::{Failure, backend::SinkEnd, ensure, pages::Pages, pattern::Prompt};

pub struct Decode {
    pub shape: PoolShape,
    pub limits: Limits,
    pub incarnation: Incarnation,
    pub machine: Sink,
    pub fabric: Box<dyn SinkFabric>,
    pub pools: Vec<Arc<PoolMemory>>,
    pub pages: Pages,
    pub requests: BTreeMap<RequestId, DecodeRequest>,
    attempts: BTreeMap<Attempt, Expected>,
    /// Effects that the machine gave while its channel was being lost.
    late: Vec<SinkEffect>,
    /// The fabric's reports are not heard.
    pub deaf: bool,
}

pub struct DecodeRequest {
    prompt: Prompt,
    /// The prefix that D holds, and the pages that were offered for the rest.
    held: Vec<u32>,
    pub offered: Vec<u32>,
    pub committed: Option<FirstToken>,
    pub failed: Option<Cause>,
    /// The offered pages came back, by this proof.
    pub back: Option<Basis>,
}

/// What the fabric may report of an attempt.
#[derive(Default)]
struct Expected {
    pieces: usize,
    landed: BTreeSet<u32>,
    revoked: bool,
    quiet: bool,
    released: bool,
}

impl DecodeRequest {
    pub fn is_over(&self) -> bool {
        self.committed.is_some() || self.failed.is_some()
    }
}

impl Decode {
    pub(super) fn new(shape: PoolShape, limits: Limits, end: SinkEnd, incarnation: Incarnation) -> Self {
        Self {
            shape,
            limits,
            incarnation,
            machine: Sink::new(shape, limits),
            fabric: end.fabric,
            pages: Pages::new(shape, end.pools.clone()),
            pools: end.pools,
            requests: BTreeMap::new(),
            attempts: BTreeMap::new(),
            late: Vec::new(),
            deaf: false,
        }
    }

    pub(super) fn reserve(
        &mut self,
        now: Time,
        id: RequestId,
        room: u64,
        prompt: &Prompt,
        held: usize,
    ) -> Result<(), Failure> {
        let count = self.shape.pages_for(prompt.tokens.len());
        let none = || Failure::new(format!("D has no {count} free pages for request {}", id.0));
        let mut held_pages = self.pages.take(count)?.ok_or_else(none)?;
        let offered = held_pages.split_off(held);
        for (page, &slot) in held_pages.iter().enumerate() {
            prompt.compute(&self.pools, &self.shape, page, slot);
        }
        self.offer(now, id, room, prompt, held_pages, offered)
    }

    /// As the engine does, with pages that it has taken.
    pub fn offer(
        &mut self,
        now: Time,
        id: RequestId,
        room: u64,
        prompt: &Prompt,
        held: Vec<u32>,
        offered: Vec<u32>,
    ) -> Result<(), Failure> {
        let held_tokens = held.len() as u32 * self.shape.page_size;
        let request = DecodeRequest {
            prompt: prompt.clone(),
            held,
            offered: offered.clone(),
            committed: None,
            failed: None,
            back: None,
        };
        let known = self.requests.insert(id, request);
        ensure!(known.is_none(), "request {} is used twice by a case", id.0);
        self.machine.reserve(now, id, &ticket(room), &prompt.tokens, held_tokens, PublishedPages::new(offered));
        Ok(())
    }

    pub(super) fn hear(&mut self, now: Time, out: &mut Vec<Out>) -> Result<(), Failure> {
        if self.deaf {
            return Ok(());
        }
        for report in self.fabric.poll() {
            match report {
                SinkReport::Landed { attempt, pieces } => {
                    self.note_landed(attempt, &pieces)?;
                    self.machine.landed(attempt, &pieces);
                }
                SinkReport::Quiet { attempt } => {
                    let expected = self.attempts.entry(attempt).or_default();
                    ensure!(expected.revoked, "attempt {} is reported quiet, and was not revoked", attempt.number);
                    ensure!(!expected.quiet, "attempt {} is reported quiet twice", attempt.number);
                    expected.quiet = true;
                    self.machine.quiet(attempt);
                }
                SinkReport::Broken { channel, why } => out.push(Out::Close(channel, why)),
            }
            self.act(now, out)?;
        }
        Ok(())
    }

    fn note_landed(&mut self, attempt: Attempt, pieces: &[u32]) -> Result<(), Failure> {
        let expected = self.attempts.entry(attempt).or_default();
        ensure!(!expected.quiet, "pieces {pieces:?} of attempt {} landed after its quiet", attempt.number);
        ensure!(!expected.released, "pieces {pieces:?} of attempt {} landed after its commit", attempt.number);
        for &piece in pieces {
            ensure!((piece as usize) < expected.pieces, "piece {piece} of {} landed", expected.pieces);
            ensure!(expected.landed.insert(piece), "piece {piece} of attempt {} landed twice", attempt.number);
        }
        Ok(())
    }

    /// Takes in what the machine wants done before its channel's data path is closed.
    pub(super) fn act_before_close(&mut self) {
        for effect in self.machine.effects() {
            match effect {
                SinkEffect::Revoke { attempt } => self.revoke(attempt),
                other => self.late.push(other),
            }
        }
    }

    fn revoke(&mut self, attempt: Attempt) {
        self.attempts.entry(attempt).or_default().revoked = true;
        self.fabric.revoke(attempt);
    }

    pub(super) fn act(&mut self, now: Time, out: &mut Vec<Out>) -> Result<(), Failure> {
        let _ = now;
        let mut effects = std::mem::take(&mut self.late);
        effects.append(&mut self.machine.effects());
        for effect in effects {
            match effect {
                SinkEffect::Dial { .. } => {}
                SinkEffect::Send { channel, frame } => out.push(Out::Send(channel, frame)),
                SinkEffect::Expect { attempt, pages, mapping } => {
                    let pieces = mapping.pieces(pages.len());
                    self.attempts.insert(attempt, Expected { pieces, ..Expected::default() });
                    self.fabric.expect(attempt, &pages, mapping);
                }
                SinkEffect::Revoke { attempt } => self.revoke(attempt),
                SinkEffect::PeerDrained { attempt } => self.fabric.peer_drained(attempt),
                SinkEffect::Release { attempt } => {
                    self.attempts.entry(attempt).or_default().released = true;
                    self.fabric.release(attempt);
                }
                SinkEffect::Verify { attempt, .. } => self.machine.verified(now, attempt, Ok(())),
                SinkEffect::CloseChannel { channel, why } => out.push(Out::Close(channel, why)),
                SinkEffect::Fact(fact) => self.fact(fact)?,
            }
        }
        Ok(())
    }

    fn fact(&mut self, fact: SinkFact) -> Result<(), Failure> {
        match fact {
            SinkFact::Committed { request, pages, proof, first } => {
                let known = self.requests.get_mut(&request).expect("facts are of requests");
                ensure!(!known.is_over(), "H7: request {} ends twice on D", request.0);
                known.committed = Some(first);
                redeem(pages, proof, known)?;
                let all = known.held.iter().chain(&known.offered).enumerate();
                for (page, &slot) in all.filter(|_| !self.pages.is_blind()) {
                    if let Some(wrong) = known.prompt.differs(&self.pools, &self.shape, page, slot) {
                        return Err(Failure::new(format!("H4: request {} committed wrong bytes: {wrong}", request.0)));
                    }
                }
            }
            SinkFact::Failed { request, cause } => {
                let known = self.requests.get_mut(&request).expect("facts are of requests");
                ensure!(!known.is_over(), "H7: request {} ends twice on D", request.0);
                known.failed = Some(cause);
            }
            SinkFact::Quiet { pages, proof } => {
                let owner = |known: &&mut DecodeRequest| known.back.is_none() && known.offered == pages.numbers();
                let known = self.requests.values_mut().find(owner);
                let known =
                    known.ok_or_else(|| Failure::new(format!("H1: {pages:?} came back and nobody had them")))?;
                ensure!(known.failed.is_some(), "H7: pages came back before the request failed");
                redeem(pages, proof, known)?;
                // The next owner fills them at once: a write that comes later is seen (H2).
                self.pages.give_back(std::mem::take(&mut known.offered));
            }
        }
        Ok(())
    }

    /// The sequence that decoded has ended: its pages are free.
    pub fn release(&mut self, id: RequestId) {
        let request = self.requests.get_mut(&id).expect("cases release what they asked for");
        self.pages.give_back(std::mem::take(&mut request.offered));
        self.pages.give_back(std::mem::take(&mut request.held));
    }

    /// The prefixes of ended requests are what they were, and are dropped.
    pub(super) fn give_back_held(&mut self) -> Result<(), Failure> {
        for request in self.requests.values_mut() {
            for (page, &slot) in request.held.iter().enumerate() {
                let wrong = request.prompt.differs(&self.pools, &self.shape, page, slot);
                ensure!(wrong.is_none(), "H1: a held prefix was written: {wrong:?}");
            }
            self.pages.give_back(std::mem::take(&mut request.held));
            if request.committed.is_some() {
                self.pages.give_back(std::mem::take(&mut request.offered));
            }
        }
        Ok(())
    }

    /// The attempt that serves a live request, or served it last.
    pub fn last_attempt(&self) -> Attempt {
        *self.attempts.keys().max_by_key(|attempt| attempt.number).expect("a case has made an attempt")
    }

    pub fn landed(&self, attempt: Attempt) -> usize {
        self.attempts.get(&attempt).map_or(0, |expected| expected.landed.len())
    }

    pub fn landed_pieces(&self) -> usize {
        self.attempts.values().map(|expected| expected.landed.len()).sum()
    }
}

fn redeem(pages: PublishedPages, proof: FenceProof, request: &mut DecodeRequest) -> Result<(), Failure> {
    let basis = proof.basis();
    let numbers = pages.redeem(proof).map_err(|mismatch| Failure::new(format!("H2: {mismatch}")))?;
    ensure!(numbers == request.offered, "H1: other pages came back than were offered");
    ensure!(request.back.replace(basis).is_none(), "H1: pages came back twice");
    Ok(())
}
