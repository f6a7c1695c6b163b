//! Runs a model through the paged pool for the golden tests: one sequence, chunks cut where the test says, pages in an
//! order that no kernel can take for granted. Owns no numbers; those lie in `data/` and were made by others.

use std::path::PathBuf;

use serde::Deserialize;
use tandem_cpu::{CpuBackend, CpuMath, CpuOptions, LogitRows, Slice};
use tandem_handoff::layout::PoolShape;
use tandem_model::{LoadOptions, Model, ModelConfig, Rope, RopeScaling};

/// Where the reference numbers of `name` lie.
pub fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data").join(name)
}

/// What the reference implementation says of one prompt.
#[derive(Deserialize)]
pub struct Case {
    pub prompt_ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    /// Of each greedy choice: the distance in logits to the second best.
    pub greedy_margins: Vec<f32>,
    /// Of each prompt token but the first.
    #[serde(default)]
    pub prompt_logprobs: Vec<f32>,
    #[serde(default)]
    pub last_logits_top10: Vec<(u32, f32)>,
}

pub fn load(path: &str) -> Model {
    tandem_model::load(path, &LoadOptions::default()).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The configuration as the reference evaluated it. Its checkpoints were cast to bf16 as a whole before they were
/// evaluated in float32, and the rotary frequencies, which are computed and not stored, lost the same bits; at position
/// 500 that is a visible angle. A reader of the files cannot know, so the test says it.
pub fn with_bf16_frequencies(config: &ModelConfig) -> ModelConfig {
    let plain = Rope { scaling: RopeScaling::Default, ..config.rope.clone() };
    let rounded = config.rope.inverse_frequencies(config.head_dim).into_iter().map(half::bf16::from_f32);
    let factors = plain.inverse_frequencies(config.head_dim).into_iter().zip(rounded).map(|(f, r)| f / r.to_f32());
    ModelConfig { rope: Rope { scaling: RopeScaling::Factors(factors.collect()), ..plain }, ..config.clone() }
}

pub struct Runner {
    backend: CpuBackend,
    pages: Vec<u32>,
    vocab: usize,
}

const PAGE_SIZE: u32 = 16;
const PAGES: u32 = 48;

impl Runner {
    pub fn new(config: &ModelConfig, model: &Model, math: CpuMath) -> Self {
        let shape = PoolShape {
            layers: config.layers as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.head_dim as u32,
            page_size: PAGE_SIZE,
            element_bytes: CpuBackend::element_bytes(math),
            tp: 1,
            pages: PAGES,
        };
        let options = CpuOptions { threads: 2, math, shape, shared_pools: false };
        let backend = CpuBackend::new(config, model.weights.clone(), options).expect("the backend starts");
        // 29 and 48 have no common divisor: every page once, none beside its neighbour.
        let pages = (0..PAGES).map(|i| i * 29 % PAGES).collect();
        Self { backend, pages, vocab: config.vocab }
    }

    /// Logits of every token of `tokens`, which continue the sequence at `start`, in chunks of these sizes in turn.
    pub fn forward(&mut self, tokens: &[u32], start: usize, chunks: &[usize]) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        let mut logits = Vec::new();
        let mut done = 0;
        for chunk in chunks.iter().cycle() {
            let chunk = &tokens[done..tokens.len().min(done + chunk)];
            let slice =
                Slice { tokens: chunk, start: (start + done) as u32, pages: &self.pages, logits: LogitRows::All };
            self.backend.step(&[slice], &mut logits).expect("a valid step");
            rows.extend(logits.chunks(self.vocab).map(<[f32]>::to_vec));
            done += chunk.len();
            if done == tokens.len() {
                break;
            }
        }
        rows
    }
}

/// The best token, the lower id if two are equal.
pub fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a))).expect("a vocabulary") as u32
}

pub fn logprob(logits: &[f32], token: u32) -> f32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - largest).exp()).sum();
    logits[token as usize] - largest - sum.ln() as f32
}

/// Decodes greedily after `first` (the logits of the prompt's last token) and holds each choice against the reference,
/// up to the first whose margin is under `margin_min`. The number of choices held.
pub fn check_greedy(runner: &mut Runner, case: &Case, first: &[f32], margin_min: f32) -> usize {
    let mut logits = first.to_vec();
    for (i, (want, margin)) in case.greedy_ids.iter().zip(&case.greedy_margins).enumerate() {
        if *margin < margin_min {
            return i;
        }
        let got = argmax(&logits);
        assert_eq!(got, *want, "choice {i}, where the reference has a margin of {margin}");
        logits = runner.forward(&[got], case.prompt_ids.len() + i, &[1]).remove(0);
    }
    case.greedy_ids.len()
}

/// Follows the reference's own choices and holds ours against each whose margin is at least `margin_min`. The number
/// of choices held.
pub fn check_forced(runner: &mut Runner, case: &Case, first: &[f32], margin_min: f32) -> usize {
    let all = runner.forward(&case.greedy_ids, case.prompt_ids.len(), &[7, 1, 16]);
    let ours = std::iter::once(first).chain(all.iter().map(Vec::as_slice));
    let mut held = 0;
    for (i, (logits, (want, margin))) in ours.zip(case.greedy_ids.iter().zip(&case.greedy_margins)).enumerate() {
        if *margin >= margin_min {
            assert_eq!(argmax(logits), *want, "choice {i}, where the reference has a margin of {margin}");
            held += 1;
        }
    }
    held
}
