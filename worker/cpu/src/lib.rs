//! The CPU backend: one decoder for all served architectures over a paged KV pool.
//!
//! It promises invariance (H9): the bits of a row's logits depend on the row's history, the weights, the math mode, the
//! instruction set and the build, and on nothing else: not on the other rows of a step, where chunks were cut, how many
//! threads ran, or over how many ranks the pool is sharded. How each part keeps this: [`simd::matmul`],
//! [`simd::attention`].
//!
//! Unsafe code is allowed in [`simd`] (vector instructions, packed weights, pool access of attention), [`kv`] and
//! [`threads`], and denied elsewhere.
#![deny(unsafe_code)]

mod decoder;
mod kv;
pub mod probe;
mod simd;
mod step;
mod threads;
mod weights;

use std::{io, sync::Arc};

use tandem_fabric::memory::PoolMemory;
use tandem_handoff::layout::PoolShape;
use tandem_model::{config::ModelConfig, weights::Weights};

use crate::{decoder::Decoder, kv::KvPools, threads::Team};

pub use crate::simd::{Isa, attention::SPAN};

/// How products are computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CpuMath {
    /// Weights as the file defines them, activations and KV in f32.
    Exact,
    /// Quantised weights stay quantised and meet activations of two signed bytes with a scale per 32; KV in f16.
    Fast,
}

#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Threads of a step, the caller among them; 0 for one per available core.
    pub threads: usize,
    pub math: CpuMath,
    pub shape: PoolShape,
    /// Whether the KV pools are to be memory that other processes of this host can map, where the system has such.
    pub shared_pools: bool,
}

/// Which of a slice's rows need logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogitRows {
    None,
    Last,
    All,
}

/// Consecutive tokens of one sequence in a step.
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a> {
    pub tokens: &'a [u32],
    /// Position of `tokens[0]`; the positions before it are in the pool already.
    pub start: u32,
    /// Cover `start + tokens.len()` tokens; owned by the sequence (H1).
    pub pages: &'a [u32],
    pub logits: LogitRows,
}

#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error("no memory for {what} ({bytes} bytes): {source}; serve a smaller model, or fewer pages")]
    Memory { what: &'static str, bytes: usize, source: io::Error },
    #[error("the CPU backend could not start its threads: {0}; use fewer")]
    Threads(io::Error),
    #[error("the KV pool's shape does not fit the model: {what} is {pool}, the model needs {model}")]
    PoolShape { what: &'static str, pool: usize, model: usize },
    #[error("weight {name} has shape [{rows}, {cols}], the configuration says [{want_rows}, {want_cols}]")]
    WeightShape { name: String, rows: usize, cols: usize, want_rows: usize, want_cols: usize },
    #[error("the weights have {found} layers, the configuration says {wanted}")]
    Layers { found: usize, wanted: usize },
    #[error("token {token} is outside the vocabulary of {vocab}; this is a fault of the engine")]
    Token { token: u32, vocab: usize },
    #[error("a slice of {tokens} tokens at {start} has {pages} pages of {page_size}; this is a fault of the engine")]
    Pages { tokens: usize, start: u32, pages: usize, page_size: u32 },
    #[error("page {page} is outside the pool of {pages}; this is a fault of the engine")]
    Page { page: u32, pages: u32 },
}

pub struct CpuBackend {
    isa: Isa,
    math: CpuMath,
    team: Team,
    kv: KvPools,
    decoder: Decoder,
    step: step::Buffers,
}

impl CpuBackend {
    /// Packs the weights for the best instruction set of this machine and allocates the pools.
    ///
    /// # Errors
    /// When shapes disagree or the system gives no memory or threads.
    pub fn new(config: &ModelConfig, weights: Weights, options: CpuOptions) -> Result<Self, CpuError> {
        Self::with_isa(config, weights, options, Isa::best())
    }

    /// As [`Self::new`], for an instruction set of [`Isa::available`].
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_isa(config: &ModelConfig, weights: Weights, options: CpuOptions, isa: Isa) -> Result<Self, CpuError> {
        check_shape(config, &options)?;
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let team = Team::new(threads).map_err(CpuError::Threads)?;
        let bytes = options.shape.pool_bytes() * options.shape.tp as usize;
        let kv = KvPools::new(options.shape, options.shared_pools).map_err(|source| CpuError::Memory {
            what: "the KV pool",
            bytes,
            source,
        })?;
        let decoder = weights::pack(config, weights, options.math, &team)?;
        tracing::info!(threads, isa = isa.name(), math = ?options.math, pool_bytes = bytes, "CPU backend is ready");
        Ok(Self { isa, math: options.math, team, kv, decoder, step: Default::default() })
    }

    /// Runs one step: writes K and V of every token into its pages, and `[rows, vocab]` logits of the rows asked for,
    /// in the order of the slices.
    ///
    /// # Errors
    /// When a token or page is out of range or pages do not cover a slice; the pool is then untouched.
    pub fn step(&mut self, slices: &[Slice<'_>], logits: &mut Vec<f32>) -> Result<(), CpuError> {
        step::check(slices, self.decoder.vocab(), self.kv.shape())?;
        self.decoder.step(self.isa, &self.team, &self.kv, slices, &mut self.step, logits);
        Ok(())
    }

    /// One pool per tensor-parallel rank.
    pub fn memory(&self) -> &[Arc<PoolMemory>] {
        self.kv.memories()
    }

    /// Zeroes the tokens of a page from `from_token` on, for all heads, layers and ranks: no bytes of an earlier owner
    /// leave with the page.
    pub fn zero_tail(&mut self, page: u32, from_token: u32) {
        self.kv.zero_tail(page, from_token);
    }

    /// Bytes per element of the KV pool.
    pub fn element_bytes(math: CpuMath) -> u32 {
        match math {
            CpuMath::Exact => 4,
            CpuMath::Fast => 2,
        }
    }

    /// Name of a KV element's type.
    pub fn kv_dtype(math: CpuMath) -> &'static str {
        match math {
            CpuMath::Exact => "float32",
            CpuMath::Fast => "float16",
        }
    }

    /// Two backends with the same id compute the same bits from the same weights.
    pub fn numerics_id(&self) -> String {
        let math = match self.math {
            CpuMath::Exact => "exact",
            CpuMath::Fast => "fast",
        };
        format!("tandem-cpu-{} {math} {}", env!("CARGO_PKG_VERSION"), self.isa.name())
    }

    pub fn threads(&self) -> usize {
        self.team.threads()
    }
}

fn check_shape(config: &ModelConfig, options: &CpuOptions) -> Result<(), CpuError> {
    let shape = &options.shape;
    for (what, pool, model) in [
        ("the number of layers", shape.layers as usize, config.layers),
        ("the number of KV heads", shape.kv_heads as usize, config.kv_heads),
        ("the head dimension", shape.head_dim as usize, config.head_dim),
        ("the bytes per element", shape.element_bytes as usize, CpuBackend::element_bytes(options.math) as usize),
    ] {
        if pool != model {
            return Err(CpuError::PoolShape { what, pool, model });
        }
    }
    if shape.page_size == 0 || shape.tp == 0 {
        return Err(CpuError::PoolShape { what: "page size or TP", pool: 0, model: 1 });
    }
    Ok(())
}
