//! P's side of the lab: sequences with pages of their own, and the source machine over the fabric's end.

use std::{collections::BTreeMap, sync::Arc};

use tandem_fabric::{SourceFabric, SourceReport, memory::PoolMemory};
use tandem_handoff::{
    cause::Cause,
    ids::{Attempt, Incarnation, RequestId, Room, Time},
    layout::PoolShape,
    limits::Limits,
    source::{Source, SourceEffect, SourceFact},
    wire::FirstToken,
};

use super::Out;
use crate::{Failure, backend::SourceEnd, ensure, pages::Pages, pattern::Prompt};

pub struct Prefill {
    pub shape: PoolShape,
    pub limits: Limits,
    pub incarnation: Incarnation,
    pub machine: Source,
    pub fabric: Box<dyn SourceFabric>,
    pub pools: Vec<Arc<PoolMemory>>,
    pub pages: Pages,
    pub requests: BTreeMap<RequestId, PrefillRequest>,
    /// Pieces posted and settled, by attempt.
    pub posts: BTreeMap<Attempt, (u64, u64)>,
    /// The fabric's reports are not heard.
    pub deaf: bool,
    /// Stop effects seen.
    pub stopped: Vec<Attempt>,
}

pub struct PrefillRequest {
    prompt: Prompt,
    pub pages: Vec<u32>,
    computed: usize,
    /// The sequence needs its pages beyond the handoff: they are not given back at its quiet.
    pub keeps_pages: bool,
    pub reserved: bool,
    pub delivered: bool,
    pub failed: Option<Cause>,
    pub quiet: bool,
}

impl Prefill {
    pub(super) fn new(shape: PoolShape, limits: Limits, end: SourceEnd, incarnation: Incarnation) -> Self {
        Self {
            shape,
            limits,
            incarnation,
            machine: Source::new(shape, limits),
            fabric: end.fabric,
            pages: Pages::new(shape, end.pools.clone()),
            pools: end.pools,
            requests: BTreeMap::new(),
            posts: BTreeMap::new(),
            deaf: false,
            stopped: Vec::new(),
        }
    }

    pub(super) fn request(&mut self, now: Time, id: RequestId, room: Room, prompt: &Prompt) -> Result<(), Failure> {
        let count = self.shape.pages_for(prompt.tokens.len());
        let pages = self.pages.take(count)?;
        let pages = pages.ok_or_else(|| Failure::new(format!("P has no {count} free pages for request {}", id.0)))?;
        let request = PrefillRequest {
            prompt: prompt.clone(),
            pages,
            computed: 0,
            keeps_pages: false,
            reserved: false,
            delivered: false,
            failed: None,
            quiet: false,
        };
        let known = self.requests.insert(id, request);
        ensure!(known.is_none(), "request {} is used twice by a case", id.0);
        self.machine.request(now, id, room, &prompt.tokens);
        Ok(())
    }

    pub(super) fn compute(&mut self, now: Time, id: RequestId, end: usize) {
        let request = self.requests.get_mut(&id).expect("cases compute what they asked for");
        let range = request.computed..end;
        request.computed = end;
        let filled = if self.pages.is_blind() { 0..0 } else { range.clone() };
        for page in filled {
            request.prompt.compute(&self.pools, &self.shape, page, request.pages[page]);
        }
        self.machine.chunk_written(now, id, &request.pages, range, &[]);
    }

    pub(super) fn finish(&mut self, now: Time, id: RequestId) {
        let all = self.requests[&id].pages.len();
        self.compute(now, id, all);
        let first = FirstToken { token: id.0 as u32, logprob: None, cached_tokens: 0 };
        let request = &self.requests[&id];
        self.machine.finish(now, id, &request.pages, all..all, &[], first);
    }

    pub(super) fn hear(&mut self, now: Time, out: &mut Vec<Out>) -> Result<(), Failure> {
        if self.deaf {
            return Ok(());
        }
        for report in self.fabric.poll() {
            match report {
                SourceReport::Settled { attempt, pieces, how } => {
                    let (posted, settled) = self.posts.entry(attempt).or_default();
                    *settled += pieces;
                    ensure!(
                        settled <= posted,
                        "H5: {settled} pieces of attempt {} settled, {posted} were posted",
                        attempt.number
                    );
                    self.machine.settled(now, attempt, pieces, how);
                }
                SourceReport::Broken { channel, why } => out.push(Out::Close(channel, why)),
            }
            self.act(now, out)?;
        }
        Ok(())
    }

    pub(super) fn act(&mut self, now: Time, out: &mut Vec<Out>) -> Result<(), Failure> {
        let _ = now;
        for effect in self.machine.effects() {
            match effect {
                SourceEffect::Send { channel, frame } => out.push(Out::Send(channel, frame)),
                SourceEffect::Post { attempt, pieces } => {
                    self.posts.entry(attempt).or_default().0 += pieces.len() as u64;
                    self.fabric.post(attempt, pieces);
                }
                SourceEffect::Stop { attempt } => {
                    self.stopped.push(attempt);
                    self.fabric.stop(attempt);
                }
                SourceEffect::PeerSettled { attempt } => self.fabric.peer_settled(attempt),
                SourceEffect::CloseChannel { channel, why } => out.push(Out::Close(channel, why)),
                SourceEffect::Fact(fact) => self.fact(fact)?,
            }
        }
        Ok(())
    }

    fn fact(&mut self, fact: SourceFact) -> Result<(), Failure> {
        let id = match &fact {
            SourceFact::Reserved { request, .. }
            | SourceFact::Delivered { request, .. }
            | SourceFact::Failed { request, .. }
            | SourceFact::Quiet { request } => *request,
        };
        let request = self.requests.get_mut(&id).expect("facts are of requests");
        ensure!(!request.quiet, "request {} of P: {fact:?} after quiet", id.0);
        match fact {
            SourceFact::Reserved { .. } => request.reserved = true,
            SourceFact::Delivered { .. } => {
                ensure!(!request.delivered && request.failed.is_none(), "H7: request {} ends twice on P", id.0);
                request.delivered = true;
            }
            SourceFact::Failed { cause, .. } => {
                ensure!(!request.delivered && request.failed.is_none(), "H7: request {} ends twice on P", id.0);
                request.failed = Some(cause);
            }
            SourceFact::Quiet { .. } => {
                ensure!(request.delivered || request.failed.is_some(), "request {} is quiet before its end", id.0);
                request.quiet = true;
                if !request.keeps_pages {
                    // The next owner writes at once: a fabric that still reads sends wrong bytes (H5).
                    self.pages.give_back(std::mem::take(&mut request.pages));
                }
            }
        }
        Ok(())
    }

    /// Pieces that were posted and have not settled.
    pub fn outstanding(&self) -> u64 {
        self.posts.values().map(|(posted, settled)| posted - settled).sum()
    }

    pub fn posted(&self) -> u64 {
        self.posts.values().map(|(posted, _)| posted).sum()
    }

    pub fn settled(&self) -> u64 {
        self.posts.values().map(|(_, settled)| settled).sum()
    }

    /// Says where computed pages of a request are not what the oracle says.
    pub fn source_differs(&self, id: RequestId) -> Option<String> {
        let request = &self.requests[&id];
        let pages = request.pages[..request.computed].iter().enumerate();
        pages.into_iter().find_map(|(page, &slot)| request.prompt.differs(&self.pools, &self.shape, page, slot))
    }

    /// Frees the pages of sequences that kept theirs.
    pub fn give_back_kept(&mut self) -> Result<(), Failure> {
        for (id, request) in &mut self.requests {
            ensure!(request.quiet, "request {} of P is not quiet", id.0);
            self.pages.give_back(std::mem::take(&mut request.pages));
        }
        Ok(())
    }
}
