//! Everything that is not a prompt: liveness, readiness, the list of workers, and questions passed on to workers.

mod engine_metrics;
mod models;
mod workers;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, Method};
use pingora::protocols::http::ServerSession;
use serde_json::{Value, json};

use crate::admin::workers::Order;
use crate::door::keys::{Key, Right};
use crate::door::reply::{self, Done};
use crate::error::{Failure, Side};
use crate::fleet::Worker;
use crate::fleet::probe::ASK_TIMEOUT;
use crate::gateway::Gateway;

/// Bytes of a passed-on answer at most.
const ANSWER_BYTES_MAX: usize = 16 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    Health,
    Readiness,
    Workers(Order),
    Loads,
    /// Asked of the first worker that answers, by the first of these paths that it has.
    Passed(&'static [&'static str]),
    Models,
    OneModel,
    HealthGenerate,
    FlushCache,
    AbortRequest,
    EngineMetrics,
}

/// Path, method, route, and what it asks of a key.
type Entry = (&'static str, Method, Route, Right);

/// sglang_router leaves `/v1/models` and the info questions open to all; here they need a key where there are keys, since
/// they tell what serves.
const ROUTES: [Entry; 22] = [
    ("/health", Method::GET, Route::Health, Right::Nobody),
    ("/liveness", Method::GET, Route::Health, Right::Nobody),
    ("/readiness", Method::GET, Route::Readiness, Right::Nobody),
    ("/health_generate", Method::GET, Route::HealthGenerate, Right::Data),
    ("/v1/models", Method::GET, Route::Models, Right::Data),
    (ONE_MODEL, Method::GET, Route::OneModel, Right::Data),
    ("/get_server_info", Method::GET, Route::Passed(&["/get_server_info", "/server_info"]), Right::Data),
    ("/server_info", Method::GET, Route::Passed(&["/server_info", "/get_server_info"]), Right::Data),
    ("/get_model_info", Method::GET, Route::Passed(&["/get_model_info", "/model_info"]), Right::Data),
    ("/model_info", Method::GET, Route::Passed(&["/model_info", "/get_model_info"]), Right::Data),
    ("/workers", Method::GET, Route::Workers(Order::List), Right::Admin),
    ("/workers", Method::POST, Route::Workers(Order::Add), Right::Admin),
    (ONE_WORKER, Method::GET, Route::Workers(Order::Show), Right::Admin),
    (ONE_WORKER, Method::PUT, Route::Workers(Order::Change), Right::Admin),
    (ONE_WORKER, Method::DELETE, Route::Workers(Order::Remove), Right::Admin),
    ("/add_worker", Method::POST, Route::Workers(Order::AddUrl), Right::Admin),
    ("/remove_worker", Method::POST, Route::Workers(Order::RemoveUrl), Right::Admin),
    ("/list_workers", Method::GET, Route::Workers(Order::ListUrls), Right::Admin),
    ("/get_loads", Method::GET, Route::Loads, Right::Admin),
    ("/flush_cache", Method::POST, Route::FlushCache, Right::Admin),
    ("/abort_request", Method::POST, Route::AbortRequest, Right::Admin),
    ("/engine_metrics", Method::GET, Route::EngineMetrics, Right::Admin),
];

/// The path of one model, as metrics call it. A model's name may have slashes.
const ONE_MODEL: &str = "/v1/models/{model}";
const ONE_MODEL_PREFIX: &str = "/v1/models/";
/// The path of one worker.
const ONE_WORKER: &str = "/workers/{id}";

/// A known path. Where it takes several methods it is the asked one's entry, and the first where it does not take that.
pub fn route(path: &str, method: &Method) -> Option<&'static Entry> {
    static TABLE: &[Entry] = &ROUTES;
    let is_one_model = path.len() > ONE_MODEL_PREFIX.len() && path.starts_with(ONE_MODEL_PREFIX);
    let is_one_worker = path.strip_prefix("/workers/").is_some_and(|id| !id.is_empty() && !id.contains('/'));
    let path = match (is_one_model, is_one_worker) {
        (true, _) => ONE_MODEL,
        (_, true) => ONE_WORKER,
        _ => path,
    };
    let of_path = || TABLE.iter().filter(|(known, ..)| *known == path);
    of_path().find(|(_, allowed, ..)| allowed == method).or_else(|| of_path().next())
}

pub async fn answer(
    gateway: &Gateway,
    session: &mut ServerSession,
    route: Route,
    body: Bytes,
    key: Option<&Key>,
) -> Done {
    match route {
        Route::Health => reply::text(session, 200, "text/plain", "OK").await,
        Route::Readiness => readiness(gateway, session).await,
        Route::Workers(order) => workers::answer(&gateway.fleet, session, order, body).await,
        Route::Loads => reply::json(session, 200, &loads(gateway).await).await,
        Route::Passed(paths) => passed(gateway, session, paths).await,
        Route::Models => models::list(gateway, session, key).await,
        Route::OneModel => {
            let path = session.req_header().uri.path();
            let id = path.strip_prefix(ONE_MODEL_PREFIX).unwrap_or("").replace("%2F", "/").replace("%2f", "/");
            models::one(gateway, session, key, &id).await
        }
        Route::HealthGenerate => models::health_generate(gateway, session).await,
        Route::EngineMetrics => {
            let text = engine_metrics::gathered(gateway).await;
            reply::text(session, 200, "text/plain; version=0.0.4", text).await
        }
        Route::FlushCache => fan_out(gateway, session, "/flush_cache", Bytes::new()).await,
        Route::AbortRequest => fan_out(gateway, session, "/abort_request", body).await,
    }
}

async fn readiness(gateway: &Gateway, session: &mut ServerSession) -> Done {
    let fleet = gateway.fleet.snapshot();
    let draining = gateway.is_draining();
    let healthy = fleet.workers.iter().filter(|w| w.is_healthy()).count();
    if fleet.is_ready() && !draining {
        let value = json!({"status": "ready", "healthy_workers": healthy, "total_workers": fleet.workers.len()});
        return reply::json(session, 200, &value).await;
    }
    let reason = if draining { "shutting down" } else { "insufficient healthy workers" };
    let unwell: Vec<Value> = fleet.workers.iter().filter(|w| !w.is_healthy()).map(|w| unwell(w)).collect();
    let value = json!({
        "status": "not ready", "reason": reason, "healthy_workers": healthy,
        "total_workers": fleet.workers.len(), "unhealthy": unwell,
    });
    reply::json(session, 503, &value).await
}

fn unwell(worker: &Worker) -> Value {
    json!({"url": worker.url(), "worker_type": worker.spec.role.worker_type(), "reason": worker.health().reason()})
}

async fn loads(gateway: &Gateway) -> Value {
    let ask = async |worker: &Worker| {
        let load = gateway.prober.tokens(worker, ASK_TIMEOUT).await.map_or(-1, |tokens| tokens as i64);
        json!({"worker": worker.url(), "load": load})
    };
    let fleet = gateway.fleet.snapshot();
    json!({"workers": join_all(fleet.workers.iter().map(|w| ask(w))).await})
}

/// Asks one worker, healthy ones first and prefill before decode, and hands its answer on.
async fn passed(gateway: &Gateway, session: &mut ServerSession, paths: &[&str]) -> Done {
    let fleet = gateway.fleet.snapshot();
    let mut order: Vec<_> = fleet.workers.iter().collect();
    order.sort_by_key(|w| (!w.is_healthy(), w.spec.role));
    let mut refusal = None;
    for worker in order {
        for path in paths {
            let Ok(answer) = gateway.prober.ask(Method::GET, worker, path).send().await else { break };
            let status = answer.status();
            let Ok(body) = answer.bytes().await else { break };
            if body.len() > ANSWER_BYTES_MAX {
                break;
            }
            if status.is_success() {
                return reply::whole(session, status.as_u16(), "application/json", HeaderMap::new(), body).await;
            }
            refusal = Some(Failure::refused(Side::Prefill, status.as_u16(), body, None));
        }
    }
    let failure = refusal.unwrap_or_else(|| Failure::no_worker("", "no worker could be asked"));
    reply::failure(session, &failure).await
}

/// What a worker said to a request that went to all.
enum Said {
    Yes,
    /// It refuses what the client asked.
    BadRequest(Bytes),
    No(String),
}

/// Posts to all workers; 200 when all took it, 206 when some did, the workers' own 400 when all say that, else 502.
async fn fan_out(gateway: &Gateway, session: &mut ServerSession, path: &'static str, body: Bytes) -> Done {
    let ask = async |worker: &Worker| {
        let request = gateway.prober.ask(Method::POST, worker, path).header("content-type", "application/json");
        let said = match request.body(body.clone()).send().await {
            Ok(answer) if answer.status().is_success() => Said::Yes,
            Ok(answer) if answer.status() == 400 => Said::BadRequest(answer.bytes().await.unwrap_or_default()),
            Ok(answer) => Said::No(format!("it answered {}", answer.status().as_u16())),
            Err(error) => Said::No(format!("it could not be asked: {error}")),
        };
        (worker.url().to_owned(), said)
    };
    let fleet = gateway.fleet.snapshot();
    let outcomes = join_all(fleet.workers.iter().map(|w| ask(w))).await;
    let total = outcomes.len();
    if let Some((_, Said::BadRequest(body))) = outcomes.first()
        && outcomes.iter().all(|(_, said)| matches!(said, Said::BadRequest(_)))
    {
        return reply::failure(session, &Failure::refused(Side::Decode, 400, body.clone(), None)).await;
    }
    let (mut successful, mut failed) = (Vec::new(), Vec::new());
    for (url, said) in outcomes {
        match said {
            Said::Yes => successful.push(url),
            Said::BadRequest(_) => failed.push(json!({"worker": url, "error": "it answered 400"})),
            Said::No(why) => failed.push(json!({"worker": url, "error": why})),
        }
    }
    let (status, word) = match (successful.len(), failed.len()) {
        (_, 0) => (200, "success"),
        (0, _) => (502, "failed"),
        _ => (206, "partial_success"),
    };
    let message = format!("{path}: {} of {total} workers", successful.len());
    let value = json!({
        "status": word, "message": message, "workers_flushed": successful.len(), "total_http_workers": total,
        "total_workers": total, "successful": successful, "failed": failed,
    });
    reply::json(session, status, &value).await
}
