//! Source and sink as a pair in one process with one clock: the stories of the protocol, each told to its end.
//!
//! The pair's network keeps frames in order per direction until the test delivers them; its fabric holds posted pieces
//! until the test lets them land. Nothing happens by itself.

use std::collections::VecDeque;

use crate::{
    cause::{Cause, CauseKind, Side},
    fence::{Basis, PublishedPages},
    ids::{Attempt, Channel, Incarnation, RequestId, Room, SessionId, Time},
    layout::PoolShape,
    limits::Limits,
    sink::{Sink, SinkEffect, SinkFact},
    source::{Piece, Settlement, Source, SourceEffect, SourceFact},
    state::AttemptState,
    ticket::Ticket,
    wire::{FirstToken, Frame},
};

mod bounds;
mod faults;
mod stories;
mod verify;

const PROMPT: [u32; 6] = [11, 12, 13, 14, 15, 16];

struct Pair {
    /// The pools of P and of D.
    shapes: [PoolShape; 2],
    now: Time,
    source: Source,
    sink: Sink,
    channel: Option<Channel>,
    to_p: VecDeque<Frame>,
    to_d: VecDeque<Frame>,
    posted: VecDeque<(Attempt, Piece)>,
    revoked: Vec<Attempt>,
    /// Open questions for checksums, with what P says they are.
    verifies: Vec<(Attempt, Vec<u32>)>,
    /// What P was told of attempts that D reads no more.
    peer_settled: Vec<Attempt>,
    closed: Vec<Channel>,
    p_facts: Vec<SourceFact>,
    d_facts: Vec<SinkFact>,
}

fn shape() -> PoolShape {
    PoolShape { layers: 1, kv_heads: 2, head_dim: 2, page_size: 4, element_bytes: 2, tp: 1, pages: 16 }
}

fn limits() -> Limits {
    Limits { bootstrap_timeout_ms: 100, waiting_timeout_ms: 1000, drain_timeout_ms: 50, ..Limits::default() }
}

fn room(value: u64) -> Room {
    Room::new(value).expect("in range")
}

fn ticket(room_value: u64) -> Ticket {
    Ticket { host: "p".into(), port: 8998, room: room(room_value) }
}

fn first() -> FirstToken {
    FirstToken { token: 42, logprob: None, cached_tokens: 0 }
}

fn user() -> Cause {
    Cause::new(Side::Decode, CauseKind::Aborted, "the client left")
}

impl Pair {
    /// A pair with an open channel.
    fn new() -> Self {
        Self::between(shape(), shape())
    }

    fn between(p: PoolShape, d: PoolShape) -> Self {
        let mut pair = Self {
            shapes: [p, d],
            now: Time(0),
            source: Source::new(p, limits()),
            sink: Sink::new(d, limits()),
            channel: None,
            to_p: VecDeque::new(),
            to_d: VecDeque::new(),
            posted: VecDeque::new(),
            revoked: Vec::new(),
            verifies: Vec::new(),
            peer_settled: Vec::new(),
            closed: Vec::new(),
            p_facts: Vec::new(),
            d_facts: Vec::new(),
        };
        pair.connect(1, 1);
        pair
    }

    fn connect(&mut self, prefill: u64, session: u64) {
        let channel = Channel { prefill: Incarnation(prefill), decode: Incarnation(2), session: SessionId(session) };
        self.channel = Some(channel);
        self.to_p.clear();
        self.to_d.clear();
        let [p, d] = self.shapes;
        self.source.channel_up(self.now, channel, d);
        self.sink.channel_up(self.now, ticket(0).address(), channel, p);
        self.act();
    }

    /// The channel and its data streams are cut: what is under way is lost.
    fn cut(&mut self) {
        let channel = self.channel.take().expect("a channel is open");
        self.to_p.clear();
        self.to_d.clear();
        self.source.channel_down(self.now, channel, "cut");
        self.sink.channel_down(self.now, channel, "cut");
        self.act();
        for (attempt, _) in std::mem::take(&mut self.posted) {
            self.source.settled(self.now, attempt, 1, Settlement::Unknown);
        }
        self.act();
    }

    fn channel(&self) -> Channel {
        self.channel.expect("a channel is open")
    }

    fn p_request(&mut self, id: u64, room_value: u64) {
        self.source.request(self.now, RequestId(id), room(room_value), &PROMPT);
        self.act();
    }

    fn d_reserve(&mut self, id: u64, room_value: u64, prompt: &[u32], pages: &[u32]) {
        let pages = PublishedPages::new(pages.to_vec());
        self.sink.reserve(self.now, RequestId(id), &ticket(room_value), prompt, 0, pages);
        self.act();
    }

    /// Both halves of one sample, met.
    fn open(&mut self, id: u64, room_value: u64) {
        self.p_request(id, room_value);
        self.d_reserve(id, room_value, &PROMPT, &[7, 3]);
        self.deliver();
    }

    /// P's device has finished the first of two pages.
    fn p_chunk(&mut self, id: u64) {
        self.source.chunk_written(self.now, RequestId(id), &[1, 2], 0..1, &[]);
        self.act();
    }

    /// D's client leaves.
    fn d_cancel(&mut self, id: u64) {
        self.sink.cancel(self.now, RequestId(id), user());
        self.act();
    }

    fn p_finish(&mut self, id: u64) {
        self.source.chunk_written(self.now, RequestId(id), &[1, 2], 0..1, &[]);
        self.source.finish(self.now, RequestId(id), &[1, 2], 1..2, &[], first());
        self.act();
    }

    /// Delivers frames until none is under way.
    fn deliver(&mut self) {
        while !self.to_p.is_empty() || !self.to_d.is_empty() {
            let channel = self.channel();
            if let Some(frame) = self.to_p.pop_front() {
                self.source.frame(self.now, channel, frame);
            }
            if let Some(frame) = self.to_d.pop_front() {
                self.sink.frame(self.now, channel, frame);
            }
            self.act();
        }
    }

    /// Lets every posted piece land and settle.
    fn land(&mut self) {
        for (attempt, piece) in std::mem::take(&mut self.posted) {
            self.sink.landed(attempt, &[piece.index]);
            self.source.settled(self.now, attempt, 1, Settlement::Sent);
        }
        self.act();
    }

    /// The fabric proves quiet for every revoked attempt.
    fn quiet(&mut self) {
        for attempt in std::mem::take(&mut self.revoked) {
            self.sink.quiet(attempt);
        }
        self.act();
    }

    fn wait_ms(&mut self, ms: u64) {
        self.now = self.now.after_ms(ms);
        self.source.tick(self.now);
        self.sink.tick(self.now);
        self.act();
    }

    fn act(&mut self) {
        for effect in self.source.effects() {
            match effect {
                SourceEffect::Send { channel, frame } if self.channel == Some(channel) => self.to_d.push_back(frame),
                SourceEffect::Post { attempt, pieces } => {
                    self.posted.extend(pieces.into_iter().map(|piece| (attempt, piece)));
                }
                SourceEffect::Fact(fact) => self.p_facts.push(fact),
                SourceEffect::PeerSettled { attempt } => self.peer_settled.push(attempt),
                SourceEffect::CloseChannel { channel, .. } => self.closed.push(channel),
                SourceEffect::Send { .. } | SourceEffect::Stop { .. } => {}
            }
        }
        for effect in self.sink.effects() {
            match effect {
                SinkEffect::Send { channel, frame } if self.channel == Some(channel) => self.to_p.push_back(frame),
                SinkEffect::Revoke { attempt } => self.revoked.push(attempt),
                SinkEffect::Verify { attempt, checksums, .. } => self.verifies.push((attempt, checksums)),
                SinkEffect::CloseChannel { channel, .. } => self.closed.push(channel),
                SinkEffect::Fact(fact) => self.d_facts.push(fact),
                _ => {}
            }
        }
    }

    /// Everything has ended, both sides are empty, and D's pages came back once, by a proof of their own.
    fn assert_ended(&mut self, pages: &[&[u32]], basis: Basis) {
        assert!(self.source.is_idle() && self.sink.is_idle());
        let mut back = Vec::new();
        for fact in std::mem::take(&mut self.d_facts) {
            if let SinkFact::Committed { pages, proof, .. } | SinkFact::Quiet { pages, proof } = fact {
                assert_eq!(proof.basis(), basis);
                back.push(pages.redeem(proof).expect("the proof of its own attempt"));
            }
        }
        assert_eq!(back, pages);
    }

    fn p_failure(&self, id: u64) -> Option<&Cause> {
        let mut failures = self.p_facts.iter().filter_map(|fact| match fact {
            SourceFact::Failed { request, cause } if request.0 == id => Some(cause),
            _ => None,
        });
        let failure = failures.next();
        assert!(failures.next().is_none(), "H7: one outcome");
        failure
    }

    fn d_failure(&self, id: u64) -> Option<&Cause> {
        let mut failures = self.d_facts.iter().filter_map(|fact| match fact {
            SinkFact::Failed { request, cause } if request.0 == id => Some(cause),
            _ => None,
        });
        let failure = failures.next();
        assert!(failures.next().is_none(), "H7: one outcome");
        failure
    }

    fn p_is_quiet(&self, id: u64) -> bool {
        self.p_facts.contains(&SourceFact::Quiet { request: RequestId(id) })
    }

    fn delivered(&self, id: u64) -> bool {
        self.p_facts.iter().any(|fact| matches!(fact, SourceFact::Delivered { request, .. } if request.0 == id))
    }

    fn committed(&self, id: u64) -> bool {
        self.d_facts.iter().any(|fact| matches!(fact, SinkFact::Committed { request, .. } if request.0 == id))
    }
}
