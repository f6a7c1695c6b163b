//! The worker's settings: raw arguments ([`args`]) become checked values once ([`check`]), and the rooms of the worker
//! rely on the checked values of this file. *Pure.*

use std::path::PathBuf;

use tandem_handoff::wire::transfer::Backend;

pub mod args;
pub mod check;

pub use args::WorkerArgs;

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill and decode in one worker.
    Null,
    Prefill,
    Decode,
}

impl Role {
    /// The name that flags, `/server_info` and `/v1/loads` use.
    pub fn name(self) -> &'static str {
        match self {
            Role::Null => "null",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }

    /// The value of SGLang's metric label `engine_type`.
    pub fn engine_type(self) -> &'static str {
        match self {
            Role::Null => "unified",
            other => other.name(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
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
    /// With more pages in quarantine the worker ends.
    pub quarantine_pages_max: u32,
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
    /// D: compare a checksum per page and KV head before the commit.
    pub kv_checksum: bool,
    /// What may carry the pages.
    pub transfer_backend: Backend,
    /// P's bootstrap listener.
    pub bootstrap_host: String,
    pub bootstrap_port: u16,
}

/// Where the worker listens, who may ask, and how much of a request it takes.
#[derive(Clone)]
pub struct HttpConfig {
    pub host: String,
    /// 0 lets the operating system choose.
    pub port: u16,
    pub api_key: Option<String>,
    pub body_bytes_max: usize,
    /// From the end of the last answer, or the connection's start, to the end of a request's head.
    pub header_timeout_ms: u64,
    /// From the end of the head to the end of the body.
    pub body_timeout_ms: u64,
    pub connections_max: usize,
    /// From the signal to stop until running requests are cut.
    pub shutdown_grace_ms: u64,
}

impl std::fmt::Debug for HttpConfig {
    /// Leaves the key out, so that no log line can carry it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpConfig").field("host", &self.host).field("port", &self.port).finish_non_exhaustive()
    }
}
