//! Both machines, all that is under way between them, and a ledger that knows what may be.

use std::collections::{BTreeMap, BTreeSet};

use tandem_handoff::{
    cause::{Cause, CauseKind, Side},
    checksum::Corrupt,
    fence::PublishedPages,
    ids::{Attempt, Channel, Incarnation, RequestId, Room, SessionId, Time},
    layout::PoolShape,
    limits::Limits,
    sink::Sink,
    source::{Piece, Settlement, Source},
    ticket::Ticket,
    wire::{Done, FirstToken, Frame, Phases, Reserve, Sent, prompt_hash},
};

use super::{Choices, Step};

mod judge;

const SHAPE_P: PoolShape =
    PoolShape { layers: 1, kv_heads: 2, head_dim: 2, page_size: 4, element_bytes: 2, tp: 1, pages: 32 };
const SHAPE_D: PoolShape = PoolShape { tp: 2, pages: 12, ..SHAPE_P };
const PROMPTS: [&[u32]; 3] = [&[1, 2, 3, 4, 5, 6], &[1, 2, 3], &[1, 2, 3, 4, 5, 6, 7, 9]];
const ROOMS: u64 = 3;

/// What the ledger knows of a request at P.
#[derive(Default)]
struct Prefill {
    prompt: usize,
    pages: Vec<u32>,
    reserved: bool,
    wants_sums: bool,
    written: usize,
    ended: bool,
    quiet: bool,
}

/// What the ledger knows of a request at D.
struct Decode {
    pages: Vec<u32>,
    ended: bool,
    back: bool,
}

/// An attempt whose pages D's fabric was told to expect.
#[derive(Default)]
struct Shown {
    request: Option<RequestId>,
    pieces: usize,
    landed: BTreeSet<u32>,
    done: bool,
    verified: bool,
    quiet: bool,
    /// A stopped piece landed, filled up with zeros.
    filled: bool,
    /// The Done was not P's.
    forged: bool,
}

/// A posted piece that has not settled.
struct Posted {
    attempt: Attempt,
    request: RequestId,
    piece: Piece,
}

pub struct World {
    now: Time,
    source: Source,
    sink: Sink,
    sums: bool,
    settles_twice: bool,
    channel: Option<Channel>,
    dialling: bool,
    prefill: u64,
    session: u64,
    to_p: Vec<(Channel, Frame)>,
    to_d: Vec<(Channel, Frame)>,
    posted: Vec<Posted>,
    poisoned: BTreeSet<Attempt>,
    stopped: BTreeSet<Attempt>,
    revoked: Vec<Attempt>,
    verifying: Vec<Attempt>,
    shown: BTreeMap<Attempt, Shown>,
    p: BTreeMap<RequestId, Prefill>,
    d: BTreeMap<RequestId, Decode>,
    free: Vec<u32>,
    seen: BTreeSet<String>,
}

fn user() -> Cause {
    Cause::new(Side::Decode, CauseKind::Aborted, "the client left")
}

fn ticket(room: u64) -> Ticket {
    Ticket { host: "p".into(), port: 8998, room: Room::new(room).expect("in range") }
}

fn limits() -> Limits {
    Limits {
        bootstrap_timeout_ms: 100,
        waiting_timeout_ms: 1000,
        drain_timeout_ms: 50,
        held_reserves_max: 2,
        tombstones_max: 2,
        ..Limits::default()
    }
}

impl World {
    pub fn new(sums: bool, settles_twice: bool) -> Self {
        let mut sink = Sink::new(SHAPE_D, limits());
        if sums {
            sink.ask_checksums();
        }
        Self {
            now: Time(0),
            source: Source::new(SHAPE_P, limits()),
            sink,
            sums,
            settles_twice,
            channel: None,
            dialling: false,
            prefill: 1,
            session: 0,
            to_p: Vec::new(),
            to_d: Vec::new(),
            posted: Vec::new(),
            poisoned: BTreeSet::new(),
            stopped: BTreeSet::new(),
            revoked: Vec::new(),
            verifying: Vec::new(),
            shown: BTreeMap::new(),
            p: BTreeMap::new(),
            d: BTreeMap::new(),
            free: (0..SHAPE_D.pages).collect(),
            seen: BTreeSet::new(),
        }
    }

    pub fn step(&mut self, step: Step, choices: &mut Choices<'_>) {
        match step {
            Step::Request => self.request(choices),
            Step::Reserve => self.reserve(choices),
            Step::Chunk => self.compute(choices, false),
            Step::Finish => self.compute(choices, true),
            Step::CancelPrefill => self.source.cancel(self.now, choices.id(), user()),
            Step::CancelDecode => self.sink.cancel(self.now, choices.id(), user()),
            Step::ToPrefill => self.deliver(true, 0, false),
            Step::ToDecode => self.deliver(false, 0, false),
            Step::Reorder | Step::Double | Step::Lose => self.mistreat(step, choices),
            Step::Forge => self.forge(choices),
            Step::Land | Step::LandAgain | Step::Unsettled => self.settle(step, choices),
            Step::Quiet => {
                if let Some(at) = choices.index(self.revoked.len()) {
                    self.quiet(at);
                }
            }
            Step::Verify => self.verify(choices),
            Step::Wait => {
                self.now = self.now.after_ms(u64::from(choices.byte()) * 5);
                self.source.tick(self.now);
                self.sink.tick(self.now);
            }
            Step::Connect => self.connect(),
            Step::RefuseDial => {
                if std::mem::take(&mut self.dialling) {
                    self.sink.dial_failed(self.now, &ticket(0).address(), user());
                }
            }
            Step::CutPrefill => self.cut(true),
            Step::CutDecode => self.cut(false),
            Step::Restart => self.restart(),
        }
        self.act(None);
        self.note(step);
    }

    /// Which states the step left behind: an input that reaches another mix is worth keeping.
    fn note(&mut self, step: Step) {
        let p: BTreeSet<_> = self.p.keys().filter_map(|&id| self.source.state(id)).collect();
        let d: BTreeSet<_> = self.d.keys().filter_map(|&id| self.sink.state(id)).collect();
        self.seen.insert(format!("{step:?} {p:?} {d:?}"));
    }

    pub fn story(&self) -> String {
        self.seen.iter().cloned().collect::<Vec<_>>().join("; ")
    }

    fn request(&mut self, choices: &mut Choices<'_>) {
        let (room, prompt) = (u64::from(choices.byte()) % ROOMS, usize::from(choices.byte()) % PROMPTS.len());
        let id = RequestId(self.p.len() as u64);
        let first = id.0 as u32 * 2 % SHAPE_P.pages;
        self.p.insert(id, Prefill { prompt, pages: vec![first, first + 1], ..Prefill::default() });
        self.source.request(self.now, id, ticket(room).room, PROMPTS[prompt]);
    }

    fn reserve(&mut self, choices: &mut Choices<'_>) {
        let (room, prompt) = (u64::from(choices.byte()) % ROOMS, usize::from(choices.byte()) % PROMPTS.len());
        // Now and then the engine errs: a prefix of half a page, or a page too few.
        let held = [0, 0, 0, 4, 4, 8, 2, 0][usize::from(choices.byte()) % 8];
        let needed = PROMPTS[prompt].len().saturating_sub(held).div_ceil(4);
        // An empty list has no page to know it by: one at a time.
        let known = needed > 0 || !self.d.values().any(|decode| decode.pages.is_empty() && !decode.back);
        if self.free.len() < needed || !known {
            return;
        }
        let id = RequestId(self.d.len() as u64);
        let pages = self.free.split_off(self.free.len() - needed);
        self.d.insert(id, Decode { pages: pages.clone(), ended: false, back: false });
        let pages = PublishedPages::new(pages);
        self.sink.reserve(self.now, id, &ticket(room), PROMPTS[prompt], held as u32, pages);
    }

    /// P's engine finishes a page, or all that is left.
    fn compute(&mut self, choices: &mut Choices<'_>, last: bool) {
        let id = choices.id();
        let Some(request) = self.p.get_mut(&id).filter(|request| request.reserved && !request.ended) else { return };
        let pages = PROMPTS[request.prompt].len().div_ceil(4);
        let end = if last { pages } else { (request.written + 1).min(pages) };
        let range = request.written..end;
        request.written = end;
        let heads = if request.wants_sums { SHAPE_P.kv_heads as usize } else { 0 };
        let sums = vec![7; range.len() * heads];
        let pages = request.pages.clone();
        match last {
            false => self.source.chunk_written(self.now, id, &pages, range, &sums),
            true => {
                let first = FirstToken { token: 42, logprob: None, cached_tokens: 0 };
                self.source.finish(self.now, id, &pages, range, &sums, first);
            }
        }
        self.act(Some(id));
    }

    fn deliver(&mut self, to_p: bool, at: usize, keep: bool) {
        let queue = if to_p { &mut self.to_p } else { &mut self.to_d };
        if at >= queue.len() {
            return;
        }
        let (channel, frame) = if keep { queue[at].clone() } else { queue.remove(at) };
        self.arrive(to_p, channel, frame);
    }

    fn arrive(&mut self, to_p: bool, channel: Channel, frame: Frame) {
        if to_p {
            return self.source.frame(self.now, channel, frame);
        }
        if let Frame::Done(done) = &frame
            && let Some(shown) = self.shown.get_mut(&done.attempt)
        {
            shown.done |= done.attempt.channel() == channel;
        }
        self.sink.frame(self.now, channel, frame);
    }

    /// What no ordered channel does, and a broken one may.
    fn mistreat(&mut self, step: Step, choices: &mut Choices<'_>) {
        let to_p = choices.byte().is_multiple_of(2);
        let queue = if to_p { &mut self.to_p } else { &mut self.to_d };
        let Some(at) = choices.index(queue.len()) else { return };
        match step {
            Step::Lose => drop(queue.remove(at)),
            Step::Double => self.deliver(to_p, at, true),
            _ => self.deliver(to_p, at, false),
        }
    }

    /// A frame that nobody sent, over the present channel or over one that has no end.
    fn forge(&mut self, choices: &mut Choices<'_>) {
        let to_p = choices.byte().is_multiple_of(2);
        let stale = Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(0) };
        let channel = if choices.byte().is_multiple_of(4) { stale } else { self.channel.unwrap_or(stale) };
        let named = if choices.byte().is_multiple_of(4) { stale } else { channel };
        let attempt = named.attempt(u64::from(choices.byte() % 16));
        let room = ticket(u64::from(choices.byte()) % ROOMS).room;
        let small = choices.byte();
        let prompt = PROMPTS[usize::from(small) % PROMPTS.len()];
        let frame = match choices.byte() % 7 {
            0 => Frame::Reserve(Reserve {
                attempt,
                room,
                prompt_tokens: prompt.len() as u32,
                prompt_hash: prompt_hash(prompt),
                held_tokens: u32::from(small / 16),
                held_hash: prompt_hash(&prompt[..usize::from(small / 16).min(prompt.len())]),
                checksums: small.is_multiple_of(2),
                pages: (0..u32::from(small % 8)).collect(),
            }),
            1 => Frame::Done(Done {
                attempt,
                first: FirstToken { token: 1, logprob: None, cached_tokens: 0 },
                account: vec![Sent { rank: 0, rail: 0, pieces: u64::from(small % 8), bytes: 0 }],
                phases: Phases::default(),
                checksums: vec![1; usize::from(small / 16)],
            }),
            2 => Frame::Failed { attempt, cause: user() },
            3 => Frame::Abort { attempt, room, cause: user() },
            4 => Frame::Drained { attempt },
            5 => Frame::Settled { attempt },
            _ => Frame::Ping { from: Incarnation(u64::from(small)), to: Incarnation(2) },
        };
        if let Frame::Done(done) = &frame
            && let Some(shown) = self.shown.get_mut(&done.attempt)
        {
            shown.forged = true;
        }
        self.arrive(to_p, channel, frame);
    }

    /// A posted piece comes to its end: in D's memory or not, and P reads its source no more.
    fn settle(&mut self, step: Step, choices: &mut Choices<'_>) {
        let Some(at) = choices.index(self.posted.len()) else { return };
        if matches!(step, Step::LandAgain) {
            let (attempt, index) = (self.posted[at].attempt, self.posted[at].piece.index);
            return self.land(attempt, index);
        }
        let how = match step {
            Step::Land => Settlement::Sent,
            _ if choices.byte().is_multiple_of(2) => Settlement::Dropped,
            _ => Settlement::Unknown,
        };
        let Posted { attempt, piece, .. } = self.posted.remove(at);
        let filled = how == Settlement::Dropped && self.stopped.contains(&attempt);
        if filled && let Some(shown) = self.shown.get_mut(&attempt) {
            // As over tcp, where the peer waits for the rest of a begun frame.
            shown.filled = true;
        }
        if filled || how == Settlement::Sent {
            self.land(attempt, piece.index);
        }
        if how == Settlement::Unknown {
            self.poisoned.insert(attempt);
        }
        for _ in 0..if self.settles_twice { 2 } else { 1 } {
            self.source.settled(self.now, attempt, 1, how);
            self.act(None);
        }
    }

    /// D's fabric accepts pieces of what it expects, until quiet.
    fn land(&mut self, attempt: Attempt, piece: u32) {
        if let Some(shown) = self.shown.get_mut(&attempt).filter(|shown| !shown.quiet) {
            shown.landed.insert(piece);
            self.sink.landed(attempt, &[piece]);
        }
    }

    fn quiet(&mut self, at: usize) {
        let attempt = self.revoked.swap_remove(at);
        if let Some(shown) = self.shown.get_mut(&attempt) {
            shown.quiet = true;
        }
        self.sink.quiet(attempt);
    }

    fn verify(&mut self, choices: &mut Choices<'_>) {
        let Some(at) = choices.index(self.verifying.len()) else { return };
        let attempt = self.verifying.swap_remove(at);
        let good = choices.byte() % 4 != 3;
        if let Some(shown) = self.shown.get_mut(&attempt) {
            shown.verified = good;
        }
        let outcome = if good { Ok(()) } else { Err(Corrupt { prompt_page: 0, page: 0, head: 0, rank: 0 }) };
        self.sink.verified(self.now, attempt, outcome);
    }

    fn connect(&mut self) {
        self.dialling = false;
        self.session += 1;
        let session = SessionId(self.session);
        let channel = Channel { prefill: Incarnation(self.prefill), decode: Incarnation(2), session };
        self.channel = Some(channel);
        self.source.channel_up(self.now, channel, SHAPE_D);
        self.act(None);
        self.sink.channel_up(self.now, ticket(0).address(), channel, SHAPE_P);
    }

    /// One side sees the end of the channel; the other sees it when it is its turn.
    fn cut(&mut self, prefill: bool) {
        let Some(channel) = self.channel else { return };
        match prefill {
            true => self.source.channel_down(self.now, channel, "cut"),
            false => self.sink.channel_down(self.now, channel, "cut"),
        }
    }

    /// P's process ends and another takes its place: its requests are gone, its writes may still land.
    fn restart(&mut self) {
        self.prefill += 1;
        self.source = Source::new(SHAPE_P, limits());
        for request in self.p.values_mut() {
            (request.ended, request.quiet) = (true, true);
        }
    }
}
