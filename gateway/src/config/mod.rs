//! The gateway's settings: raw as flags, environment and file give them ([`GatewayArgs`]), then checked once ([`Config`]).
//! Flags bear sglang_router's names. A file (`--config`, TOML or YAML) is overruled by `TANDEM_GATEWAY_*`, and that by flags.
//! One file per group of settings: adding a setting is a field there, adding a group is a line in each list of this file.

mod admission;
mod deadlines;
mod discovery;
mod fleet;
mod listen;
mod pair;
mod reload;
mod retry;
mod security;
mod upgrade;
mod words;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args as _;
use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml, Yaml};
use serde::Deserialize;

pub use admission::{AdmissionArgs, AdmissionConfig};
pub use deadlines::{DeadlineArgs, Deadlines};
pub use discovery::{DiscoveryArgs, DiscoveryConfig, Dns, DnsName, Kubernetes, WatchedFile};
pub use fleet::{FleetArgs, FleetConfig, Role, WorkerSpec, ip_of};
pub use listen::{Listen, ListenArgs};
pub use pair::{PairArgs, PairConfig};
pub use retry::{Retries, RetryArgs};
pub use security::{Class, KeySpec, RateSpec, Secret, Security, SecurityArgs, ServerTls, WorkerTls};
pub use upgrade::{Upgrade, UpgradeArgs};

use crate::error::StartError;

const ENV_PREFIX: &str = "TANDEM_GATEWAY_";

/// Raw settings. Every field is optional so that the three sources can be told apart.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct GatewayArgs {
    /// A TOML or YAML file with these settings, named as the flags with underscores.
    #[arg(long, value_name = "FILE", env = "TANDEM_GATEWAY_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Workers")]
    pub fleet: FleetArgs,
    #[command(flatten, next_help_heading = "Picking workers")]
    pub pair: PairArgs,
    #[command(flatten, next_help_heading = "Finding workers")]
    pub discovery: DiscoveryArgs,
    #[command(flatten, next_help_heading = "Listening")]
    pub listen: ListenArgs,
    #[command(flatten, next_help_heading = "Deadlines")]
    pub deadlines: DeadlineArgs,
    #[command(flatten, next_help_heading = "Trying again")]
    pub retry: RetryArgs,
    #[command(flatten, next_help_heading = "Admission")]
    pub admission: AdmissionArgs,
    #[command(flatten, next_help_heading = "Security")]
    pub security: SecurityArgs,
    #[command(flatten, next_help_heading = "Upgrade")]
    pub upgrade: UpgradeArgs,
}

/// Checked settings.
#[derive(Clone, Debug)]
pub struct Config {
    pub fleet: FleetConfig,
    pub pair: PairConfig,
    pub discovery: DiscoveryConfig,
    pub listen: Listen,
    pub deadlines: Deadlines,
    pub retries: Retries,
    pub admission: AdmissionConfig,
    pub security: Security,
    pub upgrade: Upgrade,
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
        let merged = self.over(figment.merge(environment));
        let merged = extract(&merged).map_err(|e| StartError::Config(format!("configuration: {e}")))?;
        Ok(GatewayArgs { config: file, ..merged })
    }

    /// These settings over what `below` says.
    fn over(&self, below: Figment) -> Figment {
        below
            .merge(Serialized::defaults(&self.fleet))
            .merge(Serialized::defaults(&self.pair))
            .merge(Serialized::defaults(&self.discovery))
            .merge(Serialized::defaults(&self.listen))
            .merge(Serialized::defaults(&self.deadlines))
            .merge(Serialized::defaults(&self.retry))
            .merge(Serialized::defaults(&self.admission))
            .merge(Serialized::defaults(&self.security))
            .merge(Serialized::defaults(&self.upgrade))
    }

    /// Checks what the sources gave.
    pub fn checked(self) -> Result<Config, StartError> {
        let discovery = self.discovery.checked()?;
        Ok(Config {
            fleet: self.fleet.checked(discovery.any())?,
            pair: self.pair.checked()?,
            listen: self.listen.checked()?,
            discovery,
            deadlines: self.deadlines.checked()?,
            retries: self.retry.checked()?,
            admission: self.admission.checked()?,
            security: self.security.checked()?,
            upgrade: self.upgrade.checked()?,
        })
    }
}

/// All groups of one source. What is no setting is found by [`alone`].
fn extract(figment: &Figment) -> Result<GatewayArgs, String> {
    Ok(GatewayArgs {
        config: None,
        fleet: group(figment)?,
        discovery: group(figment)?,
        pair: group(figment)?,
        listen: group(figment)?,
        deadlines: group(figment)?,
        retry: group(figment)?,
        admission: group(figment)?,
        security: group(figment)?,
        upgrade: group(figment)?,
    })
}

fn group<'a, T: Deserialize<'a>>(figment: &Figment) -> Result<T, String> {
    figment.extract().map_err(|error| error.to_string())
}

/// Checks one source by itself, so that a complaint says where the mistake is.
fn alone(source: &str, figment: &Figment) -> Result<(), StartError> {
    let bad = |what: String| Err(StartError::Config(format!("{source}: {what}")));
    let given = extract(figment).and_then(|_| group::<BTreeMap<String, figment::value::Value>>(figment));
    match given.map(|settings| settings.into_keys().find(|key| !is_known(key))) {
        Err(error) => bad(error),
        Ok(Some(key)) => bad(format!("{key:?} is no setting; `tandem gateway --help` lists them")),
        Ok(None) => Ok(()),
    }
}

/// Settings are named as the flags, with underscores.
fn is_known(key: &str) -> bool {
    let flags = GatewayArgs::augment_args(clap::Command::new(""));
    key != "config" && flags.get_arguments().any(|flag| flag.get_id() == key)
}

/// Kubernetes puts `TANDEM_GATEWAY_PORT=tcp://...` and its like into every pod beside a service named tandem-gateway.
/// `port`: the value of the first.
fn from_kubernetes(key: &str, port: &str) -> bool {
    let key = key.to_ascii_lowercase();
    key.starts_with("service_") || key.starts_with("port_") || (key == "port" && port.contains("://"))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::pair::PolicyName;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: GatewayArgs,
    }

    /// A command line of flags.
    pub fn parse(line: &str) -> GatewayArgs {
        Cli::try_parse_from(std::iter::once("x").chain(line.split_whitespace())).unwrap().args
    }

    pub fn config(line: &str) -> Result<Config, StartError> {
        parse(line).checked()
    }

    #[test]
    fn sglang_routers_flags() {
        let config = config(
            "--pd-disaggregation --prefill http://127.0.0.1:1 8998 --prefill http://[::1]:2 --prefill http://h:3 none \
             --decode http://d:4 --policy random --decode-policy round_robin --port 0",
        )
        .unwrap();
        let ports: Vec<_> = config.fleet.workers.iter().map(|w| (w.host.as_str(), w.port, w.bootstrap_port)).collect();
        assert_eq!(ports, [("127.0.0.1", 1, Some(8998)), ("[::1]", 2, None), ("h", 3, None), ("d", 4, None)]);
        assert_eq!(
            (config.pair.prefill_policy, config.pair.decode_policy),
            (PolicyName::Random, PolicyName::RoundRobin)
        );
        assert_eq!(config.listen.data.1, 0);
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
        assert_eq!((merged.listen.port, merged.listen.host.as_deref()), (Some(2), Some("::1")));
        let checked = merged.checked().unwrap();
        assert_eq!(checked.fleet.workers.len(), 3);
        assert_eq!(checked.fleet.workers[0].bootstrap_port, Some(8998));
        std::fs::write(&path, "prot = 1\n").unwrap();
        let error = parse(&format!("--config {}", path.display())).merged().unwrap_err().to_string();
        assert!(error.contains("prot") && error.contains("file") && error.contains("gateway.toml"), "{error}");
    }

    #[test]
    fn a_switch_takes_the_words_and_the_numbers() {
        let read = |value: serde_json::Value| {
            serde_json::from_value::<FleetArgs>(serde_json::json!({ "pd_disaggregation": value }))
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
        assert_eq!(config("--worker-urls http://x:1").unwrap().listen.body_bytes_max, 32 << 20);
    }
}
