//! From a model's tensors to the decoder's packed matrices: forms, slices, shapes checked.

use tandem_model::{
    config::ModelConfig,
    dequant::dequantize_row,
    weights::{Linear, Tensor, Weights},
};

use crate::{
    CpuError, CpuMath,
    decoder::{Decoder, Layer},
    simd::{
        arena::Arena,
        panels::{BLOCK, Form, Matrix},
    },
    threads::Team,
};

/// Into so many slices the intermediate of `down` is cut where its size allows: as many ranks may share it.
const DOWN_SLICES: usize = 8;

/// Where K is cut into slices that are summed by themselves (H9).
#[derive(Clone, Copy)]
enum Cut {
    /// Not at all: outputs, not inputs, are shared out over ranks.
    Whole,
    /// At heads of this many elements.
    Heads(usize),
    Intermediate,
}

impl Cut {
    /// Columns of a slice. Quantised forms cut only between blocks, so a slice may hold several heads.
    fn slice(self, form: Form, cols: usize) -> usize {
        let unit = if form.quantised() { BLOCK } else { 1 };
        match self {
            Cut::Whole => cols,
            Cut::Heads(dim) => {
                let heads = (1..).find(|heads| heads * dim % unit == 0).expect("the unit's multiple is one");
                heads * dim
            }
            Cut::Intermediate => {
                let slices = (1..=DOWN_SLICES).rev().find(|n| cols.is_multiple_of(n * unit));
                cols / slices.expect("one slice always fits")
            }
        }
    }
}

struct Packer<'a> {
    math: CpuMath,
    team: &'a Team,
    arena: Arena,
}

/// # Errors
/// When a tensor's shape is not what the configuration says, or there is no memory.
pub fn pack(config: &ModelConfig, weights: Weights, math: CpuMath, team: &Team) -> Result<Decoder, CpuError> {
    if weights.layers.len() != config.layers {
        return Err(CpuError::Layers { found: weights.layers.len(), wanted: config.layers });
    }
    let sizes = matrices(&weights).map(|t| Form::of(t.dtype, math).bytes(t.rows, t.cols)).collect::<Vec<_>>();
    let bytes = sizes.iter().sum();
    let arena = Arena::new(sizes).map_err(|source| CpuError::Memory { what: "the packed weights", bytes, source })?;
    let mut packer = Packer { math, team, arena };
    let (hidden, q, kv) = (config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let head_norm = |tensor: &Option<Tensor>| tensor.as_ref().map(|t| vector(t, config.head_dim)).transpose();
    let mut layers = Vec::with_capacity(config.layers);
    for w in &weights.layers {
        layers.push(Layer {
            attention_norm: vector(&w.attention_norm, hidden)?,
            q: packer.linear(&w.q, q, hidden, Cut::Whole)?,
            k: packer.linear(&w.k, kv, hidden, Cut::Whole)?,
            v: packer.linear(&w.v, kv, hidden, Cut::Whole)?,
            q_norm: head_norm(&w.q_norm)?,
            k_norm: head_norm(&w.k_norm)?,
            o: packer.linear(&w.o, hidden, q, Cut::Heads(config.head_dim))?,
            mlp_norm: vector(&w.mlp_norm, hidden)?,
            gate: packer.linear(&w.gate, config.intermediate, hidden, Cut::Whole)?,
            up: packer.linear(&w.up, config.intermediate, hidden, Cut::Whole)?,
            down: packer.linear(&w.down, hidden, config.intermediate, Cut::Intermediate)?,
        });
    }
    check(&weights.embedding, config.vocab, hidden)?;
    let head = packer.matrix(&weights.head, Vec::new(), config.vocab, hidden, Cut::Whole)?;
    Ok(Decoder::new(config, weights.embedding, layers, vector(&weights.final_norm, hidden)?, head))
}

/// The tensors that are packed, in the order of packing.
fn matrices(weights: &Weights) -> impl Iterator<Item = &Tensor> {
    let linears = weights.layers.iter().flat_map(|w| [&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down]);
    linears.map(|linear| &linear.weight).chain([&weights.head])
}

impl Packer<'_> {
    fn linear(&mut self, linear: &Linear, rows: usize, cols: usize, cut: Cut) -> Result<Matrix, CpuError> {
        let bias = linear.bias.as_ref().map_or(Ok(Vec::new()), |bias| vector(bias, rows))?;
        self.matrix(&linear.weight, bias, rows, cols, cut)
    }

    fn matrix(
        &mut self,
        tensor: &Tensor,
        bias: Vec<f32>,
        rows: usize,
        cols: usize,
        cut: Cut,
    ) -> Result<Matrix, CpuError> {
        check(tensor, rows, cols)?;
        let form = Form::of(tensor.dtype, self.math);
        let region = self.arena.take(form.bytes(rows, cols));
        Ok(Matrix::pack(tensor, bias, form, cut.slice(form, cols), region, self.team))
    }
}

fn check(tensor: &Tensor, want_rows: usize, want_cols: usize) -> Result<(), CpuError> {
    if (tensor.rows, tensor.cols) == (want_rows, want_cols) {
        return Ok(());
    }
    let (name, rows, cols) = (tensor.name.clone(), tensor.rows, tensor.cols);
    Err(CpuError::WeightShape { name, rows, cols, want_rows, want_cols })
}

fn vector(tensor: &Tensor, len: usize) -> Result<Vec<f32>, CpuError> {
    check(tensor, 1, len)?;
    let mut values = vec![0.0; len];
    dequantize_row(tensor.dtype, tensor.bytes(), &mut values);
    Ok(values)
}
