//! What a benchmark needs to see of the insides: decode attention alone, over one pool with all layers side by side or
//! over a pool per layer. Not part of the backend.

use std::io;

use tandem_handoff::layout::PoolShape;

use crate::{
    kv::KvPools,
    simd::{
        Isa,
        attention::{Attention, Heads, Plan, Sequence, write_token},
    },
    threads::Team,
};

/// Decode attention of one sequence, layer after layer.
pub struct AttentionProbe {
    isa: Isa,
    team: Team,
    heads: Heads,
    layers: usize,
    /// One with all layers, or one per layer.
    pools: Vec<KvPools>,
    pages: Vec<u32>,
    plan: Plan,
    qkv: Vec<f32>,
    out: Vec<f32>,
}

impl AttentionProbe {
    /// `context` tokens of K and V are written; `per_layer` asks for pools `[layer][page][kv head][K|V][token][dim]`.
    ///
    /// # Errors
    /// When the system gives no memory or threads.
    pub fn new(shape: PoolShape, heads: usize, context: usize, threads: usize, per_layer: bool) -> io::Result<Self> {
        let layers = shape.layers as usize;
        let pools = if per_layer {
            (0..layers)
                .map(|_| KvPools::new(PoolShape { layers: 1, ..shape }, false))
                .collect::<io::Result<Vec<_>>>()?
        } else {
            vec![KvPools::new(shape, false)?]
        };
        let heads = Heads { heads, kv_heads: shape.kv_heads as usize, head_dim: shape.head_dim as usize };
        let count = shape.pages_for(context + 1) as u32;
        // Pages of one sequence lie scattered over a pool that has served others: an odd stride visits each once.
        let pages = (0..count).map(|i| i * 7919 % shape.pages).collect();
        let qkv = (0..heads.qkv_cols()).map(|i| (i % 13) as f32 / 13.0 - 0.5).collect();
        let out = vec![0.0; heads.heads * heads.head_dim];
        let team = Team::new(threads)?;
        let mut probe = Self { isa: Isa::best(), team, heads, layers, pools, pages, plan: Plan::default(), qkv, out };
        probe.fill(context);
        Ok(probe)
    }

    fn pool(&self, layer: usize) -> (&KvPools, usize) {
        if self.pools.len() == 1 { (&self.pools[0], layer) } else { (&self.pools[layer], 0) }
    }

    fn fill(&mut self, context: usize) {
        let page_size = self.pools[0].shape().page_size as usize;
        let row: Vec<f32> = (0..self.heads.head_dim).map(|i| (i % 7) as f32 / 7.0 - 0.4).collect();
        for layer in 0..self.layers {
            let (pool, layer) = self.pool(layer);
            for position in 0..=context {
                let place = (self.pages[position / page_size], (position % page_size) as u32);
                for head in 0..self.heads.kv_heads {
                    write_token(self.isa, pool, layer, head, place, &row, &row);
                }
            }
        }
    }

    /// Attention of one new token at position `context` through all layers.
    pub fn step(&mut self, context: usize) {
        let pages = std::mem::take(&mut self.pages);
        let mut plan = std::mem::take(&mut self.plan);
        let mut out = std::mem::take(&mut self.out);
        let sequences = [Sequence { first_row: 0, len: 1, start: context, pages: &pages }];
        plan.prepare(self.heads, &sequences, self.team.threads());
        for layer in 0..self.layers {
            let (kv, layer) = self.pool(layer);
            let attention =
                Attention { isa: self.isa, kv, layer, heads: self.heads, sequences: &sequences, qkv: &self.qkv };
            attention.run(&self.team, &mut plan, &mut out);
        }
        (self.pages, self.plan, self.out) = (pages, plan, out);
    }
}
