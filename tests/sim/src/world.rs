//! One world: a fleet, its clients and its faults under one clock, run to its end.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, Once},
};

use tandem_handoff::state::AttemptState;

use crate::{
    agenda::Agenda,
    coverage::Coverage,
    fabric::{SharedWire, lock},
    faults::{Fault, FaultSetup, Place, Spot, Stage, Trigger},
    gateway::{Act, ClientSetup, Gateway, Outcome, Travel},
    ground::Violation,
    network::{Manners, SILENCE_US},
    node::{LegEnd, Node, Side},
    setup::{Options, Setup},
    wire::Wire,
};

mod strikes;

/// After an early end that was remembered, the other half ends so soon (it may wait for pages before it shows itself).
const EARLY_END_US: u64 = 2_000_000;
/// Frames on their way, turns, and fences: the rest of a bound.
const WAYS_US: u64 = 60_000;
/// A worker stands still, or is away, for so long at most.
const STANDSTILL_US: u64 = 200_000;
/// An answer among the fleet's others, with preemptions.
const OUTPUT_US: u64 = 600_000;
/// Events that a world has at most before it counts as running away.
const EVENTS_MAX: u64 = 400_000;

#[derive(Debug)]
enum Event {
    Turn(usize),
    ClientArrives(usize),
    LegArrives(usize, Side),
    LegCut(usize, Side),
    LegEnded(usize, Side, LegEnd),
    Deadline(usize),
    Retry(usize),
    Strike(Fault, Option<usize>),
    Start(usize),
    Resume(usize),
    Exit(usize),
}

/// What a seed came to.
#[derive(Debug)]
pub struct Report {
    pub seed: u64,
    pub violation: Option<Violation>,
    pub coverage: Coverage,
    pub answered: u64,
    pub failed: u64,
    pub aborted: u64,
    pub events: u64,
    pub virtual_us: u64,
    pub trace: String,
}

pub struct World {
    setup: Setup,
    pub(crate) wire: SharedWire,
    pub(crate) nodes: Vec<Node>,
    gateway: Gateway,
    agenda: Agenda<Event>,
    pending: Vec<(FaultSetup, u64)>,
    coverage: Coverage,
    next_sample: u64,
    events: u64,
    /// When every client had its outcome and every fault was healed.
    settled_at: Option<u64>,
    pub(crate) now: u64,
}

/// Runs one seed to its end. A panic of the product is a violation like any other.
pub fn run(seed: u64, options: Options) -> Report {
    run_setup(Setup::new(seed, options), options.trace)
}

pub fn run_setup(setup: Setup, trace: bool) -> Report {
    quiet_panics();
    let mut world = World::new(setup, trace);
    IN_WORLD.set(true);
    let end = catch_unwind(AssertUnwindSafe(|| world.run()));
    IN_WORLD.set(false);
    let panicked = end.err().map(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default()
    });
    world.report(panicked)
}

thread_local! {
    static IN_WORLD: Cell<bool> = const { Cell::new(false) };
}

/// A panic inside a world is reported by its seed; the default hook would print it as well.
fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !IN_WORLD.get() {
                default(info);
            }
        }));
    });
}

impl World {
    pub fn new(setup: Setup, trace: bool) -> Self {
        let wire: SharedWire = Arc::new(Mutex::new(Wire::new(setup.seed, setup.fabric, setup.manners, trace)));
        let nodes = setup.nodes.iter().map(|node| Node::new(node.clone(), wire.clone())).collect();
        let pending = setup.faults.iter().map(|fault| (*fault, 0)).collect();
        Self {
            setup,
            wire,
            nodes,
            gateway: Gateway::default(),
            agenda: Agenda::default(),
            pending,
            coverage: Coverage::default(),
            next_sample: 1,
            events: 0,
            settled_at: None,
            now: 0,
        }
    }

    fn run(&mut self) {
        self.begin();
        while self.advance() {}
        if !self.broken() {
            self.end();
        }
    }

    /// One event. False when nothing is left to happen, or a rule is broken.
    pub(crate) fn advance(&mut self) -> bool {
        let Some(due) = self.next_due() else { return false };
        self.now = due;
        self.events += 1;
        self.step();
        self.count_hits();
        self.wake_nodes();
        if self.events > EVENTS_MAX {
            self.violation("end", format!("{EVENTS_MAX} events happened and no end is near"));
        }
        if self.settled_at.is_none() && self.gateway.all_settled() && self.all_healed() {
            self.settled_at = Some(self.now);
        }
        let rests = self.settled_at.is_none_or(|settled| self.now <= settled + self.rest_bound_us());
        rests && !self.broken()
    }

    /// Nothing that a fault broke waits for its repair.
    fn all_healed(&self) -> bool {
        self.nodes.iter().all(|node| node.is_alive() && !node.paused)
    }

    /// How long after the last client's outcome everything must be at rest (H6). In the faithful world both halves learn
    /// of every end, at the latest by the peer's silence: what follows are the drain deadline, at most two failed fences
    /// with the same wait before the next, and the way of frames. In the hostile world the word of an end may be lost, and
    /// the half that waits for it has its own deadlines before that.
    fn rest_bound_us(&self) -> u64 {
        if self.setup.half_cuts == Some(Side::Prefill) {
            return EARLY_END_US;
        }
        let limits = &self.setup.limits;
        let drains = 4 * limits.drain_timeout_ms * 1000;
        match (self.setup.manners, self.setup.half_cuts) {
            (Manners::Faithful, None) => SILENCE_US + drains + WAYS_US,
            // P hears of no end before D has a channel.
            (Manners::Faithful, Some(_)) | (Manners::Hostile, _) => {
                self.deadlines_us() + SILENCE_US + 2 * drains + WAYS_US
            }
        }
    }

    fn deadlines_us(&self) -> u64 {
        (self.setup.limits.bootstrap_timeout_ms + self.setup.limits.waiting_timeout_ms) * 1000
    }

    /// How long an exchange may take that only the handoff's own deadlines end: these, what stands still longest, and the
    /// output, computed among others.
    fn patience_us(&self) -> u64 {
        2 * self.deadlines_us() + STANDSTILL_US + OUTPUT_US
    }

    pub(crate) fn begin(&mut self) {
        for node in &mut self.nodes {
            node.start();
        }
        for setup in self.setup.clients.clone() {
            self.add_client(setup);
        }
        for (index, (fault, _)) in self.pending.clone().into_iter().enumerate() {
            if let Trigger::At(time) = fault.trigger {
                self.agenda.at(time, Event::Strike(fault.fault, None));
                self.pending[index].1 = u64::MAX;
            }
        }
        let faults: Vec<String> = self.setup.faults.iter().map(ToString::to_string).collect();
        let line = format!(
            "{} world over {}: {} workers, clients: {}, faults: {}",
            self.setup.manners.name(),
            self.setup.fabric.name(),
            self.nodes.len(),
            self.setup.clients.len(),
            if faults.is_empty() { "none".to_owned() } else { faults.join("; ") },
        );
        self.say(&line);
    }

    fn add_client(&mut self, setup: ClientSetup) -> usize {
        let mut wire = lock(&self.wire);
        wire.ground.learn_prompt(&setup.prompt);
        if let Some(other) = &setup.decode_prompt {
            wire.ground.learn_prompt(other);
        }
        drop(wire);
        let arrives = setup.arrives.max(self.now);
        let client = self.gateway.add(setup);
        self.agenda.at(arrives, Event::ClientArrives(client));
        client
    }

    fn next_due(&self) -> Option<u64> {
        let wire = lock(&self.wire);
        [self.agenda.next(), wire.ground.writes.next(), wire.network.agenda.next()].into_iter().flatten().min()
    }

    /// The earliest event; among equal times the fabric's, then the network's.
    fn step(&mut self) {
        {
            let wire = &mut *lock(&self.wire);
            wire.ground.now = self.now;
            if wire.ground.writes.next() == Some(self.now) {
                let (_, event) = wire.ground.writes.pop().expect("it is due");
                return wire.fabric.event(&mut wire.ground, event);
            }
            if wire.network.agenda.next() == Some(self.now) {
                let (_, event) = wire.network.agenda.pop().expect("it is due");
                return wire.network.event(&mut wire.ground, event);
            }
        }
        let (_, event) = self.agenda.pop().expect("an event is due");
        self.event(event);
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Turn(node) => self.turn(node),
            Event::ClientArrives(client) | Event::Retry(client) => self.open(client),
            Event::LegArrives(exchange, side) => self.leg_arrives(exchange, side),
            Event::LegCut(exchange, side) => self.leg_cut(exchange, side),
            Event::LegEnded(exchange, side, end) => {
                let room = self.room_of(exchange);
                let acts = self.gateway.leg_ended(exchange, side, end, room);
                self.act(acts);
                if side == Side::Prefill && !self.gateway.exchanges[exchange].over {
                    self.trigger(Place::Request(Stage::Delivered), exchange);
                }
            }
            Event::Deadline(exchange) => {
                let acts = match self.setup.deadline_us {
                    Some(_) => self.gateway.timed_out(exchange),
                    None => self.gateway.never_ended(exchange),
                };
                self.act(acts);
            }
            Event::Strike(fault, exchange) => self.strike(fault, exchange),
            Event::Start(node) => {
                if !self.nodes[node].is_alive() {
                    self.nodes[node].start();
                }
            }
            Event::Resume(node) => {
                self.nodes[node].pause(false);
                self.schedule_turn(node, self.now + 1);
            }
            Event::Exit(node) => {
                self.crash(node);
            }
        }
    }

    /// Output tokens that the exchange's decode worker allows.
    fn room_of(&self, exchange: usize) -> usize {
        let open = &self.gateway.exchanges[exchange];
        let decode = &self.nodes[open.legs[Side::Decode as usize].node].setup;
        decode.tokens_max() - self.gateway.clients[open.client].setup.prompt.len()
    }

    fn draw(&self, low: u64, high: u64) -> u64 {
        lock(&self.wire).ground.rng.range(low, high)
    }

    fn open(&mut self, client: usize) {
        let pick = |side: Side| {
            let of: Vec<usize> = (0..self.nodes.len()).filter(|&node| self.nodes[node].setup.side == side).collect();
            of[lock(&self.wire).ground.rng.index(of.len())]
        };
        let (mut prefill, mut decode) = (pick(Side::Prefill), pick(Side::Decode));
        if let Some(first) = self.gateway.clients[client].doubles {
            let legs = &self.gateway.exchanges[first].legs;
            (prefill, decode) = (legs[0].node, legs[1].node);
        }
        let acts = {
            let wire = &mut *lock(&self.wire);
            self.gateway.open(client, prefill, decode, &mut wire.ground.rng)
        };
        self.act(acts);
    }

    fn act(&mut self, acts: Vec<Act>) {
        for act in acts {
            match act {
                Act::Start(exchange) => {
                    let open = &self.gateway.exchanges[exchange];
                    let names = open.legs.iter().map(|leg| self.nodes[leg.node].setup.name.clone());
                    let names: Vec<String> = names.collect();
                    let line = format!(
                        "exchange {exchange} of client {}: room {}, {} tokens, {}",
                        open.client,
                        open.room,
                        self.gateway.clients[open.client].setup.prompt.len(),
                        names.join(" and ")
                    );
                    self.say(&line);
                    for side in [Side::Prefill, Side::Decode] {
                        let due = self.now + self.draw(50, 2500);
                        self.agenda.at(due, Event::LegArrives(exchange, side));
                    }
                    let patience = self.setup.deadline_us.unwrap_or_else(|| self.patience_us());
                    self.agenda.at(self.now + patience, Event::Deadline(exchange));
                }
                Act::Cut(_, side) if self.setup.half_cuts.is_some_and(|notices| notices != side) => {}
                Act::Cut(exchange, side) => {
                    let due = self.now + self.draw(50, 1500);
                    self.agenda.at(due, Event::LegCut(exchange, side));
                }
                Act::Retry(client) => {
                    let due = self.now + self.draw(2000, 20_000);
                    self.agenda.at(due, Event::Retry(client));
                }
                Act::Violation(rule, what) => self.violation(rule, what),
            }
        }
    }

    fn leg_arrives(&mut self, exchange: usize, side: Side) {
        if matches!(self.gateway.exchanges[exchange].legs[side as usize].travel, Travel::Over) {
            return;
        }
        let node = self.gateway.exchanges[exchange].legs[side as usize].node;
        let prefill = self.gateway.exchanges[exchange].legs[0].node;
        if !self.nodes[node].is_alive() {
            return self.leg_lost(exchange, side);
        }
        let request = self.gateway.request(exchange, side, &self.nodes[prefill].setup.name);
        let sample = self.next_sample;
        self.next_sample += 1;
        self.gateway.samples.insert((node, sample), exchange);
        self.gateway.exchanges[exchange].legs[side as usize].travel = Travel::Running(sample);
        self.nodes[node].submit(sample, request);
        let line = format!("leg of exchange {exchange} arrives at {} as request {sample}", self.nodes[node].setup.name);
        self.say(&line);
        self.schedule_turn(node, self.now + 1);
    }

    fn leg_lost(&mut self, exchange: usize, side: Side) {
        let due = self.now + self.draw(50, 1500);
        self.agenda.at(due, Event::LegEnded(exchange, side, LegEnd::Lost));
    }

    fn leg_cut(&mut self, exchange: usize, side: Side) {
        let leg = &self.gateway.exchanges[exchange].legs[side as usize];
        let node = leg.node;
        match leg.travel {
            Travel::Running(sample) => {
                self.nodes[node].leave(sample);
                self.schedule_turn(node, self.now + 1);
            }
            // It overtook its own request.
            Travel::Sent if self.nodes[node].is_alive() => {
                self.agenda.at(self.now + 500, Event::LegCut(exchange, side));
            }
            // Its worker is gone, and its connection with it.
            Travel::Sent => self.gateway.exchanges[exchange].legs[side as usize].travel = Travel::Over,
            Travel::Over => {}
        }
    }

    fn schedule_turn(&mut self, node: usize, at: u64) {
        if at < self.nodes[node].turn_at {
            self.nodes[node].turn_at = at;
            self.agenda.at(at, Event::Turn(node));
        }
    }

    fn wake_nodes(&mut self) {
        let woken = std::mem::take(&mut lock(&self.wire).ground.wakes);
        for incarnation in woken {
            if let Some(node) = self.nodes.iter().position(|node| node.incarnation() == Some(incarnation)) {
                let soon = self.now + self.draw(1, 120);
                self.schedule_turn(node, soon);
            }
        }
    }

    fn turn(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        if node.turn_at != self.now {
            return;
        }
        node.turn_at = u64::MAX;
        if node.paused || !node.is_alive() {
            return;
        }
        let before = self.before_step(number);
        let outcome = self.nodes[number].turn(self.now);
        if !before.is_empty() {
            self.count_failed_step(number, &before, &outcome.ended);
        }
        if let Some(next) = outcome.next {
            self.schedule_turn(number, next);
        }
        for (sample, end) in outcome.ended {
            self.sample_ended(number, sample, end);
        }
        for (sample, state) in outcome.entered {
            self.entered(number, sample, state);
        }
        for (sample, stage) in outcome.reached {
            if let Some(&exchange) = self.gateway.samples.get(&(number, sample)) {
                self.trigger(Place::Request(stage), exchange);
            }
        }
    }

    fn sample_ended(&mut self, node: usize, sample: u64, end: LegEnd) {
        let Some(&exchange) = self.gateway.samples.get(&(node, sample)) else { return };
        let side = self.nodes[node].setup.side;
        if lock(&self.wire).ground.trace.is_on() {
            let line = format!("request {sample} of {} ends: {end}", self.nodes[node].setup.name);
            self.say(&line);
        }
        let due = self.now + self.draw(50, 1500);
        self.agenda.at(due, Event::LegEnded(exchange, side, end));
    }

    /// A request's attempt entered a state: faults that wait for it strike soon.
    fn entered(&mut self, node: usize, sample: u64, state: AttemptState) {
        let Some(&exchange) = self.gateway.samples.get(&(node, sample)) else { return };
        let here = Spot { side: self.nodes[node].setup.side, state };
        if lock(&self.wire).ground.trace.is_on() {
            let line = format!("request {sample} of {} is {state}", self.nodes[node].setup.name);
            self.say(&line);
        }
        self.trigger(Place::Attempt(here), exchange);
    }

    /// Faults that wait for this place strike soon.
    fn trigger(&mut self, here: Place, exchange: usize) {
        for index in 0..self.pending.len() {
            let (FaultSetup { fault, trigger }, seen) = self.pending[index];
            let Some((place, nth, delay)) = trigger.waits_for() else { continue };
            if place != here || seen == u64::MAX {
                continue;
            }
            self.pending[index].1 += 1;
            if seen == nth {
                self.pending[index].1 = u64::MAX;
                self.agenda.at(self.now + delay, Event::Strike(fault, Some(exchange)));
            }
        }
    }

    fn say(&self, line: &str) {
        lock(&self.wire).ground.say("gateway", format_args!("{line}"));
    }

    fn violation(&self, rule: &'static str, what: String) {
        lock(&self.wire).ground.violation(rule, what);
    }

    fn broken(&self) -> bool {
        !lock(&self.wire).ground.violations.is_empty()
    }

    /// Everything is over: nothing may be left, and a calm world has answered everyone.
    pub(crate) fn end(&mut self) {
        for (number, client) in self.gateway.clients.iter().enumerate() {
            match &client.outcome {
                None => self.violation("H7", format!("client {number} never got an outcome")),
                Some(Outcome::Answer(_)) => {}
                Some(other) if self.setup.calm => {
                    self.violation("end", format!("client {number} of a calm world got {other:?}"));
                }
                Some(_) => {}
            }
        }
        for node in &self.nodes {
            if let Some(what) = node.leftovers() {
                self.violation("leftover", what);
            }
        }
        let unsettled = lock(&self.wire).ground.unsettled();
        if let Some(attempt) = unsettled {
            let name = lock(&self.wire).ground.attempt_name(attempt);
            self.violation("leftover", format!("posts of {name} never settled"));
        }
    }

    pub(crate) fn report(self, panicked: Option<String>) -> Report {
        let mut wire = lock(&self.wire);
        if let Some(what) = panicked {
            let rule = ["H1", "H2", "H5", "H10"].into_iter().find(|rule| what.contains(&format!("{rule}:")));
            wire.ground.violation(rule.unwrap_or("panic"), format!("the worker panics: {what}"));
        }
        let count = |wanted: fn(&Outcome) -> bool| {
            self.gateway.clients.iter().filter(|client| client.outcome.as_ref().is_some_and(wanted)).count() as u64
        };
        let mut coverage = self.coverage.clone();
        coverage.preemptions = self.nodes.iter().map(Node::preemptions).sum();
        Report {
            seed: self.setup.seed,
            violation: wire.ground.violations.first().cloned(),
            coverage,
            answered: count(|outcome| matches!(outcome, Outcome::Answer(_))),
            failed: count(|outcome| matches!(outcome, Outcome::Failed { .. })),
            aborted: count(|outcome| matches!(outcome, Outcome::Aborted)),
            events: self.events,
            virtual_us: self.now,
            trace: wire.ground.trace.take(),
        }
    }
}
