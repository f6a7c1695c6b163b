//! The workers as they are configured, and how often they are asked. *Pure.*

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::words::{switch, words};
use crate::error::StartError;

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct FleetArgs {
    /// Serve with prefill and decode on separate workers. In the environment: true, false, 1 or 0.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub pd_disaggregation: bool,
    /// A prefill worker and its bootstrap port; without a port the worker is asked for it. Repeatable.
    #[arg(long, value_names = ["URL", "BOOTSTRAP_PORT"], num_args = 1..=2, action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub prefill: Vec<String>,
    /// A decode worker. Repeatable.
    #[arg(long, value_name = "URL", action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub decode: Vec<String>,
    /// Workers that do both phases.
    #[arg(long, value_name = "URL", num_args = 1.., action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub worker_urls: Vec<String>,
    /// Time between two probes of a healthy worker, in milliseconds; others are probed 8 times as often [default: 2000].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe_interval_ms: Option<u64>,
    /// A probe's answer after at most, in milliseconds. A worker that answers three in a row not at all counts as silent: its
    /// legs fail, and it is not used until it answers [default: 3000].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe_timeout_ms: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    Prefill,
    Decode,
    /// Both phases in one worker.
    Plain,
}

impl Role {
    /// sglang_router's word for it.
    pub fn worker_type(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Plain => "regular",
        }
    }
}

/// Where a worker is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerSpec {
    /// `http://host:port`, as logs, metrics and lists name the worker.
    pub url: String,
    pub tls: bool,
    /// A name, an IPv4 address, or an IPv6 address in brackets.
    pub host: String,
    pub port: u16,
    pub role: Role,
    pub bootstrap_port: Option<u16>,
}

/// Checked.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    pub workers: Vec<WorkerSpec>,
    /// Prefill and decode on separate workers.
    pub split: bool,
    pub probe_interval: Duration,
    pub probe_timeout: Duration,
}

impl FleetArgs {
    pub fn checked(&self) -> Result<FleetConfig, StartError> {
        let split = self.pd_disaggregation || !self.prefill.is_empty() || !self.decode.is_empty();
        Ok(FleetConfig {
            workers: self.workers(split)?,
            split,
            probe_interval: Duration::from_millis(self.probe_interval_ms.unwrap_or(2000).max(8)),
            probe_timeout: Duration::from_millis(self.probe_timeout_ms.unwrap_or(3000).max(1)),
        })
    }

    fn workers(&self, split: bool) -> Result<Vec<WorkerSpec>, StartError> {
        let config = |text: &str| Err(StartError::Config(text.into()));
        match (split, self.prefill.is_empty(), self.decode.is_empty(), self.worker_urls.is_empty()) {
            (true, _, _, false) => return config("--worker-urls does not go with --prefill and --decode"),
            (true, true, _, _) => return config("P/D serving needs at least one --prefill URL"),
            (true, _, true, _) => return config("P/D serving needs at least one --decode URL"),
            (false, _, _, true) => {
                return config("no workers: give --pd-disaggregation --prefill URL --decode URL, or --worker-urls URL");
            }
            _ => {}
        }
        let mut workers = prefill_workers(&self.prefill)?;
        for (urls, role) in [(&self.decode, Role::Decode), (&self.worker_urls, Role::Plain)] {
            for url in urls {
                workers.push(worker(url, role)?);
            }
        }
        for (i, worker) in workers.iter().enumerate() {
            if workers[..i].iter().any(|w| w.url == worker.url) {
                return Err(StartError::Config(format!("worker {} is given twice", worker.url)));
            }
        }
        Ok(workers)
    }
}

/// `URL [PORT]` pairs as one flat list: a number or `none` belongs to the URL before it.
fn prefill_workers(words: &[String]) -> Result<Vec<WorkerSpec>, StartError> {
    let mut workers: Vec<WorkerSpec> = Vec::new();
    for word in words {
        match (word.parse::<u16>(), workers.last_mut()) {
            (Ok(port), Some(last)) if port > 0 => last.bootstrap_port = Some(port),
            (_, Some(_)) if word.eq_ignore_ascii_case("none") => {}
            _ => workers.push(worker(word, Role::Prefill)?),
        }
    }
    Ok(workers)
}

fn worker(text: &str, role: Role) -> Result<WorkerSpec, StartError> {
    let bad = |why: &str| StartError::Config(format!("worker URL {text:?}: {why}; expected http://host:port"));
    let url = url::Url::parse(text).map_err(|e| bad(&e.to_string()))?;
    let tls = match url.scheme() {
        "http" => false,
        "https" => true,
        _ => return Err(bad("its scheme is neither http nor https")),
    };
    if !matches!(url.path(), "" | "/") || url.query().is_some() || !url.username().is_empty() {
        return Err(bad("it has more than a host and a port"));
    }
    let host = url.host_str().ok_or_else(|| bad("it has no host"))?.to_owned();
    let port = url.port_or_known_default().ok_or_else(|| bad("it has no port"))?;
    let url = format!("{}://{host}:{port}", url.scheme());
    Ok(WorkerSpec { url, tls, host, port, role, bootstrap_port: None })
}

/// The IP address inside a host text, brackets or not; `None` for names.
pub fn ip_of(host: &str) -> Option<IpAddr> {
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}
