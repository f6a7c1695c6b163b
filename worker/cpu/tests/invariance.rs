//! H9: the bits of a row depend neither on the rows beside it, nor on chunk cuts, threads or TP; for each type of
//! weights, both math modes and every instruction set of this machine.

use std::sync::Arc;

use tandem_cpu::{CpuBackend, CpuMath, CpuOptions, Isa, LogitRows, SPAN, Slice};
use tandem_handoff::layout::PoolShape;
use tandem_model::{
    config::{Architecture, ModelConfig, Rope, RopeScaling},
    weights::{DType, LayerWeights, Linear, Tensor, TensorData, Weights},
};

/// splitmix64: enough of randomness for weights, the same on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn tensor(&mut self, dtype: DType, rows: usize, cols: usize) -> Tensor {
        let mut bytes: Vec<u8> = (0..rows * dtype.row_bytes(cols)).map(|_| self.next() as u8).collect();
        let (_, block) = dtype.block();
        // Random bytes are fine quants; scales must be finite and small.
        let halves: &[usize] = match dtype {
            DType::F32 | DType::F16 | DType::BF16 => &[],
            DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => &[0],
            DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
            DType::Q6K => &[208],
        };
        for block in bytes.chunks_mut(block) {
            let value = self.uniform() * 0.1;
            match dtype {
                DType::F32 => block.copy_from_slice(&value.to_le_bytes()),
                DType::F16 => block.copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
                DType::BF16 => block.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
                _ => halves.iter().for_each(|at| {
                    let scale = half::f16::from_f32(0.002 * self.uniform());
                    block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }),
            }
        }
        Tensor { name: format!("{dtype:?}"), dtype, rows, cols, data: TensorData::Owned(Arc::from(bytes)) }
    }

    fn linear(&mut self, dtype: DType, rows: usize, cols: usize, bias: bool) -> Linear {
        let bias = bias.then(|| self.tensor(DType::F32, 1, rows));
        Linear { weight: self.tensor(dtype, rows, cols), bias }
    }
}

fn config(head_dim: usize, heads: usize, kv_heads: usize) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Qwen3,
        layers: 2,
        hidden: 256,
        intermediate: 512,
        heads,
        kv_heads,
        head_dim,
        vocab: 77,
        rms_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::Default },
        max_positions: 4096,
        tied_head: false,
    }
}

fn weights(c: &ModelConfig, dtype: DType) -> Weights {
    let mut random = Random(7);
    let r = &mut random;
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let layers = (0..c.layers)
        .map(|_| LayerWeights {
            attention_norm: r.tensor(DType::F32, 1, c.hidden),
            q: r.linear(dtype, q, c.hidden, true),
            k: r.linear(dtype, kv, c.hidden, true),
            v: r.linear(dtype, kv, c.hidden, false),
            o: r.linear(dtype, c.hidden, q, false),
            q_norm: Some(r.tensor(DType::F32, 1, c.head_dim)),
            k_norm: Some(r.tensor(DType::F32, 1, c.head_dim)),
            mlp_norm: r.tensor(DType::F32, 1, c.hidden),
            gate: r.linear(dtype, c.intermediate, c.hidden, false),
            up: r.linear(dtype, c.intermediate, c.hidden, false),
            down: r.linear(dtype, c.hidden, c.intermediate, false),
        })
        .collect();
    Weights {
        embedding: r.tensor(DType::F32, c.vocab, c.hidden),
        layers,
        final_norm: r.tensor(DType::F32, 1, c.hidden),
        head: r.tensor(dtype, c.vocab, c.hidden),
    }
}

struct Setup {
    config: ModelConfig,
    weights: Weights,
    math: CpuMath,
    isa: Isa,
}

const PAGE_SIZE: u32 = 16;
const PAGES_PER_SEQUENCE: usize = 20;
const SEQUENCES: usize = 65;

impl Setup {
    fn new(dtype: DType, math: CpuMath, isa: Isa) -> Self {
        let config = config(64, 4, 2);
        let weights = weights(&config, dtype);
        Self { config, weights, math, isa }
    }

    fn backend(&self, threads: usize, tp: u32) -> CpuBackend {
        let shape = PoolShape {
            layers: self.config.layers as u32,
            kv_heads: self.config.kv_heads as u32,
            head_dim: self.config.head_dim as u32,
            page_size: PAGE_SIZE,
            element_bytes: CpuBackend::element_bytes(self.math),
            tp,
            pages: (SEQUENCES * PAGES_PER_SEQUENCE) as u32,
        };
        let options = CpuOptions { threads, math: self.math, shape, shared_pools: false };
        CpuBackend::with_isa(&self.config, self.weights.clone(), options, self.isa).unwrap()
    }
}

/// Pages of sequence `i`, scattered over the pool.
fn pages(i: usize) -> Vec<u32> {
    (0..PAGES_PER_SEQUENCE).map(|p| (p * SEQUENCES + (i * 31 + p * 7) % SEQUENCES) as u32).collect()
}

fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..len).map(|_| (random.next() % 77) as u32).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|l| l.to_bits()).collect()
}

/// Bits of the logits of every token, in chunks of these sizes in turn.
fn run(backend: &mut CpuBackend, tokens: &[u32], chunks: &[usize]) -> Vec<u32> {
    let pages = pages(0);
    let (mut all, mut logits, mut done) = (Vec::new(), Vec::new(), 0);
    for chunk in chunks.iter().cycle() {
        let end = tokens.len().min(done + chunk);
        let slice = Slice { tokens: &tokens[done..end], start: done as u32, pages: &pages, logits: LogitRows::All };
        backend.step(&[slice], &mut logits).unwrap();
        all.extend(bits(&logits));
        done = end;
        if done == tokens.len() {
            return all;
        }
    }
    unreachable!("chunks are not empty")
}

/// Longer than a span, so that spans are merged.
const LENGTH: usize = SPAN + 45;

/// Threads, TP and chunk cuts.
type Variant = (usize, u32, &'static [usize]);
const VARIANTS: [Variant; 4] = [(3, 2, &[2, 3, 5, 7, 64, 1, 33]), (1, 1, &[1]), (2, 1, &[LENGTH]), (2, 4, &[100, 16])];

fn check_one_sequence(setup: &Setup, variants: &[Variant]) {
    let tokens = prompt(1, LENGTH);
    let want = run(&mut setup.backend(1, 1), &tokens, &[LENGTH]);
    assert!(want.iter().all(|b| f32::from_bits(*b).is_finite()), "the logits are numbers");
    for &(threads, tp, chunks) in variants {
        let got = run(&mut setup.backend(threads, tp), &tokens, chunks);
        for (row, (got, want)) in got.chunks(77).zip(want.chunks(77)).enumerate() {
            assert_eq!(got, want, "row {row} with {threads} threads, tp {tp}, chunks {chunks:?}");
        }
    }
}

/// A row alone against the same row with 1 to 63 others, some of them chunks of prompts.
fn check_batches(setup: &Setup) {
    let mut backend = setup.backend(2, 1);
    let histories: Vec<Vec<u32>> = (0..SEQUENCES).map(|i| prompt(100 + i as u64, 1 + i * 37 % 290)).collect();
    let all_pages: Vec<Vec<u32>> = (0..SEQUENCES).map(pages).collect();
    let mut logits = Vec::new();
    let mut alone = Vec::new();
    for (history, pages) in histories.iter().zip(&all_pages) {
        backend.step(&[Slice { tokens: history, start: 0, pages, logits: LogitRows::None }], &mut logits).unwrap();
        let start = history.len() as u32;
        backend.step(&[Slice { tokens: &[5], start, pages, logits: LogitRows::Last }], &mut logits).unwrap();
        alone.push(bits(&logits));
    }
    for m in 2..=64 {
        let slices: Vec<Slice<'_>> = (0..m)
            .map(|i| Slice {
                tokens: if i == 1 { &[5, 9, 11] } else { &[5] },
                start: histories[i].len() as u32,
                pages: &all_pages[i],
                logits: LogitRows::All,
            })
            .collect();
        backend.step(&slices, &mut logits).unwrap();
        let rows: Vec<_> = logits.chunks(77).map(bits).collect();
        for (i, alone) in alone.iter().take(m).enumerate() {
            let row = if i > 1 { i + 2 } else { i };
            assert_eq!(rows[row], *alone, "sequence {i} of {m}");
        }
    }
}

fn check(dtype: DType) {
    for math in [CpuMath::Exact, CpuMath::Fast] {
        let isas = Isa::available();
        let setup = Setup::new(dtype, math, isas[0]);
        check_one_sequence(&setup, &VARIANTS);
        check_batches(&setup);
        for isa in &isas[1..] {
            check_one_sequence(&Setup::new(dtype, math, *isa), &VARIANTS[..1]);
        }
    }
}

macro_rules! dtypes {
    ($($name:ident $dtype:ident),*) => { $(#[test] fn $name() { check(DType::$dtype) })* };
}

dtypes!(f32 F32, f16 F16, bf16 BF16, q8_0 Q8_0, q4_0 Q4_0, q4_1 Q4_1, q5_0 Q5_0, q5_1 Q5_1, q4_k Q4K, q5_k Q5K, q6_k Q6K);

/// Heads that no vector divides, more queries per head than a tile of rows, and odd page shares.
#[test]
fn awkward_heads() {
    for (head_dim, heads, kv_heads) in [(24, 8, 2), (8, 7, 1), (128, 2, 2), (80, 2, 1)] {
        for math in [CpuMath::Exact, CpuMath::Fast] {
            let config = config(head_dim, heads, kv_heads);
            let weights = weights(&config, DType::BF16);
            check_one_sequence(&Setup { config, weights, math, isa: Isa::best() }, &VARIANTS);
        }
    }
}

/// Instruction sets may differ in the last bits, never by more.
#[test]
fn instruction_sets_agree_closely() {
    for dtype in [DType::F32, DType::BF16, DType::Q4_1, DType::Q8_0] {
        for math in [CpuMath::Exact, CpuMath::Fast] {
            let tokens = prompt(3, 40);
            let logits = Isa::available().into_iter().map(|isa| {
                let mut backend = Setup::new(dtype, math, isa).backend(1, 1);
                run(&mut backend, &tokens, &[40]).into_iter().map(f32::from_bits).collect::<Vec<_>>()
            });
            let all: Vec<_> = logits.collect();
            let largest = all[0].iter().fold(0.0f32, |a, l| a.max(l.abs()));
            // A rounding at the edge may move one quantised activation by a step.
            let tolerance = if math == CpuMath::Exact { 1e-4 } else { 2e-2 };
            for other in &all[1..] {
                let worst = all[0].iter().zip(other).fold(0.0f32, |a, (x, y)| a.max((x - y).abs()));
                assert!(worst <= tolerance * largest, "{dtype:?} {math:?}: {worst} of {largest}");
            }
        }
    }
}

#[test]
fn a_pools_tail_is_zeroed_and_nothing_else() {
    let setup = Setup::new(DType::F32, CpuMath::Fast, Isa::best());
    let mut backend = setup.backend(1, 2);
    let tokens = prompt(9, 30);
    let want = run(&mut backend, &tokens, &[30]);
    backend.zero_tail(pages(0)[1], 14);
    let last = |backend: &mut CpuBackend| {
        let (pages, mut logits) = (pages(0), Vec::new());
        let slice = Slice { tokens: &tokens[29..], start: 29, pages: &pages, logits: LogitRows::Last };
        backend.step(&[slice], &mut logits).unwrap();
        bits(&logits)
    };
    assert_eq!(last(&mut backend), want[29 * 77..]);
    backend.zero_tail(pages(0)[1], 0);
    assert_ne!(last(&mut backend), want[29 * 77..]);
}

#[test]
fn a_wrong_slice_is_refused() {
    let setup = Setup::new(DType::F32, CpuMath::Exact, Isa::best());
    let mut backend = setup.backend(1, 1);
    let mut logits = Vec::new();
    let slice = Slice { tokens: &[77], start: 0, pages: &[0], logits: LogitRows::Last };
    assert!(backend.step(&[slice], &mut logits).unwrap_err().to_string().contains("vocabulary of 77"));
    let slice = Slice { tokens: &[1], start: 16, pages: &[0], logits: LogitRows::Last };
    assert!(backend.step(&[slice], &mut logits).unwrap_err().to_string().contains("1 pages of 16"));
    let slice = Slice { tokens: &[1], start: 0, pages: &[60_000], logits: LogitRows::Last };
    assert!(backend.step(&[slice], &mut logits).unwrap_err().to_string().contains("outside the pool"));
    assert!(backend.step(&[], &mut logits).is_ok() && logits.is_empty());
}
