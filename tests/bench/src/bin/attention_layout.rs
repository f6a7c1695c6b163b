//! Decode attention over `[page][kv head][layer][K|V][token][dim]` against a pool per layer, at contexts of 1k and 8k,
//! with SmolLM2's shape: microseconds per token, and the ratio.

use std::time::Instant;

use tandem_cpu::probe::AttentionProbe;
use tandem_handoff::layout::PoolShape;

const ROUNDS: usize = 15;

fn main() {
    for context in [1024, 8191] {
        let shape =
            PoolShape { layers: 30, kv_heads: 3, head_dim: 64, page_size: 16, element_bytes: 2, tp: 1, pages: 1024 };
        let mut probes = [false, true]
            .map(|per_layer| AttentionProbe::new(shape, 9, context, 2, per_layer).expect("memory for the pools"));
        let mut best = [f64::INFINITY; 2];
        for _ in 0..ROUNDS {
            for (probe, best) in probes.iter_mut().zip(&mut best) {
                let start = Instant::now();
                probe.step(context);
                *best = best.min(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        let [ours, per_layer] = best;
        println!(
            "{{\"context\":{context},\"layout_us\":{ours:.0},\"per_layer_us\":{per_layer:.0},\"ratio\":{:.3}}}",
            ours / per_layer
        );
    }
}
