//! The prefill side of the handoff: rendezvous, posting, and the end of attempts. *Pure.*
//!
//! The diagram of this machine stands in the crate's documentation. Inputs are calls of the engine, frames, facts of the
//! fabric, and time; outputs are [`SourceEffect`]s, each of which names its attempt and is safe to repeat.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    mem,
};

use crate::{
    cause::{Cause, CauseKind, Side},
    deadline::Deadlines,
    ids::{Attempt, Channel, RequestId, Room, Time},
    layout::{Mapping, PoolShape},
    limits::Limits,
    sabotage::Fault,
    state::AttemptState,
    wire::{Frame, Reserve, Sent},
};

mod posting;
mod rendezvous;

/// One contiguous range of P's memory to write into D's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Index in the attempt's set; D derives the destination from it.
    pub index: u32,
    /// Where it comes from: rank and byte offset in that rank's pool.
    pub source_rank: u32,
    pub source_offset: usize,
    /// Where it goes: rank, and byte offset in that rank's pool (used by one-sided backends).
    pub target_rank: u32,
    pub target_offset: usize,
    pub bytes: usize,
}

/// How posted pieces came to their end at P.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settlement {
    /// Handed over whole.
    Sent,
    /// Never begun, or stopped before the end; P reads the source no more.
    Dropped,
    /// P reads the source no more, but whether D was written is unknown: the attempt is poisoned.
    Unknown,
}

/// What the engine learns.
#[derive(Clone, PartialEq, Debug)]
pub enum SourceFact {
    /// D holds pages: prefill may start. `checksums` says whether D wants one per page and KV head.
    Reserved {
        request: RequestId,
        held_tokens: u32,
        checksums: bool,
    },
    /// Everything was handed over: so many bytes, from the first post (or Reserve, when D held the whole prompt) on.
    Delivered {
        request: RequestId,
        bytes: u64,
        since: Time,
    },
    Failed {
        request: RequestId,
        cause: Cause,
    },
    Quiet {
        request: RequestId,
    },
}

#[derive(Clone, PartialEq, Debug)]
pub enum SourceEffect {
    Send {
        channel: Channel,
        frame: Frame,
    },
    Post {
        attempt: Attempt,
        pieces: Vec<Piece>,
    },
    /// Begin no further post of the attempt, and settle what is posted.
    Stop {
        attempt: Attempt,
    },
    /// D says that it reads no source page of the attempt any more: a fabric whose D copies needs it to settle.
    PeerSettled {
        attempt: Attempt,
    },
    CloseChannel {
        channel: Channel,
        why: String,
    },
    Fact(SourceFact),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Timer {
    Request(RequestId),
    Room(Room),
}

struct Peer {
    shape: PoolShape,
    mapping: Mapping,
    /// The highest attempt number that this channel has named: a Reserve must be above it (H3).
    highest: u64,
    /// Attempts that were forgotten poisoned: they get no Drained, whatever D still says of them.
    poisoned: BTreeSet<u64>,
}

/// What a room is in use for.
enum RoomUse {
    /// A request, in any state up to quiet.
    Request(RequestId),
    /// A Reserve whose request has not come.
    Held(Reserve),
    /// One half ended before the other came; the next that meets it gets this cause.
    Tombstone(Cause),
}

struct Request {
    room: Room,
    arrived: Time,
    state: State,
}

enum State {
    /// No Reserve yet.
    Waiting { prompt: Box<[u32]> },
    /// D's pages are known; chunks are posted as they are finished.
    Open(Transfer),
    /// Done was sent; the last posts are settling.
    Pushed(Transfer),
    /// Failed; the posts are settling. `tell` says whether D still is owed Drained.
    Draining { transfer: Transfer, tell: bool },
}

struct Transfer {
    attempt: Attempt,
    opened: Time,
    first_post: Option<Time>,
    /// Pages of the prompt, and how many of them D holds already.
    pages: usize,
    held: usize,
    targets: Vec<u32>,
    /// Pages that the engine has reported as written, from the first on.
    written: usize,
    outstanding: u64,
    poisoned: bool,
    /// The drain deadline has passed at least once.
    quarantined: bool,
    account: BTreeMap<u32, Sent>,
    /// `[page after the held ones][kv head]`, as far as written; `None` when D asked for none.
    checksums: Option<Vec<u32>>,
}

/// The prefill side of one worker.
pub struct Source {
    shape: PoolShape,
    limits: Limits,
    peers: BTreeMap<Channel, Peer>,
    rooms: BTreeMap<Room, RoomUse>,
    requests: BTreeMap<RequestId, Request>,
    attempts: BTreeMap<Attempt, RequestId>,
    deadlines: Deadlines<Timer>,
    held: usize,
    tombstones: usize,
    effects: Vec<SourceEffect>,
}

impl Source {
    pub fn new(shape: PoolShape, limits: Limits) -> Self {
        Self {
            shape,
            limits,
            peers: BTreeMap::new(),
            rooms: BTreeMap::new(),
            requests: BTreeMap::new(),
            attempts: BTreeMap::new(),
            deadlines: Deadlines::default(),
            held: 0,
            tombstones: 0,
            effects: Vec::new(),
        }
    }

    /// What is to be done, in order. The caller does it at once.
    pub fn effects(&mut self) -> Vec<SourceEffect> {
        mem::take(&mut self.effects)
    }

    pub fn next_deadline(&self) -> Time {
        self.deadlines.next()
    }

    /// Requests without Reserve.
    pub fn waiting(&self) -> usize {
        self.requests.values().filter(|request| matches!(request.state, State::Waiting { .. })).count()
    }

    /// Requests after their prefill, or after their end, whose posts have not settled.
    pub fn inflight(&self) -> usize {
        let settling = |state: &State| matches!(state, State::Pushed(_) | State::Draining { .. });
        self.requests.values().filter(|request| settling(&request.state)).count()
    }

    /// Pages of ended requests whose posts did not settle within the drain deadline.
    pub fn quarantined_pages(&self) -> usize {
        self.quarantined().map(|(_, pages)| pages).sum()
    }

    /// The attempts that hold these pages, and how many each.
    pub fn quarantined(&self) -> impl Iterator<Item = (Attempt, usize)> + '_ {
        self.requests.values().filter_map(|request| match &request.state {
            State::Draining { transfer, .. } if transfer.quarantined => Some((transfer.attempt, transfer.written)),
            _ => None,
        })
    }

    /// Where the request is; `None` once it is forgotten.
    pub fn state(&self, id: RequestId) -> Option<AttemptState> {
        Some(match &self.requests.get(&id)?.state {
            State::Waiting { .. } => AttemptState::Waiting,
            State::Open(_) => AttemptState::Open,
            State::Pushed(_) => AttemptState::Pushed,
            State::Draining { transfer, .. } if transfer.quarantined => AttemptState::Quarantined,
            State::Draining { .. } => AttemptState::Draining,
        })
    }

    /// The attempt of a request that met its Reserve; `None` once it is forgotten.
    pub fn attempt(&self, id: RequestId) -> Option<Attempt> {
        match &self.requests.get(&id)?.state {
            State::Waiting { .. } => None,
            State::Open(transfer) | State::Pushed(transfer) | State::Draining { transfer, .. } => {
                Some(transfer.attempt)
            }
        }
    }

    /// Whether D wants checksums of the request's pages.
    pub fn wants_checksums(&self, id: RequestId) -> bool {
        let state = self.requests.get(&id).map(|request| &request.state);
        matches!(state, Some(State::Open(transfer)) if transfer.checksums.is_some())
    }

    /// True when no request, Reserve or attempt is left; tombstones may be.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.attempts.is_empty() && self.held == 0
    }

    /// A channel passed Hello. A channel of the same decode process that is still open ends first.
    pub fn channel_up(&mut self, now: Time, channel: Channel, shape: PoolShape) {
        let older: Vec<Channel> = self.peers.keys().filter(|old| old.decode == channel.decode).copied().collect();
        for old in older {
            if old != channel {
                let why = "the decode worker opened a new channel";
                self.effects.push(SourceEffect::CloseChannel { channel: old, why: why.into() });
                self.channel_down(now, old, why);
            }
        }
        if self.peers.contains_key(&channel) {
            // A channel is registered once: its numbers go on growing from where they are (H3).
            return;
        }
        if self.peers.len() >= self.limits.channels_max {
            let why = format!("{} channels are open, the limit of this prefill worker", self.peers.len());
            self.effects.push(SourceEffect::CloseChannel { channel, why });
            return;
        }
        let mapping = Mapping::new(&self.shape, &shape);
        self.peers.insert(channel, Peer { shape, mapping, highest: 0, poisoned: BTreeSet::new() });
    }

    /// The channel is lost: every attempt of it that is not delivered ends.
    pub fn channel_down(&mut self, now: Time, channel: Channel, why: &str) {
        if self.peers.remove(&channel).is_none() {
            return;
        }
        let cause = Cause::new(
            Side::Prefill,
            CauseKind::Lost,
            format!("the channel to the decode worker was lost: {why}; a retry is safe"),
        );
        let held =
            |room_use: &RoomUse| matches!(room_use, RoomUse::Held(reserve) if reserve.attempt.channel() == channel);
        let rooms: Vec<Room> =
            self.rooms.iter().filter(|(_, room_use)| held(room_use)).map(|(room, _)| *room).collect();
        for room in rooms {
            self.drop_room(room);
            self.bury(now, room, cause.clone());
        }
        let requests: Vec<RequestId> = self
            .attempts
            .iter()
            .filter(|(attempt, _)| attempt.channel() == channel)
            .map(|(_, request)| *request)
            .collect();
        for request in requests {
            self.end(now, request, cause.clone(), Notice::None);
        }
    }

    /// The engine takes in a request of `prompt` under `room`.
    pub fn request(&mut self, now: Time, id: RequestId, room: Room, prompt: &[u32]) {
        let refusal = match self.rooms.get(&room) {
            None => None,
            Some(RoomUse::Held(_)) => None,
            Some(RoomUse::Tombstone(cause)) => Some(cause.clone()),
            Some(RoomUse::Request(_)) => Some(Cause::new(
                Side::Prefill,
                CauseKind::Refused,
                format!(
                    "bootstrap_room {room} is in use by another live request; each request needs a room of its own"
                ),
            )),
        };
        if let Some(cause) = refusal {
            if matches!(self.rooms.get(&room), Some(RoomUse::Tombstone(_))) {
                self.drop_room(room);
            }
            self.fact(SourceFact::Failed { request: id, cause });
            self.fact(SourceFact::Quiet { request: id });
            return;
        }
        let held = self.drop_room(room);
        self.rooms.insert(room, RoomUse::Request(id));
        self.requests.insert(id, Request { room, arrived: now, state: State::Waiting { prompt: prompt.into() } });
        if !self.limits.planted.is(Fault::NoDeadlineWhileWaiting) {
            self.deadlines.set(Timer::Request(id), now.after_ms(self.limits.bootstrap_timeout_ms));
        }
        if let Some(RoomUse::Held(reserve)) = held {
            self.meet(now, id, reserve);
        }
    }

    /// Ends a request for a reason of this worker or of its client.
    pub fn cancel(&mut self, now: Time, id: RequestId, cause: Cause) {
        self.end(now, id, cause, Notice::Failed);
    }

    /// A frame came over `channel`. Frames of other channels' attempts change nothing (H3).
    pub fn frame(&mut self, now: Time, channel: Channel, frame: Frame) {
        if !self.peers.contains_key(&channel) || frame.attempt().is_some_and(|attempt| attempt.channel() != channel) {
            return;
        }
        match frame {
            Frame::Reserve(reserve) => self.reserved(now, channel, reserve),
            Frame::Abort { attempt, room, cause } => self.aborted(now, attempt, room, cause),
            Frame::Settled { attempt } => {
                if self.attempts.contains_key(&attempt) {
                    self.effects.push(SourceEffect::PeerSettled { attempt });
                }
            }
            Frame::Ping { .. } => {}
            Frame::Done(_) | Frame::Failed { .. } | Frame::Drained { .. } => {
                let why = "the decode worker sent a frame that only a prefill worker sends";
                self.effects.push(SourceEffect::CloseChannel { channel, why: why.into() });
                self.channel_down(now, channel, why);
            }
        }
    }

    /// Lets every passed deadline act.
    pub fn tick(&mut self, now: Time) {
        while let Some(timer) = self.deadlines.pop(now) {
            match timer {
                Timer::Room(room) => self.room_expired(room),
                Timer::Request(id) => self.request_expired(now, id),
            }
        }
    }

    fn request_expired(&mut self, now: Time, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let room = request.room;
        match &mut request.state {
            State::Waiting { .. } => {
                let message = format!(
                    "no decode worker offered pages for bootstrap_room {room} within {} ms; a retry is safe",
                    self.limits.bootstrap_timeout_ms
                );
                self.end(now, id, Cause::new(Side::Prefill, CauseKind::Timeout, message), Notice::Failed);
            }
            State::Open(_) | State::Pushed(_) => {
                let message = format!(
                    "the handoff of bootstrap_room {room} took longer than {} ms; a retry is safe",
                    self.limits.waiting_timeout_ms
                );
                self.end(now, id, Cause::new(Side::Prefill, CauseKind::Timeout, message), Notice::Failed);
            }
            State::Draining { transfer, .. } => {
                transfer.quarantined = true;
                let channel = transfer.attempt.channel();
                let why =
                    format!("the writes of an ended attempt did not settle within {} ms", self.limits.drain_timeout_ms);
                self.effects.push(SourceEffect::CloseChannel { channel, why: why.clone() });
                self.deadlines.set(Timer::Request(id), now.after_ms(self.limits.drain_timeout_ms));
                self.channel_down(now, channel, &why);
            }
        }
    }

    /// Ends a request that has not ended: one Failed to the engine (H7), then quiet once its posts have settled.
    fn end(&mut self, now: Time, id: RequestId, cause: Cause, notice: Notice) {
        let Entry::Occupied(mut entry) = self.requests.entry(id) else {
            return;
        };
        // Once Done is out D may commit at any moment, unless it said that it has ended: what is posted then arrives as it
        // is, or not at all. A fabric that fills up a stopped piece would let D publish the filling (H4).
        let done_is_out = matches!(entry.get().state, State::Pushed(_)) && notice != Notice::Drained;
        let transfer = match mem::replace(&mut entry.get_mut().state, State::Waiting { prompt: Box::default() }) {
            State::Waiting { .. } => {
                let room = entry.remove().room;
                self.deadlines.clear(Timer::Request(id));
                self.drop_room(room);
                self.bury(now, room, cause.clone());
                self.fact(SourceFact::Failed { request: id, cause });
                self.fact(SourceFact::Quiet { request: id });
                return;
            }
            State::Draining { transfer, tell } => {
                let tell = tell && notice != Notice::None;
                let attempt = transfer.attempt;
                entry.get_mut().state = State::Draining { transfer, tell };
                if notice == Notice::Drained {
                    // D has ended too, so nothing that is under way is wanted any more.
                    self.effects.push(SourceEffect::Stop { attempt });
                }
                return;
            }
            State::Open(transfer) | State::Pushed(transfer) => transfer,
        };
        let (attempt, room) = (transfer.attempt, entry.get().room);
        entry.get_mut().state = State::Draining { transfer, tell: notice != Notice::None };
        self.deadlines.set(Timer::Request(id), now.after_ms(self.limits.drain_timeout_ms));
        if notice == Notice::Failed {
            let frame = Frame::Failed { attempt, cause: cause.clone() };
            self.effects.push(SourceEffect::Send { channel: attempt.channel(), frame });
        }
        if self.limits.planted.is(Fault::DrainsBeforeQuiet) && notice != Notice::None {
            self.send_drained(attempt);
        }
        if self.limits.planted.is(Fault::ReusesRoomEarly) {
            self.drop_room(room);
        }
        if !done_is_out || self.limits.planted.is(Fault::StopsAfterDone) {
            self.effects.push(SourceEffect::Stop { attempt });
        }
        self.fact(SourceFact::Failed { request: id, cause });
        self.conclude(id);
    }

    /// Forgets a request whose posts have all settled, and says so to those who wait for it.
    fn conclude(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let (transfer, delivered, tell) = match &request.state {
            State::Pushed(transfer) => (transfer, true, false),
            State::Draining { transfer, tell } => {
                let known = !transfer.poisoned || self.limits.planted.is(Fault::DrainsPoisoned);
                (transfer, false, *tell && known)
            }
            State::Waiting { .. } | State::Open(_) => return,
        };
        if transfer.outstanding > 0 {
            return;
        }
        let (room, attempt, poisoned) = (request.room, transfer.attempt, transfer.poisoned);
        let bytes = transfer.account.values().map(|sent| sent.bytes).sum();
        let since = transfer.first_post.unwrap_or(transfer.opened);
        if delivered {
            self.fact(SourceFact::Delivered { request: id, bytes, since });
        }
        if tell {
            self.send_drained(attempt);
        }
        self.fact(SourceFact::Quiet { request: id });
        self.requests.remove(&id);
        self.attempts.remove(&attempt);
        self.deadlines.clear(Timer::Request(id));
        self.drop_room(room);
        if poisoned {
            self.remember_poisoned(attempt);
        }
    }

    /// D's Abort may be under way still: it must not be answered by Drained. A channel with too many to remember is closed,
    /// so that D proves quiet by itself.
    fn remember_poisoned(&mut self, attempt: Attempt) {
        let channel = attempt.channel();
        let Some(peer) = self.peers.get_mut(&channel) else {
            return;
        };
        peer.poisoned.insert(attempt.number);
        if peer.poisoned.len() > self.limits.poisoned_max {
            let why = "too many writes to the decode worker ended without a known outcome".to_owned();
            self.effects.push(SourceEffect::CloseChannel { channel, why });
        }
    }

    fn send_drained(&mut self, attempt: Attempt) {
        self.effects.push(SourceEffect::Send { channel: attempt.channel(), frame: Frame::Drained { attempt } });
    }

    fn fact(&mut self, fact: SourceFact) {
        self.effects.push(SourceEffect::Fact(fact));
    }
}

/// What D is to hear when an attempt ends at P.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Notice {
    /// Failed, then Drained.
    Failed,
    /// D ended it: Drained alone.
    Drained,
    /// The channel is gone.
    None,
}
