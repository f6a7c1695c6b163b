//! The gateway's settings: raw as flags, environment and file give them ([`GatewayArgs`]), then checked once ([`Config`]).
//! Flags bear sglang_router's names. A file (`--config`, TOML or YAML) is overruled by `TANDEM_GATEWAY_*`, and that by flags.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml, Yaml};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::StartError;
use crate::pair::Policy;

const ENV_PREFIX: &str = "TANDEM_GATEWAY_";

/// Raw settings. Every field is optional so that the three sources can be told apart.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(deny_unknown_fields)]
pub struct GatewayArgs {
    /// A TOML or YAML file with these settings, named as the flags with underscores.
    #[arg(long, value_name = "FILE", env = "TANDEM_GATEWAY_CONFIG")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
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
    /// How workers are picked [default: power_of_two].
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// How prefill workers are picked [default: --policy].
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_policy: Option<Policy>,
    /// How decode workers are picked [default: --policy].
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_policy: Option<Policy>,
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
    /// A request's whole time at most, in seconds [default: 1800].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_timeout_secs: Option<u64>,
    /// Connecting to a worker at most, in milliseconds [default: 5000].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_timeout_ms: Option<u64>,
    /// A streamed answer's first token after at most, in seconds [default: 600].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_timeout_secs: Option<u64>,
    /// Silence between two pieces of a streamed answer at most, in seconds [default: 120].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silence_timeout_secs: Option<u64>,
    /// A client that takes no byte for this many seconds counts as gone [default: 120].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_write_timeout_secs: Option<u64>,
    /// A client's request must arrive within this many seconds: its head, and then its body, which gets another second for
    /// each 16 KiB that came [default: 60].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_read_timeout_secs: Option<u64>,
    /// A request body's bytes at most [default: 33554432, as in the workers].
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_payload_size: Option<usize>,
    /// Further pairs tried when a worker cannot be reached, before anything was sent to it [default: 4].
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_max_retries: Option<u32>,
    /// Time between two probes of a healthy worker, in milliseconds; others are probed 8 times as often [default: 2000].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe_interval_ms: Option<u64>,
    /// A probe's answer after at most, in milliseconds. A worker that answers three in a row not at all counts as silent: its
    /// legs fail, and it is not used until it answers [default: 3000].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe_timeout_ms: Option<u64>,
    /// Running exchanges may go on for this long after a first SIGTERM or SIGINT, in seconds [default: 180].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shutdown_grace_period_secs: Option<u64>,
    /// Threads of the data plane [default: one per CPU].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// error, warn, info, debug or trace, or a filter as tracing understands it [default: info].
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_level: Option<String>,
    /// Clients must send `Authorization: Bearer KEY`; workers get the same from probes.
    #[arg(long, value_name = "KEY")]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "word")]
    pub api_key: Option<String>,
    /// Write the addresses actually listened on into this file, as JSON, once both listeners are bound.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address_file: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Word {
    Text(String),
    Number(u64),
}

impl Word {
    fn text(self) -> String {
        match self {
            Word::Text(text) => text,
            Word::Number(number) => number.to_string(),
        }
    }
}

/// A string or number: the environment's `1234` is a key as much as `abcd` is.
fn word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<Word>::deserialize(deserializer)?.map(Word::text))
}

/// A flag: the environment's `1` is as good as its `true`.
fn switch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Switch {
        Bool(bool),
        Word(Word),
    }
    let text = match Switch::deserialize(deserializer)? {
        Switch::Bool(on) => return Ok(on),
        Switch::Word(word) => word.text(),
    };
    match text.as_str() {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        _ => Err(serde::de::Error::custom(format!("{text:?} is none of true, false, 1 and 0"))),
    }
}

/// A list, or one string of words separated by blanks or commas.
fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Words {
        Many(Vec<Word>),
        One(Word),
    }
    let words = match Words::deserialize(deserializer)? {
        Words::Many(words) => words,
        Words::One(word) => vec![word],
    };
    let split = |word: Word| {
        let text = word.text();
        text.split([' ', ',', '\t', '\n']).filter(|w| !w.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    Ok(words.into_iter().flat_map(split).collect())
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

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    pub connect: Duration,
    pub first_token: Duration,
    pub silence: Duration,
    pub whole: Duration,
    pub client_write: Duration,
    pub client_read: Duration,
    pub drain: Duration,
}

/// Checked settings.
#[derive(Clone, Debug)]
pub struct Config {
    pub workers: Vec<WorkerSpec>,
    /// Prefill and decode on separate workers.
    pub split: bool,
    pub prefill_policy: Policy,
    pub decode_policy: Policy,
    pub listen: (String, u16),
    pub metrics_listen: (String, u16),
    pub deadlines: Deadlines,
    pub body_bytes_max: usize,
    pub retries_max: u32,
    pub probe_interval: Duration,
    pub probe_timeout: Duration,
    pub threads: usize,
    pub log_level: String,
    pub api_key: Option<String>,
    pub address_file: Option<PathBuf>,
}

impl GatewayArgs {
    /// Flags over environment over file.
    pub fn merged(self) -> Result<GatewayArgs, StartError> {
        let file = self.config.clone();
        let mut figment = Figment::new();
        if let Some(path) = &file {
            let is_yaml = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
            let shown = path.display();
            if !path.is_file() {
                return Err(StartError::Config(format!("the configuration file {shown} does not exist")));
            }
            figment = if is_yaml { figment.merge(Yaml::file(path)) } else { figment.merge(Toml::file(path)) };
            alone(&format!("the configuration file {shown}"), &figment)?;
        }
        let port = std::env::var(format!("{ENV_PREFIX}PORT")).unwrap_or_default();
        let environment = Env::prefixed(ENV_PREFIX).ignore(&["config"]);
        let environment = environment.filter(move |key| !from_kubernetes(key.as_str(), &port));
        alone(&format!("the environment's {ENV_PREFIX}*"), &Figment::from(environment.clone()))?;
        let merged = figment.merge(environment).merge(Serialized::defaults(&self)).extract();
        let mut merged: GatewayArgs = merged.map_err(|e| StartError::Config(format!("configuration: {e}")))?;
        merged.config = file;
        Ok(merged)
    }

    /// Checks what the sources gave.
    pub fn checked(self) -> Result<Config, StartError> {
        let split = self.pd_disaggregation || !self.prefill.is_empty() || !self.decode.is_empty();
        let workers = self.workers(split)?;
        let policy = self.policy.unwrap_or(Policy::PowerOfTwo);
        let secs = |name: &str, given: Option<u64>, default: u64| match given.unwrap_or(default) {
            0 => Err(StartError::Config(format!("--{name} must be at least 1"))),
            secs => Ok(Duration::from_secs(secs)),
        };
        let whole = secs("request-timeout-secs", self.request_timeout_secs, 1800)?;
        let deadlines = Deadlines {
            connect: Duration::from_millis(self.connect_timeout_ms.unwrap_or(5000).max(1)),
            first_token: secs("first-token-timeout-secs", self.first_token_timeout_secs, 600)?.min(whole),
            silence: secs("silence-timeout-secs", self.silence_timeout_secs, 120)?.min(whole),
            whole,
            client_read: secs("client-read-timeout-secs", self.client_read_timeout_secs, 60)?,
            client_write: secs("client-write-timeout-secs", self.client_write_timeout_secs, 120)?,
            drain: Duration::from_secs(self.shutdown_grace_period_secs.unwrap_or(180)),
        };
        let host = |given: Option<String>| given.unwrap_or_else(|| "0.0.0.0".into());
        let cpus = std::thread::available_parallelism().map_or(2, |n| n.get());
        Ok(Config {
            workers,
            split,
            prefill_policy: self.prefill_policy.unwrap_or(policy),
            decode_policy: self.decode_policy.unwrap_or(policy),
            listen: (host(self.host), self.port.unwrap_or(30000)),
            metrics_listen: (host(self.prometheus_host), self.prometheus_port.unwrap_or(29000)),
            deadlines,
            body_bytes_max: self.max_payload_size.unwrap_or(32 << 20),
            retries_max: self.retry_max_retries.unwrap_or(4),
            probe_interval: Duration::from_millis(self.probe_interval_ms.unwrap_or(2000).max(8)),
            probe_timeout: Duration::from_millis(self.probe_timeout_ms.unwrap_or(3000).max(1)),
            threads: self.threads.unwrap_or(cpus).clamp(1, 1024),
            log_level: self.log_level.unwrap_or_else(|| "info".into()),
            api_key: self.api_key,
            address_file: self.address_file,
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

/// Checks one source by itself, so that a complaint says where the mistake is.
fn alone(source: &str, figment: &Figment) -> Result<(), StartError> {
    match figment.extract::<GatewayArgs>() {
        Ok(_) => Ok(()),
        Err(error) => Err(StartError::Config(format!("{source}: {error}"))),
    }
}

/// Kubernetes puts `TANDEM_GATEWAY_PORT=tcp://...` and its like into every pod beside a service named tandem-gateway.
/// `port`: the value of the first.
fn from_kubernetes(key: &str, port: &str) -> bool {
    let key = key.to_ascii_lowercase();
    key.starts_with("service_") || key.starts_with("port_") || (key == "port" && port.contains("://"))
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: GatewayArgs,
    }

    fn parse(line: &str) -> GatewayArgs {
        Cli::try_parse_from(std::iter::once("x").chain(line.split_whitespace())).unwrap().args
    }

    fn config(line: &str) -> Result<Config, StartError> {
        parse(line).checked()
    }

    #[test]
    fn sglang_routers_flags() {
        let config = config(
            "--pd-disaggregation --prefill http://127.0.0.1:1 8998 --prefill http://[::1]:2 --prefill http://h:3 none \
             --decode http://d:4 --policy random --decode-policy round_robin --port 0",
        )
        .unwrap();
        let ports: Vec<_> = config.workers.iter().map(|w| (w.host.as_str(), w.port, w.bootstrap_port)).collect();
        assert_eq!(ports, [("127.0.0.1", 1, Some(8998)), ("[::1]", 2, None), ("h", 3, None), ("d", 4, None)]);
        assert_eq!((config.prefill_policy, config.decode_policy), (Policy::Random, Policy::RoundRobin));
        assert!(config.split && config.listen.1 == 0);
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (line, expected) in [
            ("", "no workers"),
            ("--prefill http://p:1", "--decode"),
            ("--pd-disaggregation --decode http://d:1", "--prefill"),
            ("--worker-urls ftp://x:1", "scheme"),
            ("--worker-urls http://x:1/path", "more than a host"),
            ("--worker-urls http://x:1 http://x:1", "twice"),
            ("--worker-urls http://x:1 --request-timeout-secs 0", "request-timeout-secs"),
        ] {
            let error = config(line).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn file_below_flags() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gateway.toml");
        std::fs::write(
            &path,
            "port = 1\nhost = \"::1\"\nprefill = [\"http://a:1 8998\", \"http://b:2\"]\ndecode = \"http://d:1\"\n",
        )
        .unwrap();
        let merged = parse(&format!("--config {} --port 2", path.display())).merged().unwrap();
        assert_eq!((merged.port, merged.host.as_deref()), (Some(2), Some("::1")));
        let checked = merged.checked().unwrap();
        assert_eq!(checked.workers.len(), 3);
        assert_eq!(checked.workers[0].bootstrap_port, Some(8998));
        std::fs::write(&path, "prot = 1\n").unwrap();
        let error = parse(&format!("--config {}", path.display())).merged().unwrap_err().to_string();
        assert!(error.contains("prot") && error.contains("file") && error.contains("gateway.toml"), "{error}");
    }

    #[test]
    fn a_switch_takes_the_words_and_the_numbers() {
        let read = |value: serde_json::Value| {
            serde_json::from_value::<GatewayArgs>(serde_json::json!({ "pd_disaggregation": value }))
                .map(|args| args.pd_disaggregation)
                .map_err(|error| error.to_string())
        };
        for (on, values) in
            [(true, [true.into(), 1.into(), "true".into()]), (false, [false.into(), 0.into(), "0".into()])]
        {
            for value in values {
                assert_eq!(read(value), Ok(on));
            }
        }
        assert!(read("yes".into()).unwrap_err().contains("true, false, 1 and 0"));
    }

    #[test]
    fn variables_of_kubernetes_are_no_settings() {
        for key in ["SERVICE_HOST", "service_port", "SERVICE_PORT_HTTP", "PORT_30000_TCP", "port_30000_tcp_addr"] {
            assert!(from_kubernetes(key, ""), "{key}");
        }
        assert!(from_kubernetes("port", "tcp://10.0.0.1:30000"));
        assert!(
            !from_kubernetes("port", "30000")
                && !from_kubernetes("host", "")
                && !from_kubernetes("prometheus_port", "")
        );
    }

    #[test]
    fn bodies_have_the_workers_limit() {
        assert_eq!(config("--worker-urls http://x:1").unwrap().body_bytes_max, 32 << 20);
    }
}
