//! The decode side of the handoff as the engine thread sees it: calls that never block, and facts that come back.
//!
//! [`DecodeRole`] glues three parts and decides nothing itself: the pure machine (`handoff: sink`), the fabric that
//! receives pages, and the control channels. The latter two hang behind traits, so that tests put scripted ones there.

use std::{collections::BTreeMap, sync::Arc};

use tandem_fabric::{SinkFabric, SinkReport, dispatch::SinkDispatch};
use tandem_handoff::{
    fence::{FenceProof, PublishedPages},
    ids::{Attempt, Channel, RequestId, Time},
    sink::{Sink, SinkEffect, SinkFact},
    ticket::Ticket,
    wire::{Cause, FirstToken},
};

use crate::{
    announce::Announcer,
    bootstrap::{
        ControlEvent, ControlPlane, HandoffKey, HandoffParts, dialler, limits, sample_error, stats::HandoffStats,
    },
    kv::sums::Checksums,
    quarantine_log::{self, QuarantineLog},
    request::{SampleError, SeqId},
};

#[cfg(test)]
pub mod scripted;

/// What the decode side tells the engine. Each reserved list of pages comes back exactly once, by `Committed` or by
/// `Quiet`; a request gets exactly one of `Committed` and `Failed`.
#[derive(Debug, PartialEq)]
pub enum DecodeFact {
    /// Every piece landed and Done came: the sequence may decode (H4).
    Committed { id: SeqId, pages: PublishedPages, proof: FenceProof, first: FirstToken },
    /// The request is over; its pages stay with the attempt until `Quiet`.
    Failed { id: SeqId, error: SampleError },
    /// No write to these pages is in progress or can begin.
    Quiet { pages: PublishedPages, proof: FenceProof },
}

/// The decode side of the handoff. All calls are made on the engine thread and never block.
pub trait DecodeHandoff: Send {
    /// Offers pages for the whole prompt, which waited for them since `arrived`, to the prefill worker that the ticket
    /// names.
    fn reserve(&mut self, now: Time, arrived: Time, id: SeqId, ticket: &Ticket, prompt: &[u32], pages: PublishedPages);

    /// Ends the request if it is not committed; `Failed` and then `Quiet` follow from `poll`. A second cancel, or one
    /// after the end, changes nothing.
    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause);

    /// Takes in frames, fabric facts and passed deadlines.
    fn poll(&mut self, now: Time) -> Vec<DecodeFact>;

    /// When `poll` must be called at the latest, if nothing wakes the engine before.
    fn next_deadline(&self) -> Time;

    fn queues(&self) -> DecodeQueues;
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeQueues {
    /// Requests that wait for a channel to their prefill worker.
    pub prealloc: u32,
    /// Requests whose pages have been offered.
    pub transfer: u32,
    /// Pages of ended attempts that are not proven quiet yet.
    pub draining_pages: u32,
    /// Of these, pages past the drain deadline.
    pub quarantined_pages: u32,
}

/// The decode side over real channels.
pub struct DecodeRole {
    sink: Sink,
    fabric: Box<dyn SinkFabric>,
    control: Box<dyn ControlPlane>,
    stats: Arc<HandoffStats>,
    /// Bytes of the pages of each live request.
    offered: BTreeMap<RequestId, u64>,
    page_bytes: u64,
    facts: Vec<DecodeFact>,
    /// Present where checksums are asked for.
    checksums: Option<Checksums>,
    announcer: Announcer,
    quarantine_log: QuarantineLog,
}

impl DecodeRole {
    /// Dials prefill workers from `parts.runtime` when tickets name them, as long as the role lives.
    pub fn start(parts: HandoffParts<'_>, key: HandoffKey) -> Self {
        let shape = parts.shape;
        let fabric = SinkDispatch::new(shape, parts.memories.clone(), parts.runtime.clone(), parts.waker.clone());
        let control = dialler::start(&parts, key, fabric.clone());
        let page_bytes = (shape.page_bytes() * shape.tp as usize) as u64;
        let sink = Sink::new(shape, limits(parts.config));
        let role = Self::over(sink, Box::new(fabric), control, parts.stats, page_bytes);
        match parts.config.kv_checksum {
            true => role.with_checksums(Checksums::of_memory(shape, parts.memories)),
            false => role,
        }
    }

    /// The role over any fabric and any control plane. `page_bytes` counts all ranks.
    pub fn over(
        sink: Sink,
        fabric: Box<dyn SinkFabric>,
        control: Box<dyn ControlPlane>,
        stats: Arc<HandoffStats>,
        page_bytes: u64,
    ) -> Self {
        Self {
            sink,
            fabric,
            control,
            stats,
            offered: BTreeMap::new(),
            page_bytes,
            facts: Vec::new(),
            checksums: None,
            announcer: Announcer::new("decode"),
            quarantine_log: QuarantineLog::new("decode", quarantine_log::FENCED),
        }
    }

    /// Asks P for checksums, and commits only pages that have them.
    pub fn with_checksums(mut self, checksums: Checksums) -> Self {
        self.sink.ask_checksums();
        Self { checksums: Some(checksums), ..self }
    }

    fn verify(&mut self, now: Time, attempt: Attempt, pages: &[u32], held: usize, expected: &[u32]) {
        let checksums = self.checksums.as_ref().expect("only a role with checksums lets its machine ask for them");
        let outcome = checksums.compare(pages, held, expected);
        if outcome.is_err() {
            self.stats.checksum_failed();
        }
        self.sink.verified(now, attempt, outcome);
        self.act(now);
    }

    /// For looks from outside: which state a request is in.
    pub fn machine(&self) -> &Sink {
        &self.sink
    }

    fn control_event(&mut self, now: Time, event: ControlEvent) {
        match event {
            ControlEvent::Up { channel, address: Some(address), shape } => {
                self.sink.channel_up(now, address, channel, shape);
            }
            ControlEvent::Up { address: None, .. } => {}
            ControlEvent::Frame { channel, frame } => self.sink.frame(now, channel, frame),
            ControlEvent::Down { channel, why } => self.channel_lost(now, channel, &why),
            ControlEvent::DialFailed { address, cause } => self.sink.dial_failed(now, &address, cause),
        }
    }

    fn channel_lost(&mut self, now: Time, channel: Channel, why: &str) {
        self.sink.channel_down(now, channel, why);
        self.act(now);
        self.fabric.close(channel);
    }

    fn fabric_report(&mut self, now: Time, report: SinkReport) {
        match report {
            SinkReport::Landed { attempt, pieces } => self.sink.landed(attempt, &pieces),
            SinkReport::Quiet { attempt } => self.sink.quiet(attempt),
            SinkReport::Broken { channel, why } => {
                self.control.close(channel, &why);
                self.channel_lost(now, channel, &why);
            }
        }
    }

    fn announce(&mut self) {
        let sink = &self.sink;
        self.announcer.look(|id| sink.state(id).map(|state| (state, sink.attempt(id))));
    }

    fn act(&mut self, now: Time) {
        // Before the effects bring further states about.
        self.announce();
        for effect in self.sink.effects() {
            match effect {
                SinkEffect::Dial { address } => self.control.dial(address),
                SinkEffect::Send { channel, frame } => self.control.send(channel, frame),
                SinkEffect::Expect { attempt, pages, mapping } => self.fabric.expect(attempt, &pages, mapping),
                SinkEffect::Revoke { attempt } => self.fabric.revoke(attempt),
                SinkEffect::Verify { attempt, pages, held, checksums } => {
                    self.verify(now, attempt, &pages, held, &checksums);
                }
                SinkEffect::PeerDrained { attempt } => self.fabric.peer_drained(attempt),
                SinkEffect::Release { attempt } => self.fabric.release(attempt),
                SinkEffect::CloseChannel { channel, why } => {
                    self.control.close(channel, &why);
                    self.fabric.close(channel);
                }
                SinkEffect::Fact(fact) => self.fact(fact),
            }
        }
        self.announce();
    }

    fn fact(&mut self, fact: SinkFact) {
        let fact = match fact {
            SinkFact::Committed { request, pages, proof, first } => {
                self.announcer.succeeded(request);
                self.stats.committed(self.offered.remove(&request).unwrap_or(0));
                DecodeFact::Committed { id: SeqId(request.0), pages, proof, first }
            }
            SinkFact::Failed { request, cause } => {
                self.announcer.failed(request);
                self.offered.remove(&request);
                self.stats.transfer_failed();
                DecodeFact::Failed { id: SeqId(request.0), error: sample_error(&cause) }
            }
            SinkFact::Quiet { pages, proof } => DecodeFact::Quiet { pages, proof },
        };
        self.facts.push(fact);
    }
}

impl DecodeHandoff for DecodeRole {
    fn reserve(&mut self, now: Time, arrived: Time, id: SeqId, ticket: &Ticket, prompt: &[u32], pages: PublishedPages) {
        self.stats.allocated(now.micros_since(arrived));
        let request = RequestId(id.0);
        self.offered.insert(request, pages.len() as u64 * self.page_bytes);
        self.announcer.follow(request, ticket.room);
        self.sink.reserve(now, request, ticket, prompt, 0, pages);
        self.act(now);
    }

    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause) {
        self.sink.cancel(now, RequestId(id.0), cause);
        self.act(now);
    }

    fn poll(&mut self, now: Time) -> Vec<DecodeFact> {
        // The fabric first: a piece that landed before its channel was lost has landed.
        for report in self.fabric.poll() {
            self.fabric_report(now, report);
            self.act(now);
        }
        for event in self.control.poll() {
            self.control_event(now, event);
            self.act(now);
        }
        // Quiet that the events above brought about at once.
        for report in self.fabric.poll() {
            self.fabric_report(now, report);
            self.act(now);
        }
        self.sink.tick(now);
        self.act(now);
        self.quarantine_log.look(self.sink.quarantined(), |attempt| attempt.prefill);
        std::mem::take(&mut self.facts)
    }

    fn next_deadline(&self) -> Time {
        if self.facts.is_empty() { self.sink.next_deadline() } else { Time(0) }
    }

    fn queues(&self) -> DecodeQueues {
        let (draining, quarantined) = self.sink.draining_pages();
        DecodeQueues {
            prealloc: self.sink.dialling() as u32,
            transfer: self.sink.offered() as u32,
            draining_pages: draining as u32,
            quarantined_pages: quarantined as u32,
        }
    }
}
