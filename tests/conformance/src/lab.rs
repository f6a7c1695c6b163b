//! A prefill and a decode worker in one process: the real machines over the real ends of a backend.
//!
//! The lab does what the workers' roles do, and looks at everything that passes: each piece settles once and lands once,
//! quiet is reported once and only for what was revoked, free pages keep their canaries, and what commits is what the
//! oracle says. Control frames travel as bytes through queues that a case can hold; time is the real time plus what a
//! case has skipped. Nothing happens between two turns but what the fabric's own threads do.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tandem_fabric::SourceFabric;
use tandem_handoff::{
    cause::{Cause, CauseKind, Side},
    ids::{Channel, Incarnation, RequestId, Room, SessionId, Time},
    layout::PoolShape,
    limits::Limits,
    ticket::Ticket,
    wire::Frame,
};

use crate::{
    Backend, Failure,
    backend::{Flow, Link, Proofs},
    ensure,
    pattern::Prompt,
};

mod decode;
mod prefill;

pub use decode::{Decode, DecodeRequest};
pub use prefill::{Prefill, PrefillRequest};

pub struct Lab {
    pub p: Prefill,
    pub d: Decode,
    pub link: Box<dyn Link>,
    pub proofs: Proofs,
    patience: Duration,
    pub to_p: Queue,
    pub to_d: Queue,
    pub channel: Option<Channel>,
    /// Channels that a machine or a fabric closed, and why.
    pub closed: Vec<(Channel, String)>,
    /// Ends of prefill workers that were replaced: nobody hears them, and what they had posted goes on.
    gone: Vec<Box<dyn SourceFabric>>,
    begun: Instant,
    skipped_ms: u64,
    sessions: u64,
}

/// Control frames on their way to one side, in order.
#[derive(Default)]
pub struct Queue {
    frames: VecDeque<(Channel, Vec<u8>)>,
    /// The frames stay on their way.
    pub held: bool,
    /// Every frame that arrived, for cases that deliver one twice.
    pub arrived: Vec<Frame>,
}

/// What a worker did that concerns the way between the two.
enum Out {
    Send(Channel, Frame),
    Close(Channel, String),
}

pub fn limits() -> Limits {
    Limits { bootstrap_timeout_ms: 60_000, waiting_timeout_ms: 120_000, drain_timeout_ms: 5_000, ..Limits::default() }
}

pub fn room(value: u64) -> Room {
    Room::new(value).expect("cases use small numbers")
}

pub fn cause(side: Side, kind: CauseKind, message: &str) -> Cause {
    Cause::new(side, kind, message)
}

/// The client went away.
pub fn user() -> Cause {
    cause(Side::Decode, CauseKind::Aborted, "the client left")
}

impl Lab {
    /// Two workers with an open channel.
    ///
    /// # Errors
    /// When the backend cannot be set up.
    pub fn new(backend: &dyn Backend, prefill: PoolShape, decode: PoolShape, limits: Limits) -> Result<Self, Failure> {
        let engine = thread::current();
        let ends = backend.pair(prefill, decode, Arc::new(move || engine.unpark()))?;
        let mut lab = Self {
            p: Prefill::new(prefill, limits, ends.prefill, Incarnation(1000)),
            d: Decode::new(decode, limits, ends.decode, Incarnation(2000)),
            link: ends.link,
            proofs: backend.proofs(),
            patience: backend.patience(),
            to_p: Queue::default(),
            to_d: Queue::default(),
            channel: None,
            closed: Vec::new(),
            gone: Vec::new(),
            begun: Instant::now(),
            skipped_ms: 0,
            sessions: 0,
        };
        lab.connect()?;
        Ok(lab)
    }

    /// For measurements: bytes are neither computed nor compared from now on.
    pub fn blind(&mut self) {
        self.p.pages.blind();
        self.d.pages.blind();
    }

    pub fn now(&self) -> Time {
        Time(self.begun.elapsed().as_micros() as u64).after_ms(self.skipped_ms)
    }

    /// Lets deadlines pass without waiting for them.
    pub fn skip_ms(&mut self, ms: u64) {
        self.skipped_ms += ms;
    }

    /// A new channel between the newest ends passes Hello; an older one is for the machines to end.
    pub fn connect(&mut self) -> Result<Channel, Failure> {
        self.sessions += 1;
        let channel =
            Channel { prefill: self.p.incarnation, decode: self.d.incarnation, session: SessionId(self.sessions) };
        self.link.open(channel)?;
        self.channel = Some(channel);
        let now = self.now();
        self.p.machine.channel_up(now, channel, self.d.shape);
        self.d.machine.channel_up(now, ticket(0).address(), channel, self.p.shape);
        self.turn()?;
        Ok(channel)
    }

    /// The network between the two breaks: control channel and data paths.
    pub fn cut(&mut self) {
        self.link.cut();
        if let Some(channel) = self.channel {
            self.lose(channel, "cut");
        }
    }

    /// Another process comes up where P was, and D has not noticed: what the old one sent is still on its way.
    pub fn restart_prefill(&mut self) -> Result<(), Failure> {
        let end = self.link.restart_prefill()?;
        let incarnation = Incarnation(self.p.incarnation.0 + 1);
        let next = Prefill::new(self.p.shape, self.p.limits, end, incarnation);
        self.gone.push(std::mem::replace(&mut self.p, next).fabric);
        Ok(())
    }

    /// Another process comes up where D was, and P has noticed that the old one is gone.
    pub fn restart_decode(&mut self) -> Result<(), Failure> {
        let end = self.link.restart_decode()?;
        if let Some(channel) = self.channel {
            self.lose(channel, "the decode worker died");
        }
        let incarnation = Incarnation(self.d.incarnation.0 + 1);
        self.d = Decode::new(self.d.shape, self.d.limits, end, incarnation);
        Ok(())
    }

    /// The control channel is gone: both sides learn it, and what was on its way is lost.
    pub fn lose(&mut self, channel: Channel, why: &str) {
        if self.channel == Some(channel) {
            self.channel = None;
        }
        for queue in [&mut self.to_p, &mut self.to_d] {
            queue.frames.retain(|(of, _)| *of != channel);
        }
        let now = self.now();
        self.p.machine.channel_down(now, channel, why);
        self.p.fabric.close(channel);
        self.d.machine.channel_down(now, channel, why);
        self.d.act_before_close();
        self.d.fabric.close(channel);
        self.closed.push((channel, why.to_owned()));
    }

    /// Both halves of one sample, with D's prefix of `held` pages; returns once P may compute.
    pub fn open(&mut self, id: u64, room_value: u64, prompt: &Prompt, held: usize) -> Result<(), Failure> {
        self.request(id, room_value, prompt)?;
        self.reserve(id, room_value, prompt, held)?;
        self.until("the rendezvous", |lab| lab.p.requests[&RequestId(id)].reserved)
    }

    /// P's half.
    pub fn request(&mut self, id: u64, room_value: u64, prompt: &Prompt) -> Result<(), Failure> {
        let now = self.now();
        self.p.request(now, RequestId(id), room(room_value), prompt)?;
        self.turn()
    }

    /// D's half.
    pub fn reserve(&mut self, id: u64, room_value: u64, prompt: &Prompt, held: usize) -> Result<(), Failure> {
        let now = self.now();
        self.d.reserve(now, RequestId(id), room_value, prompt, held)?;
        self.turn()
    }

    /// P computes the pages up to `end` and posts them.
    pub fn compute(&mut self, id: u64, end: usize) -> Result<(), Failure> {
        let now = self.now();
        self.p.compute(now, RequestId(id), end);
        self.turn()
    }

    /// P computes what is left and says Done.
    pub fn finish(&mut self, id: u64) -> Result<(), Failure> {
        let now = self.now();
        self.p.finish(now, RequestId(id));
        self.turn()
    }

    /// Opens, computes and commits one prompt, and gives everything back.
    pub fn transfer(&mut self, id: u64, room_value: u64, prompt: &Prompt, held: usize) -> Result<(), Failure> {
        self.open(id, room_value, prompt, held)?;
        self.finish(id)?;
        self.committed(id)?;
        self.d.release(RequestId(id));
        self.until("P's quiet", |lab| lab.p.requests[&RequestId(id)].quiet)
    }

    pub fn committed(&mut self, id: u64) -> Result<(), Failure> {
        self.until("the commit", |lab| lab.d.requests[&RequestId(id)].is_over())?;
        let request = &self.d.requests[&RequestId(id)];
        ensure!(request.committed.is_some(), "request {id} failed on D: {:?}", request.failed);
        Ok(())
    }

    pub fn cancel_p(&mut self, id: u64, cause: Cause) -> Result<(), Failure> {
        let now = self.now();
        self.p.machine.cancel(now, RequestId(id), cause);
        self.turn()
    }

    pub fn cancel_d(&mut self, id: u64, cause: Cause) -> Result<(), Failure> {
        let now = self.now();
        self.d.machine.cancel(now, RequestId(id), cause);
        self.turn()
    }

    /// Waits, turning, until `done` says so.
    pub fn until(&mut self, what: &str, done: impl FnMut(&mut Lab) -> bool) -> Result<(), Failure> {
        self.until_within(self.patience, what, done)
    }

    pub fn until_within(
        &mut self,
        limit: Duration,
        what: &str,
        mut done: impl FnMut(&mut Lab) -> bool,
    ) -> Result<(), Failure> {
        let start = Instant::now();
        loop {
            self.turn().map_err(|failure| failure.during(what))?;
            if done(self) {
                return Ok(());
            }
            ensure!(start.elapsed() < limit, "{what}: nothing for {limit:?}; {}", self.state());
            thread::park_timeout(Duration::from_millis(1));
        }
    }

    /// Turns for so long, whatever happens.
    pub fn pass(&mut self, time: Duration) -> Result<(), Failure> {
        let start = Instant::now();
        while start.elapsed() < time {
            self.turn()?;
            thread::park_timeout(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Delivers what is on its way, hears the fabrics, lets deadlines act.
    pub fn turn(&mut self) -> Result<(), Failure> {
        let mut out = Vec::new();
        loop {
            let mut moved = false;
            while let Some((channel, frame)) = self.to_p.next()? {
                let now = self.now();
                self.p.machine.frame(now, channel, frame);
                self.p.act(now, &mut out)?;
                moved = true;
            }
            while let Some((channel, frame)) = self.to_d.next()? {
                let now = self.now();
                self.d.machine.frame(now, channel, frame);
                self.d.act(now, &mut out)?;
                moved = true;
            }
            let now = self.now();
            self.p.hear(now, &mut out)?;
            self.d.hear(now, &mut out)?;
            self.p.machine.tick(now);
            self.p.act(now, &mut out)?;
            self.d.machine.tick(now);
            self.d.act(now, &mut out)?;
            moved |= !out.is_empty();
            for out in out.drain(..) {
                self.carry(out);
            }
            if !moved {
                return Ok(());
            }
        }
    }

    fn carry(&mut self, out: Out) {
        match out {
            Out::Close(channel, why) => self.lose(channel, &why),
            Out::Send(channel, _) if self.channel != Some(channel) => {}
            Out::Send(channel, frame) => {
                let to_p = matches!(frame, Frame::Reserve(_) | Frame::Abort { .. } | Frame::Settled { .. });
                let queue = if to_p { &mut self.to_p } else { &mut self.to_d };
                queue.frames.push_back((channel, frame.encode()));
            }
        }
    }

    /// Lets everything flow and end, then asserts that nothing is left: no request, no pinned page, no free page that
    /// was written.
    pub fn assert_over(&mut self) -> Result<(), Failure> {
        self.link.flow(Flow::Open);
        self.to_p.held = false;
        self.to_d.held = false;
        self.p.deaf = false;
        self.d.deaf = false;
        self.until("the end of everything", |lab| lab.p.machine.is_idle() && lab.d.machine.is_idle())?;
        self.p.give_back_kept()?;
        self.d.give_back_held()?;
        ensure!(self.p.pages.is_full() && self.d.pages.is_full(), "pages are lost: {}", self.state());
        ensure!(self.p.outstanding() == 0, "{} pieces never settled", self.p.outstanding());
        self.p.pages.check()?;
        self.d.pages.check()
    }

    fn state(&self) -> String {
        let (draining, quarantined) = self.d.machine.draining_pages();
        format!(
            "P: {} of {} pages free, {} pieces unsettled; D: {} of {} pages free, {draining} drain, {quarantined} of them \
             in quarantine, {} pieces landed",
            self.p.pages.free(),
            self.p.shape.pages,
            self.p.outstanding(),
            self.d.pages.free(),
            self.d.shape.pages,
            self.d.landed_pieces(),
        )
    }
}

impl Queue {
    fn next(&mut self) -> Result<Option<(Channel, Frame)>, Failure> {
        if self.held {
            return Ok(None);
        }
        let Some((channel, bytes)) = self.frames.pop_front() else {
            return Ok(None);
        };
        let frame = Frame::decode(&bytes).map_err(|error| Failure::new(format!("a frame of ours is none: {error}")))?;
        self.arrived.push(frame.clone());
        Ok(Some((channel, frame)))
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Frames that are on their way are lost, although their channel lives: only a hostile network does this.
    pub fn lose(&mut self) {
        self.frames.clear();
    }
}

fn ticket(room_value: u64) -> Ticket {
    Ticket { host: "prefill".into(), port: 8998, room: room(room_value) }
}
