//! Raw settings: one struct whose fields are the flags, the environment variables and the keys of a settings file.
//!
//! Later sources win: built-in default < file (`--config`, TOML or YAML) < environment (`TANDEM_WORKER_PORT=...`) < flag.
//! Keys are the flag names with underscores. A key that no flag has is refused by name, wherever it stands.

use std::path::PathBuf;

use figment::{
    Figment,
    providers::{Env, Format, Serialized, Toml, Yaml},
};
use serde::{Deserialize, Deserializer, Serialize};

use super::{CpuMath, Role};
use crate::error::StartError;

/// The prefix of the environment variables.
pub const ENV_PREFIX: &str = "TANDEM_WORKER_";

/// Serve a model: unsplit, or as the prefill or decode half of a split.
#[derive(Clone, Default, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerArgs {
    /// A settings file, .toml, .yaml or .yml; its keys are these flags with underscores
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<PathBuf>,
    /// A Hugging Face directory, a GGUF file, or a known name such as smollm2
    #[arg(long, value_name = "PATH|NAME")]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "text")]
    pub model_path: Option<String>,
    /// The model's name in the API [default: the model path]
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "text")]
    pub served_model_name: Option<String>,
    /// The address to listen on [default: 127.0.0.1]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "text")]
    pub host: Option<String>,
    /// The port of the HTTP API, 0 for any free one [default: 30000]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Which half of a split this worker is [default: null, both halves]
    #[arg(long, value_name = "MODE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disaggregation_mode: Option<Role>,
    /// Prefill: the port of the handoff; decode: the port to assume where a request names none [default: 8998]
    #[arg(long, value_name = "PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disaggregation_bootstrap_port: Option<u16>,
    /// What carries the KV pages: tcp, shm (shared memory, both halves on one host), or auto: shm where it can be had
    /// [default: auto]
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disaggregation_transfer_backend: Option<String>,
    /// Tensor-parallel ranks [default: 1]
    #[arg(long, visible_alias = "tp", value_name = "RANKS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tp_size: Option<u32>,
    /// Tokens per KV page, the same on both halves of a split [default: 16]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_size: Option<u32>,
    /// Prompt tokens per step, a multiple of the page size [default: 256]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunked_prefill_size: Option<u32>,
    /// Sequences that run at once [default: 64]
    #[arg(long, value_name = "REQUESTS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_running_requests: Option<u32>,
    /// Requests that may wait before others get 503 [default: 1024]
    #[arg(long, value_name = "REQUESTS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_queued_requests: Option<u32>,
    /// Tokens the KV pool holds [default: what the memory budget allows]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_total_tokens: Option<u32>,
    /// The memory budget of the KV pool [default: an eighth of the available memory, at most 4096]
    #[arg(long, value_name = "MIB")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_memory_mib: Option<u64>,
    /// Prompt and answer together, at most [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_length: Option<u32>,
    /// Decode: free tokens kept per running sequence before another prompt is let in [default: 128]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_reserved_decode_tokens: Option<u32>,
    /// KV pages that may stay in quarantine, up to the whole pool; with more the worker stops in order and exits with
    /// status 3 [default: a quarter of the pool]
    #[arg(long, value_name = "PAGES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quarantine_pages_max: Option<u32>,
    /// cpu, cuda or auto [default: auto]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<Device>,
    /// Clients must send this as a bearer token; health and metrics stay public
    #[arg(long, value_name = "KEY")]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "text")]
    pub api_key: Option<String>,
    /// error, warn, info, debug, trace, or a filter like tandem_worker=debug,info [default: info]
    #[arg(long, value_name = "FILTER")]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "text")]
    pub log_level: Option<String>,
    /// exact: activations in f32; fast: quantised where that is faster [default: fast]
    #[arg(long, value_name = "MODE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_math: Option<CpuMath>,
    /// Compute threads [default: the cores available]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// A file with the key that both halves of a split share; without it any decode worker may connect
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handoff_key_file: Option<PathBuf>,
    /// Decode: verify each prompt's KV pages against checksums before decoding. The prefill worker computes them for each
    /// decode worker that asks, whatever its own setting. In the environment: true, false, 1 or 0
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub enable_kv_checksum: bool,
    /// Prefill: how long a request or a reservation waits for its other half [default: 300000]
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_timeout_ms: Option<u64>,
    /// Decode: how long a reservation waits for the prompt's KV cache [default: 300000]
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_timeout_ms: Option<u64>,
    /// How often the two halves tell each other that they live [default: 5000]
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat_interval_ms: Option<u64>,
    /// Missed heartbeats after which a peer counts as lost [default: 2]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat_max_failure: Option<u32>,
    /// The largest request body [default: 33554432]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_body_bytes: Option<usize>,
    /// How long a client may take to send a request's head, and how long a connection may idle [default: 30000]
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header_timeout_ms: Option<u64>,
    /// How long a client may take to send a request's body [default: 60000]
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_timeout_ms: Option<u64>,
    /// Connections at once; more wait in the listen queue [default: 8192]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_connections: Option<usize>,
    /// How long running requests may go on after a signal to stop [default: 10000]
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shutdown_grace_ms: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    Cpu,
    Cuda,
    Auto,
}

impl WorkerArgs {
    /// HTTP connections at once.
    pub fn connections_max(&self) -> usize {
        self.max_connections.unwrap_or(8192)
    }

    /// These flags over the environment over the settings file. Merging twice changes nothing.
    pub fn merged(self) -> Result<WorkerArgs, StartError> {
        let environment = || Env::prefixed(ENV_PREFIX).filter(|key| !from_kubernetes(key.as_str()));
        let mut figment = Figment::new();
        let file = match &self.config {
            Some(file) => Some(file.clone()),
            None => std::env::var_os(format!("{ENV_PREFIX}CONFIG")).map(PathBuf::from),
        };
        if let Some(file) = &file {
            if !file.is_file() {
                return Err(StartError::Settings(format!(
                    "the settings file {} is not a readable file",
                    file.display()
                )));
            }
            figment = match file.extension().and_then(|e| e.to_str()) {
                Some("toml") => figment.merge(Toml::file_exact(file)),
                Some("yaml" | "yml") => figment.merge(Yaml::file_exact(file)),
                _ => {
                    return Err(StartError::Settings(format!(
                        "the settings file {} must end in .toml, .yaml or .yml",
                        file.display()
                    )));
                }
            };
        }
        figment
            .merge(environment())
            .merge(Serialized::defaults(&self))
            .extract()
            .map_err(|e| StartError::Settings(e.to_string()))
    }
}

/// Kubernetes puts `TANDEM_WORKER_PORT=tcp://...` and its like into every pod beside a service named tandem-worker.
fn from_kubernetes(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    key.starts_with("service_")
        || key.starts_with("port_")
        || (key == "port" && std::env::var(format!("{ENV_PREFIX}PORT")).is_ok_and(|value| value.contains("://")))
}

/// Text out of a source without types: an environment variable `API_KEY=12345` arrives as a number.
fn text<'de, D: Deserializer<'de>>(source: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Scalar {
        Text(String),
        Unsigned(u64),
        Signed(i64),
        Float(f64),
        Bool(bool),
    }
    Ok(Option::<Scalar>::deserialize(source)?.map(|scalar| match scalar {
        Scalar::Text(text) => text,
        Scalar::Unsigned(number) => number.to_string(),
        Scalar::Signed(number) => number.to_string(),
        Scalar::Float(number) => number.to_string(),
        Scalar::Bool(flag) => flag.to_string(),
    }))
}

/// A flag out of a source without types: an environment variable `ENABLE_KV_CHECKSUM=1` arrives as a number.
fn switch<'de, D: Deserializer<'de>>(source: D) -> Result<bool, D::Error> {
    let word = text(source)?.unwrap_or_default();
    match word.as_str() {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        _ => Err(serde::de::Error::custom(format!("{word:?} is none of true, false, 1 and 0"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_takes_the_words_and_the_numbers() {
        let read = |value: serde_json::Value| {
            serde_json::from_value::<WorkerArgs>(serde_json::json!({ "enable_kv_checksum": value }))
                .map(|args| args.enable_kv_checksum)
                .map_err(|error| error.to_string())
        };
        for on in [true.into(), 1.into(), "1".into(), "true".into()] {
            assert_eq!(read(on), Ok(true));
        }
        for off in [false.into(), 0.into(), "0".into(), "false".into()] {
            assert_eq!(read(off), Ok(false));
        }
        for bad in [2.into(), "yes".into(), "".into()] {
            assert!(read(bad).unwrap_err().contains("true, false, 1 and 0"));
        }
    }
}
