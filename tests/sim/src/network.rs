//! Control channels between processes: dialling, frames, heartbeats, and their end. *Pure.*
//!
//! In the *faithful* world each direction delivers an ordered prefix of what was sent and then a cut, which each end sees
//! at its own time: what TCP does. In the *hostile* world frames are also lost, doubled and reordered, to the
//! end: only deadlines bring such a world to rest.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tandem_handoff::{
    ids::{Channel, Incarnation, SessionId},
    ticket::Address,
    wire::{Cause, CauseKind, Frame, Side},
};
use tandem_worker::bootstrap::{ControlEvent, ControlPlane};

use crate::{
    agenda::Agenda,
    fabric::{SharedWire, lock},
    ground::Ground,
    wire::Wire,
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Manners {
    Faithful,
    Hostile,
}

impl Manners {
    pub const ALL: [Manners; 2] = [Manners::Faithful, Manners::Hostile];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|manners| manners.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Manners::Faithful => "faithful",
            Manners::Hostile => "hostile",
        }
    }
}

/// A peer that is silent for so long is given up.
pub const SILENCE_US: u64 = 60_000;
/// How long a dial is tried.
const DIAL_WINDOW_US: u64 = 40_000;

#[derive(Debug)]
pub enum Event {
    Frame { to: Incarnation, channel: Channel, bytes: Vec<u8> },
    Up { to: Incarnation, channel: Channel, address: Option<Address>, peer: Incarnation },
    Down { to: Incarnation, channel: Channel, why: String },
    Dial { from: Incarnation, address: Address, give_up: u64 },
}

/// One end of a channel, as its process sees it, and what travels towards it.
#[derive(Clone, Copy, Debug)]
struct End {
    open: bool,
    /// Its process has heard that the channel is gone.
    told: bool,
    /// The last delivery: later ones come later.
    last: u64,
    /// Nothing that would arrive later than this arrives.
    cut: u64,
}

#[derive(Debug)]
struct Line {
    at_prefill: End,
    at_decode: End,
    /// Nothing arrives on either end before this time.
    stalled: u64,
}

impl Line {
    fn end(&mut self, channel: &Channel, at: Incarnation) -> &mut End {
        if at == channel.prefill { &mut self.at_prefill } else { &mut self.at_decode }
    }
}

#[derive(Debug)]
pub struct Network {
    manners: Manners,
    pub agenda: Agenda<Event>,
    lines: BTreeMap<Channel, Line>,
    inboxes: BTreeMap<Incarnation, VecDeque<ControlEvent>>,
    /// Who answers at an address.
    listeners: BTreeMap<Address, Incarnation>,
    sessions: BTreeMap<Incarnation, u64>,
    dialling: BTreeSet<(Incarnation, Address)>,
}

fn peer_of(channel: &Channel, process: Incarnation) -> Incarnation {
    if process == channel.prefill { channel.decode } else { channel.prefill }
}

impl Network {
    pub fn new(manners: Manners) -> Self {
        Self {
            manners,
            agenda: Agenda::default(),
            lines: BTreeMap::new(),
            inboxes: BTreeMap::new(),
            listeners: BTreeMap::new(),
            sessions: BTreeMap::new(),
            dialling: BTreeSet::new(),
        }
    }

    pub fn listen(&mut self, address: Address, process: Incarnation) {
        self.listeners.insert(address, process);
    }

    /// Channels with an open end, in order.
    pub fn channels(&self) -> Vec<Channel> {
        let open = |line: &Line| line.at_prefill.open && line.at_decode.open;
        self.lines.iter().filter(|(_, line)| open(line)).map(|(channel, _)| *channel).collect()
    }

    fn send(&mut self, ground: &mut Ground, from: Incarnation, channel: Channel, frame: &Frame) {
        let rough = self.manners == Manners::Hostile;
        let to = peer_of(&channel, from);
        let Some(line) = self.lines.get_mut(&channel) else { return };
        if !line.end(&channel, from).open {
            return;
        }
        let copies = match rough {
            true if ground.rng.percent(8) => 0,
            true if ground.rng.percent(8) => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let mut due = line.stalled.max(ground.now) + ground.rng.range(20, 800);
            let end = line.end(&channel, to);
            if rough {
                due += if ground.rng.percent(20) { ground.rng.range(0, 15_000) } else { 0 };
            } else {
                due = due.max(end.last + 1);
                end.last = due;
            }
            if due <= end.cut {
                self.agenda.at(due, Event::Frame { to, channel, bytes: frame.encode() });
            }
        }
        if copies == 0 {
            ground.says(from, format_args!("the network loses the next frame"));
        }
    }

    /// `process` hears that the channel is gone, after what was delivered to it before.
    fn tell_down(&mut self, to: Incarnation, channel: Channel, at: u64, why: &str) {
        let Some(line) = self.lines.get_mut(&channel) else { return };
        let end = line.end(&channel, to);
        let due = at.max(end.last + 1);
        end.last = due;
        end.cut = end.cut.min(due);
        self.agenda.at(due, Event::Down { to, channel, why: why.to_owned() });
    }

    fn close(&mut self, ground: &mut Ground, process: Incarnation, channel: Channel, why: &str) {
        let Some(line) = self.lines.get_mut(&channel) else { return };
        let end = line.end(&channel, process);
        if !end.open {
            return;
        }
        end.open = false;
        end.cut = ground.now;
        let soon = ground.now + ground.rng.range(1, 100);
        self.agenda.at(soon, Event::Down { to: process, channel, why: format!("this worker closed it: {why}") });
        let later = ground.now + ground.rng.range(20, 1500);
        self.tell_down(peer_of(&channel, process), channel, later, "the peer closed it or died");
    }

    /// The channel breaks: each direction delivers a prefix, each end sees the cut at its own time.
    pub fn cut(&mut self, ground: &mut Ground, channel: Channel) {
        for to in [channel.prefill, channel.decode] {
            if let Some(line) = self.lines.get_mut(&channel) {
                let end = line.end(&channel, to);
                end.cut = end.cut.min(ground.now + ground.rng.range(0, 600));
            }
            let seen = ground.now + ground.rng.range(600, 20_000);
            self.tell_down(to, channel, seen, "the connection was cut");
        }
    }

    /// Nothing passes for a while; after the silence both ends give the channel up.
    pub fn stall(&mut self, ground: &mut Ground, channel: Channel, micros: u64) {
        if micros > SILENCE_US {
            for to in [channel.prefill, channel.decode] {
                if let Some(line) = self.lines.get_mut(&channel) {
                    line.end(&channel, to).cut = ground.now;
                }
                let seen = ground.now + SILENCE_US + ground.rng.range(0, 10_000);
                self.tell_down(to, channel, seen, "the peer was silent");
            }
        } else if let Some(line) = self.lines.get_mut(&channel) {
            line.stalled = ground.now + micros;
        }
    }

    /// The process is gone: its peers see their channels end, at once or after the silence.
    pub fn died(&mut self, ground: &mut Ground, process: Incarnation) {
        self.inboxes.remove(&process);
        self.listeners.retain(|_, listener| *listener != process);
        let quickly = ground.rng.percent(70);
        let channels: Vec<Channel> = self.lines.keys().copied().collect();
        for channel in channels {
            if channel.prefill != process && channel.decode != process {
                continue;
            }
            if let Some(line) = self.lines.get_mut(&channel) {
                line.end(&channel, process).open = false;
                let end = line.end(&channel, peer_of(&channel, process));
                end.cut = end.cut.min(ground.now + ground.rng.range(0, 800));
            }
            let wait = if quickly { ground.rng.range(100, 2000) } else { SILENCE_US };
            let (peer, seen) = (peer_of(&channel, process), ground.now + wait);
            self.tell_down(peer, channel, seen, "the peer closed it or died");
        }
    }

    /// The process stands still for `micros`: its peers give it up after the silence.
    pub fn paused(&mut self, ground: &mut Ground, process: Incarnation, micros: u64) {
        let channels: Vec<Channel> = self.channels();
        for channel in channels {
            if (channel.prefill == process || channel.decode == process) && micros > SILENCE_US {
                let peer = peer_of(&channel, process);
                let seen = ground.now + SILENCE_US + ground.rng.range(0, 5000);
                self.tell_down(peer, channel, seen, "the peer was silent");
                // The process itself finds the closed connection when it runs again.
                let back = ground.now + micros;
                self.tell_down(process, channel, back, "the peer closed it or died");
            }
        }
    }

    fn dial(&mut self, ground: &mut Ground, from: Incarnation, address: Address) {
        if self.dialling.insert((from, address.clone())) {
            let give_up = ground.now + DIAL_WINDOW_US;
            let due = ground.now + ground.rng.range(50, 2000);
            self.agenda.at(due, Event::Dial { from, address, give_up });
        }
    }

    fn dialled(&mut self, ground: &mut Ground, from: Incarnation, address: Address, give_up: u64) {
        if !ground.is_alive(from) {
            return;
        }
        let listener = self.listeners.get(&address).copied().filter(|&listener| ground.runs(listener));
        let Some(prefill) = listener else {
            if ground.now < give_up {
                let due = ground.now + ground.rng.range(2000, 8000);
                self.agenda.at(due, Event::Dial { from, address, give_up });
                return;
            }
            self.dialling.remove(&(from, address.clone()));
            let message = format!("the prefill worker {address} cannot be reached; a retry is safe");
            let cause = Cause::new(Side::Decode, CauseKind::Lost, message);
            self.report(ground, from, ControlEvent::DialFailed { address, cause });
            return;
        };
        self.dialling.remove(&(from, address.clone()));
        let known = self
            .lines
            .iter_mut()
            .find(|(channel, line)| channel.prefill == prefill && channel.decode == from && line.at_decode.open);
        if let Some((&channel, _)) = known {
            let shape = ground.memory(prefill).shape;
            self.report(ground, from, ControlEvent::Up { channel, address: Some(address), shape });
            return;
        }
        let session = self.sessions.entry(prefill).or_default();
        *session += 1;
        let channel = Channel { prefill, decode: from, session: SessionId(*session) };
        let up_p = ground.now + ground.rng.range(1, 200);
        let up_d = up_p + ground.rng.range(1, 800);
        let end = |last| End { open: true, told: false, last, cut: u64::MAX };
        self.lines.insert(channel, Line { at_prefill: end(up_p), at_decode: end(up_d), stalled: 0 });
        self.agenda.at(up_p, Event::Up { to: prefill, channel, address: None, peer: from });
        self.agenda.at(up_d, Event::Up { to: from, channel, address: Some(address), peer: prefill });
    }

    fn report(&mut self, ground: &mut Ground, to: Incarnation, event: ControlEvent) {
        self.inboxes.entry(to).or_default().push_back(event);
        ground.wake(to);
    }

    pub fn event(&mut self, ground: &mut Ground, event: Event) {
        match event {
            Event::Dial { from, address, give_up } => self.dialled(ground, from, address, give_up),
            Event::Up { to, channel, address, peer } if ground.is_alive(to) => {
                let shape = ground.memory(peer).shape;
                ground.says(to, format_args!("channel of session {} is up", channel.session.0));
                self.report(ground, to, ControlEvent::Up { channel, address, shape });
            }
            Event::Down { to, channel, why } if ground.is_alive(to) => {
                let Some(line) = self.lines.get_mut(&channel) else { return };
                let end = line.end(&channel, to);
                if std::mem::replace(&mut end.told, true) {
                    return;
                }
                end.open = false;
                ground.says(to, format_args!("channel of session {} is down: {why}", channel.session.0));
                self.report(ground, to, ControlEvent::Down { channel, why });
            }
            Event::Frame { to, channel, bytes } if ground.is_alive(to) => {
                let now = ground.now;
                let arrives = self.lines.get_mut(&channel).is_some_and(|line| {
                    let end = line.end(&channel, to);
                    end.open && now <= end.cut
                });
                if arrives {
                    let frame = Frame::decode(&bytes).expect("a frame's own bytes decode");
                    self.report(ground, to, ControlEvent::Frame { channel, frame });
                }
            }
            Event::Up { .. } | Event::Down { .. } | Event::Frame { .. } => {}
        }
    }
}

/// The control channels as one process uses them.
pub struct Control {
    pub wire: SharedWire,
    pub process: Incarnation,
}

impl ControlPlane for Control {
    fn send(&mut self, channel: Channel, frame: Frame) {
        let Wire { ground, network, .. } = &mut *lock(&self.wire);
        if let Frame::Reserve(reserve) = &frame {
            let page_size = ground.memory(self.process).shape.page_size;
            ground.learn_attempt(reserve, page_size);
        }
        if ground.trace.is_on() {
            let what = crate::trace::frame(ground, &frame);
            ground.says(self.process, format_args!("sends {what}"));
        }
        ground.sends(&frame);
        network.send(ground, self.process, channel, &frame);
    }

    fn close(&mut self, channel: Channel, why: &str) {
        let Wire { ground, network, .. } = &mut *lock(&self.wire);
        network.close(ground, self.process, channel, why);
    }

    fn dial(&mut self, address: Address) {
        let Wire { ground, network, .. } = &mut *lock(&self.wire);
        network.dial(ground, self.process, address);
    }

    fn poll(&mut self) -> Vec<ControlEvent> {
        let Wire { ground, network, .. } = &mut *lock(&self.wire);
        let events: Vec<ControlEvent> = network.inboxes.entry(self.process).or_default().drain(..).collect();
        for event in &events {
            if let ControlEvent::Frame { frame, .. } = event {
                ground.takes(frame);
                if ground.trace.is_on() {
                    let what = crate::trace::frame(ground, frame);
                    ground.says(self.process, format_args!("takes {what}"));
                }
            }
        }
        events
    }
}
