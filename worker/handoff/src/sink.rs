//! The decode side of the handoff: offering pages, collecting pieces, and the end of attempts. *Pure.*
//!
//! The diagram of this machine stands in the crate's documentation. It is the only maker of [`FenceProof`]s, and makes
//! one only when every piece of a set landed, when the fabric reported quiet, or when nothing was ever shown to a peer.

use std::{collections::BTreeMap, mem};

use crate::{
    cause::{Cause, CauseKind, Side},
    deadline::Deadlines,
    fence::{FenceProof, Publication, PublishedPages},
    ids::{Attempt, Channel, RequestId, Room, Time},
    layout::{Mapping, PieceSet, PoolShape},
    limits::Limits,
    sabotage::Fault,
    state::AttemptState,
    ticket::{Address, Ticket},
    wire::{CHECKSUMS_MAX, Done, FirstToken, Frame, PAGES_MAX, Reserve, prompt_hash},
};

mod arrival;
mod ending;

/// What the engine learns.
#[derive(PartialEq, Debug)]
pub enum SinkFact {
    Committed { request: RequestId, pages: PublishedPages, proof: FenceProof, first: FirstToken },
    Failed { request: RequestId, cause: Cause },
    Quiet { pages: PublishedPages, proof: FenceProof },
}

#[derive(PartialEq, Debug)]
pub enum SinkEffect {
    /// Open a channel to this prefill worker; answered by `channel_up` or `dial_failed`.
    Dial {
        address: Address,
    },
    Send {
        channel: Channel,
        frame: Frame,
    },
    /// Accept the pieces of this attempt into these pages. Comes before the Reserve that shows them.
    Expect {
        attempt: Attempt,
        pages: Vec<u32>,
        mapping: Mapping,
    },
    /// Accept nothing more, and report when no write is in progress or can begin.
    Revoke {
        attempt: Attempt,
    },
    /// Everything landed and Done came: compare the checksums of `pages`, which follow `held` pages of the prompt, with
    /// these, `[page][kv head of the whole model]`, each copy of a replicated head too. Answered by `verified`.
    Verify {
        attempt: Attempt,
        pages: Vec<u32>,
        held: usize,
        checksums: Vec<u32>,
    },
    /// P says that all its writes have settled: a one-sided fabric needs it for its proof.
    PeerDrained {
        attempt: Attempt,
    },
    /// The attempt has committed: every piece is there, so none is accepted any more.
    Release {
        attempt: Attempt,
    },
    CloseChannel {
        channel: Channel,
        why: String,
    },
    Fact(SinkFact),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Timer {
    Request(RequestId),
    Drain(Attempt),
}

struct Peer {
    address: Address,
    shape: PoolShape,
}

/// A request that is neither committed nor failed.
struct Live {
    room: Room,
    /// Leading tokens of the prompt that the caller holds already; `pages` are for the rest.
    held_tokens: u32,
    pages: PublishedPages,
    publication: Publication,
    state: State,
}

enum State {
    /// No channel to the prefill worker yet: nobody has seen the pages.
    Dialling { address: Address, prompt_tokens: u32, prompt_hash: u128, held_hash: u128 },
    /// The pages were offered.
    Offered { attempt: Attempt, landed: PieceSet, done: Option<Done> },
    /// Everything is there, and the checksums are being compared.
    Verifying { attempt: Attempt, first: FirstToken },
}

/// An attempt that ended before its commit: its pages wait for proof of quiet.
struct Draining {
    request: RequestId,
    pages: PublishedPages,
    publication: Publication,
    /// The drain deadline has passed at least once.
    quarantined: bool,
}

/// The decode side of one worker.
pub struct Sink {
    shape: PoolShape,
    limits: Limits,
    channels: BTreeMap<Channel, Peer>,
    by_address: BTreeMap<Address, Channel>,
    live: BTreeMap<RequestId, Live>,
    attempts: BTreeMap<Attempt, RequestId>,
    draining: BTreeMap<Attempt, Draining>,
    deadlines: Deadlines<Timer>,
    last_publication: u64,
    /// Of attempts: given when pages are shown, since P accepts growing numbers only, and a prefill worker that is called by
    /// two names gets both names' pages over one channel.
    last_number: u64,
    /// Ask for a checksum per page and KV head, and compare before the commit.
    checksums: bool,
    effects: Vec<SinkEffect>,
}

impl Sink {
    pub fn new(shape: PoolShape, limits: Limits) -> Self {
        Self {
            shape,
            limits,
            channels: BTreeMap::new(),
            by_address: BTreeMap::new(),
            live: BTreeMap::new(),
            attempts: BTreeMap::new(),
            draining: BTreeMap::new(),
            deadlines: Deadlines::default(),
            last_publication: 0,
            last_number: 0,
            checksums: false,
            effects: Vec::new(),
        }
    }

    /// Asks for a checksum per page and KV head from now on, and commits only what a `Verify` was answered well for.
    pub fn ask_checksums(&mut self) {
        self.checksums = true;
    }

    /// What is to be done, in order. The caller does it at once.
    pub fn effects(&mut self) -> Vec<SinkEffect> {
        mem::take(&mut self.effects)
    }

    pub fn next_deadline(&self) -> Time {
        self.deadlines.next()
    }

    /// Requests that wait for a channel.
    pub fn dialling(&self) -> usize {
        self.live.len() - self.attempts.len()
    }

    /// Requests whose pages were offered.
    pub fn offered(&self) -> usize {
        self.attempts.len()
    }

    /// Pages of ended attempts that are not proven quiet, and how many of them are past the drain deadline.
    pub fn draining_pages(&self) -> (usize, usize) {
        let draining = self.draining.values().map(|draining| draining.pages.len()).sum();
        (draining, self.quarantined().map(|(_, pages)| pages).sum())
    }

    /// The attempts whose pages are past the drain deadline, and how many each has.
    pub fn quarantined(&self) -> impl Iterator<Item = (Attempt, usize)> + '_ {
        let quarantined = self.draining.iter().filter(|(_, draining)| draining.quarantined);
        quarantined.map(|(attempt, draining)| (*attempt, draining.pages.len()))
    }

    /// Where the request is; `None` once its pages were given back.
    pub fn state(&self, id: RequestId) -> Option<AttemptState> {
        match self.live.get(&id).map(|live| &live.state) {
            Some(State::Dialling { .. }) => Some(AttemptState::Dialling),
            Some(State::Offered { .. }) => Some(AttemptState::Offered),
            Some(State::Verifying { .. }) => Some(AttemptState::Verifying),
            None => self.draining().find(|(request, _, _)| *request == id).map(|(_, _, state)| state),
        }
    }

    /// The attempt of a request whose pages were offered; `None` once they were given back.
    pub fn attempt(&self, id: RequestId) -> Option<Attempt> {
        match self.live.get(&id).map(|live| &live.state) {
            Some(State::Dialling { .. }) => None,
            Some(State::Offered { attempt, .. } | State::Verifying { attempt, .. }) => Some(*attempt),
            None => self.draining().find(|(request, _, _)| *request == id).map(|(_, attempt, _)| attempt),
        }
    }

    /// The ended attempts that are not proven quiet, each `Draining` or `Quarantined`.
    pub fn draining(&self) -> impl Iterator<Item = (RequestId, Attempt, AttemptState)> + '_ {
        self.draining.iter().map(|(attempt, draining)| {
            let state = if draining.quarantined { AttemptState::Quarantined } else { AttemptState::Draining };
            (draining.request, *attempt, state)
        })
    }

    /// True when every list of pages has been given back.
    pub fn is_idle(&self) -> bool {
        self.live.is_empty() && self.draining.is_empty()
    }

    /// Offers `pages` to the prefill worker of the ticket: room for the prompt from `held_tokens` on. The pages of these
    /// tokens, a whole-page prefix, stay with the caller, who leases them until commit or end (H1).
    pub fn reserve(
        &mut self,
        now: Time,
        id: RequestId,
        ticket: &Ticket,
        prompt: &[u32],
        held_tokens: u32,
        mut pages: PublishedPages,
    ) {
        self.last_publication += 1;
        let publication = Publication(self.last_publication);
        pages.bind(publication);
        let address = ticket.address();
        let wrong = self.misfit(prompt, held_tokens, pages.len());
        let held = &prompt[..prompt.len().min(held_tokens as usize)];
        let state = State::Dialling {
            address: address.clone(),
            prompt_tokens: prompt.len() as u32,
            prompt_hash: prompt_hash(prompt),
            held_hash: prompt_hash(held),
        };
        self.live.insert(id, Live { room: ticket.room, held_tokens, pages, publication, state });
        self.deadlines.set(Timer::Request(id), now.after_ms(self.limits.waiting_timeout_ms));
        if let Some(message) = wrong {
            self.end(now, id, Cause::new(Side::Decode, CauseKind::Internal, message), true);
        } else if let Some(&channel) = self.by_address.get(&address) {
            self.offer(channel, id);
        } else {
            self.effects.push(SinkEffect::Dial { address });
        }
    }

    /// Why the engine's pages do not fit the prompt, if they do not.
    fn misfit(&self, prompt: &[u32], held_tokens: u32, pages: usize) -> Option<String> {
        let held = held_tokens as usize;
        if !held_tokens.is_multiple_of(self.shape.page_size) || held > prompt.len() {
            return Some(format!(
                "the engine holds {held} tokens, no whole-page prefix of a prompt of {}; please report this",
                prompt.len()
            ));
        }
        let needed = self.shape.pages_for(prompt.len()) - held / self.shape.page_size as usize;
        if pages != needed || pages > PAGES_MAX {
            return Some(format!("the engine gave {pages} pages for a prompt that needs {needed}; please report this"));
        }
        let checksums = pages * self.shape.kv_heads as usize;
        (self.checksums && checksums > CHECKSUMS_MAX).then(|| {
            format!(
                "the prompt has {checksums} checksums, {CHECKSUMS_MAX} is the most; use a smaller --context-length or no \
                 --enable-kv-checksum"
            )
        })
    }

    /// Ends a request for a reason of this worker or of its client.
    pub fn cancel(&mut self, now: Time, id: RequestId, cause: Cause) {
        if self.limits.planted.is(Fault::FreesTwice) {
            self.free_once_more(id);
        }
        self.end(now, id, cause, true);
    }

    /// `address` is served by `channel`, which passed Hello. Another address may have led to it before.
    pub fn channel_up(&mut self, now: Time, address: Address, channel: Channel, shape: PoolShape) {
        if let Some(&old) = self.by_address.get(&address)
            && old != channel
        {
            let why = "a new channel to the same prefill worker took its place";
            self.effects.push(SinkEffect::CloseChannel { channel: old, why: why.into() });
            self.channel_down(now, old, why);
        }
        let open = self.channels.len();
        if open >= self.limits.channels_max && !self.channels.contains_key(&channel) {
            let why = format!("{open} channels to prefill workers are open, the limit of this decode worker");
            self.effects.push(SinkEffect::CloseChannel { channel, why: why.clone() });
            let cause = Cause::new(Side::Decode, CauseKind::Unavailable, format!("{why}; a retry elsewhere is safe"));
            self.dial_failed(now, &address, cause);
            return;
        }
        if self.by_address.len() < self.limits.channels_max || self.by_address.contains_key(&address) {
            // Over the limit a further name of a known worker is not remembered, and dialled again by each request.
            self.by_address.insert(address.clone(), channel);
        }
        self.channels.entry(channel).or_insert(Peer { address: address.clone(), shape });
        for id in self.dialling_to(&address) {
            self.offer(channel, id);
        }
    }

    /// No channel to `address` could be made.
    pub fn dial_failed(&mut self, now: Time, address: &Address, cause: Cause) {
        for id in self.dialling_to(address) {
            self.end(now, id, cause.clone(), true);
        }
    }

    /// The channel is lost: every attempt of it that is not committed ends, and D proves quiet by itself.
    pub fn channel_down(&mut self, now: Time, channel: Channel, why: &str) {
        let Some(peer) = self.channels.remove(&channel) else {
            return;
        };
        self.by_address.retain(|_, known| *known != channel);
        let message = format!("the channel to the prefill worker {} was lost: {why}; a retry is safe", peer.address);
        let cause = Cause::new(Side::Decode, CauseKind::Lost, message);
        let lost: Vec<RequestId> = self
            .attempts
            .iter()
            .filter(|(attempt, _)| attempt.channel() == channel)
            .map(|(_, request)| *request)
            .collect();
        for id in lost {
            self.end(now, id, cause.clone(), false);
        }
        if self.limits.planted.is(Fault::SkipsFence) {
            let gone: Vec<Attempt> =
                self.draining.keys().filter(|attempt| attempt.channel() == channel).copied().collect();
            gone.into_iter().for_each(|attempt| self.quiet(attempt));
        }
    }

    /// A frame came over `channel`. Frames of other channels' attempts, and of attempts that are over, change nothing
    /// (H3).
    pub fn frame(&mut self, now: Time, channel: Channel, frame: Frame) {
        if !self.channels.contains_key(&channel) || frame.attempt().is_some_and(|attempt| attempt.channel() != channel)
        {
            return;
        }
        match frame {
            Frame::Done(done) => self.done(now, done),
            Frame::Failed { attempt, cause } => {
                if let Some(id) = self.request_of(attempt, Fault::ForgetsAttemptOnFailed)
                    && !(self.limits.planted.is(Fault::CommitsAfterFailure) && self.has_done(id))
                {
                    self.end(now, id, cause, false);
                }
            }
            Frame::Drained { attempt } => self.drained(now, attempt),
            Frame::Ping { .. } => {}
            Frame::Reserve(_) | Frame::Abort { .. } | Frame::Settled { .. } => {
                let why = "the prefill worker sent a frame that only a decode worker sends";
                self.effects.push(SinkEffect::CloseChannel { channel, why: why.into() });
                self.channel_down(now, channel, why);
            }
        }
    }

    /// Lets every passed deadline act.
    pub fn tick(&mut self, now: Time) {
        while let Some(timer) = self.deadlines.pop(now) {
            match timer {
                Timer::Request(id) => self.request_expired(now, id),
                Timer::Drain(attempt) => self.drain_expired(now, attempt),
            }
        }
    }

    fn dialling_to(&self, wanted: &Address) -> Vec<RequestId> {
        let waits = |live: &Live| matches!(&live.state, State::Dialling { address, .. } if address == wanted);
        let mut ids: Vec<_> =
            self.live.iter().filter(|(_, live)| waits(live)).map(|(id, live)| (live.publication, *id)).collect();
        // First come, first served.
        ids.sort_unstable();
        ids.into_iter().map(|(_, id)| id).collect()
    }

    /// Shows the request's pages to the peer of `channel`.
    fn offer(&mut self, channel: Channel, id: RequestId) {
        let (Some(peer), Some(live)) = (self.channels.get(&channel), self.live.get_mut(&id)) else {
            return;
        };
        let State::Dialling { prompt_tokens, prompt_hash, held_hash, .. } = live.state else {
            return;
        };
        if self.draining.is_empty() || !self.limits.planted.is(Fault::NumbersRetryAlike) {
            self.last_number += 1;
        }
        let attempt = channel.attempt(self.last_number);
        let mapping = Mapping::new(&peer.shape, &self.shape);
        let pages = live.pages.numbers().to_vec();
        let landed = PieceSet::new(mapping.pieces(pages.len()));
        live.state = State::Offered { attempt, landed, done: None };
        self.attempts.insert(attempt, id);
        if self.limits.planted.is(Fault::NoDeadlineWhileOffered) {
            self.deadlines.clear(Timer::Request(id));
        }
        let reserve = Reserve {
            attempt,
            room: live.room,
            prompt_tokens,
            prompt_hash,
            held_tokens: live.held_tokens,
            held_hash,
            checksums: self.checksums,
            pages: pages.clone(),
        };
        self.effects.push(SinkEffect::Expect { attempt, pages, mapping });
        self.effects.push(SinkEffect::Send { channel, frame: Frame::Reserve(reserve) });
    }

    fn fact(&mut self, fact: SinkFact) {
        self.effects.push(SinkEffect::Fact(fact));
    }
}
