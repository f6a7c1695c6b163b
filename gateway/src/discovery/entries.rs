//! A list of workers as a file writes it: TOML, YAML or JSON, with the fields of `POST /workers`. *Pure*, but for the
//! environment variables that entries name.
//!
//! ```yaml
//! workers:
//!   - {url: "http://10.0.0.1:30000", worker_type: prefill, bootstrap_port: 8998}
//!   - {url: "http://10.0.0.2:30000", worker_type: decode, api_key_env: DECODE_KEY}
//! ```
//! YAML and JSON may also be the list alone. An empty file is an explicit empty list.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::config::{Role, Secret, WorkerSpec};

/// Workers of one file at most.
const WORKERS_MAX: usize = 10_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    Toml,
    Yaml,
    Json,
}

impl Format {
    /// By the ending of a file's name; YAML contains JSON, so it is what anything else is taken for.
    pub fn of(path: &std::path::Path) -> Format {
        match path.extension().and_then(|e| e.to_str()) {
            Some("toml") => Format::Toml,
            Some("json") => Format::Json,
            _ => Format::Yaml,
        }
    }
}

/// All workers that the text names.
///
/// # Errors
/// The first mistake, with its line.
pub fn parse(text: &str, format: Format) -> Result<Vec<WorkerSpec>, String> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let List(entries) = match format {
        Format::Toml => toml::from_str(text).map_err(|e| at_line(text, e.span(), e.message()))?,
        Format::Json => serde_json::from_str(text).map_err(|e| e.to_string())?,
        Format::Yaml => serde_saphyr::from_str(text).map_err(|e| e.to_string())?,
    };
    if entries.len() > WORKERS_MAX {
        return Err(format!("it lists {} workers; at most {WORKERS_MAX} are taken", entries.len()));
    }
    let mut specs: Vec<WorkerSpec> = Vec::with_capacity(entries.len());
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for entry in entries {
        let url = entry.url.clone();
        let before = seen.get(&url).copied().unwrap_or(0);
        let spec = entry.spec().map_err(|why| format!("line {}: {why}", line_of(text, &url, before)))?;
        if specs.iter().any(|s| s.url == spec.url) {
            return Err(format!("line {}: worker {url} is listed twice", line_of(text, &url, before)));
        }
        seen.insert(url, before + 1);
        specs.push(spec);
    }
    Ok(specs)
}

fn at_line(text: &str, span: Option<std::ops::Range<usize>>, message: &str) -> String {
    match span.and_then(|span| text.get(..span.start)) {
        Some(before) => format!("line {}: {message}", before.matches('\n').count() + 1),
        None => message.to_owned(),
    }
}

/// The line of the `nth` place, counted from 0, at which `needle` stands.
fn line_of(text: &str, needle: &str, nth: usize) -> usize {
    let at = text.match_indices(needle).nth(nth).map_or(0, |(at, _)| at);
    text[..at].matches('\n').count() + 1
}

/// Fields have the names of sglang_router's `POST /workers`, and the shorter ones that people try first.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    url: String,
    #[serde(default, alias = "role")]
    worker_type: WorkerType,
    bootstrap_port: Option<NonZeroU16>,
    #[serde(alias = "model")]
    model_id: Option<String>,
    api_key: Option<String>,
    /// The environment variable that holds the key.
    api_key_env: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(serde::Deserialize, Clone, Copy, Default)]
#[serde(rename_all = "lowercase")]
enum WorkerType {
    Prefill,
    Decode,
    #[default]
    #[serde(alias = "plain")]
    Regular,
}

impl Entry {
    fn spec(self) -> Result<WorkerSpec, String> {
        let role = match self.worker_type {
            WorkerType::Prefill => Role::Prefill,
            WorkerType::Decode => Role::Decode,
            WorkerType::Regular => Role::Plain,
        };
        if self.bootstrap_port.is_some() && role != Role::Prefill {
            return Err(format!("worker {}: only prefill workers have a bootstrap_port", self.url));
        }
        let key = match (self.api_key, self.api_key_env) {
            (Some(_), Some(_)) => return Err(format!("worker {}: give api_key or api_key_env, not both", self.url)),
            (key, None) => key,
            (None, Some(name)) => {
                Some(std::env::var(&name).map_err(|_| {
                    format!("worker {}: the environment variable {name} for its key is not set", self.url)
                })?)
            }
        };
        let mut spec = WorkerSpec::new(&self.url, role)?;
        spec.bootstrap_port = self.bootstrap_port.map(NonZeroU16::get);
        spec.model = self.model_id;
        spec.api_key = key.map(Secret);
        spec.labels = self.labels;
        Ok(spec)
    }
}

/// The list alone, or a table that holds it. Not an untagged enum, whose errors lose their lines.
struct List(Vec<Entry>);

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    workers: Vec<Entry>,
}

impl<'de> Deserialize<'de> for List {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = List;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a list of workers, or a table with the list `workers`")
            }

            fn visit_unit<E>(self) -> Result<List, E> {
                Ok(List(Vec::new()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<List, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = seq.next_element()? {
                    entries.push(entry);
                }
                Ok(List(entries))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<List, A::Error> {
                Ok(List(Table::deserialize(MapAccessDeserializer::new(map))?.workers))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const YAML: &str = "workers:\n- url: http://a:1\n  worker_type: prefill\n  bootstrap_port: 8998\n- url: http://b:2\n  role: decode\n  model: m\n- url: http://c:3\n";
    const TOML: &str = "[[workers]]\nurl = \"http://a:1\"\nworker_type = \"prefill\"\nbootstrap_port = 8998\n\
                        [[workers]]\nurl = \"http://b:2\"\nrole = \"decode\"\nmodel = \"m\"\n[[workers]]\nurl = \"http://c:3\"\n";
    const JSON: &str = r#"[{"url":"http://a:1","worker_type":"prefill","bootstrap_port":8998},
                           {"url":"http://b:2","role":"decode","model":"m"},{"url":"http://c:3"}]"#;

    #[test]
    fn three_formats_say_the_same() {
        let specs = parse(YAML, Format::Yaml).unwrap();
        let seen: Vec<_> = specs.iter().map(|s| (&*s.url, s.role, s.bootstrap_port, s.model.as_deref())).collect();
        assert_eq!(
            seen,
            [
                ("http://a:1", Role::Prefill, Some(8998), None),
                ("http://b:2", Role::Decode, None, Some("m")),
                ("http://c:3", Role::Plain, None, None),
            ]
        );
        assert_eq!(parse(TOML, Format::Toml).unwrap(), specs);
        assert_eq!(parse(JSON, Format::Json).unwrap(), specs);
        assert_eq!(parse(JSON, Format::Yaml).unwrap(), specs);
    }

    #[test]
    fn an_empty_file_is_an_empty_list() {
        for format in [Format::Toml, Format::Yaml, Format::Json] {
            assert_eq!(parse(" \n", format), Ok(vec![]));
        }
        for (text, format) in [("workers: []", Format::Yaml), ("workers = []", Format::Toml), ("[]", Format::Json)] {
            assert_eq!(parse(text, format), Ok(vec![]), "{text}");
        }
        assert_eq!(parse("# nobody yet\n", Format::Yaml), Ok(vec![]));
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        for (text, format, expected) in [
            ("workers:\n- url: http://a:1\n- url: http://a:1\n", Format::Yaml, ["line 3", "twice"]),
            ("workers:\n- url: http://a:1\n- url: ftp://a:1\n", Format::Yaml, ["line 3", "scheme"]),
            ("workers:\n- url: http://a:1\n  rloe: decode\n", Format::Yaml, ["line 3", "rloe"]),
            ("workers:\n- url: http://a:1\n  role: decoder\n", Format::Yaml, ["line 3", "decoder"]),
            ("workers:\n- url: http://a:1\n  bootstrap_port: 70000\n", Format::Yaml, ["line 3", "70000"]),
            ("- url: http://a:1\n  bootstrap_port: 1\n", Format::Yaml, ["line 1", "only prefill"]),
            ("- url: http://a:1\n  api_key_env: NOT_SET_ANYWHERE\n", Format::Yaml, ["line 1", "NOT_SET_ANYWHERE"]),
            ("[[workers]]\nurl = 1\n", Format::Toml, ["line 2", "string"]),
            ("[[workers]]\nurl = \n", Format::Toml, ["line 2", ""]),
            ("[{\"url\": \"http://a:1\"},\n {}]", Format::Json, ["line 2", "url"]),
        ] {
            let error = parse(text, format).expect_err(text);
            assert!(expected.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }
}
