//! One worker of the fleet: its processes, one after the other, each a real engine core with a real role.

use std::{collections::BTreeMap, fmt, sync::Arc};

use tandem_handoff::{
    ids::{Incarnation, RequestId, Time},
    layout::PoolShape,
    limits::Limits,
    sink::Sink,
    source::Source,
    state::AttemptState,
    ticket::Address,
};
use tandem_worker::{
    config::{CpuMath, EngineConfig, Role},
    decode_role::DecodeRole,
    engine::{
        EngineParts, EngineWaker, Mail, RoleDriver, Submission,
        core::{Core, Turn},
    },
    kv::sums::{Checksums, PageSums},
    prefill_role::PrefillRole,
    request::{SampleEvent, SampleRequest, SeqId},
    scheduler::Sequence,
};
use tokio::sync::mpsc::{self, error::TryRecvError};

use crate::{
    backend::{NoText, SimBackend},
    fabric::{SharedWire, SinkEnd, SourceEnd, lock},
    faults::Stage,
    ground::Host,
    memory::Memory,
    model,
    network::Control,
    roles::{WatchedDecode, WatchedPrefill},
    trace::numbers,
};

/// Which half of a pair.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Side {
    Prefill,
    Decode,
}

/// How one worker is configured.
#[derive(Clone, Debug)]
pub struct NodeSetup {
    pub side: Side,
    pub name: String,
    pub shape: PoolShape,
    pub chunk_tokens: u32,
    pub running_max: u32,
    pub reserved_decode_tokens: u32,
    pub context: u32,
    pub limits: Limits,
    pub checksums: bool,
}

impl NodeSetup {
    /// Prompt and output tokens of one sequence at most.
    pub fn tokens_max(&self) -> usize {
        self.context.min(self.shape.pages * self.shape.page_size) as usize
    }

    /// The names by which tickets call a prefill worker.
    pub fn addresses(&self) -> [Address; 2] {
        ["", ".alias"].map(|suffix| Address { host: format!("{}{suffix}", self.name), port: 8998 })
    }
}

/// How a sample ended at its worker.
#[derive(Clone, Debug, PartialEq)]
pub enum LegEnd {
    Finished(Vec<u32>),
    Failed {
        refused: bool,
        message: String,
    },
    /// The worker died or could not be reached.
    Lost,
}

impl fmt::Display for LegEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LegEnd::Finished(tokens) => write!(f, "with the tokens {}", numbers(tokens)),
            LegEnd::Failed { refused: true, message } => write!(f, "refused: {message}"),
            LegEnd::Failed { refused: false, message } => write!(f, "failed: {message}"),
            LegEnd::Lost => f.write_str("lost with its worker"),
        }
    }
}

/// A sample's stream, as the gateway's connection holds it.
struct Stream {
    events: mpsc::Receiver<SampleEvent>,
    tokens: Vec<u32>,
}

/// Who has a page of a worker's pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    Free,
    /// This request's own, to read and write.
    Sequence(u64),
    /// Of the attempt of this request: a peer knows its address and may write it.
    Attempt(u64),
    /// This request's own, and read by posts that have not settled.
    Leased(u64),
    /// Of no request any more, but posts that have not settled still read it.
    Pinned,
}

enum Watched {
    Prefill(WatchedPrefill),
    Decode(WatchedDecode),
}

/// One process: alive from its start to its crash.
struct Process {
    incarnation: Incarnation,
    core: Core,
    role: Watched,
    mail: Mail,
    streams: BTreeMap<u64, Stream>,
    /// The process's own clock is this much off the world's.
    clock_offset: u64,
    /// The state of each request that the role knows, as it was last seen.
    states: BTreeMap<u64, AttemptState>,
    /// The stage of each request at D that is outside its attempt, as it was last seen.
    stages: BTreeMap<u64, Stage>,
}

pub struct Node {
    pub setup: NodeSetup,
    wire: SharedWire,
    process: Option<Process>,
    pub paused: bool,
    /// When the next turn is due; other turn events are stale.
    pub turn_at: u64,
    /// Preemptions of its earlier processes.
    preempted: u64,
}

/// What a turn brought about.
#[derive(Default)]
pub struct Outcome {
    /// When the next turn is due.
    pub next: Option<u64>,
    pub ended: Vec<(u64, LegEnd)>,
    /// Requests whose attempt has entered a state.
    pub entered: Vec<(u64, AttemptState)>,
    /// Requests that have entered a stage outside their attempt.
    pub reached: Vec<(u64, Stage)>,
}

impl Node {
    pub fn new(setup: NodeSetup, wire: SharedWire) -> Self {
        Self { setup, wire, process: None, paused: false, turn_at: u64::MAX, preempted: 0 }
    }

    pub fn incarnation(&self) -> Option<Incarnation> {
        self.process.as_ref().map(|process| process.incarnation)
    }

    pub fn is_alive(&self) -> bool {
        self.process.is_some()
    }

    /// A fresh process with empty memory; a restarted worker is another incarnation on the same address.
    pub fn start(&mut self) {
        let setup = &self.setup;
        let incarnation = {
            let mut wire = lock(&self.wire);
            let incarnation = Incarnation(wire.ground.rng.word());
            let host = Host {
                name: setup.name.clone(),
                alive: true,
                paused: false,
                memory: Memory::new(setup.shape),
                fail_steps: 0,
                source_reports: vec![],
                sink_reports: vec![],
            };
            wire.ground.hosts.insert(incarnation, host);
            wire.ground.says(incarnation, format_args!("starts, incarnation {:016x}", incarnation.0));
            incarnation
        };
        let wire = || self.wire.clone();
        let control = Box::new(Control { wire: wire(), process: incarnation });
        let sums = Checksums::over(setup.shape, Box::new(Sums { wire: wire(), process: incarnation }));
        let (role, driver) = match setup.side {
            Side::Prefill => {
                for address in setup.addresses() {
                    lock(&self.wire).network.listen(address, incarnation);
                }
                let fabric = Box::new(SourceEnd { wire: wire(), process: incarnation });
                let source = Source::new(setup.shape, setup.limits);
                let role = PrefillRole::over(source, fabric, control, Arc::default()).with_checksums(sums);
                let watched = WatchedPrefill::new(role, wire(), incarnation);
                (Watched::Prefill(watched.clone()), RoleDriver::Prefill(Box::new(watched)))
            }
            Side::Decode => {
                let fabric = Box::new(SinkEnd { wire: wire(), process: incarnation });
                let sink = Sink::new(setup.shape, setup.limits);
                let mut role = DecodeRole::over(sink, fabric, control, Arc::default(), 1);
                if setup.checksums {
                    role = role.with_checksums(sums);
                }
                let watched = WatchedDecode::new(role, wire(), incarnation);
                (Watched::Decode(watched.clone()), RoleDriver::Decode(Box::new(watched)))
            }
        };
        let parts = EngineParts {
            config: self.config(),
            backend: Box::new(SimBackend { wire: wire(), process: incarnation }),
            text: Arc::new(NoText),
            eos: [model::EOS].into(),
            role: driver,
            waker: EngineWaker::new(),
            clock: Arc::new(|| Time(0)),
        };
        #[cfg_attr(not(feature = "sabotage"), expect(unused_mut))]
        let mut core = Core::new(parts);
        #[cfg(feature = "sabotage")]
        core.plant(setup.limits.planted);
        let clock_offset = lock(&self.wire).ground.rng.below(1_000_000);
        self.process = Some(Process {
            incarnation,
            core,
            role,
            mail: Mail::default(),
            streams: BTreeMap::new(),
            clock_offset,
            states: BTreeMap::new(),
            stages: BTreeMap::new(),
        });
        self.paused = false;
        self.turn_at = u64::MAX;
    }

    fn config(&self) -> EngineConfig {
        let setup = &self.setup;
        EngineConfig {
            role: match setup.side {
                Side::Prefill => Role::Prefill,
                Side::Decode => Role::Decode,
            },
            page_size: setup.shape.page_size,
            chunked_prefill_size: setup.chunk_tokens,
            max_running_requests: setup.running_max,
            queue_requests_max: 1000,
            max_total_tokens: setup.shape.pages * setup.shape.page_size,
            context_length: setup.context,
            num_reserved_decode_tokens: setup.reserved_decode_tokens,
            tp_size: setup.shape.tp,
            cpu_math: CpuMath::Exact,
            threads: 1,
            quarantine_pages_max: setup.shape.pages,
        }
    }

    /// The process dies where it stands. Returns the samples that die with it.
    pub fn crash(&mut self) -> Vec<u64> {
        let Some(process) = self.process.take() else { return vec![] };
        self.preempted += process.core.loads().retracted_total;
        let crate::wire::Wire { ground, fabric, network } = &mut *lock(&self.wire);
        ground.says(process.incarnation, format_args!("dies"));
        if let Some(host) = ground.hosts.get_mut(&process.incarnation) {
            host.alive = false;
        }
        network.died(ground, process.incarnation);
        fabric.died(ground, process.incarnation);
        self.turn_at = u64::MAX;
        process.streams.into_keys().collect()
    }

    /// The process stops in order: every sample ends by name, then it exits.
    pub fn shut_down(&mut self, now: u64) -> Vec<(u64, LegEnd)> {
        let Some(process) = &mut self.process else { return vec![] };
        let submissions = std::mem::take(&mut process.mail).submissions;
        process.core.shut_down(Time(now + process.clock_offset), submissions);
        process.hear(&self.wire)
    }

    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
        if let Some(process) = &self.process
            && let Some(host) = lock(&self.wire).ground.hosts.get_mut(&process.incarnation)
        {
            host.paused = paused;
        }
    }

    /// A sample arrives. The caller numbers samples, never twice.
    pub fn submit(&mut self, id: u64, request: SampleRequest) {
        let Some(process) = &mut self.process else { return };
        let (sender, events) = mpsc::channel(request.sampling.max_tokens as usize + 3);
        process.streams.insert(id, Stream { events, tokens: vec![] });
        process.mail.submissions.push(Submission { id: SeqId(id), request, events: sender });
    }

    /// The gateway closed the sample's connection.
    pub fn leave(&mut self, id: u64) {
        if let Some(process) = &mut self.process
            && process.streams.remove(&id).is_some()
        {
            process.mail.gone.push(SeqId(id));
        }
    }

    /// `POST /abort_request`.
    pub fn abort(&mut self, rid: String) {
        if let Some(process) = &mut self.process {
            process.mail.aborts.push(tandem_worker::engine::Abort::Request(rid));
        }
    }

    /// One turn of the engine, and all looks that the checkers take after it.
    pub fn turn(&mut self, now: u64) -> Outcome {
        let Some(process) = &mut self.process else { return Outcome::default() };
        let mail = std::mem::take(&mut process.mail);
        let turn = process.core.turn(Time(now + process.clock_offset), mail);
        let mut outcome = Outcome { ended: process.hear(&self.wire), ..Outcome::default() };
        process.check(&self.wire);
        outcome.entered = process.enter_states();
        outcome.reached = process.enter_stages();
        let soon = |wire: &SharedWire| now + lock(wire).ground.rng.range(200, 900);
        outcome.next = match turn {
            Turn::Worked => Some(soon(&self.wire)),
            Turn::Idle { until: Time::NEVER } => None,
            Turn::Idle { until } => Some(until.0.saturating_sub(process.clock_offset).max(now + 1)),
        };
        outcome
    }

    /// The state of a request's attempt, as the role's machine names it.
    pub fn state(&self, id: u64) -> Option<AttemptState> {
        self.process.as_ref()?.state(id)
    }

    /// Where a request is outside its attempt, by the engine's own books.
    pub fn stage(&self, id: u64) -> Option<Stage> {
        self.process.as_ref()?.stages.get(&id).copied()
    }

    /// Whether a sample's connection is open and it has not ended.
    pub fn serves(&self, id: u64) -> bool {
        self.process.as_ref().is_some_and(|process| process.streams.contains_key(&id))
    }

    /// Steps that the device is going to fail.
    pub fn fail_steps(&self) -> u32 {
        let Some(incarnation) = self.incarnation() else { return 0 };
        lock(&self.wire).ground.hosts.get(&incarnation).map_or(0, |host| host.fail_steps)
    }

    /// How often a sequence lost its pages to another one. A prefill worker never preempts: a prompt has all its pages
    /// from admission on, and only an output grows.
    pub fn preemptions(&self) -> u64 {
        self.preempted + self.process.as_ref().map_or(0, |process| process.core.loads().retracted_total)
    }

    /// Who has each page of the worker's pool.
    pub fn owners(&self) -> Option<Vec<Owner>> {
        let process = self.process.as_ref()?;
        let (pool, mut wire) = (process.core.scheduler().pool(), lock(&self.wire));
        let memory = wire.ground.memory(process.incarnation);
        let scheduler = process.core.scheduler();
        let sequences = scheduler.running().iter().chain(scheduler.handoff().values());
        let own = |sequence: &Sequence| sequence.pages.indices().iter().map(|&page| (page, sequence.id.0)).collect();
        let owned: BTreeMap<u32, u64> = sequences.flat_map::<Vec<_>, _>(own).collect();
        let owner = |page: u32| match (memory.holder(page), owned.get(&page)) {
            _ if pool.is_free(page) => Owner::Free,
            (Some(request), _) => Owner::Attempt(request),
            (None, Some(&request)) if pool.may_write(page) => Owner::Sequence(request),
            (None, Some(&request)) => Owner::Leased(request),
            (None, None) => Owner::Pinned,
        };
        Some((0..self.setup.shape.pages).map(owner).collect())
    }

    /// The states of the requests that the role has not let go of, in the order of their numbers.
    pub fn states(&self) -> Vec<AttemptState> {
        self.process.as_ref().map_or(vec![], |process| process.states.values().copied().collect())
    }

    /// What keeps the worker from being at rest.
    pub fn leftovers(&self) -> Option<String> {
        let process = self.process.as_ref()?;
        let loads = process.core.loads();
        let idle = match &process.role {
            Watched::Prefill(watched) => watched.lock().role.machine().is_idle(),
            Watched::Decode(watched) => watched.lock().role.machine().is_idle(),
        };
        let rest = loads.running + loads.waiting;
        if loads.free_pages == loads.total_pages && rest == 0 && idle && process.streams.is_empty() {
            return None;
        }
        Some(format!(
            "{}: {} of {} pages free, {rest} samples live, {} streams open, machine {}, {} pages draining",
            self.setup.name,
            loads.free_pages,
            loads.total_pages,
            process.streams.len(),
            if idle { "idle" } else { "not idle" },
            loads.draining_pages,
        ))
    }
}

impl Process {
    /// Takes what the samples said (H7: one end each, and nothing after it).
    fn hear(&mut self, wire: &SharedWire) -> Vec<(u64, LegEnd)> {
        let mut ended = Vec::new();
        for (&id, stream) in &mut self.streams {
            let mut end = None;
            let broken = loop {
                match stream.events.try_recv() {
                    Ok(_) if end.is_some() => break Some("goes on after its end"),
                    Ok(SampleEvent::Prompt(_)) => {}
                    Ok(SampleEvent::Token { token, .. }) => stream.tokens.push(token),
                    Ok(SampleEvent::Finished { .. }) => {
                        end = Some(LegEnd::Finished(std::mem::take(&mut stream.tokens)))
                    }
                    Ok(SampleEvent::Failed(error)) => {
                        let refused = error.kind == tandem_worker::request::SampleErrorKind::BadRequest;
                        end = Some(LegEnd::Failed { refused, message: error.message });
                    }
                    Err(TryRecvError::Disconnected) if end.is_none() => break Some("stops without an end"),
                    Err(TryRecvError::Empty) if end.is_some() => break Some("is kept after its end"),
                    Err(_) => break None,
                }
            };
            if let Some(how) = broken {
                let mut wire = lock(wire);
                let name = wire.ground.name(self.incarnation).to_owned();
                wire.ground.violation("H7", format!("{name}: the stream of sample {id} {how}"));
            }
            if let Some(end) = end {
                ended.push((id, end));
            }
        }
        for (id, _) in &ended {
            self.streams.remove(id);
        }
        ended
    }

    /// H1 in the pool, the ledger against the pool, and the rows of every running sequence against the oracle.
    fn check(&mut self, wire: &SharedWire) {
        let scheduler = self.core.scheduler();
        scheduler.check();
        let mut wire = lock(wire);
        let memory = wire.ground.memory(self.incarnation);
        let pool = scheduler.pool();
        for page in 0..memory.shape.pages {
            memory.free[page as usize] = pool.is_free(page);
        }
        let (held, attempts) = (memory.held(), pool.counts().attempts);
        let mut broken = (held != attempts)
            .then(|| ("H1", format!("the pool calls {attempts} pages an attempt's, the handoff was given {held}")));
        for sequence in scheduler.running() {
            let chains = model::chains(&sequence.tokens[..sequence.computed]);
            if let Some(what) = memory.differs(sequence.pages.indices(), &chains, false) {
                broken = Some(("H4", format!("running sequence {:?}: {what}", sequence.id)));
            }
        }
        if let Some((rule, what)) = broken {
            let name = wire.ground.name(self.incarnation).to_owned();
            wire.ground.violation(rule, format!("{name}: {what}"));
        }
    }

    fn state(&self, id: u64) -> Option<AttemptState> {
        match &self.role {
            Watched::Prefill(watched) => watched.lock().role.machine().state(RequestId(id)),
            Watched::Decode(watched) => watched.lock().role.machine().state(RequestId(id)),
        }
    }

    /// Requests whose state is another than after the last turn.
    fn enter_states(&mut self) -> Vec<(u64, AttemptState)> {
        let ids: Vec<u64> = match &self.role {
            Watched::Prefill(watched) => watched.lock().live().collect(),
            Watched::Decode(watched) => watched.lock().live().collect(),
        };
        let states: BTreeMap<u64, AttemptState> = ids.iter().filter_map(|&id| Some((id, self.state(id)?))).collect();
        let entered = states.iter().filter(|(id, state)| self.states.get(id) != Some(state));
        let entered = entered.map(|(&id, &state)| (id, state)).collect();
        self.states = states;
        entered
    }

    /// Requests of a decode worker whose stage is another than after the last turn.
    fn enter_stages(&mut self) -> Vec<(u64, Stage)> {
        if matches!(self.role, Watched::Prefill(_)) {
            return vec![];
        }
        let scheduler = self.core.scheduler();
        let staged = |sequences: Vec<u64>, stage| sequences.into_iter().map(move |id| (id, stage));
        let waiting = scheduler.waiting().iter().map(|sequence| sequence.id.0).collect();
        let running = scheduler.running().iter().map(|sequence| sequence.id.0).collect();
        let retracted = scheduler.retracted().iter().map(|sequence| sequence.id.0).collect();
        let stages: BTreeMap<u64, Stage> = staged(waiting, Stage::Unplaced)
            .chain(staged(running, Stage::Decoding))
            .chain(staged(retracted, Stage::Preempted))
            .collect();
        let reached = stages.iter().filter(|(id, stage)| self.stages.get(id) != Some(stage));
        let reached = reached.map(|(&id, &stage)| (id, stage)).collect();
        self.stages = stages;
        reached
    }
}

/// Sums of modelled pages.
struct Sums {
    wire: SharedWire,
    process: Incarnation,
}

impl PageSums for Sums {
    fn sum(&self, rank: u32, page: u32, slot: u32) -> u32 {
        let mut wire = lock(&self.wire);
        let memory = wire.ground.memory(self.process);
        let at = memory.shape.head_offset(page, slot);
        tandem_handoff::checksum::head_checksum(memory.bytes(rank, at, memory.shape.head_bytes()))
    }
}
