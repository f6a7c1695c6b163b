//! The workers as they are configured, how they are asked for their health, and when their breakers open. *Pure.*

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::config::security::Secret;
use crate::config::words::{switch, word, words};
use crate::error::StartError;
use crate::fleet::{Rules, Thresholds};

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct FleetArgs {
    /// Serve with prefill and decode on separate workers. In the environment: true, false, 1 or 0.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub pd_disaggregation: bool,
    /// Whose prefill and decode workers these are, which decides what is sent to them [default: tandem].
    #[arg(long, value_enum, value_name = "KIND")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pd_backend: Option<Backend>,
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
    /// Start without workers: they come by POST /workers. In the environment: true, false, 1 or 0.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub enable_igw: bool,
    /// The model of all workers given by flags; without it each is asked for the names it serves.
    #[arg(long, value_name = "NAME")]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "word")]
    pub served_model_name: Option<String>,
    /// Pick a data-parallel rank of a worker, too, and tell it which. In the environment: true, false, 1 or 0.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub dp_aware: bool,
    /// Open legs of a removed worker may go on for this long, in seconds [default: --request-timeout-secs].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_drain_timeout_secs: Option<f64>,
    /// Time between two health checks of a healthy worker, in seconds, also fractions; others are checked 8 times as often
    /// [default: 2].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_check_interval_secs: Option<f64>,
    /// A health check that is not answered within this many seconds, also fractions, is a failed one; an answer that comes
    /// later still counts [default: 3].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_check_timeout_secs: Option<f64>,
    /// After so many checks in a row without an answer a worker counts as silent: its legs fail, and it is not used until it
    /// answers [default: 3].
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_failure_threshold: Option<u32>,
    /// After so many answered checks in a row a worker is healthy again [default: 1].
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_success_threshold: Option<u32>,
    /// The path of health checks [default: /health].
    #[arg(long, value_name = "PATH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_check_endpoint: Option<String>,
    /// Ask no worker for its health; what can be connected to is used. In the environment: true, false, 1 or 0.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub disable_health_check: bool,
    /// After so many failed legs in a row a worker's circuit breaker opens; also when half of the legs that ended within the
    /// window failed, of twice as many at least [default: 10].
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cb_failure_threshold: Option<u32>,
    /// After so many trials that went well, one at a time, an open breaker closes [default: 1].
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cb_success_threshold: Option<u32>,
    /// An open breaker waits a second before it tries a leg, twice as long after each that fails, and this many seconds at
    /// most [default: 10].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cb_timeout_duration_secs: Option<f64>,
    /// The window in which a breaker compares failed legs with others, in seconds [default: 30].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cb_window_duration_secs: Option<f64>,
    /// No circuit breakers. In the environment: true, false, 1 or 0.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub disable_circuit_breaker: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Role {
    Prefill,
    Decode,
    /// Both phases in one worker.
    Plain,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Prefill, Role::Decode, Role::Plain];

    /// What errors call it.
    pub fn name(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Plain => "plain",
        }
    }

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
    /// Its model; `None` has it asked for the names it serves.
    pub model: Option<String>,
    /// Sent to it as `Authorization: Bearer`, instead of the gateway's key.
    pub api_key: Option<Secret>,
    pub labels: BTreeMap<String, String>,
    /// Data-parallel ranks; `None` has it asked.
    pub dp_size: Option<u16>,
}

impl WorkerSpec {
    /// A worker at `http://host:port` (or https). The error says what is wrong with the URL.
    pub fn new(url: &str, role: Role) -> Result<WorkerSpec, String> {
        let bad = |why: &str| format!("worker URL {url:?}: {why}; expected http://host:port");
        let parsed = url::Url::parse(url).map_err(|e| bad(&e.to_string()))?;
        let tls = match parsed.scheme() {
            "http" => false,
            "https" => true,
            _ => return Err(bad("its scheme is neither http nor https")),
        };
        if !matches!(parsed.path(), "" | "/") || parsed.query().is_some() || !parsed.username().is_empty() {
            return Err(bad("it has more than a host and a port"));
        }
        let host = parsed.host_str().ok_or_else(|| bad("it has no host"))?.to_owned();
        let port = parsed.port_or_known_default().filter(|p| *p > 0).ok_or_else(|| bad("it has no port"))?;
        Ok(WorkerSpec {
            url: format!("{}://{host}:{port}", parsed.scheme()),
            tls,
            host,
            port,
            role,
            bootstrap_port: None,
            model: None,
            api_key: None,
            labels: BTreeMap::new(),
            dp_size: None,
        })
    }
}

/// Checked.
#[derive(Clone, PartialEq, Debug)]
pub struct FleetConfig {
    pub workers: Vec<WorkerSpec>,
    pub backend: Backend,
    pub dp_aware: bool,
    /// `None` is a request's whole time.
    pub drain: Option<Duration>,
    pub check_interval: Duration,
    pub check_timeout: Duration,
    pub check_endpoint: String,
    pub checks_disabled: bool,
    pub thresholds: Thresholds,
    pub breaker: Option<Rules>,
}

/// An open breaker's first wait.
const BREAKER_FIRST_WAIT: Duration = Duration::from_secs(1);

impl FleetArgs {
    /// `discovered`: workers come from somewhere else, too.
    pub fn checked(&self, discovered: bool) -> Result<FleetConfig, StartError> {
        let split = self.pd_disaggregation || !self.prefill.is_empty() || !self.decode.is_empty();
        let mut workers = self.workers(split, discovered)?;
        for worker in &mut workers {
            worker.model.clone_from(&self.served_model_name);
        }
        let check_endpoint = self.health_check_endpoint.clone().unwrap_or_else(|| "/health".into());
        if !check_endpoint.starts_with('/') {
            return Err(StartError::Config(format!(
                "--health-check-endpoint {check_endpoint:?} must begin with a slash"
            )));
        }
        Ok(FleetConfig {
            workers,
            backend: self.pd_backend.unwrap_or_default(),
            dp_aware: self.dp_aware,
            drain: self
                .worker_drain_timeout_secs
                .map(|secs| seconds("worker-drain-timeout-secs", Some(secs), secs))
                .transpose()?,
            check_interval: seconds("health-check-interval-secs", self.health_check_interval_secs, 2.0)?,
            check_timeout: seconds("health-check-timeout-secs", self.health_check_timeout_secs, 3.0)?,
            check_endpoint,
            checks_disabled: self.disable_health_check,
            thresholds: Thresholds {
                failures: count("health-failure-threshold", self.health_failure_threshold, 3)?,
                successes: count("health-success-threshold", self.health_success_threshold, 1)?,
            },
            breaker: if self.disable_circuit_breaker { None } else { Some(self.breaker()?) },
        })
    }

    fn breaker(&self) -> Result<Rules, StartError> {
        let open_max = seconds("cb-timeout-duration-secs", self.cb_timeout_duration_secs, 10.0)?;
        Ok(Rules {
            failures_in_a_row: count("cb-failure-threshold", self.cb_failure_threshold, 10)?,
            trials: count("cb-success-threshold", self.cb_success_threshold, 1)?,
            open_first: BREAKER_FIRST_WAIT.min(open_max),
            open_max,
            window: seconds("cb-window-duration-secs", self.cb_window_duration_secs, 30.0)?,
        })
    }

    fn workers(&self, split: bool, discovered: bool) -> Result<Vec<WorkerSpec>, StartError> {
        let config = |text: &str| Err(StartError::Config(text.into()));
        match (split, self.prefill.is_empty(), self.decode.is_empty(), self.worker_urls.is_empty()) {
            _ if self.enable_igw || discovered => {}
            (true, true, _, _) => return config("P/D serving needs at least one --prefill URL"),
            (true, _, true, _) => return config("P/D serving needs at least one --decode URL"),
            (false, _, _, true) => {
                return config(
                    "no workers: give --pd-disaggregation --prefill URL --decode URL, or --worker-urls URL; with \
                     --workers-file, DNS or Kubernetes they are found, and with --enable-igw they may come later, by POST \
                     /workers",
                );
            }
            _ => {}
        }
        let mut workers = prefill_workers(&self.prefill)?;
        for (urls, role) in [(&self.decode, Role::Decode), (&self.worker_urls, Role::Plain)] {
            for url in urls {
                workers.push(WorkerSpec::new(url, role).map_err(StartError::Config)?);
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
            _ => workers.push(WorkerSpec::new(word, Role::Prefill).map_err(StartError::Config)?),
        }
    }
    Ok(workers)
}

/// A time in seconds, also fractions: more than nothing, and less than a year.
fn seconds(name: &str, given: Option<f64>, default: f64) -> Result<Duration, StartError> {
    let secs = given.unwrap_or(default);
    match secs.is_finite() && (0.001..=31_536_000.0).contains(&secs) {
        true => Ok(Duration::from_secs_f64(secs)),
        false => Err(StartError::Config(format!("--{name} must be between 0.001 and 31536000 seconds"))),
    }
}

fn count(name: &str, given: Option<u32>, default: u32) -> Result<u32, StartError> {
    match given.unwrap_or(default) {
        0 => Err(StartError::Config(format!("--{name} must be at least 1"))),
        count => Ok(count),
    }
}

/// The IP address inside a host text, brackets or not; `None` for names.
pub fn ip_of(host: &str) -> Option<IpAddr> {
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}
