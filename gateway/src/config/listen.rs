//! Where the gateway listens, with how many threads, and what it takes off a connection. *Pure.*

use std::path::PathBuf;

use http::HeaderName;
use serde::{Deserialize, Serialize};

use crate::config::words::{switch, words};
use crate::error::StartError;

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
    /// Address of the listener for administering [default: 127.0.0.1].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_host: Option<String>,
    /// Port of a listener of its own for administering, after which the data listener has none of it; 0 lets the system
    /// choose [default: none, the data listener administers].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_port: Option<u16>,
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
    /// Write a line of JSON per request to this file, which may be moved away to rotate it; `-` is standard output
    /// [default: none].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_log: Option<PathBuf>,
    /// A request body's bytes at most [default: 33554432, as in the workers].
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_payload_size: Option<usize>,
    /// A request head's bytes at most; larger ones are answered 431 [default: 65536].
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_header_size: Option<usize>,
    /// Client connections at a time at most; those beyond are answered 503 and closed [default: 65536].
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_connections: Option<usize>,
    /// Headers that may hold a client's own request id; the first that does names the request
    /// [default: x-request-id x-correlation-id x-trace-id request-id].
    #[arg(long, value_name = "NAME", num_args = 1.., action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub request_id_headers: Vec<String>,
    /// Take HTTP/2 without TLS from clients that begin with its preface, beside HTTP/1.1 [default: off].
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub h2c: bool,
}

/// Checked.
#[derive(Clone, Debug)]
pub struct Listen {
    pub data: (String, u16),
    pub metrics: (String, u16),
    pub admin: Option<(String, u16)>,
    pub threads: usize,
    pub address_file: Option<PathBuf>,
    pub log_level: String,
    pub access_log: Option<PathBuf>,
    pub body_bytes_max: usize,
    pub head_bytes_max: usize,
    pub connections_max: usize,
    pub request_id_headers: Vec<HeaderName>,
    pub h2c: bool,
}

/// Below this no client's head fits.
const HEAD_BYTES_LEAST: usize = 1024;

impl ListenArgs {
    pub fn checked(&self) -> Result<Listen, StartError> {
        let host = |given: &Option<String>| given.clone().unwrap_or_else(|| "0.0.0.0".into());
        let cpus = std::thread::available_parallelism().map_or(2, |n| n.get());
        let head_bytes_max = self.max_header_size.unwrap_or(64 << 10);
        if head_bytes_max < HEAD_BYTES_LEAST {
            return Err(StartError::Config(format!("--max-header-size must be at least {HEAD_BYTES_LEAST}")));
        }
        if self.max_connections == Some(0) {
            return Err(StartError::Config("--max-connections must be at least 1".into()));
        }
        Ok(Listen {
            data: (host(&self.host), self.port.unwrap_or(30000)),
            metrics: (host(&self.prometheus_host), self.prometheus_port.unwrap_or(29000)),
            admin: self.admin_port.map(|port| (self.admin_host.clone().unwrap_or_else(|| "127.0.0.1".into()), port)),
            threads: self.threads.unwrap_or(cpus).clamp(1, 1024),
            address_file: self.address_file.clone(),
            log_level: self.log_level.clone().unwrap_or_else(|| "info".into()),
            access_log: self.access_log.clone(),
            body_bytes_max: self.max_payload_size.unwrap_or(32 << 20),
            head_bytes_max,
            connections_max: self.max_connections.unwrap_or(1 << 16),
            request_id_headers: self.request_id_headers()?,
            h2c: self.h2c,
        })
    }

    fn request_id_headers(&self) -> Result<Vec<HeaderName>, StartError> {
        const USUAL: [&str; 4] = ["x-request-id", "x-correlation-id", "x-trace-id", "request-id"];
        let given = self.request_id_headers.iter().map(String::as_str);
        let names: Vec<&str> = if self.request_id_headers.is_empty() { USUAL.into() } else { given.collect() };
        let parse = |name: &&str| {
            HeaderName::try_from(*name)
                .map_err(|_| StartError::Config(format!("--request-id-headers: {name:?} is no header's name")))
        };
        names.iter().map(parse).collect()
    }
}
