//! All workers' metrics as one text: each sample gains the label `worker_addr`, families come together under one HELP and
//! TYPE. Workers may differ in their families and in their labels. Bounded. *Pure* but for asking.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use futures_util::future::join_all;
use http::Method;

use crate::fleet::Worker;
use crate::gateway::Gateway;

/// Bytes of one worker's text at most; what is beyond is left out, and so is a line that was cut.
const WORKER_BYTES_MAX: usize = 4 << 20;
/// Bytes of all of it at most.
const ALL_BYTES_MAX: usize = 64 << 20;

/// The metrics of those workers that answer.
pub async fn gathered(gateway: &Gateway) -> String {
    let fleet = gateway.fleet.snapshot();
    let ask = async |worker: &Worker| {
        let mut answer = gateway.prober.ask(Method::GET, worker, "/metrics").send().await.ok()?;
        if !answer.status().is_success() {
            return None;
        }
        let mut text = Vec::new();
        while let Some(piece) = answer.chunk().await.ok()? {
            text.extend_from_slice(&piece[..piece.len().min(WORKER_BYTES_MAX - text.len())]);
            if text.len() == WORKER_BYTES_MAX {
                text.truncate(text.iter().rposition(|b| *b == b'\n').unwrap_or(0));
                break;
            }
        }
        Some((worker.authority.clone(), String::from_utf8_lossy(&text).into_owned()))
    };
    let texts: Vec<_> = join_all(fleet.workers.iter().map(|w| ask(w))).await.into_iter().flatten().collect();
    merged(&texts)
}

#[derive(Default)]
struct Family<'a> {
    help: Option<&'a str>,
    kind: Option<&'a str>,
    samples: String,
}

/// The texts of workers, by their addresses, as one.
fn merged(texts: &[(String, String)]) -> String {
    let mut families: BTreeMap<&str, Family> = BTreeMap::new();
    let mut bytes = 0;
    for (address, text) in texts {
        let mut current = "";
        for line in text.lines() {
            if let Some((kind, name, rest)) = comment(line) {
                let family = families.entry(name).or_default();
                match kind {
                    "HELP" => family.help = family.help.or(Some(rest)),
                    _ => {
                        current = name;
                        family.kind = family.kind.or(Some(rest));
                    }
                }
                continue;
            }
            let Some(end) = line.find(['{', ' ']).filter(|end| *end > 0 && !line.starts_with('#')) else { continue };
            bytes += line.len() + address.len() + 18;
            if bytes > ALL_BYTES_MAX {
                break;
            }
            let (name, rest) = line.split_at(end);
            let family = if belongs(name, current) { current } else { name };
            let samples = &mut families.entry(family).or_default().samples;
            // Writing into a string cannot fail.
            let _ = match rest.strip_prefix('{') {
                Some(labels) if labels.starts_with('}') => {
                    writeln!(samples, "{name}{{worker_addr=\"{address}\"{labels}")
                }
                Some(labels) => writeln!(samples, "{name}{{worker_addr=\"{address}\",{labels}"),
                None => writeln!(samples, "{name}{{worker_addr=\"{address}\"}}{rest}"),
            };
        }
    }
    let mut out = String::new();
    for (name, family) in families.iter().filter(|(_, family)| !family.samples.is_empty()) {
        for (word, text) in [("HELP", family.help), ("TYPE", family.kind)] {
            if let Some(text) = text {
                let _ = writeln!(out, "# {word} {name} {text}");
            }
        }
        out.push_str(&family.samples);
    }
    out
}

/// `# HELP name text` and `# TYPE name text`.
fn comment(line: &str) -> Option<(&str, &str, &str)> {
    let (kind, rest) = line.strip_prefix("# ")?.split_once(' ')?;
    let (name, text) = rest.split_once(' ')?;
    matches!(kind, "HELP" | "TYPE").then_some((kind, name, text))
}

/// Whether a sample is one of a family's: histograms and summaries have several names.
fn belongs(sample: &str, family: &str) -> bool {
    let suffix = sample.strip_prefix(family);
    !family.is_empty()
        && suffix.is_some_and(|s| matches!(s, "" | "_bucket" | "_sum" | "_count" | "_total" | "_created"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_with_other_families_and_labels_come_together() {
        let p = "# HELP h Time\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_sum 3\nh_count 2\n# TYPE only_p gauge\nonly_p{a=\"}\"} 1\n";
        let d = "# HELP h Time\n# TYPE h histogram\nh_bucket{le=\"1\",dp_rank=\"0\"} 5\nplain{} 7\nplain 8\n\nbroken\n";
        let text = merged(&[("p:1".into(), p.into()), ("d:2".into(), d.into())]);
        assert_eq!(
            text,
            "# HELP h Time\n# TYPE h histogram\nh_bucket{worker_addr=\"p:1\",le=\"1\"} 2\nh_sum{worker_addr=\"p:1\"} 3\n\
             h_count{worker_addr=\"p:1\"} 2\nh_bucket{worker_addr=\"d:2\",le=\"1\",dp_rank=\"0\"} 5\n\
             # TYPE only_p gauge\nonly_p{worker_addr=\"p:1\",a=\"}\"} 1\n\
             plain{worker_addr=\"d:2\"} 7\nplain{worker_addr=\"d:2\"} 8\n"
        );
    }

    #[test]
    fn nothing_makes_it_larger_than_its_limit() {
        let text = "some_metric_with_a_name{label=\"value\"} 1\n".repeat(100_000);
        let texts: Vec<_> = (0..20).map(|i| (format!("w:{i}"), text.clone())).collect();
        assert!(merged(&texts).len() <= ALL_BYTES_MAX + 1024);
    }
}
