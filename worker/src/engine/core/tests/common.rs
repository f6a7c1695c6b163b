//! A core driven turn by turn, and what its samples said.

use std::{collections::BTreeMap, sync::Arc};

use tandem_handoff::ids::Time;
use tokio::sync::mpsc;

use crate::{
    config::{CpuMath, EngineConfig, Role},
    engine::{
        core::{Core, Turn},
        inbox::{Abort, EngineWaker, Mail, Submission},
        thread::{EngineParts, RoleDriver},
        toy::{EOS, Letters, Toy},
    },
    request::{LogprobRequest, SampleEvent, SampleRequest, SamplingParams, SeqId},
};

/// Turns after which a test is stuck.
const TURNS_MAX: usize = 20_000;

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub pages: u32,
    pub page_size: u32,
    pub chunk: u32,
    pub running: u32,
    pub context: u32,
    pub reserved_decode: u32,
}

impl Shape {
    /// A pool that never runs short, with the same limits on lengths.
    pub fn roomy(self) -> Self {
        Self { context: self.context.min(self.pages * self.page_size), pages: 512, ..self }
    }
}

pub fn config(shape: Shape, role: Role) -> EngineConfig {
    EngineConfig {
        role,
        page_size: shape.page_size,
        chunked_prefill_size: shape.chunk,
        max_running_requests: shape.running,
        queue_requests_max: 1000,
        max_total_tokens: shape.pages * shape.page_size,
        context_length: shape.context,
        num_reserved_decode_tokens: shape.reserved_decode,
        quarantine_pages_max: shape.pages / 4,
        tp_size: 1,
        cpu_math: CpuMath::Exact,
        threads: 1,
    }
}

pub fn parts(shape: Shape, role: Role, driver: RoleDriver) -> (EngineParts, Toy) {
    let toy = Toy::new(shape.pages as usize, shape.page_size as usize);
    let parts = EngineParts {
        config: config(shape, role),
        backend: Box::new(toy.clone()),
        text: Arc::new(Letters),
        eos: [EOS].into(),
        role: driver,
        waker: EngineWaker::new(),
        clock: Arc::new(|| Time(0)),
    };
    (parts, toy)
}

pub fn request(prompt: &[u32], max_tokens: u32) -> SampleRequest {
    SampleRequest {
        rid: "r".into(),
        sample_index: 0,
        prompt: prompt.into(),
        sampling: SamplingParams::greedy(max_tokens),
        logprobs: LogprobRequest::default(),
        ticket: None,
    }
}

/// A core, and all events of its samples in order of submission.
pub struct Bench {
    pub core: Core,
    pub toy: Toy,
    pub now: Time,
    next: u64,
    streams: BTreeMap<SeqId, mpsc::Receiver<SampleEvent>>,
    pub said: BTreeMap<SeqId, Vec<SampleEvent>>,
}

impl Bench {
    pub fn new(shape: Shape, role: Role, driver: RoleDriver) -> Self {
        let (parts, toy) = parts(shape, role, driver);
        let (streams, said) = (BTreeMap::new(), BTreeMap::new());
        Self { core: Core::new(parts), toy, now: Time(0), next: 1, streams, said }
    }

    pub fn null(shape: Shape) -> Self {
        Self::new(shape, Role::Null, RoleDriver::Null)
    }

    /// A turn with this mail; checks H1 after it.
    pub fn turn(&mut self, mail: Mail) -> Turn {
        self.now = Time(self.now.0 + 1000);
        let turn = self.core.turn(self.now, mail);
        self.core.scheduler.check();
        let said = &mut self.said;
        self.streams.retain(|id, stream| {
            let mut open = true;
            while let Ok(event) = stream.try_recv() {
                open = !matches!(event, SampleEvent::Finished { .. } | SampleEvent::Failed(_));
                said.entry(*id).or_default().push(event);
            }
            open
        });
        turn
    }

    pub fn submission(&mut self, request: &SampleRequest) -> Submission {
        let id = SeqId(self.next);
        self.next += 1;
        let (events, stream) = mpsc::channel(request.sampling.max_tokens.min(100_000) as usize + 3);
        self.streams.insert(id, stream);
        self.said.insert(id, vec![]);
        Submission { id, request: request.clone(), events }
    }

    pub fn submit(&mut self, request: &SampleRequest) -> SeqId {
        let submission = self.submission(request);
        let id = submission.id;
        self.turn(Mail { submissions: vec![submission], ..Mail::default() });
        id
    }

    pub fn abort(&mut self, rid: &str) {
        self.turn(Mail { aborts: vec![Abort::Request(rid.into())], ..Mail::default() });
    }

    pub fn until_idle(&mut self) {
        for _ in 0..TURNS_MAX {
            if let Turn::Idle { .. } = self.turn(Mail::default()) {
                return;
            }
        }
        panic!("the engine does not come to rest");
    }

    pub fn assert_all_free(&self) {
        let loads = self.core.loads();
        assert_eq!(loads.free_pages, loads.total_pages, "{loads:?}");
        assert_eq!((loads.running, loads.waiting, loads.total_tokens), (0, 0, 0), "{loads:?}");
    }
}

/// What `request` says alone, with room for everything.
pub fn alone(shape: Shape, request: &SampleRequest) -> Vec<SampleEvent> {
    let mut bench = Bench::null(Shape { chunk: 4096, running: 1, ..shape.roomy() });
    let id = bench.submit(&SampleRequest { ticket: None, ..request.clone() });
    bench.until_idle();
    bench.assert_all_free();
    bench.said.remove(&id).unwrap()
}

pub fn tokens(events: &[SampleEvent]) -> Vec<u32> {
    let token = |event: &SampleEvent| match event {
        SampleEvent::Token { token, .. } => Some(*token),
        _ => None,
    };
    events.iter().filter_map(token).collect()
}
