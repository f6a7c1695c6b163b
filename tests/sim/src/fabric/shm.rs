//! The shared memory model: D maps P's pool and its own copier moves posted ranges. *Pure.*
//!
//! D is quiet when its copier confirmed that it stopped. P cannot revoke D's mapping: a posted piece settles when D
//! reports it copied, when D said Settled for the attempt, when D closed its end of the session (which it does after its
//! copier has stopped), or when D's process is proven gone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tandem_fabric::{SinkReport, SourceReport};
use tandem_handoff::{
    ids::{Attempt, Channel, Incarnation},
    layout::Mapping,
    source::{Piece, Settlement},
};

use super::{Harm, Model, destination};
use crate::ground::{Ground, Post};

#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// D's copier takes up, or goes on with, the first posted range.
    Copy(Channel),
    /// P reads D's report that a piece is copied.
    Report(Attempt),
    /// D's copier has stopped for the attempt.
    Stopped(Attempt),
    /// P sees that D closed its end, or that D's process is gone.
    Gone { channel: Channel, at_prefill: bool },
}

#[derive(Default)]
struct Session {
    /// Posted ranges that the copier has not finished, with the bytes that are copied of the first.
    ranges: VecDeque<Post>,
    copied: usize,
    copy_due: bool,
    closed_by_prefill: bool,
    closed_by_decode: bool,
}

struct Expected {
    pages: Vec<u32>,
    mapping: Mapping,
}

#[derive(Default)]
pub struct Shm {
    sessions: BTreeMap<Channel, Session>,
    expected: BTreeMap<Attempt, Expected>,
    stopping: BTreeSet<Attempt>,
    /// P's books: pieces that it must keep unchanged.
    outstanding: BTreeMap<Attempt, u64>,
}

impl Shm {
    fn schedule(&mut self, ground: &mut Ground, channel: Channel) {
        let session = self.sessions.entry(channel).or_default();
        if !session.copy_due && !session.ranges.is_empty() {
            session.copy_due = true;
            let delay = ground.pace(channel);
            ground.after(delay, super::Event::Shm(Event::Copy(channel)));
        }
    }

    /// Copies a part of the first range out of P's live memory, whether P runs or not.
    fn copy(&mut self, ground: &mut Ground, channel: Channel) {
        let Some(session) = self.sessions.get_mut(&channel) else { return };
        session.copy_due = false;
        if session.closed_by_decode || !ground.is_alive(channel.decode) {
            return;
        }
        if !ground.runs(channel.decode) {
            return self.schedule(ground, channel);
        }
        let Some(post) = session.ranges.front() else { return };
        let Some(expected) = self.expected.get(&post.attempt) else {
            session.ranges.pop_front();
            session.copied = 0;
            return self.schedule(ground, channel);
        };
        let total = post.piece.bytes;
        let from = session.copied;
        let to = (from + total.div_ceil(1 + ground.rng.index(3))).min(total);
        let place = destination(ground, post.attempt, &expected.pages, &expected.mapping, &post.piece);
        let bytes = ground.read_source(post, from, to);
        if let Some((rank, at)) = place {
            ground.write_target(post.attempt, rank, at + from, &bytes);
        }
        session.copied = to;
        if to == total {
            let post = session.ranges.pop_front().expect("the first range was copied");
            session.copied = 0;
            let (attempt, pieces) = (post.attempt, vec![post.piece.index]);
            ground.sink_report(channel.decode, SinkReport::Landed { attempt, pieces });
            let delay = ground.pace(channel);
            ground.after(delay, super::Event::Shm(Event::Report(attempt)));
        }
        self.schedule(ground, channel);
    }

    fn settle(&mut self, ground: &mut Ground, attempt: Attempt, pieces: u64, how: Settlement) {
        let Some(outstanding) = self.outstanding.get_mut(&attempt) else { return };
        let pieces = pieces.min(*outstanding);
        *outstanding -= pieces;
        if *outstanding == 0 {
            self.outstanding.remove(&attempt);
        }
        ground.settle(attempt, pieces, how);
    }

    fn settle_all(&mut self, ground: &mut Ground, channel: Channel) {
        let attempts: Vec<Attempt> =
            self.outstanding.keys().filter(|attempt| attempt.channel() == channel).copied().collect();
        for attempt in attempts {
            self.settle(ground, attempt, u64::MAX, Settlement::Unknown);
        }
    }

    fn tell_gone(&mut self, ground: &mut Ground, channel: Channel, at_prefill: bool) {
        let delay = ground.rng.range(10, 3000);
        ground.after(delay, super::Event::Shm(Event::Gone { channel, at_prefill }));
    }

    fn gone(&mut self, ground: &mut Ground, channel: Channel, at_prefill: bool) {
        let why = "the peer closed its end of the shared memory".to_owned();
        let Some(session) = self.sessions.get(&channel) else { return };
        if at_prefill {
            let closed = session.closed_by_prefill;
            self.settle_all(ground, channel);
            if !closed {
                ground.source_report(channel.prefill, SourceReport::Broken { channel, why });
            }
        } else if !session.closed_by_decode {
            ground.sink_report(channel.decode, SinkReport::Broken { channel, why });
        }
    }
}

impl Model for Shm {
    fn post(&mut self, ground: &mut Ground, attempt: Attempt, pieces: Vec<Piece>) {
        let channel = attempt.channel();
        for piece in pieces {
            let expected = ground.expected(attempt, &piece);
            let session = self.sessions.entry(channel).or_default();
            if session.closed_by_prefill || session.closed_by_decode || !ground.is_alive(channel.decode) {
                ground.settle(attempt, 1, Settlement::Dropped);
                continue;
            }
            session.ranges.push_back(Post { attempt, piece, expected });
            *self.outstanding.entry(attempt).or_default() += 1;
        }
        self.schedule(ground, channel);
    }

    /// What was posted is D's to copy: nothing can be called back.
    fn stop(&mut self, _: &mut Ground, _: Attempt) {}

    fn close_source(&mut self, ground: &mut Ground, channel: Channel) {
        let session = self.sessions.entry(channel).or_default();
        if !std::mem::replace(&mut session.closed_by_prefill, true) {
            self.tell_gone(ground, channel, false);
        }
    }

    fn peer_settled(&mut self, ground: &mut Ground, attempt: Attempt) {
        self.settle(ground, attempt, u64::MAX, Settlement::Dropped);
    }

    fn expect(&mut self, _: &mut Ground, attempt: Attempt, pages: &[u32], mapping: Mapping) {
        self.sessions.entry(attempt.channel()).or_default();
        self.expected.insert(attempt, Expected { pages: pages.to_vec(), mapping });
    }

    fn revoke(&mut self, ground: &mut Ground, attempt: Attempt) {
        if self.expected.contains_key(&attempt) && self.stopping.insert(attempt) {
            let delay = ground.rng.range(5, 400);
            ground.after(delay, super::Event::Shm(Event::Stopped(attempt)));
        }
    }

    fn peer_drained(&mut self, _: &mut Ground, _: Attempt) {}

    fn release(&mut self, _: &mut Ground, attempt: Attempt) {
        self.expected.remove(&attempt);
    }

    /// The copier stops for the whole session; the end is closed after that.
    fn close_sink(&mut self, ground: &mut Ground, channel: Channel) {
        let session = self.sessions.entry(channel).or_default();
        if !std::mem::replace(&mut session.closed_by_decode, true) {
            session.ranges.clear();
            self.tell_gone(ground, channel, true);
        }
    }

    fn event(&mut self, ground: &mut Ground, event: super::Event) {
        let super::Event::Shm(event) = event else { return };
        match event {
            Event::Copy(channel) => self.copy(ground, channel),
            Event::Report(attempt) => self.settle(ground, attempt, 1, Settlement::Sent),
            Event::Stopped(attempt) if ground.is_alive(attempt.decode) && !ground.runs(attempt.decode) => {
                ground.after(1000, super::Event::Shm(Event::Stopped(attempt)));
            }
            Event::Stopped(attempt) => {
                self.stopping.remove(&attempt);
                if self.expected.remove(&attempt).is_some() {
                    if let Some(session) = self.sessions.get_mut(&attempt.channel())
                        && session.ranges.front().is_some_and(|post| post.attempt == attempt)
                    {
                        session.copied = 0;
                    }
                    if let Some(session) = self.sessions.get_mut(&attempt.channel()) {
                        session.ranges.retain(|post| post.attempt != attempt);
                    }
                    ground.sink_report(attempt.decode, SinkReport::Quiet { attempt });
                }
            }
            Event::Gone { channel, at_prefill } => self.gone(ground, channel, at_prefill),
        }
    }

    fn harm(&mut self, ground: &mut Ground, harm: Harm) -> bool {
        if let Harm::Break(channel) = harm
            && self
                .sessions
                .get(&channel)
                .is_some_and(|session| !session.closed_by_prefill && !session.closed_by_decode)
        {
            // The socket between the two broke: D notices, stops its copier, and closes.
            self.tell_gone(ground, channel, false);
            return true;
        }
        false
    }

    fn died(&mut self, ground: &mut Ground, process: Incarnation) {
        self.expected.retain(|attempt, _| attempt.decode != process);
        self.outstanding.retain(|attempt, _| attempt.prefill != process);
        let channels: Vec<Channel> = self.sessions.keys().copied().collect();
        for channel in channels {
            if channel.decode == process {
                self.tell_gone(ground, channel, true);
            } else if channel.prefill == process {
                self.tell_gone(ground, channel, false);
            }
        }
    }
}
