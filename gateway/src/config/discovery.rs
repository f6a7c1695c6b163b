//! Where workers come from, beside those that flags name: a watched file, DNS, Kubernetes. *Pure*; what is read from the
//! outside is read in `discovery`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::Role;
use crate::config::words::{switch, word, words};
use crate::discovery::selector::{Rules, Selector};
use crate::error::StartError;

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct DiscoveryArgs {
    /// A TOML, YAML or JSON file that lists workers; it is watched, and a broken new version changes nothing [default: none].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers_file: Option<PathBuf>,
    /// Time between two looks at --workers-file, in milliseconds; a change counts once two looks saw the same [default: 1000].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers_file_interval_ms: Option<u64>,
    /// A name whose addresses are prefill workers, with their port and, if the workers are not to be asked for it, their
    /// bootstrap port. Repeatable [default: none].
    #[arg(long, value_name = "NAME:PORT[:BOOTSTRAP_PORT]", action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub prefill_dns: Vec<String>,
    /// A name whose addresses are decode workers, with their port. Repeatable [default: none].
    #[arg(long, value_name = "NAME:PORT", action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub decode_dns: Vec<String>,
    /// A name whose addresses are workers that do both phases, with their port. Repeatable [default: none].
    #[arg(long, value_name = "NAME:PORT", action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub worker_dns: Vec<String>,
    /// Time between two look-ups of a name, in milliseconds [default: 5000].
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_interval_ms: Option<u64>,
    /// A name that cannot be looked up, or is unknown, keeps its last addresses for this many seconds [default: 300].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_grace_secs: Option<u64>,
    /// Find workers among the pods of Kubernetes, by the selectors below. In the environment: true, false, 1 or 0.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "switch")]
    pub service_discovery: bool,
    /// The port on which pods serve, unless their annotation tandem/port says another [default: 80].
    #[arg(long, value_name = "PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_discovery_port: Option<u16>,
    /// The namespace whose pods are watched [default: all].
    #[arg(long, value_name = "NAMESPACE")]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "word")]
    pub service_discovery_namespace: Option<String>,
    /// Labels of pods that are prefill workers; each must match [default: none].
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub prefill_selector: Vec<String>,
    /// Labels of pods that are decode workers; each must match [default: none].
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub decode_selector: Vec<String>,
    /// Labels of pods that are workers for both phases; each must match [default: none].
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub selector: Vec<String>,
    /// All pods are listed anew after this many seconds, whatever the watch said [default: 300].
    #[arg(long, value_name = "SECS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_discovery_relist_secs: Option<u64>,
    /// The Kubernetes API, for instance of a `kubectl proxy` [default: by KUBECONFIG, else by the pod's service account].
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_discovery_api_url: Option<String>,
}

/// Checked.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DiscoveryConfig {
    pub file: Option<WatchedFile>,
    pub dns: Option<Dns>,
    pub kubernetes: Option<Kubernetes>,
}

impl DiscoveryConfig {
    /// Some source is configured.
    pub fn any(&self) -> bool {
        self.file.is_some() || self.dns.is_some() || self.kubernetes.is_some()
    }
}

#[derive(Clone, PartialEq, Debug)]
pub struct WatchedFile {
    pub path: PathBuf,
    pub interval: Duration,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Dns {
    pub names: Vec<DnsName>,
    pub interval: Duration,
    pub grace: Duration,
}

/// A name whose addresses are workers of one role.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DnsName {
    pub name: String,
    pub port: u16,
    pub role: Role,
    pub bootstrap_port: Option<u16>,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Kubernetes {
    pub namespace: Option<String>,
    pub rules: Rules,
    pub relist: Duration,
    pub api_url: Option<String>,
}

impl DiscoveryArgs {
    pub fn checked(&self) -> Result<DiscoveryConfig, StartError> {
        let interval = Duration::from_millis(self.workers_file_interval_ms.unwrap_or(1000).max(10));
        let file = self.workers_file.clone().map(|path| WatchedFile { path, interval });
        Ok(DiscoveryConfig { file, dns: self.dns()?, kubernetes: self.kubernetes()? })
    }

    fn dns(&self) -> Result<Option<Dns>, StartError> {
        let mut names = Vec::new();
        for (flag, texts, role) in [
            ("--prefill-dns", &self.prefill_dns, Role::Prefill),
            ("--decode-dns", &self.decode_dns, Role::Decode),
            ("--worker-dns", &self.worker_dns, Role::Plain),
        ] {
            for text in texts {
                let name = dns_name(text, role);
                names.push(name.map_err(|why| StartError::Config(format!("{flag} {text:?}: {why}")))?);
            }
        }
        let interval = Duration::from_millis(self.dns_interval_ms.unwrap_or(5000).max(10));
        let grace = Duration::from_secs(self.dns_grace_secs.unwrap_or(300));
        Ok((!names.is_empty()).then_some(Dns { names, interval, grace }))
    }

    fn kubernetes(&self) -> Result<Option<Kubernetes>, StartError> {
        let bad = |why: String| Err(StartError::Config(why));
        let mut selectors = Vec::new();
        for (flag, terms, role) in [
            ("--prefill-selector", &self.prefill_selector, Role::Prefill),
            ("--decode-selector", &self.decode_selector, Role::Decode),
            ("--selector", &self.selector, Role::Plain),
        ] {
            if terms.is_empty() {
                continue;
            }
            if !self.service_discovery {
                return bad(format!("{flag} does nothing without --service-discovery"));
            }
            match Selector::parse(terms) {
                Ok(selector) => selectors.push((role, selector)),
                Err(why) => return bad(format!("{flag} {:?}: {why}", terms.join(" "))),
            }
        }
        if !self.service_discovery {
            return Ok(None);
        }
        let port = self.service_discovery_port.unwrap_or(80);
        if port == 0 {
            return bad("--service-discovery-port must be at least 1".into());
        }
        let rules = Rules::new(selectors, port);
        let rules = rules.map_err(|why| StartError::Config(format!("--service-discovery: {why}")))?;
        if let Some(url) = &self.service_discovery_api_url
            && !url.parse::<http::Uri>().is_ok_and(|u| u.scheme().is_some() && u.host().is_some())
        {
            return bad(format!("--service-discovery-api-url {url:?} is no URL; expected https://host:port"));
        }
        if let Some(namespace) = &self.service_discovery_namespace
            && (namespace.is_empty() || !namespace.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'))
        {
            return bad(format!("--service-discovery-namespace {namespace:?} is no name of a namespace"));
        }
        Ok(Some(Kubernetes {
            namespace: self.service_discovery_namespace.clone(),
            rules,
            relist: Duration::from_secs(self.service_discovery_relist_secs.unwrap_or(300).max(1)),
            api_url: self.service_discovery_api_url.clone(),
        }))
    }
}

fn dns_name(text: &str, role: Role) -> Result<DnsName, String> {
    let form = if role == Role::Prefill { "name:port or name:port:bootstrap-port" } else { "name:port" };
    if text.contains("//") {
        return Err(format!("a name has no scheme; expected {form}, without http://"));
    }
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let port = |part: &str| match part.parse::<u16>() {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(format!("{part:?} is no port; expected {form}")),
    };
    let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    if name.is_empty() || !name.bytes().all(known) {
        return Err(format!("{name:?} is no name; expected {form}"));
    }
    if name.parse::<IpAddr>().is_ok() {
        return Err(format!("{name} is an address, which never changes; give it as a worker's URL"));
    }
    let own = port(parts.next().ok_or_else(|| format!("it has no port; expected {form}"))?)?;
    let bootstrap_port = parts.next().map(port).transpose()?;
    if parts.next().is_some() || (bootstrap_port.is_some() && role != Role::Prefill) {
        return Err(format!("it has too many parts; expected {form}"));
    }
    Ok(DnsName { name: name.to_owned(), port: own, role, bootstrap_port })
}

#[cfg(test)]
mod tests {
    use crate::config::Role;
    use crate::config::tests::parse;

    fn refusal(line: &str) -> String {
        parse(line).discovery.checked().map(|_| ()).expect_err(line).to_string()
    }

    #[test]
    fn names_with_their_ports() {
        let checked = parse("--prefill-dns p.x:30000:8998 --prefill-dns q:1 --decode-dns d:2 --worker-dns w:3")
            .discovery
            .checked()
            .unwrap();
        let dns = checked.dns.unwrap();
        let seen: Vec<_> = dns.names.iter().map(|n| (&*n.name, n.port, n.bootstrap_port, n.role)).collect();
        assert_eq!(
            seen,
            [
                ("p.x", 30000, Some(8998), Role::Prefill),
                ("q", 1, None, Role::Prefill),
                ("d", 2, None, Role::Decode),
                ("w", 3, None, Role::Plain),
            ]
        );
    }

    #[test]
    fn what_cannot_be_meant_fails_at_start_and_says_what_to_do() {
        for (line, expected) in [
            ("--prefill-dns p", "no port"),
            ("--prefill-dns p:0", "no port"),
            ("--decode-dns d:1:2", "too many"),
            ("--worker-dns http://w:1", "without http://"),
            ("--worker-dns 10.0.0.1:1", "worker's URL"),
            ("--service-discovery", "--prefill-selector"),
            ("--service-discovery --selector app", "KEY=VALUE"),
            ("--service-discovery --prefill-selector a=b --decode-selector a=b", "same"),
            ("--selector app=x", "--service-discovery"),
            ("--service-discovery --selector a=b --service-discovery-port 0", "at least 1"),
            ("--service-discovery --selector a=b --service-discovery-api-url x", "no URL"),
            ("--service-discovery --selector a=b --service-discovery-namespace a/b", "namespace"),
        ] {
            let error = refusal(line);
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
