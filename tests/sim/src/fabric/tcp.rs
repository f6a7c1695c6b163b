//! The TCP model: an ordered stream per channel and rank of D. *Pure.*
//!
//! P's sender copies a piece part by part into the stream; D's reader looks the attempt up before each part and either
//! takes a borrow of the page, during which it writes, or discards. P is quiet when the kernel has the bytes, or when the
//! piece was given up; D is quiet when no borrow of a revoked attempt is out.

use std::collections::{BTreeMap, VecDeque};

use tandem_fabric::{SinkReport, SourceReport};
use tandem_handoff::{
    ids::{Attempt, Channel, Incarnation},
    layout::Mapping,
    source::{Piece, Settlement},
};

use super::{Harm, Model, destination};
use crate::ground::{Ground, Post};

/// Parts that the kernel holds before the sender must wait.
const WINDOW_PARTS: usize = 4;

#[derive(Clone, Copy, Debug)]
pub enum Event {
    Send(usize),
    Arrive(usize),
    /// The reader's read call is over: the borrow goes back.
    Copied(usize),
    /// One end notices that its stream is broken.
    Broken {
        stream: usize,
        at_prefill: bool,
    },
}

/// A part of a piece in the kernel's buffers.
struct Part {
    attempt: Attempt,
    piece: Piece,
    from: usize,
    bytes: Vec<u8>,
    last: bool,
}

struct Stream {
    channel: Channel,
    queue: VecDeque<Post>,
    /// The piece that the sender is in the middle of, and how many bytes of it are copied. `None` inside once it was
    /// stopped: the rest goes out as zeros.
    sending: Option<(Option<Post>, Attempt, Piece, usize)>,
    parts: VecDeque<Part>,
    /// The reader is in a read call for the first part.
    reading: bool,
    send_due: bool,
    arrive_due: bool,
    broken: bool,
    closed_by_prefill: bool,
    closed_by_decode: bool,
}

struct Expected {
    pages: Vec<u32>,
    mapping: Mapping,
    revoked: bool,
    borrows: u32,
    /// Bytes that came of each piece.
    came: BTreeMap<u32, usize>,
}

#[derive(Default)]
pub struct Tcp {
    streams: Vec<Stream>,
    by_lane: BTreeMap<(Channel, u32), usize>,
    expected: BTreeMap<Attempt, Expected>,
}

impl Tcp {
    fn lane(&mut self, channel: Channel, rank: u32) -> usize {
        let next = self.streams.len();
        let lane = *self.by_lane.entry((channel, rank)).or_insert(next);
        if lane == next {
            self.streams.push(Stream {
                channel,
                queue: VecDeque::new(),
                sending: None,
                parts: VecDeque::new(),
                reading: false,
                send_due: false,
                arrive_due: false,
                broken: false,
                closed_by_prefill: false,
                closed_by_decode: false,
            });
        }
        lane
    }

    fn lanes(&self, channel: Channel) -> Vec<usize> {
        (0..self.streams.len()).filter(|&lane| self.streams[lane].channel == channel).collect()
    }

    fn schedule_send(&mut self, ground: &mut Ground, lane: usize) {
        let stream = &mut self.streams[lane];
        if !stream.send_due {
            stream.send_due = true;
            let delay = ground.pace(stream.channel);
            ground.after(delay, super::Event::Tcp(Event::Send(lane)));
        }
    }

    fn schedule_arrive(&mut self, ground: &mut Ground, lane: usize) {
        let stream = &mut self.streams[lane];
        if !stream.arrive_due && !stream.reading && !stream.parts.is_empty() {
            stream.arrive_due = true;
            let delay = ground.pace(stream.channel);
            ground.after(delay, super::Event::Tcp(Event::Arrive(lane)));
        }
    }

    fn send(&mut self, ground: &mut Ground, lane: usize) {
        let stream = &mut self.streams[lane];
        stream.send_due = false;
        let channel = stream.channel;
        if stream.broken || stream.closed_by_prefill || !ground.is_alive(channel.prefill) {
            return;
        }
        if stream.parts.len() >= WINDOW_PARTS || !ground.runs(channel.prefill) {
            return self.schedule_send(ground, lane);
        }
        let (post, attempt, piece, sent) = match stream.sending.take() {
            Some(sending) => sending,
            None => match stream.queue.pop_front() {
                Some(post) => {
                    let (attempt, piece) = (post.attempt, post.piece);
                    (Some(post), attempt, piece, 0)
                }
                None => return,
            },
        };
        let to = (sent + piece.bytes.div_ceil(1 + ground.rng.index(3))).min(piece.bytes);
        let last = to == piece.bytes;
        let bytes = match &post {
            Some(post) => ground.read_source(post, sent, to),
            None => vec![0; to - sent],
        };
        let stream = &mut self.streams[lane];
        stream.parts.push_back(Part { attempt, piece, from: sent, bytes, last });
        match last {
            true if post.is_some() => ground.settle(attempt, 1, Settlement::Sent),
            true => {}
            false => stream.sending = Some((post, attempt, piece, to)),
        }
        self.schedule_arrive(ground, lane);
        self.schedule_send(ground, lane);
    }

    /// The reader looks the next part's attempt up, first thing (H3), and borrows its page for the read call.
    fn arrive(&mut self, ground: &mut Ground, lane: usize) {
        let stream = &mut self.streams[lane];
        stream.arrive_due = false;
        let channel = stream.channel;
        if stream.closed_by_decode || !ground.is_alive(channel.decode) {
            return;
        }
        if !ground.runs(channel.decode) {
            return self.schedule_arrive(ground, lane);
        }
        let Some(part) = stream.parts.front() else { return };
        match self.expected.get_mut(&part.attempt) {
            Some(expected) if !expected.revoked => {
                expected.borrows += 1;
                stream.reading = true;
                let delay = ground.rng.range(1, 60);
                ground.after(delay, super::Event::Tcp(Event::Copied(lane)));
            }
            _ => {
                let (attempt, length) = (part.attempt, part.bytes.len());
                ground.tells(channel.decode, attempt, format_args!("reads {length} bytes and throws them AWAY, of"));
                stream.parts.pop_front();
                self.schedule_arrive(ground, lane);
            }
        }
    }

    fn copied(&mut self, ground: &mut Ground, lane: usize) {
        let stream = &mut self.streams[lane];
        stream.reading = false;
        let channel = stream.channel;
        let Some(part) = stream.parts.pop_front() else { return };
        if !ground.is_alive(channel.decode) {
            return;
        }
        let Some(expected) = self.expected.get_mut(&part.attempt) else { return };
        let place = destination(ground, part.attempt, &expected.pages, &expected.mapping, &part.piece);
        if let Some((rank, at)) = place {
            ground.write_target(part.attempt, rank, at + part.from, &part.bytes);
        }
        expected.borrows -= 1;
        let came = expected.came.entry(part.piece.index).or_default();
        *came += part.bytes.len();
        if expected.revoked {
            if expected.borrows == 0 {
                self.expected.remove(&part.attempt);
                ground.sink_report(channel.decode, SinkReport::Quiet { attempt: part.attempt });
            }
        } else if part.last && *came == part.piece.bytes {
            let (attempt, pieces) = (part.attempt, vec![part.piece.index]);
            ground.sink_report(channel.decode, SinkReport::Landed { attempt, pieces });
        }
        self.schedule_arrive(ground, lane);
    }

    /// What P had not handed over comes to its end: a begun piece with an unknown outcome.
    fn give_up(&mut self, ground: &mut Ground, lane: usize) {
        let stream = &mut self.streams[lane];
        if let Some((Some(post), ..)) = stream.sending.take() {
            ground.settle(post.attempt, 1, Settlement::Unknown);
        }
        for post in std::mem::take(&mut stream.queue) {
            ground.settle(post.attempt, 1, Settlement::Dropped);
        }
    }

    fn broken(&mut self, ground: &mut Ground, lane: usize, at_prefill: bool) {
        let channel = self.streams[lane].channel;
        let why = "a data stream broke".to_owned();
        if at_prefill {
            if !self.streams[lane].closed_by_prefill && ground.is_alive(channel.prefill) {
                self.give_up(ground, lane);
                ground.source_report(channel.prefill, SourceReport::Broken { channel, why });
            }
        } else if !self.streams[lane].closed_by_decode {
            ground.sink_report(channel.decode, SinkReport::Broken { channel, why });
        }
    }

    /// Both ends learn of the end of a stream, each at its own time.
    fn break_lane(&mut self, ground: &mut Ground, lane: usize) {
        if std::mem::replace(&mut self.streams[lane].broken, true) {
            return;
        }
        for at_prefill in [true, false] {
            let delay = ground.rng.range(10, 3000);
            ground.after(delay, super::Event::Tcp(Event::Broken { stream: lane, at_prefill }));
        }
    }
}

impl Model for Tcp {
    fn post(&mut self, ground: &mut Ground, attempt: Attempt, pieces: Vec<Piece>) {
        for piece in pieces {
            let expected = ground.expected(attempt, &piece);
            let lane = self.lane(attempt.channel(), piece.target_rank);
            let stream = &mut self.streams[lane];
            if stream.closed_by_prefill || stream.broken {
                ground.settle(attempt, 1, Settlement::Dropped);
                continue;
            }
            stream.queue.push_back(Post { attempt, piece, expected });
            self.schedule_send(ground, lane);
        }
    }

    fn stop(&mut self, ground: &mut Ground, attempt: Attempt) {
        for lane in self.lanes(attempt.channel()) {
            let stream = &mut self.streams[lane];
            let before = stream.queue.len();
            stream.queue.retain(|post| post.attempt != attempt);
            let dropped = (before - stream.queue.len()) as u64;
            // As the real sender does: D has a part of the frame, and its rest follows as zeros, so what is in D's page
            // is unknown, although the stream lives on.
            let in_the_middle = match &mut stream.sending {
                Some((post, of, ..)) if *of == attempt => post.take().is_some(),
                _ => false,
            };
            ground.settle(attempt, dropped, Settlement::Dropped);
            ground.settle(attempt, u64::from(in_the_middle), Settlement::Unknown);
        }
    }

    fn close_source(&mut self, ground: &mut Ground, channel: Channel) {
        for lane in self.lanes(channel) {
            self.streams[lane].closed_by_prefill = true;
            self.give_up(ground, lane);
            self.break_lane(ground, lane);
        }
    }

    fn peer_settled(&mut self, _: &mut Ground, _: Attempt) {}

    fn expect(&mut self, _: &mut Ground, attempt: Attempt, pages: &[u32], mapping: Mapping) {
        let pages = pages.to_vec();
        let expected = Expected { pages, mapping, revoked: false, borrows: 0, came: BTreeMap::new() };
        self.expected.insert(attempt, expected);
    }

    fn revoke(&mut self, ground: &mut Ground, attempt: Attempt) {
        let Some(expected) = self.expected.get_mut(&attempt) else { return };
        expected.revoked = true;
        if expected.borrows == 0 {
            self.expected.remove(&attempt);
            ground.sink_report(attempt.decode, SinkReport::Quiet { attempt });
        }
    }

    fn peer_drained(&mut self, _: &mut Ground, _: Attempt) {}

    fn release(&mut self, _: &mut Ground, attempt: Attempt) {
        self.expected.remove(&attempt);
    }

    fn close_sink(&mut self, ground: &mut Ground, channel: Channel) {
        for lane in self.lanes(channel) {
            self.streams[lane].closed_by_decode = true;
            self.break_lane(ground, lane);
        }
    }

    fn event(&mut self, ground: &mut Ground, event: super::Event) {
        let super::Event::Tcp(event) = event else { return };
        match event {
            Event::Send(lane) => self.send(ground, lane),
            Event::Arrive(lane) => self.arrive(ground, lane),
            Event::Copied(lane) => self.copied(ground, lane),
            Event::Broken { stream, at_prefill } => self.broken(ground, stream, at_prefill),
        }
    }

    fn harm(&mut self, ground: &mut Ground, harm: Harm) -> bool {
        let Harm::Break(channel) = harm else { return false };
        let Some(&lane) = self.lanes(channel).first() else { return false };
        let was_whole = !self.streams[lane].broken;
        self.break_lane(ground, lane);
        was_whole
    }

    fn died(&mut self, ground: &mut Ground, process: Incarnation) {
        self.expected.retain(|attempt, _| attempt.decode != process);
        for lane in 0..self.streams.len() {
            let channel = self.streams[lane].channel;
            if channel.prefill == process || channel.decode == process {
                self.break_lane(ground, lane);
            }
        }
    }
}
