//! The RDMA model: P's writes are one-sided and land in D's memory at some later time, in parts, whatever D thinks. *Pure.*
//!
//! Nothing on D can refuse a write: a write of a dead attempt lands, also after P has died, as long as the queue pair of
//! its rail lives at D. D is quiet by Drained (each posted write had a *success* completion) or by its own fence of the
//! channel, which takes time, may fail, and is tried again. A slice whose acknowledgement is lost is resent on the other
//! rail, after the failed rail was moved to ERR and D fenced its own queue pair of it; the original may land before that.
//! D's answer to the rail's fence names the slices that have landed, and only the others are resent: without that a slice
//! that D has committed long ago would be written again, into pages that are a sequence's by then. So no original lands
//! after its resend here: fence first, resend after is what any RDMA backend of this product must keep to, not what this
//! model finds convenient. A backend that resends before the fence has no proof of quiet left, neither by Drained (the
//! success of the resend says nothing of the original) nor by H2's other means.

use std::collections::{BTreeMap, BTreeSet};

use tandem_fabric::{SinkReport, SourceReport};
use tandem_handoff::{
    ids::{Attempt, Channel, Incarnation},
    layout::Mapping,
    source::{Piece, Settlement},
};

use super::{Harm, Model};
use crate::{
    faults::Fault,
    ground::{Ground, Post},
};

const RAILS: u32 = 2;

#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// P's adapter reads the next part of a write out of P's memory.
    Read(usize),
    /// A part arrives at D.
    Land { write: usize, from: usize },
    /// The completion comes back to P.
    Complete(usize),
    /// P gives an unacknowledged rail up: ERR at P, then D fences the rail and says so.
    RailFenced { channel: Channel, rail: u32 },
    /// D's fence of the whole channel is over.
    Fenced { channel: Channel, works: bool },
    /// A write to a process that is gone is given up.
    Unreachable(Channel),
}

/// One work request.
struct Write {
    post: Post,
    rail: u32,
    /// Bytes that P's adapter has read, and those that are on the wire: (from, bytes).
    read: usize,
    in_flight: Vec<(usize, Vec<u8>)>,
    landed: usize,
    lose_ack: bool,
    state: WriteState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WriteState {
    Posted,
    /// A completion of any kind came: P's adapter reads the source no more.
    Over,
    /// Its rail failed and the slice waits for the fence, to be resent.
    Waiting,
}

#[derive(Default)]
struct Connection {
    /// Rails whose queue pair at D is destroyed: nothing lands any more.
    fenced: BTreeSet<u32>,
    /// Rails that P has moved to ERR: nothing is read or completed any more.
    failed: BTreeSet<u32>,
    fencing: bool,
    lose_acks: u32,
    fail_fences: u32,
    closed_by_prefill: bool,
}

#[derive(Default)]
pub struct Rdma {
    writes: Vec<Write>,
    connections: BTreeMap<Channel, Connection>,
    /// D's books.
    expected: BTreeSet<Attempt>,
    revoked: BTreeSet<Attempt>,
    drained: BTreeSet<Attempt>,
    /// P's books: attempts of which nothing is to be resent.
    stopped: BTreeSet<Attempt>,
}

impl Rdma {
    fn start(&mut self, ground: &mut Ground, post: Post, rail: u32) {
        let channel = post.attempt.channel();
        let connection = self.connections.entry(channel).or_default();
        let lose_ack = rail == 0 && connection.lose_acks > 0;
        if lose_ack {
            connection.lose_acks -= 1;
        }
        let write = self.writes.len();
        let state = WriteState::Posted;
        self.writes.push(Write { post, rail, read: 0, in_flight: vec![], landed: 0, lose_ack, state });
        let delay = ground.pace(channel);
        ground.after(delay, super::Event::Rdma(Event::Read(write)));
    }

    fn read(&mut self, ground: &mut Ground, number: usize) {
        let write = &mut self.writes[number];
        let channel = write.post.attempt.channel();
        if write.state != WriteState::Posted || !ground.is_alive(channel.prefill) {
            return;
        }
        let total = write.post.piece.bytes;
        let to = (write.read + total.div_ceil(1 + ground.rng.index(3))).min(total);
        let bytes = ground.read_source(&write.post, write.read, to);
        let from = std::mem::replace(&mut write.read, to);
        write.in_flight.push((from, bytes));
        let delay = ground.pace(channel);
        ground.after(delay, super::Event::Rdma(Event::Land { write: number, from }));
        if to < total {
            let delay = ground.pace(channel);
            ground.after(delay, super::Event::Rdma(Event::Read(number)));
        }
    }

    fn land(&mut self, ground: &mut Ground, number: usize, from: usize) {
        let write = &mut self.writes[number];
        let (attempt, piece) = (write.post.attempt, write.post.piece);
        let channel = attempt.channel();
        let connection = self.connections.entry(channel).or_default();
        let Some(place) = write.in_flight.iter().position(|(at, _)| *at == from) else { return };
        let (_, bytes) = write.in_flight.swap_remove(place);
        if !ground.is_alive(channel.decode) {
            return;
        }
        if connection.fenced.contains(&write.rail) {
            let what = format_args!("the fence REFUSES {} bytes that arrive now, of", bytes.len());
            return ground.tells(channel.decode, attempt, what);
        }
        ground.write_target(attempt, piece.target_rank, piece.target_offset + from, &bytes);
        write.landed += bytes.len();
        if write.landed == piece.bytes {
            if self.expected.contains(&attempt) {
                // Completions are reported at least once, as an adapter's queue that is read again does.
                let times = if ground.rng.percent(15) { 2 } else { 1 };
                let pieces = vec![piece.index; times];
                ground.sink_report(channel.decode, SinkReport::Landed { attempt, pieces });
            }
            let delay = ground.rng.range(5, 200);
            ground.after(delay, super::Event::Rdma(Event::Complete(number)));
        }
    }

    fn complete(&mut self, ground: &mut Ground, number: usize) {
        let write = &mut self.writes[number];
        let (attempt, rail) = (write.post.attempt, write.rail);
        if write.state != WriteState::Posted || !ground.is_alive(attempt.prefill) {
            return;
        }
        if write.lose_ack {
            let channel = attempt.channel();
            ground.hit(Fault::AckLost, attempt);
            ground
                .says(attempt.prefill, format_args!("an acknowledgement on rail {rail} is lost, the rail is given up"));
            return self.fail_rail(ground, channel, rail);
        }
        write.state = WriteState::Over;
        ground.settle(attempt, 1, Settlement::Sent);
    }

    /// ERR at P: what is unacknowledged on the rail waits to be resent, once D has fenced the rail.
    fn fail_rail(&mut self, ground: &mut Ground, channel: Channel, rail: u32) {
        let connection = self.connections.entry(channel).or_default();
        if !connection.failed.insert(rail) {
            return;
        }
        for write in &mut self.writes {
            if write.state == WriteState::Posted && write.rail == rail && write.post.attempt.channel() == channel {
                write.state = WriteState::Waiting;
            }
        }
        let delay = ground.rng.range(100, 4000);
        ground.after(delay, super::Event::Rdma(Event::RailFenced { channel, rail }));
    }

    fn rail_fenced(&mut self, ground: &mut Ground, channel: Channel, rail: u32) {
        if ground.is_alive(channel.decode) && !ground.runs(channel.decode) {
            ground.after(1000, super::Event::Rdma(Event::RailFenced { channel, rail }));
            return;
        }
        let connection = self.connections.entry(channel).or_default();
        connection.fenced.insert(rail);
        let other = (0..RAILS).find(|other| !connection.failed.contains(other));
        let usable = other.filter(|_| !connection.closed_by_prefill && ground.is_alive(channel.decode));
        let waits = |write: &Write| write.state == WriteState::Waiting && write.post.attempt.channel() == channel;
        let waiting: Vec<usize> =
            (0..self.writes.len()).filter(|&at| waits(&self.writes[at]) && self.writes[at].rail == rail).collect();
        self.report_again(ground, channel, rail);
        for number in waiting {
            let write = &mut self.writes[number];
            write.state = WriteState::Over;
            let (post, landed) = (write.post.clone(), write.landed == write.post.piece.bytes);
            if !ground.is_alive(channel.prefill) {
                continue;
            }
            match usable {
                _ if landed => ground.settle(post.attempt, 1, Settlement::Sent),
                _ if self.stopped.contains(&post.attempt) => ground.settle(post.attempt, 1, Settlement::Dropped),
                Some(rail) => self.start(ground, post, rail),
                None => ground.settle(post.attempt, 1, Settlement::Unknown),
            }
        }
    }

    /// D drains the completions of a fenced rail and reports what landed there, again where it had done so before.
    fn report_again(&mut self, ground: &mut Ground, channel: Channel, rail: u32) {
        for write in &self.writes {
            let (attempt, piece) = (write.post.attempt, write.post.piece);
            let landed = write.landed == piece.bytes && write.rail == rail;
            if landed && attempt.channel() == channel && self.expected.contains(&attempt) {
                ground.sink_report(channel.decode, SinkReport::Landed { attempt, pieces: vec![piece.index] });
            }
        }
    }

    /// Everything of a channel that P has posted ends with a flush: whether D was written is unknown.
    fn flush(&mut self, ground: &mut Ground, channel: Channel) {
        for number in 0..self.writes.len() {
            let write = &mut self.writes[number];
            if write.state != WriteState::Over && write.post.attempt.channel() == channel {
                write.state = WriteState::Over;
                let attempt = write.post.attempt;
                ground.settle(attempt, 1, Settlement::Unknown);
            }
        }
    }

    /// D's fence: queue pairs to ERR, drained, destroyed. Quiet follows for what is revoked.
    fn fence(&mut self, ground: &mut Ground, channel: Channel) {
        let connection = self.connections.entry(channel).or_default();
        if std::mem::replace(&mut connection.fencing, true) {
            return;
        }
        let works = connection.fail_fences == 0;
        connection.fail_fences = connection.fail_fences.saturating_sub(1);
        ground.says(channel.decode, format_args!("fences the channel of session {}", channel.session.0));
        let delay = ground.rng.range(50, 3000);
        ground.after(delay, super::Event::Rdma(Event::Fenced { channel, works }));
    }

    fn fenced(&mut self, ground: &mut Ground, channel: Channel, works: bool) {
        if ground.is_alive(channel.decode) && !ground.runs(channel.decode) {
            ground.after(1000, super::Event::Rdma(Event::Fenced { channel, works }));
            return;
        }
        let connection = self.connections.entry(channel).or_default();
        connection.fencing = false;
        if !works {
            ground.says(channel.decode, format_args!("the fence of session {} failed", channel.session.0));
            for attempt in self.revoked.iter().filter(|attempt| attempt.channel() == channel) {
                ground.hit(Fault::FenceFails, *attempt);
            }
            return;
        }
        connection.fenced.extend(0..RAILS);
        ground.says(channel.decode, format_args!("the fence of session {} stands", channel.session.0));
        // P's writes are no longer answered: its adapter gives them up after its retries.
        let delay = ground.rng.range(500, 20_000);
        ground.after(delay, super::Event::Rdma(Event::Unreachable(channel)));
        let quiet: Vec<Attempt> = self.revoked.iter().filter(|attempt| attempt.channel() == channel).copied().collect();
        for attempt in quiet {
            self.quiet(ground, attempt);
        }
    }

    fn quiet(&mut self, ground: &mut Ground, attempt: Attempt) {
        self.revoked.remove(&attempt);
        self.expected.remove(&attempt);
        self.drained.remove(&attempt);
        ground.sink_report(attempt.decode, SinkReport::Quiet { attempt });
    }

    fn is_fenced(&self, channel: Channel) -> bool {
        self.connections.get(&channel).is_some_and(|connection| connection.fenced.len() == RAILS as usize)
    }
}

impl Model for Rdma {
    fn post(&mut self, ground: &mut Ground, attempt: Attempt, pieces: Vec<Piece>) {
        for piece in pieces {
            let expected = ground.expected(attempt, &piece);
            let post = Post { attempt, piece, expected };
            let connection = self.connections.entry(attempt.channel()).or_default();
            let rail = (0..RAILS).find(|rail| !connection.failed.contains(rail));
            match rail.filter(|_| !connection.closed_by_prefill) {
                Some(rail) => self.start(ground, post, rail),
                None => ground.settle(attempt, 1, Settlement::Dropped),
            }
        }
    }

    /// Writes that the adapter has begun go on to their completion; others are taken back.
    fn stop(&mut self, ground: &mut Ground, attempt: Attempt) {
        let mut dropped = 0;
        self.stopped.insert(attempt);
        for write in &mut self.writes {
            if write.post.attempt == attempt && write.state == WriteState::Posted && write.read == 0 {
                write.state = WriteState::Over;
                dropped += 1;
            }
        }
        ground.settle(attempt, dropped, Settlement::Dropped);
    }

    fn close_source(&mut self, ground: &mut Ground, channel: Channel) {
        let connection = self.connections.entry(channel).or_default();
        connection.closed_by_prefill = true;
        connection.failed.extend(0..RAILS);
        self.flush(ground, channel);
    }

    fn peer_settled(&mut self, _: &mut Ground, _: Attempt) {}

    fn expect(&mut self, _: &mut Ground, attempt: Attempt, _: &[u32], _: Mapping) {
        self.expected.insert(attempt);
    }

    fn revoke(&mut self, ground: &mut Ground, attempt: Attempt) {
        if !self.expected.contains(&attempt) {
            return;
        }
        self.revoked.insert(attempt);
        if self.is_fenced(attempt.channel()) || self.drained.contains(&attempt) {
            self.quiet(ground, attempt);
        }
    }

    fn peer_drained(&mut self, ground: &mut Ground, attempt: Attempt) {
        if self.revoked.contains(&attempt) {
            self.quiet(ground, attempt);
        } else if self.expected.contains(&attempt) {
            self.drained.insert(attempt);
        }
    }

    fn release(&mut self, _: &mut Ground, attempt: Attempt) {
        self.expected.remove(&attempt);
        self.drained.remove(&attempt);
    }

    fn close_sink(&mut self, ground: &mut Ground, channel: Channel) {
        if !self.is_fenced(channel) {
            self.fence(ground, channel);
        }
    }

    fn event(&mut self, ground: &mut Ground, event: super::Event) {
        let super::Event::Rdma(event) = event else { return };
        match event {
            Event::Read(write) => self.read(ground, write),
            Event::Land { write, from } => self.land(ground, write, from),
            Event::Complete(write) => self.complete(ground, write),
            Event::RailFenced { channel, rail } => self.rail_fenced(ground, channel, rail),
            Event::Fenced { channel, works } => self.fenced(ground, channel, works),
            Event::Unreachable(channel) => {
                self.flush(ground, channel);
                let why = "the decode worker does not answer".to_owned();
                ground.source_report(channel.prefill, SourceReport::Broken { channel, why });
            }
        }
    }

    fn harm(&mut self, ground: &mut Ground, harm: Harm) -> bool {
        match harm {
            Harm::LoseAck(channel) => {
                self.connections.entry(channel).or_default().lose_acks += 1;
                false
            }
            Harm::FailFence(channel) => {
                self.connections.entry(channel).or_default().fail_fences += 1;
                false
            }
            Harm::Break(channel) => {
                // Both rails fail: P gives everything up, and what is on the wire may still land.
                ground.after(1, super::Event::Rdma(Event::Unreachable(channel)));
                !self.connections.entry(channel).or_default().closed_by_prefill
            }
        }
    }

    fn died(&mut self, ground: &mut Ground, process: Incarnation) {
        for attempts in [&mut self.expected, &mut self.revoked, &mut self.drained] {
            attempts.retain(|attempt| attempt.decode != process);
        }
        let channels: Vec<Channel> = self.connections.keys().copied().collect();
        for channel in channels {
            if channel.decode == process {
                let delay = ground.rng.range(1000, 20_000);
                ground.after(delay, super::Event::Rdma(Event::Unreachable(channel)));
            }
        }
    }
}
