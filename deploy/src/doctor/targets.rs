//! Which workers to look at, as the settings or a running gateway name them.

use serde_json::Value;
use tandem_gateway::{Role, WorkerSpec};

use super::ask::Asker;

/// A worker as the gateway is told about it.
#[derive(Clone, Debug)]
pub struct Target {
    pub url: String,
    /// A name or an address, IPv6 in brackets: where decode workers are sent.
    pub host: String,
    pub role: Role,
    pub bootstrap_port: Option<u16>,
    pub api_key: Option<String>,
}

impl From<WorkerSpec> for Target {
    fn from(spec: WorkerSpec) -> Self {
        let api_key = spec.api_key.map(|key| key.reveal().to_owned());
        Target { url: spec.url, host: spec.host, role: spec.role, bootstrap_port: spec.bootstrap_port, api_key }
    }
}

/// What `GET /workers` of a gateway lists.
///
/// # Errors
/// A gateway that does not answer, or not as a gateway.
pub async fn of_gateway(asker: &Asker, gateway: &str, key: Option<&str>) -> Result<Vec<Target>, String> {
    let url = format!("{}/workers", gateway.trim_end_matches('/'));
    let answer = asker.get(&url, key).await.map_err(|why| {
        format!("the gateway does not answer GET {url}: {why}; check --gateway, and that the gateway runs")
    })?;
    match (answer.status, answer.json["workers"].as_array()) {
        (200, Some(workers)) => workers.iter().map(listed).collect(),
        (401 | 403, _) => {
            Err(format!("the gateway refuses GET {url} with {}; give its --api-key, or --admin-api-key", answer.status))
        }
        (status, _) => Err(format!("GET {url} answered {status} and no list of workers; is that a gateway's address?")),
    }
}

fn listed(worker: &Value) -> Result<Target, String> {
    let strange = |what: &str| format!("the gateway lists a worker {what}: {worker}");
    let url = worker["url"].as_str().ok_or_else(|| strange("without a url"))?;
    let role = match worker["worker_type"].as_str() {
        Some("prefill") => Role::Prefill,
        Some("decode") => Role::Decode,
        Some("regular") => Role::Plain,
        _ => return Err(strange("without a known worker_type")),
    };
    let mut target = Target::from(WorkerSpec::new(url, role)?);
    target.bootstrap_port = worker["bootstrap_port"].as_u64().and_then(|port| u16::try_from(port).ok());
    Ok(target)
}
