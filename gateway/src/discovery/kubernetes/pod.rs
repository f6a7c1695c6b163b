//! A pod as far as it decides about a worker, and the worker that it is. *Pure.*

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Deserialize;

use super::selector::Rules;
use crate::config::{Role, WorkerSpec};
use crate::discovery::url_of;

/// The bootstrap port of a prefill worker; the first that is there counts.
const BOOTSTRAP_ANNOTATIONS: [&str; 2] = ["tandem/bootstrap-port", "sglang.ai/bootstrap-port"];
const PORT_ANNOTATION: &str = "tandem/port";
const MODEL_ANNOTATION: &str = "tandem/model";

/// The few fields of a pod that are read; the rest of its kilobytes is skipped over.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct Pod {
    #[serde(default)]
    pub metadata: Metadata,
    #[serde(default)]
    pub status: Status,
}

#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub resource_version: String,
    pub deletion_timestamp: Option<String>,
    pub labels: Option<BTreeMap<String, String>>,
    pub annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct Status {
    pub phase: String,
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    pub conditions: Option<Vec<Condition>>,
}

#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    pub status: String,
}

impl Pod {
    /// `namespace/name`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    /// All containers are ready: Kubernetes' own summary, which a lone container's state is not.
    fn is_ready(&self) -> bool {
        let conditions = self.status.conditions.as_deref().unwrap_or_default();
        self.status.phase == "Running" && conditions.iter().any(|c| c.kind == "Ready" && c.status == "True")
    }

    fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(name).map(|value| value.trim())
    }

    fn port(&self, name: &str) -> Result<Option<u16>, String> {
        match self.annotation(name).map(|text| (text, text.parse::<u16>())) {
            None => Ok(None),
            Some((_, Ok(port))) if port > 0 => Ok(Some(port)),
            Some((text, _)) => Err(format!("its annotation {name} is {text:?}, not a port from 1 to 65535")),
        }
    }

    /// The worker that this pod is now; `None` for none: other labels, not ready, without an address, being deleted.
    ///
    /// # Errors
    /// What somebody has to correct at the pod.
    pub fn worker(&self, rules: &Rules) -> Result<Option<WorkerSpec>, String> {
        let none = BTreeMap::new();
        let Some(role) = rules.role(self.metadata.labels.as_ref().unwrap_or(&none))? else { return Ok(None) };
        let bootstrap = BOOTSTRAP_ANNOTATIONS.into_iter().filter(|_| role == Role::Prefill);
        let bootstrap = bootstrap.map(|name| self.port(name)).find_map(Result::transpose).transpose()?;
        let port = self.port(PORT_ANNOTATION)?.unwrap_or(rules.port);
        if self.metadata.deletion_timestamp.is_some() || !self.is_ready() {
            return Ok(None);
        }
        let Some(ip) = self.status.pod_ip.as_deref().and_then(|ip| ip.parse::<IpAddr>().ok()) else { return Ok(None) };
        let mut spec = WorkerSpec::new(&url_of(ip, port), role)?;
        spec.bootstrap_port = bootstrap;
        spec.model = self.annotation(MODEL_ANNOTATION).map(str::to_owned);
        Ok(Some(spec))
    }
}
