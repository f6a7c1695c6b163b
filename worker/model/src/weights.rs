//! Weights as the file holds them: names resolved, shapes checked, no arithmetic. *Pure.*

use std::{ops::Range, sync::Arc};

use tandem_fabric::memory::FileMap;

/// How a tensor's elements are stored. Quantised types are GGML's blocks along a row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DType {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
}

impl DType {
    /// Elements in one block, and the bytes of one block.
    pub fn block(self) -> (usize, usize) {
        match self {
            DType::F32 => (1, 4),
            DType::F16 | DType::BF16 => (1, 2),
            DType::Q8_0 => (32, 34),
            DType::Q4_0 => (32, 18),
            DType::Q4_1 => (32, 20),
            DType::Q5_0 => (32, 22),
            DType::Q5_1 => (32, 24),
            DType::Q4K => (256, 144),
            DType::Q5K => (256, 176),
            DType::Q6K => (256, 210),
        }
    }

    pub fn row_bytes(self, cols: usize) -> usize {
        let (elements, bytes) = self.block();
        debug_assert_eq!(cols % elements, 0);
        cols / elements * bytes
    }
}

/// A row-major matrix `[rows, cols]` (a vector has one row), either a range of a mapped file or bytes of its own.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub data: TensorData,
}

#[derive(Clone, Debug)]
pub enum TensorData {
    Mapped(Arc<FileMap>, Range<usize>),
    Owned(Arc<[u8]>),
}

impl Tensor {
    /// `rows * dtype.row_bytes(cols)` bytes, little endian.
    pub fn bytes(&self) -> &[u8] {
        match &self.data {
            TensorData::Mapped(map, range) => &map.bytes()[range.clone()],
            TensorData::Owned(bytes) => bytes,
        }
    }
}

/// `y = W x + b`; `weight` is `[out, in]`.
#[derive(Clone, Debug)]
pub struct Linear {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
}

#[derive(Clone, Debug)]
pub struct LayerWeights {
    pub attention_norm: Tensor,
    /// `[heads * head_dim, hidden]`
    pub q: Linear,
    /// `[kv_heads * head_dim, hidden]`
    pub k: Linear,
    pub v: Linear,
    /// `[hidden, heads * head_dim]`
    pub o: Linear,
    /// `[head_dim]`, Qwen3
    pub q_norm: Option<Tensor>,
    pub k_norm: Option<Tensor>,
    pub mlp_norm: Tensor,
    /// `[intermediate, hidden]`
    pub gate: Linear,
    pub up: Linear,
    /// `[hidden, intermediate]`
    pub down: Linear,
}

#[derive(Clone, Debug)]
pub struct Weights {
    /// `[vocab, hidden]`
    pub embedding: Tensor,
    pub layers: Vec<LayerWeights>,
    pub final_norm: Tensor,
    /// `[vocab, hidden]`; with a tied head a clone of `embedding` (the bytes are shared).
    pub head: Tensor,
}
