//! What the fleet serves: the models of all pools, each as one of its workers describes it, and whether they still generate.

use std::time::Duration;

use futures_util::future::join_all;
use http::Method;
use pingora::protocols::http::ServerSession;
use serde_json::{Value, json};

use crate::door::keys::Key;
use crate::door::reply::{self, Done};
use crate::error::{Blame, Failure};
use crate::fleet::{Pool, Worker};
use crate::gateway::Gateway;

/// A worker may generate a token to answer whether it can.
const GENERATE_TIMEOUT: Duration = Duration::from_secs(25);

/// All models that the key may see, in OpenAI's shape.
pub async fn list(gateway: &Gateway, session: &mut ServerSession, key: Option<&Key>) -> Done {
    reply::json(session, 200, &json!({"object": "list", "data": known(gateway, key).await})).await
}

pub async fn one(gateway: &Gateway, session: &mut ServerSession, key: Option<&Key>, id: &str) -> Done {
    match known(gateway, key).await.into_iter().find(|model| model["id"] == id) {
        Some(model) => reply::json(session, 200, &model).await,
        None => {
            let what = "there is no such model here; GET /v1/models lists those there are";
            reply::failure(session, &Failure::client(404, "model_not_found", what)).await
        }
    }
}

async fn known(gateway: &Gateway, key: Option<&Key>) -> Vec<Value> {
    let fleet = gateway.fleet.snapshot();
    let described = join_all(fleet.pools().iter().map(|pool| described(gateway, pool))).await;
    let mut models: Vec<Value> = described.into_iter().flatten().collect();
    let named = |models: &[Value], name: &str| models.iter().any(|model| model["id"] == name);
    for (name, _) in fleet.models() {
        if !named(&models, name) {
            models.push(json!({"id": name, "object": "model", "created": 0, "owned_by": "tandem"}));
        }
    }
    let sees = |model: &Value| key.is_none_or(|key| model["id"].as_str().is_some_and(|id| key.sees(id)));
    models.retain(sees);
    models.sort_by(|a, b| a["id"].as_str().cmp(&b["id"].as_str()));
    models.dedup_by(|a, b| a["id"] == b["id"]);
    models
}

/// The models of a pool as its first healthy worker that answers describes them.
async fn described(gateway: &Gateway, pool: &Pool) -> Vec<Value> {
    for worker in healthy(pool) {
        let Ok(answer) = gateway.prober.ask(Method::GET, worker, "/v1/models").send().await else { continue };
        if let Ok(Value::Object(mut list)) = answer.json().await
            && let Some(Value::Array(models)) = list.remove("data")
        {
            return models;
        }
    }
    Vec::new()
}

fn healthy(pool: &Pool) -> impl Iterator<Item = &Worker> {
    use crate::config::Role;
    let roles = [Role::Prefill, Role::Decode, Role::Plain].into_iter();
    roles.flat_map(|role| pool.workers(role)).map(|worker| &**worker).filter(|worker| worker.is_healthy())
}

/// Whether one worker of each role in each pool still generates.
pub async fn health_generate(gateway: &Gateway, session: &mut ServerSession) -> Done {
    let fleet = gateway.fleet.snapshot();
    let mut asked: Vec<&Worker> = Vec::new();
    for pool in fleet.pools() {
        for worker in healthy(pool) {
            if !asked.iter().any(|other| other.spec.role == worker.spec.role && other.spec.model == worker.spec.model) {
                asked.push(worker);
            }
        }
    }
    let ask = async |worker: &Worker| {
        let request = gateway.prober.ask(Method::GET, worker, "/health_generate").timeout(GENERATE_TIMEOUT);
        request.send().await.is_ok_and(|answer| answer.status().is_success())
    };
    let said = join_all(asked.iter().map(|worker| ask(worker))).await;
    if fleet.is_ready() && said.iter().all(|good| *good) {
        return reply::text(session, 200, "text/plain", "OK").await;
    }
    let what = "a worker that was asked to generate did not, or there is none to ask; GET /readiness tells more";
    let mut failure = Failure::new(503, "health_generate_failed", Blame::Gateway, what);
    failure.retry_after_secs = Some(1);
    reply::failure(session, &failure).await
}
