//! The transfer-fault lab: one transfer at a time, printed step by step with who has which page after each step. For
//! people who want to learn the protocol. *Pure*: the same text every time.
//!
//! Chance decides in a world how long everything takes. A story is told in the first seed in which its lesson is to be
//! seen, so that a change of a model never leaves a story without its point.

use std::fmt::Write;

use tandem_handoff::{limits::Limits, state::AttemptState};

use crate::{
    fabric::{Kind, lock},
    faults::{Fault, FaultSetup, Spot, Trigger},
    gateway::ClientSetup,
    ground::Tally,
    model,
    network::Manners,
    node::{NodeSetup, Owner, Side},
    setup::Setup,
    world::World,
};

/// Columns of the text.
const WIDTH: usize = 100;
/// Seeds in which a story's lesson is looked for.
const SEEDS_MAX: u64 = 5000;

const LEGEND: &str = "\
The transfer-fault lab: one prefill worker p0 (P), one decode worker d0 (D), one prompt of 14 tokens
in pages of 4 tokens. Each step says what happened, and then who has which page of D and of P.

  exchange      one client's request as two legs, to P and to D, which find each other by its room
  incarnation   one life of a worker process; a restarted worker is another one
  session       one control channel between two incarnations; frames go over it in order
  attempt       one try to move one prompt: D's Reserve opens it, its number is never used again
  piece         what one write moves; here a page. A write may arrive in parts
  posted        P has given the piece to its fabric, which reads P's page whenever it likes
  landed        the whole piece is in D's page, and D's fabric said so
  settled       P's fabric reads the page no more: the piece was sent, dropped or given up
  quiet         no write of the attempt can reach D's pages any more. It needs a proof, not patience
  leased        read by a post that has not settled: its owner may not write it or give it back
  pinned        leased, and its request is over: nobody owns it, nobody gets it
  rail          one of two paths of an rdma channel; a fence closes D's end of it for good
  H2            a page that a peer may still write is never free and never of another request
  H4            D publishes a prompt only after all of it landed and Done of this attempt came
  H5            a page that is still read by a write is never changed and never free
";

/// One transfer and what happens to it.
struct Story {
    title: &'static str,
    lesson: &'static str,
    /// What proved quiet, and where the pages went.
    proof: &'static str,
    fabric: Kind,
    faults: &'static [FaultSetup],
    waiting_timeout_ms: u64,
    /// Whether the lesson, and the proof, are to be seen in the steps.
    shows: fn(&[String]) -> bool,
}

const OFFERED: Spot = Spot { side: Side::Decode, state: AttemptState::Offered };
const OPEN: Spot = Spot { side: Side::Prefill, state: AttemptState::Open };
const P_DRAINING: Spot = Spot { side: Side::Prefill, state: AttemptState::Draining };

const fn when(spot: Spot, delay: u64, fault: Fault) -> FaultSetup {
    FaultSetup { fault, trigger: Trigger::Entered { spot, nth: 0, delay } }
}

/// The place of the first step with all of these words.
fn find(steps: &[String], words: &[&str]) -> Option<usize> {
    steps.iter().position(|step| words.iter().all(|word| step.contains(word)))
}

/// Whether such steps exist, in this order; one step may be two of them.
fn in_order(steps: &[String], wanted: &[&[&str]]) -> bool {
    let places: Option<Vec<usize>> = wanted.iter().map(|words| find(steps, words)).collect();
    places.is_some_and(|places| places.is_sorted())
}

/// D's pages are the attempt's and P's are pinned, and neither side has a request any more.
const BOTH_PINNED: &[&str] = &["D draining", "attempt of request", "P draining", "pinned"];

const STORIES: [Story; 5] = [
    Story {
        title: "A clean transfer (tcp)",
        lesson: "D offers pages before P computes anything. Each finished chunk goes out while the next one computes. D \
                 publishes when every piece has landed and Done has come, not before (H4); P's pages stay leased until \
                 each post has settled (H5).",
        proof: "every post settled as sent, so P's pages went back to its pool; every piece landed, so D's pages went \
                from the attempt to the request, and back to the pool after its last token.",
        fabric: Kind::Tcp,
        faults: &[],
        waiting_timeout_ms: 200,
        shows: |steps| in_order(steps, &[&["commits request"], &["of d0 ends"]]),
    },
    Story {
        title: "Abort, reason user: the client leaves while pages move (rdma)",
        lesson: "The request is gone at once on both sides; its pages are not. A write that the adapter has begun reads \
                 P's page and lands in D's page whatever both think of the request. So D's pages stay with the ended \
                 attempt and P's stay pinned, both `draining`, and a late write hits a page that waits for it.",
        proof: "P's last post settled, so P's pages went back to its pool and P said Drained; that proved D quiet (no \
                posted write is left), and D's pages went back to its pool.",
        fabric: Kind::Rdma,
        faults: &[when(OPEN, 150, Fault::DataSlow), when(OPEN, 300, Fault::ClientLeaves)],
        waiting_timeout_ms: 200,
        shows: |steps| {
            let both = find(steps, BOTH_PINNED);
            let late = both.is_some_and(|both| find(&steps[both + 1..], &["bytes of a write", "D draining"]).is_some());
            late && in_order(steps, &[BOTH_PINNED, &["sends Drained"], &["takes Drained"]])
        },
    },
    Story {
        title: "Abort, reason timeout: the data path is slow and D's deadline passes (tcp)",
        lesson: "A deadline ends the request and frees nothing. Over tcp D itself copies from the stream into its pages, \
                 and asks before each part whether the attempt may still write: what comes after the end is read and \
                 thrown away.",
        proof: "no read call of D's was writing into the attempt's pages any more, which proved D quiet without P's help, \
                and D's pages went back to its pool; P's did when P's sender let go of the last piece.",
        fabric: Kind::Tcp,
        faults: &[when(OFFERED, 0, Fault::DataSlow)],
        waiting_timeout_ms: 12,
        shows: |steps| {
            let timeout = &["did not arrive within", "D draining", "attempt of request"];
            in_order(steps, &[timeout, &["is QUIET"], &["throws them AWAY"]])
        },
    },
    Story {
        title: "Abort, reason P failed: P's device fails, then P dies with a write on the wire (rdma)",
        lesson: "P says why, and D's client hears P's own cause. Then P dies: nobody is left to say Drained, and what is \
                 on the wire still travels. D fences the dead peer's channel itself; the fence stops the last write, and \
                 only that proof frees D's pages (H2).",
        proof: "D's fence stands: what arrives after it is refused, which proved D quiet, and D's pages went back to its \
                pool. P's pages went with P's process.",
        fabric: Kind::Rdma,
        faults: &[
            when(OPEN, 100, Fault::DataSlow),
            when(OPEN, 100, Fault::PrefillStepFails),
            when(P_DRAINING, 400, Fault::PrefillCrashes),
        ],
        waiting_timeout_ms: 200,
        shows: |steps| {
            let own_cause = &["of d0 ends: failed: prefill worker:"];
            in_order(steps, &[own_cause, &["p0       dies"], &["stands"], &["is QUIET"], &["REFUSES"]])
        },
    },
    Story {
        title: "Abort, reason D failed: the decode worker dies while it copies (shm)",
        lesson: "D copies out of P's memory, and P cannot take its pages out of D's hands. While D's process may live, P \
                 keeps each posted page pinned, although its request is over (H5).",
        proof: "D's process was proven gone, so nobody reads P's pages any more: the posts settled and P's pages went back \
                to its pool. D's pages went with D's process.",
        fabric: Kind::Shm,
        faults: &[when(OPEN, 100, Fault::DataSlow), when(OPEN, 400, Fault::DecodeCrashes)],
        waiting_timeout_ms: 200,
        shows: |steps| {
            in_order(steps, &[&["d0       dies"], &["P draining", "pinned", "D dead"], &["settled (given up"]])
        },
    },
];

/// The whole lab as text.
pub fn text() -> String {
    let mut text = String::from(LEGEND);
    for (number, story) in STORIES.iter().enumerate() {
        let title = wrap(&format!("== {}. {}", number + 1, story.title), 3);
        write!(text, "\n{title}{}\n", wrap(&format!("   {}", story.lesson), 3)).expect("a string takes all");
        text.push_str(&tell(story));
    }
    text
}

/// The words of a line in lines of the text's width; the second and later ones begin `indent` further right.
fn wrap(line: &str, indent: usize) -> String {
    let start = line.len() - line.trim_start().len();
    let (mut text, mut column) = (line[..start].to_owned(), start);
    for (number, word) in line[start..].split(' ').enumerate() {
        let length = word.chars().count();
        if number > 0 && column + 1 + length > WIDTH {
            write!(text, "\n{:indent$}", "").expect("a string takes all");
            column = indent;
        } else if number > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += length;
    }
    text.push('\n');
    text
}

fn setup(story: &Story, seed: u64) -> Setup {
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
        seed,
        manners: Manners::Faithful,
        fabric: story.fabric,
        calm: false,
        nodes: vec![node(Side::Prefill, "p0"), node(Side::Decode, "d0")],
        limits,
        clients: vec![client],
        faults: story.faults.to_vec(),
        deadline_us: None,
        half_cuts: None,
    }
}

/// What a learner sees change.
#[derive(Clone, PartialEq)]
struct Seen {
    owners: [Option<Vec<Owner>>; 2],
    states: [Vec<AttemptState>; 2],
    tally: Tally,
}

fn owner(owner: Owner) -> String {
    match owner {
        Owner::Free => "free".to_owned(),
        Owner::Sequence(request) => format!("request {request}"),
        Owner::Attempt(request) => format!("attempt of request {request}"),
        Owner::Leased(request) => format!("request {request}, leased"),
        Owner::Pinned => "pinned".to_owned(),
    }
}

/// `1`, or `1-3`.
fn range(from: usize, to: usize) -> String {
    if from == to { from.to_string() } else { format!("{from}-{to}") }
}

/// Neighbouring pages of which the same is true: the pages, and what.
fn grouped<T: PartialEq + Copy>(pages: &[T]) -> Vec<(String, T)> {
    let mut from = 0;
    let mut groups = Vec::new();
    for group in pages.chunk_by(PartialEq::eq) {
        groups.push((range(from, from + group.len() - 1), group[0]));
        from += group.len();
    }
    groups
}

impl Seen {
    fn of(world: &World) -> Self {
        let [prefill, decode] = [0, 1].map(|node: usize| &world.nodes[node]);
        let tally = lock(&world.wire).ground.tally;
        Self { owners: [prefill.owners(), decode.owners()], states: [prefill.states(), decode.states()], tally }
    }

    /// The state of one side, and who has its pages.
    fn side(&self, letter: char, side: Side) -> String {
        let Some(owners) = &self.owners[side as usize] else {
            return format!("     {letter} {:<12}| its memory is gone with the process\n", "dead");
        };
        let names: Vec<&str> = self.states[side as usize].iter().map(|state| state.name()).collect();
        let state = if names.is_empty() { "-".to_owned() } else { names.join(", ") };
        let pages: Vec<String> =
            grouped(owners).into_iter().map(|(pages, who)| format!("{pages}: {}", owner(who))).collect();
        format!("     {letter} {state:<12}| pages {}\n", pages.join(" | "))
    }

    fn lines(&self) -> String {
        let Tally { posted, landed, settled } = self.tally;
        let (decode, prefill) = (self.side('D', Side::Decode), self.side('P', Side::Prefill));
        format!("{decode}{prefill}     {:<14}| {posted} posted, {landed} landed, {settled} settled\n", "pieces")
    }

    /// Pages that changed hands since `before`.
    fn moves(&self, before: &Self) -> String {
        let mut text = String::new();
        for (letter, side) in [('D', Side::Decode), ('P', Side::Prefill)] {
            let (Some(old), Some(new)) = (&before.owners[side as usize], &self.owners[side as usize]) else { continue };
            let pairs: Vec<(Owner, Owner)> = old.iter().copied().zip(new.iter().copied()).collect();
            for (pages, (from, to)) in grouped(&pairs).into_iter().filter(|(_, (from, to))| from != to) {
                let word = if pages.contains('-') { "pages" } else { "page" };
                writeln!(text, "  => {letter}'s {word} {pages}: {} -> {}", owner(from), owner(to))
                    .expect("a string takes all");
            }
        }
        text
    }
}

/// The story in the first seed that shows its lesson.
fn tell(story: &Story) -> String {
    let told = (0..SEEDS_MAX).map(|seed| steps(story, seed)).find(|(steps, _)| (story.shows)(steps));
    let (steps, end) = told.expect("a seed shows the lesson: the lab's test looks for each");
    let mut text = String::new();
    for (number, step) in steps.iter().enumerate() {
        writeln!(text, "step {}", number + 1).expect("a string takes all");
        step.lines().for_each(|line| text.push_str(&wrap(line, 24)));
    }
    text.push_str(&wrap(&format!("proof: {}", story.proof), 7));
    text.push_str(&end);
    text
}

/// A line of the trace without the blanks that worlds of more than ten seconds need.
fn narrow(line: &str) -> &str {
    line.strip_prefix("   ").unwrap_or(line).trim_end()
}

/// The steps of one seed, and what the checkers say at its end.
fn steps(story: &Story, seed: u64) -> (Vec<String>, String) {
    let mut world = World::new(setup(story, seed), true);
    lock(&world.wire).ground.late_us = 0;
    world.begin();
    let mut seen = Seen::of(&world);
    let (mut steps, mut lines) = (Vec::new(), String::new());
    loop {
        let goes_on = world.advance();
        lines.push_str(&lock(&world.wire).ground.trace.take());
        let now = Seen::of(&world);
        if now != seen || (!goes_on && !lines.is_empty()) {
            // There is one attempt between these two: its number is enough.
            let said = lines.replace(" (p0>d0, session 1)", "");
            let mut step: String = said.lines().map(|line| format!("{}\n", narrow(line))).collect();
            step.push_str(&now.moves(&seen));
            step.push_str(&now.lines());
            steps.push(step);
            lines.clear();
            seen = now;
        }
        if !goes_on {
            break;
        }
    }
    world.end();
    let end = match world.report(None).violation {
        None => "end: every page is free again, every promise was kept\n".to_owned(),
        Some(violation) => format!("end: {violation}\n"),
    };
    (steps, end)
}
