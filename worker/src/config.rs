//! The worker's settings after parsing and checking: what the rooms of the worker may rely on.

use std::path::PathBuf;

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill and decode in one worker.
    Null,
    Prefill,
    Decode,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuMath {
    /// Weights as the file defines them, activations and KV in f32.
    Exact,
    /// Quantised activations where that is faster.
    Fast,
}

/// Limits of the scheduler and the pool, all checked against the model.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub role: Role,
    pub page_size: u32,
    /// Prompt tokens per step, over all sequences.
    pub chunked_prefill_size: u32,
    pub max_running_requests: u32,
    /// Tokens that wait in the queue at most before 503, in requests.
    pub queue_requests_max: u32,
    /// Capacity of the pool in tokens.
    pub max_total_tokens: u32,
    pub context_length: u32,
    /// Decode only: free tokens kept per running sequence before a new Reserve.
    pub num_reserved_decode_tokens: u32,
    pub tp_size: u32,
    pub cpu_math: CpuMath,
    pub threads: usize,
}

/// Deadlines of the handoff, each in milliseconds.
#[derive(Clone, Debug)]
pub struct HandoffConfig {
    /// P: from the request to D's Reserve, and a Reserve without request.
    pub bootstrap_timeout_ms: u64,
    /// D: from Reserve to Done.
    pub waiting_timeout_ms: u64,
    pub heartbeat_interval_ms: u64,
    pub heartbeat_max_failure: u32,
    pub key_file: Option<PathBuf>,
    /// P's bootstrap listener.
    pub bootstrap_host: String,
    pub bootstrap_port: u16,
}
