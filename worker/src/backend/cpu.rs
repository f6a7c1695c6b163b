//! The CPU backend as the engine sees it: [`tandem_cpu::CpuBackend`], its slices and its errors translated.

use std::sync::Arc;

use tandem_cpu::{CpuBackend, CpuError, CpuOptions};
use tandem_fabric::memory::PoolMemory;
use tandem_handoff::layout::PoolShape;
use tandem_model::{config::ModelConfig, weights::Weights};

use super::{Backend, BackendError, Slice};
use crate::config::{CpuMath, EngineConfig};

pub struct Cpu {
    backend: CpuBackend,
    vocab: usize,
}

impl Cpu {
    /// Packs the weights and allocates the pool that `engine` asks for; `shared_pools` as in [`CpuOptions`].
    ///
    /// # Errors
    /// When the model does not fit the pool's shape, or the system gives no memory or threads.
    pub fn start(
        model: &ModelConfig,
        weights: Weights,
        engine: &EngineConfig,
        shared_pools: bool,
    ) -> Result<Self, CpuError> {
        let (math, shape) = (math(engine.cpu_math), pool_shape(model, engine));
        let backend =
            CpuBackend::new(model, weights, CpuOptions { threads: engine.threads, math, shape, shared_pools })?;
        Ok(Self { backend, vocab: model.vocab })
    }
}

/// The pool of a worker with these settings.
pub fn pool_shape(model: &ModelConfig, engine: &EngineConfig) -> PoolShape {
    PoolShape {
        layers: model.layers as u32,
        kv_heads: model.kv_heads as u32,
        head_dim: model.head_dim as u32,
        page_size: engine.page_size,
        element_bytes: element_bytes(engine.cpu_math),
        tp: engine.tp_size,
        pages: engine.max_total_tokens / engine.page_size,
    }
}

/// Bytes of one element of the KV pool.
pub fn element_bytes(math: CpuMath) -> u32 {
    CpuBackend::element_bytes(self::math(math))
}

/// Name of the KV elements' type, as a handoff compares it.
pub fn kv_dtype(engine: &EngineConfig) -> &'static str {
    CpuBackend::kv_dtype(math(engine.cpu_math))
}

fn math(math: CpuMath) -> tandem_cpu::CpuMath {
    match math {
        CpuMath::Exact => tandem_cpu::CpuMath::Exact,
        CpuMath::Fast => tandem_cpu::CpuMath::Fast,
    }
}

impl Backend for Cpu {
    fn step(&mut self, slices: &[Slice<'_>], logits: &mut Vec<f32>) -> Result<(), BackendError> {
        self.backend.step(slices, logits).map_err(|error| BackendError(error.to_string()))
    }

    fn zero_tail(&mut self, page: u32, from_token: u32) {
        self.backend.zero_tail(page, from_token);
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn memory(&self) -> &[Arc<PoolMemory>] {
        self.backend.memory()
    }

    fn numerics_id(&self) -> String {
        self.backend.numerics_id()
    }
}
