//! The prefill side of the handoff as the engine thread sees it: calls that never block, and facts that come back.
//!
//! [`PrefillRole`] glues three parts and decides nothing itself: the pure machine (`handoff: source`), the fabric that
//! writes pages, and the control channels. The latter two hang behind traits, so that tests put scripted ones there.

use std::{collections::BTreeMap, net::SocketAddr, ops::Range, sync::Arc};

use tandem_fabric::{SourceFabric, SourceReport, dispatch::SourceDispatch};
use tandem_handoff::{
    ids::{RequestId, Time},
    source::{Source, SourceEffect, SourceFact},
    ticket::Ticket,
    wire::{Cause, FirstToken},
};

use crate::{
    announce::Announcer,
    bootstrap::{
        BootstrapPort, ControlEvent, ControlPlane, HandoffParts, HandoffStartError, limits, listener, sample_error,
        stats::HandoffStats,
    },
    kv::sums::Checksums,
    quarantine_log::{self, QuarantineLog},
    request::{SampleError, SeqId},
};

#[cfg(test)]
pub mod scripted;

/// What the prefill side tells the engine. Each request gets exactly one of `Delivered` and `Failed`, and after it
/// exactly one `Quiet`.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillFact {
    /// D holds pages for the whole prompt: prefill may start.
    Reserved {
        id: SeqId,
        /// Tokens that D holds already, whole pages from the start of the prompt; they are computed, not pushed.
        held_tokens: u32,
    },
    /// All pages were pushed and Done was sent: the HTTP leg may answer.
    Delivered {
        id: SeqId,
    },
    Failed {
        id: SeqId,
        error: SampleError,
    },
    /// No write names the request's pages any more: they may be freed (H5).
    Quiet {
        id: SeqId,
    },
}

/// The prefill side of the handoff. All calls are made on the engine thread and never block.
pub trait PrefillHandoff: Send {
    /// Opens the rendezvous of one sample.
    fn request(&mut self, now: Time, id: SeqId, ticket: &Ticket, prompt: &[u32]);

    /// The device has finished `pages[range]`, whole pages, contiguous from the last call's end. `pages` are the
    /// sequence's pages from token 0.
    fn chunk_written(&mut self, now: Time, id: SeqId, pages: &[u32], range: Range<usize>);

    /// The device has finished the last pages (the range may be empty), and `first` was sampled.
    fn finish(&mut self, now: Time, id: SeqId, pages: &[u32], range: Range<usize>, first: FirstToken);

    /// Ends the request. A second cancel, or one after the end, changes nothing. `Failed` (unless the request has ended
    /// already) and `Quiet` follow from `poll`.
    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause);

    /// Takes in frames, fabric facts and passed deadlines.
    fn poll(&mut self, now: Time) -> Vec<PrefillFact>;

    /// When `poll` must be called at the latest, if nothing wakes the engine before.
    fn next_deadline(&self) -> Time;

    /// Requests that wait for their decode worker's Reserve, and requests that are pushing or draining.
    fn queues(&self) -> PrefillQueues;
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillQueues {
    /// Requests without a Reserve.
    pub bootstrap: u32,
    /// Requests whose pages are pinned after their prefill, or after their end, until quiet.
    pub inflight: u32,
    /// Pages of ended requests whose writes did not settle within the drain deadline.
    pub quarantined_pages: u32,
}

/// The prefill side over real channels.
pub struct PrefillRole {
    source: Source,
    fabric: Box<dyn SourceFabric>,
    control: Box<dyn ControlPlane>,
    stats: Arc<HandoffStats>,
    /// When each live request arrived, and when its Reserve met it: for the metrics.
    met: BTreeMap<RequestId, (Time, Option<Time>)>,
    facts: Vec<PrefillFact>,
    /// Absent where the pages cannot be read by this process.
    checksums: Option<Checksums>,
    announcer: Announcer,
    quarantine_log: QuarantineLog,
}

impl PrefillRole {
    /// Binds the bootstrap port and serves it from `parts.runtime` as long as the role lives. Returns the address, whose
    /// port the system has chosen where the configuration says 0.
    ///
    /// # Errors
    /// When the port cannot be listened on.
    pub fn start(parts: HandoffParts<'_>, port: BootstrapPort) -> Result<(Self, SocketAddr), HandoffStartError> {
        let fabric = SourceDispatch::new(parts.memories.clone(), parts.runtime.clone(), parts.waker.clone());
        let (control, address) = listener::start(&parts, port, fabric.clone())?;
        let source = Source::new(parts.shape, limits(parts.config));
        let checksums = Checksums::of_memory(parts.shape, parts.memories);
        Ok((Self::over(source, Box::new(fabric), control, parts.stats).with_checksums(checksums), address))
    }

    /// The role over any fabric and any control plane.
    pub fn over(
        source: Source,
        fabric: Box<dyn SourceFabric>,
        control: Box<dyn ControlPlane>,
        stats: Arc<HandoffStats>,
    ) -> Self {
        Self {
            source,
            fabric,
            control,
            stats,
            met: BTreeMap::new(),
            facts: Vec::new(),
            checksums: None,
            announcer: Announcer::new("prefill"),
            quarantine_log: QuarantineLog::new("prefill", quarantine_log::WRITES_END),
        }
    }

    /// Computes the checksums that a decode worker asks for.
    pub fn with_checksums(self, checksums: Checksums) -> Self {
        Self { checksums: Some(checksums), ..self }
    }

    /// Of `pages[range]`, where the decode worker of `id` wants them. The device has finished these pages.
    fn sums(&self, id: SeqId, pages: &[u32], range: &Range<usize>) -> Vec<u32> {
        match &self.checksums {
            Some(checksums) if self.source.wants_checksums(RequestId(id.0)) => {
                pages.get(range.clone()).map_or(Vec::new(), |pages| checksums.of(pages))
            }
            _ => Vec::new(),
        }
    }

    /// For looks from outside: which state a request is in.
    pub fn machine(&self) -> &Source {
        &self.source
    }

    fn control_event(&mut self, now: Time, event: ControlEvent) {
        match event {
            ControlEvent::Up { channel, shape, .. } => self.source.channel_up(now, channel, shape),
            ControlEvent::Frame { channel, frame } => self.source.frame(now, channel, frame),
            ControlEvent::Down { channel, why } => {
                self.source.channel_down(now, channel, &why);
                self.fabric.close(channel);
            }
            ControlEvent::DialFailed { .. } => {}
        }
    }

    fn fabric_report(&mut self, now: Time, report: SourceReport) {
        match report {
            SourceReport::Settled { attempt, pieces, how } => self.source.settled(now, attempt, pieces, how),
            SourceReport::Broken { channel, why } => {
                self.control.close(channel, &why);
                self.source.channel_down(now, channel, &why);
                self.fabric.close(channel);
            }
        }
    }

    fn announce(&mut self) {
        let source = &self.source;
        self.announcer.look(|id| source.state(id).map(|state| (state, source.attempt(id))));
    }

    fn act(&mut self, now: Time) {
        // Before the effects bring further states about.
        self.announce();
        for effect in self.source.effects() {
            match effect {
                SourceEffect::Send { channel, frame } => self.control.send(channel, frame),
                SourceEffect::Post { attempt, pieces } => {
                    self.stats.posted(&pieces);
                    self.fabric.post(attempt, pieces);
                }
                SourceEffect::Stop { attempt } => self.fabric.stop(attempt),
                SourceEffect::PeerSettled { attempt } => self.fabric.peer_settled(attempt),
                SourceEffect::CloseChannel { channel, why } => {
                    self.control.close(channel, &why);
                    self.fabric.close(channel);
                }
                SourceEffect::Fact(fact) => self.fact(now, fact),
            }
        }
        self.announce();
    }

    fn fact(&mut self, now: Time, fact: SourceFact) {
        let fact = match fact {
            SourceFact::Reserved { request, held_tokens, .. } => {
                if let Some((_, reserved)) = self.met.get_mut(&request) {
                    *reserved = Some(now);
                }
                PrefillFact::Reserved { id: SeqId(request.0), held_tokens }
            }
            SourceFact::Delivered { request, bytes, since } => {
                self.announcer.succeeded(request);
                let (arrived, reserved) = self.met.remove(&request).unwrap_or((now, None));
                let bootstrap_us = reserved.unwrap_or(now).micros_since(arrived);
                self.stats.delivered(bytes, bootstrap_us, now.micros_since(since));
                PrefillFact::Delivered { id: SeqId(request.0) }
            }
            SourceFact::Failed { request, cause } => {
                self.announcer.failed(request);
                match self.met.remove(&request) {
                    Some((_, Some(_))) => self.stats.transfer_failed(),
                    _ => self.stats.bootstrap_failed(),
                }
                PrefillFact::Failed { id: SeqId(request.0), error: sample_error(&cause) }
            }
            SourceFact::Quiet { request } => PrefillFact::Quiet { id: SeqId(request.0) },
        };
        self.facts.push(fact);
    }
}

impl PrefillHandoff for PrefillRole {
    fn request(&mut self, now: Time, id: SeqId, ticket: &Ticket, prompt: &[u32]) {
        self.met.insert(RequestId(id.0), (now, None));
        self.announcer.follow(RequestId(id.0), ticket.room);
        self.source.request(now, RequestId(id.0), ticket.room, prompt);
        self.act(now);
    }

    fn chunk_written(&mut self, now: Time, id: SeqId, pages: &[u32], range: Range<usize>) {
        let sums = self.sums(id, pages, &range);
        self.source.chunk_written(now, RequestId(id.0), pages, range, &sums);
        self.act(now);
    }

    fn finish(&mut self, now: Time, id: SeqId, pages: &[u32], range: Range<usize>, first: FirstToken) {
        let sums = self.sums(id, pages, &range);
        self.source.finish(now, RequestId(id.0), pages, range, &sums, first);
        self.act(now);
    }

    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause) {
        self.source.cancel(now, RequestId(id.0), cause);
        self.act(now);
    }

    fn poll(&mut self, now: Time) -> Vec<PrefillFact> {
        for event in self.control.poll() {
            self.control_event(now, event);
            self.act(now);
        }
        for report in self.fabric.poll() {
            self.fabric_report(now, report);
            self.act(now);
        }
        self.source.tick(now);
        self.act(now);
        self.quarantine_log.look(self.source.quarantined(), |attempt| attempt.decode);
        std::mem::take(&mut self.facts)
    }

    fn next_deadline(&self) -> Time {
        if self.facts.is_empty() { self.source.next_deadline() } else { Time(0) }
    }

    fn queues(&self) -> PrefillQueues {
        PrefillQueues {
            bootstrap: self.source.waiting() as u32,
            inflight: self.source.inflight() as u32,
            quarantined_pages: self.source.quarantined_pages() as u32,
        }
    }
}
