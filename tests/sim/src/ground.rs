//! What every part of a world stands on: the clock, chance, the trace, the processes and their memory, and the books of
//! the checkers. *Pure*: time is a number.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use tandem_fabric::{SinkReport, SourceReport};
use tandem_handoff::{
    ids::{Attempt, Channel, Incarnation},
    source::{Piece, Settlement},
    wire::{Frame, Reserve},
};

use crate::{agenda::Agenda, fabric, faults::Fault, memory::Memory, model, rng::Rng, trace::Trace};

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The invariant, or what else was promised: `H1` to `H10`, `end`, `answer`, `leftover`.
    pub rule: &'static str,
    pub at: u64,
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}.{:03} ms: {}", self.rule, self.at / 1000, self.at % 1000, self.what)
    }
}

/// One worker process.
#[derive(Debug)]
pub struct Host {
    pub name: String,
    pub alive: bool,
    pub paused: bool,
    pub memory: Memory,
    /// Steps that its device is going to fail.
    pub fail_steps: u32,
    pub source_reports: Vec<SourceReport>,
    pub sink_reports: Vec<SinkReport>,
}

/// Pieces, over all attempts. What is settled counts as long as its process lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    pub posted: u64,
    pub settled: u64,
    pub landed: u64,
}

/// What the checkers know of an attempt, from the Reserve that D sent.
#[derive(Debug)]
struct Known {
    chains: Arc<[u64]>,
    pages: Vec<u32>,
    /// Leading pages that D held already.
    held: usize,
}

pub struct Ground {
    pub now: u64,
    pub rng: Rng,
    pub trace: Trace,
    pub violations: Vec<Violation>,
    pub hosts: BTreeMap<Incarnation, Host>,
    /// Events of the fabric. They have an agenda of their own because they go on while a step runs (H10).
    pub writes: Agenda<fabric::Event>,
    /// Processes with something to take in.
    pub wakes: BTreeSet<Incarnation>,
    /// Until when the data path of a channel is slow.
    slow: BTreeMap<Channel, u64>,
    /// Attempts of prompts by hash: the gateway's books.
    prompts: BTreeMap<u128, Arc<[u64]>>,
    attempts: BTreeMap<Attempt, Known>,
    /// Which request of D an attempt serves: told when D's fabric begins to expect it.
    served: BTreeMap<Attempt, u64>,
    /// Posted and not settled, per attempt.
    outstanding: BTreeMap<Attempt, u64>,
    /// Pieces that D's fabric has reported, which it may do more than once.
    landed: BTreeSet<(Attempt, u32)>,
    /// Attempts with a post of unknown outcome.
    poisoned: BTreeSet<Attempt>,
    /// Attempts that D's fabric has reported quiet.
    quiet: BTreeSet<Attempt>,
    /// Attempts whose Failed, and whose Done, D has taken from its channel.
    failed: BTreeSet<Attempt>,
    done: BTreeSet<Attempt>,
    /// Attempts whose Drained D has taken.
    drained: BTreeSet<Attempt>,
    pub tally: Tally,
    /// How long the fabric goes on between the launch of a step and its reads, at most.
    pub late_us: u64,
    /// Pieces that a bad wire is going to change, per channel.
    flips: BTreeMap<Channel, u32>,
    /// Whether any byte was changed on its way.
    pub flipped: bool,
    /// Armed faults that came true, of which attempt, for which request of D. The world takes them.
    pub hits: Vec<(Fault, Attempt, u64)>,
}

impl Ground {
    pub fn new(seed: u64, trace: bool) -> Self {
        Self {
            now: 0,
            rng: Rng::new(seed),
            trace: Trace::new(trace),
            violations: Vec::new(),
            hosts: BTreeMap::new(),
            writes: Agenda::default(),
            wakes: BTreeSet::new(),
            slow: BTreeMap::new(),
            prompts: BTreeMap::new(),
            attempts: BTreeMap::new(),
            served: BTreeMap::new(),
            outstanding: BTreeMap::new(),
            landed: BTreeSet::new(),
            poisoned: BTreeSet::new(),
            quiet: BTreeSet::new(),
            failed: BTreeSet::new(),
            done: BTreeSet::new(),
            drained: BTreeSet::new(),
            tally: Tally::default(),
            late_us: 400,
            flips: BTreeMap::new(),
            flipped: false,
            hits: Vec::new(),
        }
    }

    pub fn violation(&mut self, rule: &'static str, what: String) {
        self.say("CHECKER", format_args!("{rule} is broken: {what}"));
        self.violations.push(Violation { rule, at: self.now, what });
    }

    pub fn say(&mut self, who: &str, what: fmt::Arguments<'_>) {
        self.trace.line(self.now, who, what);
    }

    /// A line of the trace by a process.
    pub fn says(&mut self, who: Incarnation, what: fmt::Arguments<'_>) {
        if self.trace.is_on() {
            let name = self.name(who).to_owned();
            self.say(&name, what);
        }
    }

    /// A line about an attempt, by a process: what happens, then the attempt's name.
    pub fn tells(&mut self, who: Incarnation, attempt: Attempt, what: fmt::Arguments<'_>) {
        if self.trace.is_on() {
            let name = self.attempt_name(attempt);
            self.says(who, format_args!("{what} {name}"));
        }
    }

    pub fn name(&self, process: Incarnation) -> &str {
        self.hosts.get(&process).map_or("?", |host| &host.name)
    }

    /// `attempt 3 of d0->p1`.
    pub fn attempt_name(&self, attempt: Attempt) -> String {
        let (p, d) = (self.name(attempt.prefill), self.name(attempt.decode));
        format!("attempt {} ({p}>{d}, session {})", attempt.number, attempt.session.0)
    }

    pub fn is_alive(&self, process: Incarnation) -> bool {
        self.hosts.get(&process).is_some_and(|host| host.alive)
    }

    /// Alive and not stopped: its threads run.
    pub fn runs(&self, process: Incarnation) -> bool {
        self.hosts.get(&process).is_some_and(|host| host.alive && !host.paused)
    }

    pub fn memory(&mut self, process: Incarnation) -> &mut Memory {
        &mut self.hosts.get_mut(&process).expect("a process is known from its start on").memory
    }

    pub fn wake(&mut self, process: Incarnation) {
        self.wakes.insert(process);
    }

    /// How long the next thing of a channel's data path takes.
    pub fn pace(&mut self, channel: Channel) -> u64 {
        match self.slow.get(&channel) {
            Some(&until) if until > self.now => self.rng.range(500, 20_000),
            _ => self.rng.range(10, 250),
        }
    }

    /// Makes a channel's data path slow for a while.
    pub fn slow_down(&mut self, channel: Channel, until: u64) {
        self.slow.insert(channel, until);
    }

    pub fn after(&mut self, delay: u64, event: fabric::Event) {
        self.writes.at(self.now + delay, event);
    }

    pub fn learn_prompt(&mut self, prompt: &[u32]) {
        let chains = model::chains(prompt).into();
        self.prompts.insert(tandem_handoff::wire::prompt_hash(prompt), chains);
    }

    /// A Reserve leaves D: its attempt stands for that prompt and those pages.
    pub fn learn_attempt(&mut self, reserve: &Reserve, page_size: u32) {
        let Some(chains) = self.prompts.get(&reserve.prompt_hash).cloned() else {
            self.violation("H9", format!("D offers pages for a prompt that nobody asked for: {reserve:?}"));
            return;
        };
        if self.attempts.contains_key(&reserve.attempt) {
            let name = self.attempt_name(reserve.attempt);
            self.violation("H8", format!("{name} is offered twice: an attempt's number was used again"));
        }
        let held = (reserve.held_tokens / page_size) as usize;
        self.attempts.insert(reserve.attempt, Known { chains, pages: reserve.pages.clone(), held });
    }

    /// D's fabric expects an attempt: the pages must be held by one request, for which the attempt is.
    pub fn expects(&mut self, attempt: Attempt, pages: &[u32]) {
        let memory = self.memory(attempt.decode);
        let holders: BTreeSet<Option<u64>> = pages.iter().map(|&page| memory.holder(page)).collect();
        match (holders.len(), holders.first()) {
            (1, Some(&Some(request))) => {
                self.served.insert(attempt, request);
            }
            _ => {
                let name = self.attempt_name(attempt);
                self.violation("H1", format!("{name} shows pages {pages:?}, which {holders:?} hold"));
            }
        }
    }

    /// What a posted piece must hold when it is read: D's prompt, as the oracle has it.
    pub fn expected(&mut self, attempt: Attempt, piece: &Piece) -> Vec<u8> {
        let target_page = (piece.target_offset / self.memory(attempt.decode).shape.page_bytes()) as u32;
        let shape = self.memory(attempt.prefill).shape;
        let page_bytes = shape.page_bytes();
        let known = self.attempts.get(&attempt);
        let place = known.and_then(|known| known.pages.iter().position(|&page| page == target_page));
        let (Some(known), Some(place)) = (known, place) else {
            let name = self.attempt_name(attempt);
            self.violation("H2", format!("P posts a piece of {name} into page {target_page}, which was not offered"));
            return vec![0; piece.bytes];
        };
        let image = model::page_image(&shape, piece.source_rank, known.held + place, &known.chains);
        let from = piece.source_offset % page_bytes;
        image[from..from + piece.bytes].to_vec()
    }

    /// Reads a part of a posted piece out of P's memory, now (H5).
    pub fn read_source(&mut self, post: &Post, from: usize, to: usize) -> Vec<u8> {
        let Post { attempt, piece, expected } = post;
        let at = piece.source_offset + from;
        let bytes = self.memory(attempt.prefill).bytes(piece.source_rank, at, to - from).to_vec();
        let memory = self.memory(attempt.prefill);
        let page = memory.page_of(piece.source_offset);
        if memory.free[page as usize] {
            let name = self.attempt_name(*attempt);
            self.violation("H5", format!("P's page {page} is free while a write of {name} reads it"));
        } else if bytes != expected[from..to] {
            let name = self.attempt_name(*attempt);
            self.violation(
                "H5",
                format!("P's page {page} changed, or was never right, before a write of {name} had settled"),
            );
        }
        bytes
    }

    /// A part of a piece arrives in D's memory, now (H2). A process that is gone has no memory.
    pub fn write_target(&mut self, attempt: Attempt, rank: u32, at: usize, bytes: &[u8]) {
        if !self.is_alive(attempt.decode) {
            return;
        }
        let mut bytes = bytes.to_vec();
        if let Some(flips) = self.flips.get_mut(&attempt.channel())
            && *flips > 0
            && !bytes.is_empty()
        {
            *flips -= 1;
            let place = self.rng.index(bytes.len());
            bytes[place] ^= 1;
            self.flipped = true;
            self.hit(Fault::BytesChange, attempt);
        }
        let memory = self.memory(attempt.decode);
        let page = memory.page_of(at);
        let holder = memory.holder(page);
        memory.write(rank, at, &bytes);
        self.tells(attempt.decode, attempt, format_args!("page {page} gets {} bytes of a write of", bytes.len()));
        if holder.is_none() || holder != self.served.get(&attempt).copied() {
            let (name, d) = (self.attempt_name(attempt), self.name(attempt.decode).to_owned());
            let holder = holder.map_or("no attempt holds".to_owned(), |request| format!("request {request} holds"));
            self.violation("H2", format!("a write of {name} lands in page {page} of {d}, which {holder}"));
        }
    }

    pub fn posted(&mut self, attempt: Attempt, pieces: u64) {
        self.tally.posted += pieces;
        *self.outstanding.entry(attempt).or_default() += pieces;
    }

    /// Reports settled pieces to P; the model must settle each once.
    pub fn settle(&mut self, attempt: Attempt, pieces: u64, how: Settlement) {
        if pieces == 0 {
            return;
        }
        if self.is_alive(attempt.prefill) {
            self.tally.settled += pieces;
            let how = match how {
                Settlement::Sent => "sent",
                Settlement::Dropped => "dropped, nothing of it goes out any more",
                Settlement::Unknown => "given up, its outcome is unknown",
            };
            self.tells(attempt.prefill, attempt, format_args!("{pieces} posted and now settled ({how}), of"));
        }
        let outstanding = self.outstanding.get_mut(&attempt).expect("what settles was posted");
        *outstanding = outstanding.checked_sub(pieces).expect("a piece settles once");
        if *outstanding == 0 {
            self.outstanding.remove(&attempt);
        }
        if how == Settlement::Unknown {
            self.poisoned.insert(attempt);
        }
        self.source_report(attempt.prefill, SourceReport::Settled { attempt, pieces, how });
    }

    pub fn source_report(&mut self, process: Incarnation, report: SourceReport) {
        if let Some(host) = self.hosts.get_mut(&process)
            && host.alive
        {
            host.source_reports.push(report);
            self.wake(process);
        }
    }

    pub fn sink_report(&mut self, process: Incarnation, report: SinkReport) {
        match &report {
            SinkReport::Quiet { attempt } => {
                self.quiet.insert(*attempt);
                self.tells(process, *attempt, format_args!("the fabric is QUIET, it can write no more, for"));
            }
            SinkReport::Landed { attempt, pieces } => {
                for &piece in pieces {
                    let again = if self.landed.insert((*attempt, piece)) { "" } else { ", reported once more" };
                    self.tells(process, *attempt, format_args!("piece {piece} has landed whole{again}, of"));
                }
                self.tally.landed = self.landed.len() as u64;
            }
            SinkReport::Broken { .. } => {}
        }
        if let Some(host) = self.hosts.get_mut(&process)
            && host.alive
        {
            host.sink_reports.push(report);
            self.wake(process);
        }
    }

    /// What a frame promises, checked as it leaves.
    pub fn sends(&mut self, frame: &Frame) {
        let (attempt, rule, broken) = match frame {
            Frame::Drained { attempt } if self.outstanding.contains_key(attempt) => {
                (attempt, "H2", "P says Drained before its posts have settled")
            }
            Frame::Drained { attempt } if self.poisoned.contains(attempt) => {
                (attempt, "H2", "P says Drained although the outcome of a post is unknown")
            }
            Frame::Settled { attempt } if !self.quiet.contains(attempt) => {
                (attempt, "H5", "D says Settled before its fabric is quiet")
            }
            _ => return,
        };
        let name = self.attempt_name(*attempt);
        self.violation(rule, format!("{broken}: {name}"));
    }

    /// D takes a frame from its channel.
    pub fn takes(&mut self, frame: &Frame) {
        match frame {
            Frame::Failed { attempt, .. } => self.failed.insert(*attempt),
            Frame::Done(done) => self.done.insert(done.attempt),
            Frame::Drained { attempt } => self.drained.insert(*attempt),
            _ => false,
        };
    }

    /// D's fabric is told that P has drained an attempt (H3: by a frame of that attempt).
    pub fn told_drained(&mut self, attempt: Attempt) {
        if !self.drained.contains(&attempt) {
            let name = self.attempt_name(attempt);
            self.violation("H3", format!("D takes Drained of another attempt for that of {name}"));
        }
    }

    /// Attempts that serve a request of this process.
    fn attempts_of(&self, process: Incarnation, request: u64) -> impl Iterator<Item = &Attempt> {
        let serves = move |(attempt, served): &(&Attempt, &u64)| attempt.decode == process && **served == request;
        self.served.iter().filter(serves).map(|(attempt, _)| attempt)
    }

    /// Whether D has taken Failed, and Done, of the request's own attempt.
    pub fn heard(&self, process: Incarnation, request: u64) -> (bool, bool) {
        let any = |among: &BTreeSet<Attempt>| self.attempts_of(process, request).any(|attempt| among.contains(attempt));
        (any(&self.failed), any(&self.done))
    }

    /// An armed fault came true for an attempt.
    pub fn hit(&mut self, fault: Fault, attempt: Attempt) {
        if let Some(&request) = self.served.get(&attempt) {
            self.hits.push((fault, attempt, request));
        }
    }

    /// The next piece of the channel changes on its way.
    pub fn flip_next(&mut self, channel: Channel) {
        *self.flips.entry(channel).or_default() += 1;
    }

    /// Posts of live processes that never settled: a leftover at the end of a world.
    pub fn unsettled(&self) -> Option<Attempt> {
        self.outstanding.keys().copied().find(|attempt| self.is_alive(attempt.prefill))
    }
}

/// A posted piece, and what it must hold.
#[derive(Clone, Debug)]
pub struct Post {
    pub attempt: Attempt,
    pub piece: Piece,
    pub expected: Vec<u8>,
}
