//! The door: one HTTP request off a client's connection, checked, its body read within the limit, and handed to the route
//! it names. Afterwards the connection serves on or is closed.

mod head;
pub mod reply;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use http::{Method, header};
use pingora::ErrorType;
use pingora::apps::{HttpPersistentSettings, HttpServerApp, ReusedHttpStream};
use pingora::protocols::http::ServerSession;
use pingora::server::ShutdownWatch;

use tokio::time::{timeout, timeout_at};

use crate::admin;
use crate::config::Config;
use crate::door::reply::Done;
use crate::error::{Failure, Side};
use crate::exchange::drive;
use crate::gateway::Gateway;
use crate::request::{self, Endpoint};

/// How long the rest of a refused body is read before the connection is closed, so that the client sees the answer.
const DRAIN_WAIT: Duration = Duration::from_secs(1);
const REQUEST_ID_BYTES_MAX: usize = 128;
/// A body may be this slow.
const BODY_BYTES_PER_SECOND_MIN: usize = 16 * 1024;
/// The name of pingora's error for a chunk that is none.
const INVALID_CHUNK: &str = "InvalidChunk";
/// Of a body with a declared length this much memory is taken before it has arrived.
const BODY_RESERVED_BYTES_MAX: usize = 1 << 20;

/// The data listener's application.
pub struct DataApp(pub Arc<Gateway>);

/// The metrics listener's application.
pub struct MetricsApp(pub Arc<Gateway>);

#[async_trait]
impl HttpServerApp for DataApp {
    async fn process_new_http(
        self: &Arc<Self>,
        mut session: ServerSession,
        _: &ShutdownWatch,
    ) -> Option<ReusedHttpStream> {
        // The wait for a connection's next request may be long: it begins under these settings, the request under those of
        // its own time.
        if !head_arrived(&mut session, self.0.config().deadlines.client_read).await {
            return None;
        }
        name_request(&mut session);
        let gateway = &self.0;
        let _running = gateway.begin_request();
        // Without this a client that sends its next request early looks like one that talks out of turn.
        session.set_pipelining_enabled(true);
        if gateway.draining.load(Relaxed) {
            session.set_keepalive(None);
        }
        let arrived = Instant::now();
        let target = Target::of(&session);
        gateway.metrics.door.arrived(target.method_label, target.path_label);
        let done = serve(gateway, &mut session, &target, arrived).await;
        let seconds = arrived.elapsed().as_secs_f64();
        gateway.metrics.door.answered(target.method_label, target.path_label, done.status, done.code, seconds);
        next_request(session, done).await
    }
}

#[async_trait]
impl HttpServerApp for MetricsApp {
    async fn process_new_http(
        self: &Arc<Self>,
        mut session: ServerSession,
        _: &ShutdownWatch,
    ) -> Option<ReusedHttpStream> {
        if !head_arrived(&mut session, self.0.config().deadlines.client_read).await {
            return None;
        }
        session.set_pipelining_enabled(true);
        let done = match session.req_header().uri.path() {
            "/metrics" => match self.0.metrics.render(&self.0.fleet) {
                Ok(text) => reply::text(&mut session, 200, "text/plain; version=0.0.4", text).await,
                Err(error) => reply::text(&mut session, 500, "text/plain", error.to_string()).await,
            },
            path => {
                let failure = not_found(path);
                reply::failure(&mut session, &failure).await
            }
        };
        next_request(session, done).await
    }
}

/// Reads a request's head; what cannot be one, or an ambiguous one, is answered with 400 and the connection ends. It ends
/// without a word where no head came within `limit`, the wait for a connection's next request included.
async fn head_arrived(session: &mut ServerSession, limit: Duration) -> bool {
    let fault = match timeout(limit, session.read_request()).await {
        Ok(Ok(true)) => match head::fault(&session.to_h1_raw(), session.req_header().version) {
            None => return true,
            Some(fault) => fault,
        },
        Ok(Ok(false)) | Err(_) => return false,
        Ok(Err(error)) => {
            tracing::debug!(%error, "malformed request head");
            "the bytes received are not an HTTP request"
        }
    };
    session.set_keepalive(None);
    let failure = Failure::client(400, "malformed_request", format!("malformed request head: {fault}"));
    reply::failure(session, &failure).await;
    session.shutdown().await;
    false
}

/// Gives the request an id where its client gave none that can be logged and passed on.
fn name_request(session: &mut ServerSession) {
    let given = session.get_header_bytes(reply::REQUEST_ID);
    let usable = (1..=REQUEST_ID_BYTES_MAX).contains(&given.len()) && given.iter().all(u8::is_ascii_graphic);
    if !usable {
        let made = format!("{:032x}", rand::random::<u128>());
        session.req_header_mut().insert_header(reply::REQUEST_ID, made).expect("hex digits are a header value");
    }
}

async fn next_request(mut session: ServerSession, done: Done) -> Option<ReusedHttpStream> {
    if !done.whole {
        session.shutdown().await;
        return None;
    }
    if !session.is_body_done() {
        let drained = timeout(DRAIN_WAIT, session.drain_request_body()).await;
        if !matches!(drained, Ok(Ok(()))) {
            session.shutdown().await;
            return None;
        }
    }
    let settings = HttpPersistentSettings::for_session(&session);
    let reusable = session.finish().await.ok().flatten()?;
    Some(ReusedHttpStream::from_reusable_stream(reusable, settings))
}

enum Kind {
    Data(Endpoint),
    Admin(admin::Route),
    Unknown,
}

/// What a request asks for, with labels from fixed sets.
struct Target {
    kind: Kind,
    allowed: Method,
    open_to_all: bool,
    method: Method,
    method_label: &'static str,
    path_label: &'static str,
}

impl Target {
    fn of(session: &ServerSession) -> Self {
        let head = session.req_header();
        // A HEAD is a GET whose body stays home.
        let method = if head.method == Method::HEAD { Method::GET } else { head.method.clone() };
        let method_label = match method {
            Method::GET => "GET",
            Method::POST => "POST",
            _ => "OTHER",
        };
        let path = head.uri.path();
        let (kind, allowed, open_to_all, path_label) = match (Endpoint::of_path(path), admin::route(path)) {
            (Some(endpoint), _) => (Kind::Data(endpoint), Method::POST, false, endpoint.path()),
            (None, Some((known, allowed, route, open))) => (Kind::Admin(*route), allowed.clone(), *open, *known),
            (None, None) => (Kind::Unknown, method.clone(), true, "other"),
        };
        Target { kind, allowed, open_to_all, method, method_label, path_label }
    }
}

async fn serve(gateway: &Gateway, session: &mut ServerSession, target: &Target, arrived: Instant) -> Done {
    let config = gateway.config();
    let prepared = tokio::select! {
        prepared = prepare(&config, session, target) => prepared,
        () = gateway.until_grace_ends() => Err(Failure::stopping()),
    };
    match prepared {
        Err(failure) => reply::failure(session, &failure).await,
        Ok(None) => Done::broken(499, "client_gone"),
        Ok(Some(body)) => match target.kind {
            Kind::Admin(route) => admin::answer(gateway, session, route, body).await,
            Kind::Data(endpoint) => match checked(gateway, config, session, endpoint, body, arrived) {
                Ok(request) => drive::run(gateway, session, &request).await,
                Err(failure) => reply::failure(session, &failure).await,
            },
            Kind::Unknown => reply::failure(session, &not_found(session.req_header().uri.path())).await,
        },
    }
}

/// Checks that come before the body is read, then reads it; `None` when the client left meanwhile.
async fn prepare(config: &Config, session: &mut ServerSession, target: &Target) -> Result<Option<Bytes>, Failure> {
    if matches!(target.kind, Kind::Unknown) {
        return Err(not_found(session.req_header().uri.path()));
    }
    if target.method != target.allowed {
        let what = format!("{} takes {}", target.path_label, target.allowed);
        return Err(Failure::client(405, "method_not_allowed", what));
    }
    if let Some(key) = config.security.api_key.as_ref().filter(|_| !target.open_to_all) {
        let given = session.get_header_bytes(header::AUTHORIZATION).strip_prefix(b"Bearer ").unwrap_or(b"");
        if !same(given, key.as_bytes()) {
            let what = "send the gateway's key as `Authorization: Bearer KEY`";
            return Err(Failure::client(401, "invalid_api_key", what));
        }
    }
    let read = read_body(session, config.listen.body_bytes_max, config.deadlines.client_read).await;
    if read.is_err() {
        // Where the next request begins is not known.
        session.set_keepalive(None);
    }
    read
}

/// Compares in time that depends on the lengths alone.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |diff, (x, y)| diff | (x ^ y)) == 0
}

/// The whole body; `None` when the client left. It must arrive within `limit`, and another second per piece of
/// [`BODY_BYTES_PER_SECOND_MIN`] that came.
async fn read_body(session: &mut ServerSession, bytes_max: usize, limit: Duration) -> Result<Option<Bytes>, Failure> {
    let began = Instant::now();
    let too_large = |bytes: u64| {
        let what =
            format!("the request body has at least {bytes} bytes, the limit is {bytes_max} (--max-payload-size)");
        Failure::client(413, "payload_too_large", what)
    };
    let declared = session.get_header(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.trim().parse::<u64>().ok());
    if let Some(declared) = declared.filter(|d| *d > bytes_max as u64) {
        return Err(too_large(declared));
    }
    let expects = session.get_header_bytes(header::EXPECT).eq_ignore_ascii_case(b"100-continue");
    if expects && session.write_continue_response().await.is_err() {
        return Ok(None);
    }
    let mut body = BytesMut::with_capacity(declared.map_or(0, |d| (d as usize).min(BODY_RESERVED_BYTES_MAX)));
    loop {
        let earned = Duration::from_secs((body.len() / BODY_BYTES_PER_SECOND_MIN) as u64);
        let Ok(read) = timeout_at((began + limit + earned).into(), session.read_request_body()).await else {
            return Err(too_slow(body.len()));
        };
        match read {
            Ok(Some(piece)) if body.len() + piece.len() > bytes_max => {
                return Err(too_large((body.len() + piece.len()) as u64));
            }
            Ok(Some(piece)) => body.extend_from_slice(&piece),
            Ok(None) => return Ok(Some(body.freeze())),
            Err(error) if *error.etype() == ErrorType::ReadTimedout => return Err(too_slow(body.len())),
            Err(error) if error.etype().as_str() == INVALID_CHUNK => {
                tracing::debug!(%error, "malformed chunk");
                return Err(Failure::client(400, "malformed_body", "the request body's chunked coding is malformed"));
            }
            Err(error) => {
                tracing::debug!(%error, "the client left in the middle of its body");
                return Ok(None);
            }
        }
    }
}

fn too_slow(bytes: usize) -> Failure {
    let what = format!("the request body did not arrive in time, {bytes} bytes of it came; send it again, faster");
    Failure::client(408, "client_read_timeout", what)
}

fn checked(
    gateway: &Gateway,
    config: Arc<Config>,
    session: &ServerSession,
    endpoint: Endpoint,
    body: Bytes,
    arrived: Instant,
) -> Result<drive::Request, Failure> {
    let scanned = request::scan(endpoint, body)?;
    if let Some(field) = scanned.prompt_logprobs.filter(|_| gateway.fleet.split) {
        let asks = if field == "echo" { "the prompt as part of the answer" } else { "logprobs of the prompt" };
        let what = format!(
            "`{field}` asks for {asks}, which this gateway does not serve with prefill and decode on separate workers; \
             leave it out, or use a plain worker"
        );
        return Err(Failure::client(400, "unsupported_with_pd", what).at(field));
    }
    if gateway.fleet.split && gateway.fleet.side(Side::Prefill).all(|w| w.bootstrap_port().is_none() && w.is_healthy())
    {
        tracing::warn!("no prefill worker has a bootstrap port: give it behind --prefill URL");
    }
    Ok(drive::Request { config, endpoint, headers: session.req_header().headers.clone(), scanned, arrived })
}

fn not_found(path: &str) -> Failure {
    let shown: String = path.chars().take(200).collect();
    Failure::client(404, "not_found", format!("there is no {shown} here"))
}
