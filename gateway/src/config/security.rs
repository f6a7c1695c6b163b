//! Who may ask what, and with which certificates. *Pure* but for reading the files that are named.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use figment::Figment;
use figment::providers::{Format, Toml, Yaml};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::words::{word, words};
use crate::error::StartError;

/// Keys of one gateway at most: each request looks at all of them.
const KEYS_MAX: usize = 1000;
const KEY_NAME_BYTES_MAX: usize = 64;

/// Text that no log, no message and no `{:?}` shows.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl Secret {
    /// The text itself, for the few places that need it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Secret(text.to_owned())
    }
}

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text.into())
    }
}

fn secret<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Secret>, D::Error> {
    Ok(word(deserializer)?.map(Secret))
}

/// Raw, as flags, environment and file give them.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct SecurityArgs {
    /// Clients must send `Authorization: Bearer KEY`; it may administer, too, and workers get the same from probes
    /// [default: none].
    #[arg(long, value_name = "KEY")]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "secret")]
    pub api_key: Option<Secret>,
    /// A TOML or YAML file of further keys, by their SHA-256, each with a name, models, limits and a priority
    /// [default: none].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_keys_file: Option<PathBuf>,
    /// A key that administers and does nothing else [default: none].
    #[arg(long, value_name = "KEY")]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "secret")]
    pub admin_api_key: Option<Secret>,
    /// Serve clients over TLS with this certificate chain, PEM; HTTP/2 is offered by ALPN [default: none].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert_path: Option<PathBuf>,
    /// The private key of --tls-cert-path, PEM [default: none].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key_path: Option<PathBuf>,
    /// Clients must show a certificate of these authorities, PEM [default: none is asked for].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_client_ca_path: Option<PathBuf>,
    /// Trust only these authorities, PEM, for workers at https URLs [default: those of the system]. Repeatable.
    #[arg(long, value_name = "FILE", num_args = 1.., action = clap::ArgAction::Append)]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "words")]
    pub ca_cert_paths: Vec<String>,
    /// Show workers this certificate chain, PEM [default: none].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_cert_path: Option<PathBuf>,
    /// The private key of --client-cert-path, PEM [default: none].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_key_path: Option<PathBuf>,
}

/// Checked.
#[derive(Clone, Debug)]
pub struct Security {
    /// What workers get from the gateway.
    pub api_key: Option<Secret>,
    pub keys: Vec<KeySpec>,
    /// The keys file, for its changes.
    pub keys_file: Option<PathBuf>,
    pub server: Option<ServerTls>,
    pub workers: WorkerTls,
}

/// The files of the data listener's TLS.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerTls {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub client_ca: Option<PathBuf>,
}

/// The files of TLS towards workers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WorkerTls {
    pub authorities: Vec<PathBuf>,
    /// Certificate chain and key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// A request's priority class. The queue serves higher ones first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    Low,
    #[default]
    Normal,
    High,
}

/// Requests per second, and how many may come at once.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RateSpec {
    pub per_second: f64,
    pub burst: f64,
}

/// One key and what it may do.
#[derive(Clone, PartialEq, Debug)]
pub struct KeySpec {
    pub name: String,
    pub sha256: [u8; 32],
    /// Empty: all.
    pub models: Vec<String>,
    pub rate: Option<RateSpec>,
    pub concurrent_max: Option<usize>,
    /// The highest class its requests may have, and the one they have without a wish of their own; `None`: any, and normal.
    pub class: Option<Class>,
    pub data: bool,
    pub admin: bool,
}

impl Default for KeySpec {
    fn default() -> Self {
        KeySpec {
            name: String::new(),
            sha256: [0; 32],
            models: Vec::new(),
            rate: None,
            concurrent_max: None,
            class: None,
            data: true,
            admin: false,
        }
    }
}

impl SecurityArgs {
    pub fn checked(&self) -> Result<Security, StartError> {
        let config = |what: &str| StartError::Config(what.into());
        let mut keys = Vec::new();
        if let Some(key) = &self.api_key {
            keys.push(KeySpec { name: "default".into(), sha256: digest(key)?, admin: true, ..KeySpec::default() });
        }
        if let Some(key) = &self.admin_api_key {
            let sha256 = digest(key)?;
            keys.push(KeySpec { name: "admin".into(), sha256, admin: true, data: false, ..KeySpec::default() });
        }
        if let Some(file) = &self.api_keys_file {
            keys.extend(read_keys(file)?);
        }
        check_keys(&keys)?;
        let server = match (&self.tls_cert_path, &self.tls_key_path) {
            (Some(cert), Some(key)) => {
                Some(ServerTls { cert: cert.clone(), key: key.clone(), client_ca: self.tls_client_ca_path.clone() })
            }
            (None, None) if self.tls_client_ca_path.is_none() => None,
            _ => return Err(config("TLS for clients needs both --tls-cert-path and --tls-key-path")),
        };
        let identity = match (&self.client_cert_path, &self.client_key_path) {
            (Some(cert), Some(key)) => Some((cert.clone(), key.clone())),
            (None, None) => None,
            _ => return Err(config("--client-cert-path and --client-key-path go together")),
        };
        let authorities = self.ca_cert_paths.iter().map(PathBuf::from).collect();
        Ok(Security {
            api_key: self.api_key.clone(),
            keys,
            keys_file: self.api_keys_file.clone(),
            server,
            workers: WorkerTls { authorities, identity },
        })
    }
}

fn digest(key: &Secret) -> Result<[u8; 32], StartError> {
    match key.reveal() {
        "" => Err(StartError::Config("an API key is empty; leave the flag out to serve without keys".into())),
        text => Ok(Sha256::digest(text).into()),
    }
}

/// One entry of the keys file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    sha256: String,
    #[serde(default)]
    models: Vec<String>,
    requests_per_second: Option<f64>,
    burst: Option<u32>,
    max_concurrent_requests: Option<usize>,
    priority: Option<Class>,
    #[serde(default)]
    admin: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entries {
    keys: Vec<Entry>,
}

/// The keys of a file.
pub fn read_keys(file: &Path) -> Result<Vec<KeySpec>, StartError> {
    let bad = |what: String| StartError::Config(format!("the keys file {}: {what}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| bad(error.to_string()))?;
    let is_toml = file.extension().is_some_and(|e| e == "toml");
    let figment = match is_toml {
        true => Figment::from(Toml::string(&text)),
        false => Figment::from(Yaml::string(&text)),
    };
    let entries: Entries = figment.extract().map_err(|error| bad(error.to_string()))?;
    entries.keys.into_iter().map(|entry| entry.spec().map_err(&bad)).collect()
}

impl Entry {
    fn spec(self) -> Result<KeySpec, String> {
        let name = &self.name;
        let sha256 = unhex(&self.sha256)
            .ok_or_else(|| format!("`sha256` of {name:?} must be 64 hexadecimal digits: printf %s KEY | sha256sum"))?;
        let rate = match (self.requests_per_second, self.burst) {
            (Some(per_second), burst) if per_second.is_finite() && per_second > 0.0 => {
                Some(RateSpec { per_second, burst: burst.map_or(per_second.ceil(), f64::from).max(1.0) })
            }
            (Some(_), _) => return Err(format!("`requests_per_second` of {name:?} must be above 0")),
            (None, Some(_)) => return Err(format!("`burst` of {name:?} needs `requests_per_second`")),
            (None, None) => None,
        };
        if self.max_concurrent_requests == Some(0) {
            return Err(format!("`max_concurrent_requests` of {name:?} must be at least 1"));
        }
        Ok(KeySpec {
            sha256,
            models: self.models,
            rate,
            concurrent_max: self.max_concurrent_requests,
            class: self.priority,
            data: true,
            admin: self.admin,
            name: self.name,
        })
    }
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut out = [0; 32];
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (i, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(out)
}

/// Names become labels of metrics and words of logs, so they are few, plain and different.
fn check_keys(keys: &[KeySpec]) -> Result<(), StartError> {
    let bad = |what: String| Err(StartError::Config(what));
    if keys.len() > KEYS_MAX {
        return bad(format!("there are {} keys, the limit is {KEYS_MAX}", keys.len()));
    }
    for (i, key) in keys.iter().enumerate() {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if !(1..=KEY_NAME_BYTES_MAX).contains(&key.name.len()) || !key.name.bytes().all(plain) {
            return bad(format!("the key name {:?} must be 1 to {KEY_NAME_BYTES_MAX} of A-Z a-z 0-9 - _ .", key.name));
        }
        if keys[..i].iter().any(|k| k.name == key.name) {
            return bad(format!(
                "two keys are named {:?}; `default` is --api-key, `admin` is --admin-api-key",
                key.name
            ));
        }
        if keys[..i].iter().any(|k| k.sha256 == key.sha256) {
            return bad(format!("the key {:?} is there twice under different names", key.name));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    fn read(name: &str, text: &str) -> Result<Vec<KeySpec>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        read_keys(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn a_keys_file_in_both_languages() {
        let hex = "ab".repeat(32);
        let toml = format!(
            "[[keys]]\nname = \"a\"\nsha256 = \"{hex}\"\nmodels = [\"m\"]\nrequests_per_second = 0.5\n\
             max_concurrent_requests = 3\npriority = \"high\"\nadmin = true\n"
        );
        let yaml = format!(
            "keys:\n- name: a\n  sha256: {hex}\n  models: [m]\n  requests_per_second: 0.5\n  \
             max_concurrent_requests: 3\n  priority: high\n  admin: true\n"
        );
        let expected = KeySpec {
            name: "a".into(),
            sha256: [0xab; 32],
            models: vec!["m".into()],
            rate: Some(RateSpec { per_second: 0.5, burst: 1.0 }),
            concurrent_max: Some(3),
            class: Some(Class::High),
            data: true,
            admin: true,
        };
        assert_eq!(read("k.toml", &toml), Ok(vec![expected.clone()]));
        assert_eq!(read("k.yaml", &yaml), Ok(vec![expected]));
    }

    #[test]
    fn a_bad_keys_file_says_what_is_wrong() {
        let hex = "ab".repeat(32);
        for (text, expected) in [
            ("keys:\n- name: a\n  sha256: xyz\n".to_owned(), "sha256sum"),
            (format!("keys:\n- name: a\n  sha256: {hex}\n  modles: [m]\n"), "modles"),
            (format!("keys:\n- name: a\n  sha256: {hex}\n  burst: 3\n"), "requests_per_second"),
            (format!("keys:\n- name: a\n  sha256: {hex}\n  max_concurrent_requests: 0\n"), "at least 1"),
        ] {
            let error = read("k.yaml", &text).unwrap_err();
            assert!(error.contains(expected) && error.contains("k.yaml"), "{error}");
        }
    }

    #[test]
    fn keys_and_certificates_go_together() {
        let with = |flags: &str| config(&format!("--worker-urls http://w:1 {flags}")).map_err(|e| e.to_string());
        let both = with("--api-key k --admin-api-key a").unwrap().security.keys;
        assert_eq!(
            both.iter().map(|k| (k.name.as_str(), k.data, k.admin)).collect::<Vec<_>>(),
            [("default", true, true), ("admin", false, true)]
        );
        assert!(with("--api-key k --admin-api-key k").unwrap_err().contains("twice"));
        assert!(with("--tls-cert-path c").unwrap_err().contains("--tls-key-path"));
        assert!(with("--tls-client-ca-path c").unwrap_err().contains("--tls-cert-path"));
        assert!(with("--client-key-path c").unwrap_err().contains("--client-cert-path"));
    }

    #[test]
    fn secrets_are_not_shown() {
        let args = crate::config::tests::parse("--worker-urls http://w:1 --api-key hush --admin-api-key hush2");
        let shown = format!("{args:?} {:?}", args.clone().checked().unwrap());
        assert!(!shown.contains("hush"), "{shown}");
    }
}
