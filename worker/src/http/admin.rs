//! What operators, probes and gateways ask: health, identity, load, metrics; and the two orders they give.

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::{Deserialize, Serialize};

use super::{App, body, error::ApiError, json, openai::unix_seconds};
use crate::{config::Role, metrics};

/// A step that takes longer than this means that the engine is stuck.
const STEP_AGE_MAX: Duration = Duration::from_secs(120);

/// `GET /health`: whether this process works, whatever its peers do.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    match fault(&app) {
        None => json(&Health { status: "ok", role: app.facts.role.name() }),
        Some(message) => unavailable(message),
    }
}

/// `GET /ready`: whether new requests are welcome.
pub async fn ready(State(app): State<Arc<App>>) -> Response {
    if app.stopping.load(Ordering::Acquire) {
        return unavailable("this worker is stopping".into());
    }
    health(State(app)).await
}

#[derive(Serialize)]
struct Health {
    status: &'static str,
    role: &'static str,
}

fn fault(app: &App) -> Option<String> {
    if !app.engine.is_alive() {
        return Some("the engine has ended; its reason is in this worker's log".into());
    }
    let age = app.engine.last_step_age();
    if age > STEP_AGE_MAX {
        return Some(format!("the engine's present step has been going on for {} s", age.as_secs()));
    }
    let excess = app.engine.loads().excess?;
    Some(format!("{excess}; this worker admits nothing more, lets running requests end, and exits"))
}

fn unavailable(message: String) -> Response {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message).into_response()
}

/// `GET /metrics`, for Prometheus.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.metrics.render(&app.engine.loads());
    ([(header::CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE))], text).into_response()
}

#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: [ModelCard<'a>; 1],
}

#[derive(Serialize)]
struct ModelCard<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    max_model_len: u32,
}

fn card(app: &App) -> ModelCard<'_> {
    ModelCard {
        id: &app.facts.served_model_name,
        object: "model",
        created: app.facts.started_unix,
        owned_by: "tandem",
        root: &app.facts.model_path,
        max_model_len: app.facts.model_len_max(),
    }
}

/// `GET /v1/models`
pub async fn models(State(app): State<Arc<App>>) -> Response {
    json(&ModelList { object: "list", data: [card(&app)] })
}

/// `GET /v1/models/{model}`
pub async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    super::openai::check_model(&app, Some(&name))?;
    Ok(json(&card(&app)))
}

/// `GET /model_info`, in SGLang's fields.
pub async fn model_info(State(app): State<Arc<App>>) -> Response {
    #[derive(Serialize)]
    struct ModelInfo<'a> {
        model_path: &'a str,
        served_model_name: &'a str,
        tokenizer_path: &'a str,
        is_generation: bool,
        weight_version: &'static str,
        disaggregation_mode: &'static str,
        model_type: &'a str,
        max_context_length: u32,
        vocab_size: usize,
        fingerprint: &'a str,
    }
    let facts = &app.facts;
    json(&ModelInfo {
        model_path: &facts.model_path,
        served_model_name: &facts.served_model_name,
        tokenizer_path: &facts.model_path,
        is_generation: true,
        weight_version: "default",
        disaggregation_mode: facts.role.name(),
        model_type: &facts.model_type,
        max_context_length: facts.context_length,
        vocab_size: app.vocab(),
        fingerprint: &facts.fingerprint,
    })
}

/// `GET /server_info`: the settings in force, in SGLang's names, and the present load.
pub async fn server_info(State(app): State<Arc<App>>) -> Response {
    #[derive(Serialize)]
    struct ServerInfo<'a> {
        #[serde(flatten)]
        facts: &'a super::Facts,
        version: &'static str,
        status: &'static str,
        dp_size: u32,
        disaggregation_transfer_backend: &'static str,
        max_total_num_tokens: u32,
        internal_states: [LoadEntry; 1],
    }
    json(&ServerInfo {
        facts: &app.facts,
        version: env!("CARGO_PKG_VERSION"),
        status: if app.stopping.load(Ordering::Acquire) { "stopping" } else { "ready" },
        dp_size: 1,
        disaggregation_transfer_backend: "tcp",
        max_total_num_tokens: app.facts.max_total_tokens,
        internal_states: [load_entry(&app)],
    })
}

/// `GET /v1/loads`
pub async fn loads(State(app): State<Arc<App>>) -> Response {
    #[derive(Serialize)]
    struct Answer {
        timestamp: u64,
        version: &'static str,
        accelerator: &'static str,
        num_accelerators: u32,
        loads: [LoadEntry; 1],
    }
    json(&Answer {
        timestamp: unix_seconds(),
        version: env!("CARGO_PKG_VERSION"),
        accelerator: app.facts.device,
        num_accelerators: app.facts.tp_size,
        loads: [load_entry(&app)],
    })
}

/// One worker's load; SGLang has one such entry per data-parallel rank.
#[derive(Serialize)]
struct LoadEntry {
    dp_rank: u32,
    num_running_reqs: u32,
    num_waiting_reqs: u32,
    num_used_tokens: u64,
    num_total_tokens: u64,
    max_total_num_tokens: u32,
    max_running_requests: u32,
    token_usage: f64,
    gen_throughput: f32,
    pages: Pages,
    disaggregation: Disaggregation,
}

/// Where the pool's pages are. A pool at rest has all of them free.
#[derive(Serialize)]
struct Pages {
    page_size: u32,
    total: u32,
    free: u32,
    used: u32,
    draining: u32,
    quarantined: u32,
    quarantined_max: u32,
}

#[derive(Serialize)]
struct Disaggregation {
    mode: &'static str,
    prefill_bootstrap_queue_reqs: u32,
    prefill_inflight_queue_reqs: u32,
    decode_prealloc_queue_reqs: u32,
    decode_transfer_queue_reqs: u32,
    decode_retracted_queue_reqs: u32,
}

fn load_entry(app: &App) -> LoadEntry {
    let loads = app.engine.loads();
    let retracted = if app.facts.role == Role::Prefill { 0 } else { loads.retracted };
    LoadEntry {
        dp_rank: 0,
        num_running_reqs: loads.running,
        num_waiting_reqs: loads.waiting,
        num_used_tokens: loads.used_tokens,
        num_total_tokens: loads.total_tokens,
        max_total_num_tokens: app.facts.max_total_tokens,
        max_running_requests: app.facts.max_running_requests,
        token_usage: f64::from(loads.total_pages - loads.free_pages.min(loads.total_pages))
            / f64::from(loads.total_pages.max(1)),
        gen_throughput: loads.gen_throughput,
        pages: Pages {
            page_size: app.facts.page_size,
            total: loads.total_pages,
            free: loads.free_pages,
            used: loads.used_pages,
            draining: loads.draining_pages,
            quarantined: loads.quarantined_pages,
            quarantined_max: loads.quarantine_pages_max,
        },
        disaggregation: Disaggregation {
            mode: app.facts.role.name(),
            prefill_bootstrap_queue_reqs: loads.bootstrap_queue,
            prefill_inflight_queue_reqs: loads.inflight_queue,
            decode_prealloc_queue_reqs: loads.prealloc_queue,
            decode_transfer_queue_reqs: loads.transfer_queue,
            decode_retracted_queue_reqs: retracted,
        },
    }
}

/// `POST /flush_cache`: a success, since no prompt's KV cache outlives its request here.
pub async fn flush_cache() -> Response {
    "Cache flushed: this worker keeps no KV cache between requests.\n".into_response()
}

/// `POST /abort_request`: `{"rid": "..."}` or `{"abort_all": true}`. An unknown id is no error: its request may just have
/// ended.
pub async fn abort_request(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    #[derive(Deserialize)]
    struct Abort {
        rid: Option<String>,
        abort_all: Option<bool>,
    }
    let bytes: Bytes = body::read(&headers, body, app.body_limits).await?;
    let abort: Abort = body::parse(&bytes)?;
    match (abort.rid.filter(|rid| !rid.is_empty()), abort.abort_all.unwrap_or(false)) {
        (_, true) => app.engine.abort("")?,
        (Some(rid), false) => app.engine.abort(&rid)?,
        (None, false) => return Err(ApiError::invalid("rid", "send the rid to abort, or abort_all: true")),
    }
    Ok(StatusCode::OK.into_response())
}
