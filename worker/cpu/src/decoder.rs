//! One decoder for Llama, Mistral, Qwen2 and Qwen3: a pre-norm transformer with grouped-query attention and SwiGLU.
//! What differs between them is in the weights (biases, q/k norms) and in the configuration.

use tandem_model::{config::ModelConfig, dequant::dequantize_row, weights::Tensor};

use crate::{
    Slice,
    kv::KvPools,
    simd::{
        Isa,
        attention::{Attention, Heads, Sequence, write_token},
        matmul::{Activations, matmul},
        panels::Matrix,
        rows,
    },
    step::Buffers,
    threads::Team,
};

/// Below so many rows, handing rows to other threads costs more than it saves.
const ROWS_TO_SHARE: usize = 4;

pub struct Decoder {
    pub heads: Heads,
    pub hidden: usize,
    pub intermediate: usize,
    pub rms_eps: f32,
    /// `[head_dim / 2]`
    pub inverse_frequencies: Vec<f32>,
    /// Multiplies both cosine and sine (YaRN).
    pub rope_scale: f32,
    /// `[vocab, hidden]`, as the file stores it: a row is unpacked when its token comes.
    pub embedding: Tensor,
    pub layers: Vec<Layer>,
    pub final_norm: Vec<f32>,
    pub head: Matrix,
}

pub struct Layer {
    pub attention_norm: Vec<f32>,
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub o: Matrix,
    pub mlp_norm: Vec<f32>,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

/// What every layer of one step needs.
struct Step<'a> {
    isa: Isa,
    team: &'a Team,
    kv: &'a KvPools,
    sequences: &'a [Sequence<'a>],
}

impl Decoder {
    pub fn new(
        config: &ModelConfig,
        embedding: Tensor,
        layers: Vec<Layer>,
        final_norm: Vec<f32>,
        head: Matrix,
    ) -> Self {
        Self {
            heads: Heads { heads: config.heads, kv_heads: config.kv_heads, head_dim: config.head_dim },
            hidden: config.hidden,
            intermediate: config.intermediate,
            rms_eps: config.rms_eps,
            inverse_frequencies: config.rope.inverse_frequencies(config.head_dim),
            rope_scale: config.rope.attention_scale(),
            embedding,
            layers,
            final_norm,
            head,
        }
    }

    pub fn vocab(&self) -> usize {
        self.head.rows
    }

    /// See [`crate::CpuBackend::step`]; the slices have been checked.
    pub fn step(
        &self,
        isa: Isa,
        team: &Team,
        kv: &KvPools,
        slices: &[Slice<'_>],
        buffers: &mut Buffers,
        logits: &mut Vec<f32>,
    ) {
        buffers.list_rows(slices, kv.shape().page_size as usize);
        let mut first_row = 0;
        let sequences: Vec<Sequence<'_>> = slices
            .iter()
            .map(|slice| {
                let len = slice.tokens.len();
                first_row += len;
                Sequence { first_row: first_row - len, len, start: slice.start as usize, pages: slice.pages }
            })
            .collect();
        let step = Step { isa, team, kv, sequences: &sequences };
        buffers.plan.prepare(self.heads, &sequences, team.threads());
        self.embed(&step, buffers);
        for (index, layer) in self.layers.iter().enumerate() {
            self.attention(&step, index, layer, buffers);
            self.mlp(&step, layer, buffers);
        }
        self.logits(&step, buffers, logits);
    }

    fn embed(&self, step: &Step<'_>, b: &mut Buffers) {
        let rows = b.rows.len();
        let half = self.inverse_frequencies.len();
        b.hidden.resize(rows * self.hidden, 0.0);
        b.update.resize(rows * self.hidden, 0.0);
        b.update.fill(0.0);
        b.cos.resize(rows * half, 0.0);
        b.sin.resize(rows * half, 0.0);
        let row_bytes = self.embedding.dtype.row_bytes(self.hidden);
        let items = b.rows.iter().zip(b.hidden.chunks_mut(self.hidden));
        let items = items.zip(b.cos.chunks_mut(half).zip(b.sin.chunks_mut(half)));
        each_row(step.team, items, |((row, hidden), (cos, sin))| {
            let bytes = &self.embedding.bytes()[row.token as usize * row_bytes..][..row_bytes];
            dequantize_row(self.embedding.dtype, bytes, hidden);
            for (i, frequency) in self.inverse_frequencies.iter().enumerate() {
                let (s, c) = (row.position as f32 * frequency).sin_cos();
                cos[i] = c * self.rope_scale;
                sin[i] = s * self.rope_scale;
            }
        });
    }

    /// Adds the last update to the residual stream and makes its norm the activations of the next products.
    fn norm(&self, step: &Step<'_>, weight: &[f32], quantised: bool, b: &mut Buffers) {
        b.activations.reshape(b.rows.len(), self.hidden, quantised);
        let items = b.hidden.chunks_mut(self.hidden).zip(b.update.chunks(self.hidden)).zip(b.activations.rows_mut());
        each_row(step.team, items, |((hidden, update), row)| {
            rows::add(step.isa, hidden, update);
            rows::rms_norm(step.isa, hidden, weight, self.rms_eps, row.values);
            row.finish(step.isa);
        });
    }

    fn attention(&self, step: &Step<'_>, index: usize, layer: &Layer, b: &mut Buffers) {
        let qkv = [&layer.q, &layer.k, &layer.v];
        self.norm(step, &layer.attention_norm, any_quantised(&qkv), b);
        let cols = self.heads.qkv_cols();
        b.qkv.resize(b.rows.len() * cols, 0.0);
        matmul(step.isa, step.team, &qkv, &b.activations, &mut b.qkv);

        let half = self.inverse_frequencies.len();
        let angles = b.cos.chunks(half).zip(b.sin.chunks(half));
        let items = b.rows.iter().zip(b.qkv.chunks_mut(cols)).zip(angles);
        each_row(step.team, items, |((row, qkv), angles)| self.place(step, index, layer, row.place, qkv, angles));

        b.activations.reshape(b.rows.len(), self.heads.heads * self.heads.head_dim, layer.o.form.quantised());
        let attention = Attention {
            isa: step.isa,
            kv: step.kv,
            layer: index,
            heads: self.heads,
            sequences: step.sequences,
            qkv: &b.qkv,
        };
        attention.run(step.team, &mut b.plan, &mut b.activations.values);
        if b.activations.quantised {
            each_row(step.team, b.activations.rows_mut(), |row| row.finish(step.isa));
        }
        matmul(step.isa, step.team, &[&layer.o], &b.activations, &mut b.update);
    }

    /// Norms and rotates one row's q and k, and writes its k and v into the pool.
    fn place(
        &self,
        step: &Step<'_>,
        index: usize,
        layer: &Layer,
        place: (u32, u32),
        qkv: &mut [f32],
        (cos, sin): (&[f32], &[f32]),
    ) {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let (q, kv) = qkv.split_at_mut(heads * head_dim);
        let (k, v) = kv.split_at_mut(kv_heads * head_dim);
        let scale = 1.0 / (head_dim as f32).sqrt();
        for (rows, norm, scale) in [(q, &layer.q_norm, scale), (&mut *k, &layer.k_norm, 1.0)] {
            for head in rows.chunks_mut(head_dim) {
                if let Some(norm) = norm {
                    rows::rms_norm_in_place(step.isa, head, norm, self.rms_eps);
                }
                rows::rotate(step.isa, head, cos, sin, scale);
            }
        }
        for (head, (k, v)) in k.chunks(head_dim).zip(v.chunks(head_dim)).enumerate() {
            write_token(step.isa, step.kv, index, head, place, k, v);
        }
    }

    fn mlp(&self, step: &Step<'_>, layer: &Layer, b: &mut Buffers) {
        let gate_up = [&layer.gate, &layer.up];
        self.norm(step, &layer.mlp_norm, any_quantised(&gate_up), b);
        b.gate_up.resize(b.rows.len() * 2 * self.intermediate, 0.0);
        matmul(step.isa, step.team, &gate_up, &b.activations, &mut b.gate_up);
        b.activations.reshape(b.rows.len(), self.intermediate, layer.down.form.quantised());
        let items = b.gate_up.chunks(2 * self.intermediate).zip(b.activations.rows_mut());
        each_row(step.team, items, |(gate_up, row)| {
            let (gate, up) = gate_up.split_at(self.intermediate);
            rows::silu_mul(step.isa, gate, up, row.values);
            row.finish(step.isa);
        });
        matmul(step.isa, step.team, &[&layer.down], &b.activations, &mut b.update);
    }

    fn logits(&self, step: &Step<'_>, b: &mut Buffers, logits: &mut Vec<f32>) {
        logits.resize(b.logit_rows.len() * self.vocab(), 0.0);
        if b.logit_rows.is_empty() {
            return;
        }
        let activations: &mut Activations = &mut b.activations;
        activations.reshape(b.logit_rows.len(), self.hidden, self.head.form.quantised());
        for (index, row) in b.logit_rows.iter().zip(activations.rows_mut()) {
            let range = index * self.hidden..(index + 1) * self.hidden;
            let hidden = &mut b.hidden[range.clone()];
            rows::add(step.isa, hidden, &b.update[range]);
            rows::rms_norm(step.isa, hidden, &self.final_norm, self.rms_eps, row.values);
            row.finish(step.isa);
        }
        matmul(step.isa, step.team, &[&self.head], activations, logits);
    }
}

fn any_quantised(matrices: &[&Matrix]) -> bool {
    matrices.iter().any(|matrix| matrix.form.quantised())
}

/// Runs `f` for each row, shared out if there are enough.
fn each_row<T: Send>(team: &Team, rows: impl ExactSizeIterator<Item = T> + Send, f: impl Fn(T) + Sync) {
    if rows.len() < ROWS_TO_SHARE { rows.for_each(f) } else { team.for_each(rows, |row, _| f(row)) }
}
