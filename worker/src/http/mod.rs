//! The worker's HTTP API: OpenAI's endpoints, SGLang's `/generate`, and what operators ask.
//!
//! ```text
//! listen -> around (id, key, panic, metrics) -> endpoint: body -> {openai, generate}
//!                                                         fields -> params, prompt -> engine (port)
//!                                                sse or one JSON <- answers <- events <- engine
//! ```
//! Every refusal is an [`error::ApiError`]. Bodies and template rendering are kept off the runtime's threads when long.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use rand::RngCore;
use serde::Serialize;
use tandem_model::{Generation, Tokenizer};
use tower_http::catch_panic::CatchPanicLayer;

use self::{
    answers::Answers,
    body::BodyLimits,
    error::{ApiError, Reason},
    generate::Generate,
    openai::{chat::Chat, completions::Completions, reply::Reply},
    port::EnginePort,
    preparing::Preparing,
    prompt::Batch,
};
use crate::{
    config::{CpuMath, Role},
    metrics::Metrics,
};

pub mod admin;
pub mod answers;
pub mod body;
pub mod endpoint;
pub mod error;
pub mod fields;
pub mod generate;
pub mod listen;
pub mod openai;
pub mod params;
pub mod port;
pub mod preparing;
pub mod prompt;
pub mod sse;

/// Bodies up to this size are parsed and tokenized where they arrive: it takes well under a millisecond.
const INLINE_BYTES_MAX: usize = 8 << 10;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Every path, for metrics: a client's own path must not become a series.
const PATHS: [&str; 16] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/models",
    "/health",
    "/health_generate",
    "/ready",
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
    "/v1/loads",
    "/metrics",
    "/flush_cache",
    "/abort_request",
    "/",
];

/// Asked by probes and scrapers, which carry no key.
const PUBLIC: [&str; 4] = ["/health", "/health_generate", "/ready", "/metrics"];

/// What this worker is, as `/server_info` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    pub model_path: String,
    pub served_model_name: String,
    pub model_type: String,
    pub fingerprint: String,
    pub host: String,
    pub port: u16,
    #[serde(rename = "disaggregation_mode")]
    pub role: Role,
    #[serde(rename = "disaggregation_bootstrap_port")]
    pub bootstrap_port: u16,
    pub tp_size: u32,
    pub page_size: u32,
    pub chunked_prefill_size: u32,
    pub max_running_requests: u32,
    pub max_total_tokens: u32,
    pub context_length: u32,
    pub num_reserved_decode_tokens: u32,
    pub device: &'static str,
    pub cpu_math: CpuMath,
    pub threads: usize,
    pub numerics: String,
    pub vocab_size: usize,
    pub started_unix: u64,
}

impl Facts {
    /// Tokens of a prompt and its answer together, at most.
    pub fn model_len_max(&self) -> u32 {
        self.context_length.min(self.max_total_tokens)
    }
}

/// What the handlers share.
pub struct App {
    pub engine: Arc<dyn EnginePort>,
    pub tokenizer: Tokenizer,
    pub generation: Generation,
    pub facts: Facts,
    pub metrics: Arc<Metrics>,
    pub body_limits: BodyLimits,
    pub api_key: Option<String>,
    /// Set at the signal to stop: new work is turned away, running work goes on.
    pub stopping: AtomicBool,
    pub preparing: Preparing,
}

/// When a request came.
#[derive(Clone)]
pub struct Arrival {
    pub at: Instant,
}

impl App {
    /// Reads a body and makes a request of it.
    ///
    /// # Errors
    /// What [`body::read`] and `make` refuse; 503 while the worker stops.
    pub async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        headers: &HeaderMap,
        body: Body,
        make: impl FnOnce(&Arc<Self>, &[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if self.stopping.load(std::sync::atomic::Ordering::Acquire) {
            let message = "this worker is stopping; send the request to another one";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message));
        }
        let bytes: Bytes = body::read(headers, body, self.body_limits).await?;
        if bytes.len() <= INLINE_BYTES_MAX {
            return make(self, &bytes);
        }
        let app = self.clone();
        self.preparing.run(bytes.len(), move || make(&app, &bytes)).await?
    }

    /// Gives the samples to the engine.
    ///
    /// # Errors
    /// 503 when its queue is full.
    pub fn submit(&self, batch: Batch, arrived: Instant) -> Result<Answers, ApiError> {
        let prompt_tokens: usize = batch.samples.iter().map(|sample| sample.prompt.len()).sum();
        let streams = self.engine.submit_all(batch.samples)?;
        self.metrics.requests.prompt_tokens.inc_by(prompt_tokens as u64);
        Ok(Answers::new(streams, arrived, self.metrics.requests.clone()))
    }

    pub fn vocab(&self) -> usize {
        self.facts.vocab_size
    }

    /// A decode worker computes no prompt: its prefill worker reports the prompt's logprobs.
    pub fn prompt_logprobs(&self, from: Option<u32>) -> Option<u32> {
        from.filter(|_| self.facts.role != Role::Decode)
    }

    pub fn new_id(&self, prefix: &str) -> String {
        let mut bytes = [0; 16];
        rand::rng().fill_bytes(&mut bytes);
        format!("{prefix}{:032x}", u128::from_be_bytes(bytes))
    }
}

/// A JSON answer.
pub fn json(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => {
            let mut response = Response::new(Body::from(body));
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        }
        Err(error) => ApiError::internal(format!("the answer cannot be written as JSON: {error}")).into_response(),
    }
}

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(endpoint::handle::<Reply<Chat>>))
        .route("/v1/completions", post(endpoint::handle::<Reply<Completions>>))
        .route("/generate", post(endpoint::handle::<Generate>).put(endpoint::handle::<Generate>))
        .route("/v1/models", get(admin::models))
        .route("/v1/models/{*model}", get(admin::model))
        .route("/health", get(admin::health))
        .route("/health_generate", get(admin::health))
        .route("/ready", get(admin::ready))
        .route("/server_info", get(admin::server_info))
        .route("/get_server_info", get(admin::server_info))
        .route("/model_info", get(admin::model_info))
        .route("/get_model_info", get(admin::model_info))
        .route("/v1/loads", get(admin::loads))
        .route("/metrics", get(admin::metrics))
        .route("/flush_cache", post(admin::flush_cache).get(admin::flush_cache))
        .route("/abort_request", post(admin::abort_request))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(app.clone(), around))
        .with_state(app)
}

async fn unknown_path(request: Request) -> ApiError {
    let path = request.uri().path().to_owned();
    ApiError::new(StatusCode::NOT_FOUND, "unknown_path", format!("this worker has no path {path}"))
}

async fn wrong_method(method: Method, request: Request) -> ApiError {
    let path = request.uri().path().to_owned();
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", format!("{path} does not take {method}"))
}

/// The last net: a panic is a fault of this worker, and its request's alone.
fn panicked(panic: Box<dyn std::any::Any + Send>) -> Response {
    let reason = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no reason given");
    tracing::error!(reason, "a request handler panicked");
    ApiError::internal("this worker failed while it handled the request; its log has the reason").into_response()
}

/// What holds for every request: an id, the key, a measurement.
async fn around(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let at = Instant::now();
    let request_id = request_id(&app, request.headers());
    let path = request.uri().path();
    let endpoint = PATHS.iter().find(|known| **known == path).copied().unwrap_or("other");
    let mut response = match check_key(&app, path, request.headers()) {
        Ok(()) => {
            request.extensions_mut().insert(Arrival { at });
            next.run(request).await
        }
        Err(error) => error.into_response(),
    };
    let status = response.status();
    if status.is_server_error() {
        let reason = response.extensions().get::<Reason>().map_or("not known", |reason| reason.0.as_str());
        let id = request_id.to_str().unwrap_or_default();
        tracing::warn!(endpoint, status = status.as_u16(), id, reason, "a request failed");
    }
    app.metrics.requests.responded(endpoint, status.as_u16(), at.elapsed());
    response.headers_mut().insert(REQUEST_ID, request_id);
    response
}

/// The client's id if it is short and plain, a new one otherwise.
fn request_id(app: &App, headers: &HeaderMap) -> HeaderValue {
    let plain = |value: &&HeaderValue| {
        !value.is_empty() && value.len() <= REQUEST_ID_BYTES_MAX && value.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    headers
        .get(REQUEST_ID)
        .filter(plain)
        .cloned()
        .unwrap_or_else(|| HeaderValue::try_from(app.new_id("")).expect("hex digits are a header value"))
}

fn check_key(app: &App, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(key) = &app.api_key else { return Ok(()) };
    if PUBLIC.contains(&path) {
        return Ok(());
    }
    let given = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.as_bytes().split_at_checked(7))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "))
        .map(|(_, token)| token);
    match given {
        Some(token) if equal_in_constant_time(token, key.as_bytes()) => Ok(()),
        Some(_) => Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", "the API key is wrong")),
        None => Err(ApiError::new(
            StatusCode::UNAUTHORIZED,
            "invalid_api_key",
            "no API key: send the header \"Authorization: Bearer KEY\"",
        )),
    }
}

/// The time tells the length at most, never how many bytes agree.
fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests;
