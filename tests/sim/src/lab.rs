//! The transfer-fault lab: one transfer at a time, printed step by step with who holds which pin after each step. For
//! people who want to learn the protocol. *Pure*: the same text every time.

use std::fmt::Write;

use tandem_handoff::{limits::Limits, sabotage::Planted, state::AttemptState};

use crate::{
    fabric::{Kind, lock},
    faults::{Fault, FaultSetup, Spot, Trigger},
    gateway::ClientSetup,
    ground::Tally,
    model,
    network::Manners,
    node::{NodeSetup, Pins, Side},
    setup::Setup,
    world::World,
};

/// One transfer and what happens to it.
struct Story {
    title: &'static str,
    lesson: &'static str,
    fabric: Kind,
    faults: &'static [FaultSetup],
    waiting_timeout_ms: u64,
}

const OFFERED: Spot = Spot { side: Side::Decode, state: AttemptState::Offered };
const OPEN: Spot = Spot { side: Side::Prefill, state: AttemptState::Open };

const fn when(spot: Spot, delay: u64, fault: Fault) -> FaultSetup {
    FaultSetup { fault, trigger: Trigger::Entered { spot, nth: 0, delay } }
}

const STORIES: [Story; 5] = [
    Story {
        title: "A clean transfer (tcp)",
        lesson: "D offers pages before P computes anything. Each finished chunk goes out while the next one computes. D \
                 publishes when every piece has landed and Done has come, not before (H4); P's pages stay leased until \
                 each post has settled (H5).",
        fabric: Kind::Tcp,
        faults: &[],
        waiting_timeout_ms: 200,
    },
    Story {
        title: "Abort, reason user: the client leaves while pages move (tcp)",
        lesson: "The request is gone at once on both sides; the pages are not. D revokes the attempt and frees its pages \
                 when no read into them is in progress; P frees its own when its posts have settled.",
        fabric: Kind::Tcp,
        faults: &[when(OPEN, 300, Fault::ClientLeaves)],
        waiting_timeout_ms: 200,
    },
    Story {
        title: "Abort, reason timeout: the data path is slow and D's deadline passes (rdma)",
        lesson: "A deadline ends the request and frees nothing: one-sided writes of the ended attempt still land. D's pages \
                 come back when P says Drained (each posted write has completed), or else by D's own fence.",
        fabric: Kind::Rdma,
        faults: &[when(OFFERED, 0, Fault::DataSlow)],
        waiting_timeout_ms: 12,
    },
    Story {
        title: "Abort, reason P failed: the prefill worker dies with writes on the wire (rdma)",
        lesson: "Nobody is left to say Drained, and what is on the wire may still land. D fences the dead peer's channel \
                 itself; only that proof frees its pages (H2).",
        fabric: Kind::Rdma,
        faults: &[when(OPEN, 500, Fault::PrefillCrashes)],
        waiting_timeout_ms: 200,
    },
    Story {
        title: "Abort, reason D failed: the decode worker gives the request up while it copies (shm)",
        lesson: "D copies out of P's memory, so P cannot take its pages back by itself. D stops its copier, then says \
                 Settled; until then P keeps every posted page leased (H5).",
        fabric: Kind::Shm,
        faults: &[when(OPEN, 200, Fault::DecodeAborts)],
        waiting_timeout_ms: 200,
    },
];

/// The whole lab as text.
pub fn text() -> String {
    let mut text = String::from(
        "The transfer-fault lab: one prefill worker p0, one decode worker d0, one prompt of 14 tokens in pages of 4.\n\
         After each step: who holds D's and P's pages, and how many pieces were posted, landed and settled.\n",
    );
    for (number, story) in STORIES.iter().enumerate() {
        writeln!(text, "\n== {}. {}\n   {}\n", number + 1, story.title, story.lesson).expect("a string takes all");
        text.push_str(&tell(story));
    }
    text
}

fn setup(story: &Story) -> Setup {
    let limits = Limits {
        bootstrap_timeout_ms: 200,
        waiting_timeout_ms: story.waiting_timeout_ms,
        drain_timeout_ms: 40,
        ..Limits::default()
    };
    let node = |side, name: &str| NodeSetup {
        side,
        name: name.to_owned(),
        shape: model::shape(1, 1, 4, 1, 8),
        chunk_tokens: 4,
        running_max: 4,
        reserved_decode_tokens: 4,
        context: 32,
        limits,
        checksums: true,
    };
    let client = ClientSetup {
        arrives: 0,
        prompt: (1..=14).collect::<Vec<u32>>().into(),
        sampling: model::sampling(3, 0.0, 1),
        decode_prompt: None,
        retries: 0,
    };
    Setup {
        seed: 5,
        manners: Manners::Faithful,
        fabric: story.fabric,
        calm: false,
        nodes: vec![node(Side::Prefill, "p0"), node(Side::Decode, "d0")],
        limits: Limits { planted: Planted::default(), ..limits },
        clients: vec![client],
        faults: story.faults.to_vec(),
        deadline_us: None,
        half_cuts: None,
    }
}

/// What a learner sees change.
#[derive(Clone, PartialEq)]
struct Seen {
    pins: [Option<Pins>; 2],
    states: [Vec<AttemptState>; 2],
    tally: Tally,
}

impl Seen {
    fn of(world: &World) -> Self {
        let [prefill, decode] = [0, 1].map(|node: usize| &world.nodes[node]);
        let tally = lock(&world.wire).ground.tally;
        Self { pins: [prefill.pins(), decode.pins()], states: [prefill.states(), decode.states()], tally }
    }

    fn line(&self) -> String {
        let states = |states: &[AttemptState]| match states {
            [] => "-".to_owned(),
            known => known.iter().map(|state| state.name()).collect::<Vec<_>>().join(", "),
        };
        let decode = self.pins[1].map_or("dead".to_owned(), |pins| {
            format!("{} of the attempt, {} of the sequence, {} free", pins.attempts, pins.sequences, pins.free)
        });
        let prefill = self.pins[0].map_or("dead".to_owned(), |pins| {
            format!("{} of the sequence, {} leased by posts, {} free", pins.sequences, pins.leased, pins.free)
        });
        let Tally { posted, landed, settled } = self.tally;
        format!(
            "     | D ({}): {decode}\n     | P ({}): {prefill}\n     | pieces: {posted} posted, {landed} landed, {settled} settled",
            states(&self.states[1]),
            states(&self.states[0]),
        )
    }
}

fn tell(story: &Story) -> String {
    let mut world = World::new(setup(story), true);
    lock(&world.wire).ground.late_us = 0;
    world.begin();
    let mut seen = Seen::of(&world);
    let mut text = String::new();
    let (mut steps, mut lines) = (0, String::new());
    loop {
        let goes_on = world.advance();
        lines.push_str(&lock(&world.wire).ground.trace.take());
        let now = Seen::of(&world);
        if now != seen || (!goes_on && !lines.is_empty()) {
            steps += 1;
            writeln!(text, "step {steps}").expect("a string takes all");
            lines.lines().for_each(|line| writeln!(text, "  {}", line.trim_end()).expect("a string takes all"));
            writeln!(text, "{}", now.line()).expect("a string takes all");
            lines.clear();
            seen = now;
        }
        if !goes_on {
            break;
        }
    }
    world.end();
    let report = world.report(None);
    match report.violation {
        None => text.push_str("end: every page is free again, every promise was kept\n"),
        Some(violation) => writeln!(text, "end: {violation}").expect("a string takes all"),
    }
    text
}
