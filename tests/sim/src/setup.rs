//! What a seed stands for: fleet, limits, workload and faults. *Pure*: the same seed and options give the same setup.

use std::sync::Arc;

use tandem_handoff::{
    layout::PoolShape,
    limits::Limits,
    sabotage::{Fault, Planted},
};

use crate::{
    fabric::Kind,
    faults::{FaultSetup, early_ends, plan},
    gateway::ClientSetup,
    model,
    network::Manners,
    node::{NodeSetup, Side},
    rng::Rng,
};

/// What a run asks of every seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    pub manners: Option<Manners>,
    pub fabric: Option<Kind>,
    /// No faults, and the faithful world unless another is asked for: then every request must be answered.
    pub calm: bool,
    pub trace: bool,
    /// A fault in the machines and engines, for the checkers to find.
    pub planted: Planted,
}

impl Options {
    /// The flags of the command line that choose the same worlds: a replay needs them besides its seed.
    pub fn flags(&self) -> String {
        let world = self.manners.map(|manners| format!(" --world {}", manners.name()));
        let fabric = self.fabric.map(|kind| format!(" --fabric {}", kind.name()));
        let calm = self.calm.then(|| " --calm".to_owned());
        [world, fabric, calm].into_iter().flatten().collect()
    }
}

#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub manners: Manners,
    pub fabric: Kind,
    pub calm: bool,
    pub nodes: Vec<NodeSetup>,
    pub limits: Limits,
    pub clients: Vec<ClientSetup>,
    pub faults: Vec<FaultSetup>,
    /// The gateway gives an exchange up after this time; `None` leaves the end to the handoff's own deadlines.
    pub deadline_us: Option<u64>,
    /// A client that leaves is noticed by this side alone: the gateway died too.
    pub half_cuts: Option<Side>,
}

const PAGE_SIZE: u32 = 4;

impl Setup {
    pub fn new(seed: u64, options: Options) -> Self {
        let mut rng = Rng::new(seed ^ 0x5E7_0000_0000);
        let manners = rng.pick(&Manners::ALL);
        // A network that loses frames fails requests by itself: calm is a faithful world, unless one asks otherwise.
        let manners = options.manners.unwrap_or(if options.calm { Manners::Faithful } else { manners });
        let fabric = rng.pick(&Kind::ALL);
        let fabric = options.fabric.unwrap_or(fabric);
        let calm = options.calm || (manners == Manners::Faithful && rng.percent(5));
        let half_cuts = !calm && manners == Manners::Faithful && rng.percent(8);
        let half_cuts = half_cuts.then(|| rng.pick(&[Side::Prefill, Side::Decode]));
        let roomy = calm || half_cuts == Some(Side::Prefill);
        let limits = Limits { planted: options.planted, ..limits(&mut rng, roomy) };
        let (layers, kv_heads) = (rng.range(1, 2) as u32, rng.pick(&[1, 2, 3, 4]));
        // On, as every test has them; off in half of the seeds that hunt a planted fault, so that the oracle finds it too.
        let unsummed = rng.percent(50);
        let hunts = Fault::ALL.into_iter().any(|fault| options.planted.is(fault));
        let checksums = !(hunts && unsummed);
        let mut nodes = Vec::new();
        for (side, letter) in [(Side::Prefill, 'p'), (Side::Decode, 'd')] {
            for number in 0..rng.range(1, 3) {
                let pages = rng.range(6, 16) as u32;
                let shape = model::shape(layers, kv_heads, PAGE_SIZE, rng.pick(&[1, 1, 1, 2]), pages);
                nodes.push(node(&mut rng, side, format!("{letter}{number}"), shape, limits, checksums));
            }
        }
        let room = nodes.iter().map(NodeSetup::tokens_max).min().expect("a fleet has workers");
        let clients = clients(&mut rng, room, calm);
        let faults = match (calm, half_cuts.is_some()) {
            (true, _) => vec![],
            (_, true) => early_ends(&mut rng),
            _ => plan(&mut rng, fabric, checksums),
        };
        let patient = calm || half_cuts.is_some() || rng.percent(50);
        let deadline_us = (!patient).then(|| rng.range(100_000, 900_000));
        Self { seed, manners, fabric, calm, nodes, limits, clients, faults, deadline_us, half_cuts }
    }
}

fn limits(rng: &mut Rng, calm: bool) -> Limits {
    let timeout = |rng: &mut Rng| if calm { 10_000 } else { rng.range(80, 400) };
    Limits {
        bootstrap_timeout_ms: timeout(rng),
        waiting_timeout_ms: timeout(rng),
        drain_timeout_ms: rng.range(10, 60),
        held_reserves_max: if calm { 64 } else { rng.pick(&[1, 4, 64]) },
        tombstones_max: if calm { 64 } else { rng.pick(&[1, 4, 64]) },
        channels_max: 16,
        ..Limits::default()
    }
}

fn node(rng: &mut Rng, side: Side, name: String, shape: PoolShape, limits: Limits, checksums: bool) -> NodeSetup {
    NodeSetup {
        side,
        name,
        shape,
        chunk_tokens: rng.pick(&[4, 4, 8, 16]),
        running_max: rng.range(1, 6) as u32,
        reserved_decode_tokens: rng.pick(&[0, 4, 8]),
        context: 40,
        limits,
        checksums,
    }
}

fn clients(rng: &mut Rng, room: usize, calm: bool) -> Vec<ClientSetup> {
    let spread = rng.pick(&[2_000, 20_000, 100_000]);
    let shared = tokens(rng, 16);
    (0..rng.range(5, 25))
        .map(|_| {
            let longest = (room - 2).min(30) as u64;
            let len = if rng.percent(30) { rng.range(1, longest / 4 + 1) * 4 } else { rng.range(1, longest) };
            let len = (len.min(longest)) as usize;
            let mut prompt = tokens(rng, len);
            if rng.percent(20) {
                let shared_len = shared.len().min(len);
                prompt[..shared_len].copy_from_slice(&shared[..shared_len]);
            }
            let decode_prompt = (!calm && rng.percent(3)).then(|| {
                let mut other = prompt.clone();
                let place = rng.index(other.len());
                if rng.percent(50) {
                    other[place] = other[place] % (model::VOCAB as u32 - 1) + 1;
                } else {
                    other.truncate(place.max(1));
                }
                Arc::from(other)
            });
            let decode_prompt = decode_prompt.filter(|other: &Arc<[u32]>| other[..] != prompt[..]);
            let max_tokens = if rng.percent(4) { 0 } else { rng.range(1, 12) as u32 };
            let temperature = if rng.percent(50) { 0.0 } else { 0.9 };
            let mut sampling = model::sampling(max_tokens, temperature, rng.word());
            sampling.ignore_eos = rng.percent(50);
            if rng.percent(10) {
                sampling.stop_token_ids = vec![rng.range(1, 23) as u32];
            }
            let retries = rng.range(0, 2) as u32;
            ClientSetup { arrives: rng.range(0, spread), prompt: prompt.into(), sampling, decode_prompt, retries }
        })
        .collect()
}

fn tokens(rng: &mut Rng, len: usize) -> Vec<u32> {
    (0..len).map(|_| rng.range(1, model::VOCAB as u64 - 1) as u32).collect()
}
