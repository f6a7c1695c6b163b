//! Where the gateway listens, with how many threads, and what it takes off a connection. *Pure.*

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct ListenArgs {
    /// Address to listen on [default: 0.0.0.0].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Port to listen on; 0 lets the system choose [default: 30000].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Address of the metrics listener [default: 0.0.0.0].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prometheus_host: Option<String>,
    /// Port of the metrics listener; 0 lets the system choose [default: 29000].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prometheus_port: Option<u16>,
    /// Threads of the data plane [default: one per CPU].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Write the addresses actually listened on into this file, as JSON, once both listeners are bound.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address_file: Option<PathBuf>,
    /// error, warn, info, debug or trace, or a filter as tracing understands it [default: info].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_level: Option<String>,
    /// A request body's bytes at most [default: 33554432, as in the workers].
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_payload_size: Option<usize>,
}

/// Checked.
#[derive(Clone, Debug)]
pub struct Listen {
    pub data: (String, u16),
    pub metrics: (String, u16),
    pub threads: usize,
    pub address_file: Option<PathBuf>,
    pub log_level: String,
    pub body_bytes_max: usize,
}

impl ListenArgs {
    pub fn checked(&self) -> Listen {
        let host = |given: &Option<String>| given.clone().unwrap_or_else(|| "0.0.0.0".into());
        let cpus = std::thread::available_parallelism().map_or(2, |n| n.get());
        Listen {
            data: (host(&self.host), self.port.unwrap_or(30000)),
            metrics: (host(&self.prometheus_host), self.prometheus_port.unwrap_or(29000)),
            threads: self.threads.unwrap_or(cpus).clamp(1, 1024),
            address_file: self.address_file.clone(),
            log_level: self.log_level.clone().unwrap_or_else(|| "info".into()),
            body_bytes_max: self.max_payload_size.unwrap_or(32 << 20),
        }
    }
}
