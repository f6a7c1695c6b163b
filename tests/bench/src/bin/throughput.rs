//! `throughput MODEL THREADS`: prefill and decode tokens per second of one sequence with the default (fast) arithmetic,
//! the best of several rounds, as one line of JSON.

use std::time::Instant;

use tandem_cpu::{CpuBackend, CpuMath, CpuOptions, LogitRows, Slice};
use tandem_handoff::layout::PoolShape;
use tandem_model::LoadOptions;

const PREFILL: usize = 512;
const DECODE: usize = 128;
const ROUNDS: usize = 5;

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap_or_else(|| "smollm2".to_owned());
    let threads = args.next().map_or(2, |text| text.parse().expect("a number of threads"));
    let model = tandem_model::load(&path, &LoadOptions::default()).expect("the model loads");
    let config = &model.config;
    let pages: Vec<u32> = (0..64).collect();
    let shape = PoolShape {
        layers: config.layers as u32,
        kv_heads: config.kv_heads as u32,
        head_dim: config.head_dim as u32,
        page_size: 16,
        element_bytes: CpuBackend::element_bytes(CpuMath::Fast),
        tp: 1,
        pages: pages.len() as u32,
    };
    let options = CpuOptions { threads, math: CpuMath::Fast, shape, shared_pools: false };
    let mut backend = CpuBackend::new(config, model.weights, options).expect("the backend starts");
    let prompt: Vec<u32> = (0..PREFILL as u32).map(|i| 100 + i * 37 % 20_000).collect();
    let (mut prefill, mut decode) = (0.0f64, 0.0f64);
    let mut logits = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        backend
            .step(&[Slice { tokens: &prompt, start: 0, pages: &pages, logits: LogitRows::Last }], &mut logits)
            .expect("a step");
        prefill = prefill.max(PREFILL as f64 / start.elapsed().as_secs_f64());
        let start = Instant::now();
        for i in 0..DECODE {
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("a vocabulary");
            let slice =
                Slice { tokens: &[best as u32], start: (PREFILL + i) as u32, pages: &pages, logits: LogitRows::Last };
            backend.step(&[slice], &mut logits).expect("a step");
        }
        decode = decode.max(DECODE as f64 / start.elapsed().as_secs_f64());
    }
    println!("{{\"prefill\":{prefill:.1},\"decode\":{decode:.1}}}");
}
