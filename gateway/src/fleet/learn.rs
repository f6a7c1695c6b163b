//! What a worker says of itself, read from its answers: role, names of its model, bootstrap port, data-parallel size.
//! *Pure*.

use serde_json::Value;

use crate::config::{Role, WorkerSpec};

/// Names of one worker's model that are kept.
const MODELS_MAX: usize = 256;
const MODEL_NAME_BYTES_MAX: usize = 256;
/// More ranks than that are taken for a mistake.
const DP_SIZE_MAX: u64 = 1024;

/// What is known of a worker beyond its configuration.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Facts {
    /// The names it serves, its own name first; empty while it was not asked.
    pub models: Vec<String>,
    /// The role it took on since it was met in the configured one.
    pub role: Option<Role>,
    pub bootstrap_port: Option<u16>,
    pub dp_size: Option<u16>,
}

/// The role that a worker says it runs in; `None` where it says nothing (vLLM does not).
pub fn role(server_info: &Value) -> Option<Role> {
    match server_info["disaggregation_mode"].as_str()? {
        "prefill" => Some(Role::Prefill),
        "decode" => Some(Role::Decode),
        "null" => Some(Role::Plain),
        _ => None,
    }
}

/// Facts out of `/server_info` and `/v1/models`, either of which may be missing.
pub fn facts(server_info: &Value, models: &Value, known: &Facts) -> Facts {
    let port = server_info["disaggregation_bootstrap_port"].as_u64().and_then(|p| u16::try_from(p).ok());
    let dp_size = server_info["dp_size"].as_u64().filter(|size| (2..=DP_SIZE_MAX).contains(size));
    let names = names(server_info, models);
    Facts {
        models: if names.is_empty() { known.models.clone() } else { names },
        role: known.role,
        bootstrap_port: port.filter(|p| *p > 0).or(known.bootstrap_port),
        dp_size: match server_info.is_object() {
            true => dp_size.map(|size| size as u16),
            false => known.dp_size,
        },
    }
}

/// The list of models says most (adapters, too); else the served name, else the model's path.
fn names(server_info: &Value, models: &Value) -> Vec<String> {
    let listed = models["data"].as_array().into_iter().flatten().filter_map(|model| model["id"].as_str());
    let own = ["served_model_name", "model_path"].into_iter().filter_map(|field| server_info[field].as_str()).take(1);
    let fits = |name: &&str| !name.is_empty() && name.len() <= MODEL_NAME_BYTES_MAX;
    let mut names: Vec<String> = Vec::new();
    for name in listed.filter(fits).take(MODELS_MAX) {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    if names.is_empty() { own.filter(fits).map(str::to_owned).collect() } else { names }
}

/// Why a worker cannot serve where it was configured.
pub fn wrong_role(spec: &WorkerSpec, found: Role) -> String {
    let flag = match found {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Plain => "null",
    };
    format!("it is configured as a {} worker, but runs with --disaggregation-mode {flag}", spec.role.worker_type())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_list_of_models_comes_before_the_served_name_and_that_before_the_path() {
        let info = json!({"served_model_name": "m", "model_path": "/x/m"});
        let list = json!({"data": [{"id": "m"}, {"id": "lora"}, {"id": "m"}, {"id": ""}]});
        let none = Facts::default();
        assert_eq!(facts(&info, &list, &none).models, ["m", "lora"]);
        assert_eq!(facts(&info, &Value::Null, &none).models, ["m"]);
        assert_eq!(facts(&json!({"model_path": "/x/m"}), &Value::Null, &none).models, ["/x/m"]);
        let known = Facts { models: vec!["m".into()], ..Facts::default() };
        assert_eq!(facts(&Value::Null, &Value::Null, &known), known, "silence changes nothing");
    }

    #[test]
    fn numbers_out_of_range_are_no_facts() {
        let odd = json!({"disaggregation_bootstrap_port": 70000, "dp_size": 1});
        assert_eq!(facts(&odd, &Value::Null, &Facts::default()), Facts::default());
        let good = json!({"disaggregation_bootstrap_port": 8998, "dp_size": 4});
        let facts = facts(&good, &Value::Null, &Facts::default());
        assert_eq!((facts.bootstrap_port, facts.dp_size), (Some(8998), Some(4)));
    }

    #[test]
    fn roles_by_sglangs_words() {
        let of = |mode: &str| role(&json!({"disaggregation_mode": mode}));
        assert_eq!(
            [of("prefill"), of("decode"), of("null"), of("?")],
            [Some(Role::Prefill), Some(Role::Decode), Some(Role::Plain), None]
        );
        assert_eq!(role(&json!({})), None);
    }
}
