//! The door: one HTTP request off a client's connection, checked, its body read within the limit, and handed to the route
//! it names. Afterwards the connection serves on or is closed.

mod access;
mod admission;
mod body;
pub mod clients;
mod head;
pub mod keys;
pub mod reply;
mod target;
pub mod tls;
mod wire;

use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use pingora::apps::{HttpPersistentSettings, HttpServerApp, HttpServerOptions, ReusedHttpStream, ServerApp};
use pingora::protocols::Stream;
use pingora::protocols::http::ServerSession;
use pingora::protocols::http::v2::server::{H2Options, default_h2_options};
use pingora::server::ShutdownWatch;
use tokio::time::{timeout, timeout_at};

use crate::admin;
use crate::config::{Class, Config};
use crate::door::access::{AccessLog, Line};
use crate::door::admission::Admission;
use crate::door::clients::Clients;
use crate::door::keys::{Bucket, Key, KeyPermit, Keyring, Right, limited};
use crate::door::reply::Done;
use crate::door::target::{Kind, Surface, Target};
use crate::door::wire::{Gauge, Wire};
use crate::error::{Failure, StartError};
use crate::exchange::{client, drive};
use crate::gateway::Gateway;
use crate::metrics::door::DoorMetrics;
use crate::request::{self, Endpoint};

/// How long the rest of a refused body is read before the connection is closed, so that the client sees the answer.
const DRAIN_WAIT: Duration = Duration::from_secs(1);
/// How long a connection beyond the cap may take to send the head that its refusal answers.
const REFUSAL_WAIT: Duration = Duration::from_secs(5);
const REQUEST_ID_BYTES_MAX: usize = 128;
/// A request's own limit for its wait in the queue, in milliseconds.
const QUEUE_TIMEOUT: HeaderName = HeaderName::from_static("x-tandem-queue-timeout-ms");
/// Requests that one HTTP/2 connection may have open at a time.
const H2_STREAMS_MAX: u32 = 1000;
/// What one HTTP/2 stream's answer may have waiting in this process for a slow client.
const H2_SEND_BUFFER_BYTES: usize = 32 * 1024;
/// What a client may send of one body, and of all bodies of its HTTP/2 connection, before it hears that more is welcome.
const H2_WINDOW_BYTES: [u32; 2] = [256 * 1024, 1 << 20];

/// What the door keeps between requests.
#[derive(Debug)]
pub struct Door {
    pub clients: Clients,
    pub admission: Arc<Admission>,
    keys: ArcSwap<Keyring>,
    rate: Mutex<Option<Bucket>>,
    access: Option<AccessLog>,
}

impl Door {
    pub fn new(config: &Config, metrics: &DoorMetrics) -> Result<Self, StartError> {
        let (keys, now) = (&config.security.keys, Instant::now());
        let access = config.listen.access_log.as_deref();
        let access = access.map(|path| AccessLog::open(path, metrics.access_lines_lost.clone())).transpose()?;
        Ok(Door {
            clients: Clients::default(),
            admission: Admission::new(&config.admission),
            keys: ArcSwap::from_pointee(Keyring::new(keys, &Keyring::default(), now)),
            rate: Mutex::new(config.admission.rate.map(|rate| Bucket::new(rate, now))),
            access,
        })
    }

    /// Takes over settings that were read again. What runs and waits goes on and counts on.
    pub fn configure(&self, config: &Config) {
        let now = Instant::now();
        self.keys.store(Arc::new(Keyring::new(&config.security.keys, &self.keys.load(), now)));
        self.admission.adopt(&config.admission);
        *self.rate.lock().expect("no panic under this lock") = config.admission.rate.map(|rate| Bucket::new(rate, now));
    }

    /// Who asks, if a key is asked for, and whether it may ask now.
    fn caller(&self, headers: &HeaderMap, right: Right) -> Result<Caller, Failure> {
        let key = self.keys.load().authorize(headers, right)?;
        let permit = match &key {
            Some(key) if right == Right::Data => Some(key.enter(Instant::now())?),
            _ => None,
        };
        Ok(Caller { key, _permit: permit })
    }

    /// A refusal of one more prompt that needs nothing of its body.
    fn refuses_prompts(&self) -> Result<(), Failure> {
        self.admission.refuses_now()?;
        match self.rate.lock().expect("no panic under this lock").as_mut().map(|rate| rate.take(Instant::now())) {
            Some(Err(wait)) => {
                let what = "the gateway's rate of requests is used up (--rate-limit-tokens-per-second)";
                Err(limited("rate_limited", what.into(), wait))
            }
            _ => Ok(()),
        }
    }
}

/// Who asks, counted under its key until this is dropped.
#[derive(Debug)]
struct Caller {
    key: Option<Arc<Key>>,
    _permit: Option<KeyPermit>,
}

/// The data listener's application.
pub struct DataApp(pub Arc<Gateway>);

/// The application of the operators' listener, where they have one.
pub struct AdminApp(pub Arc<Gateway>);

/// The metrics listener's application.
pub struct MetricsApp(pub Arc<Gateway>);

#[async_trait]
impl ServerApp for DataApp {
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let surface = if self.0.config().listen.admin.is_some() { Surface::Data } else { Surface::Whole };
        serve_client(&self.0, surface, stream, shutdown).await
    }
}

#[async_trait]
impl ServerApp for AdminApp {
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        serve_client(&self.0, Surface::Admin, stream, shutdown).await
    }
}

/// Serves a connection to its end, counted among all that are open.
async fn serve_client(
    gateway: &Arc<Gateway>,
    surface: Surface,
    stream: Stream,
    shutdown: &ShutdownWatch,
) -> Option<Stream> {
    let Some(entry) = gateway.door.clients.enter(gateway.config().listen.connections_max) else {
        gateway.metrics.door.connections_refused.inc();
        return None;
    };
    let (connection, wire) = Connection::new(gateway.clone(), Purpose::Requests(surface), entry.admitted, stream);
    connection.process_new(wire, shutdown).await
}

#[async_trait]
impl ServerApp for MetricsApp {
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let (connection, wire) = Connection::new(self.0.clone(), Purpose::Metrics, true, stream);
        connection.process_new(wire, shutdown).await
    }
}

/// What a listener is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Requests(Surface),
    Metrics,
}

/// One client's connection: one request after another, or over HTTP/2 several at a time.
struct Connection {
    gateway: Arc<Gateway>,
    purpose: Purpose,
    admitted: bool,
    gauge: Arc<Gauge>,
    options: HttpServerOptions,
}

impl Connection {
    fn new(gateway: Arc<Gateway>, purpose: Purpose, admitted: bool, stream: Stream) -> (Arc<Self>, Stream) {
        let config = gateway.config();
        let idle = config.deadlines.client_read;
        let gauge = Arc::new(Gauge::new(config.listen.head_bytes_max));
        let mut options = HttpServerOptions::default();
        options.h2c = config.listen.h2c;
        options.h2_idle_timeout = Some(idle);
        let wire = Wire::new(stream, gauge.clone(), idle);
        (Arc::new(Connection { gateway, purpose, admitted, gauge, options }), Box::new(wire))
    }
}

#[async_trait]
impl HttpServerApp for Connection {
    async fn process_new_http(
        self: &Arc<Self>,
        mut session: ServerSession,
        _: &ShutdownWatch,
    ) -> Option<ReusedHttpStream> {
        if !self.head_arrived(&mut session).await {
            return None;
        }
        // Without this a client that sends its next request early looks like one that talks out of turn.
        session.set_pipelining_enabled(true);
        // All waiting has limits of ours.
        session.set_read_timeout(None);
        let done = match self.purpose {
            Purpose::Requests(surface) => self.serve_request(&mut session, surface).await,
            Purpose::Metrics => self.serve_metrics(&mut session).await,
        };
        self.next_request(session, done).await
    }

    fn h2_options(&self) -> Option<H2Options> {
        let mut options = default_h2_options();
        options
            .max_header_list_size(self.gauge.head_bytes_max().try_into().unwrap_or(u32::MAX))
            .max_concurrent_streams(H2_STREAMS_MAX)
            .initial_window_size(H2_WINDOW_BYTES[0])
            .initial_connection_window_size(H2_WINDOW_BYTES[1])
            .max_send_buffer_size(H2_SEND_BUFFER_BYTES);
        Some(options)
    }

    fn server_options(&self) -> Option<&HttpServerOptions> {
        Some(&self.options)
    }
}

impl Connection {
    async fn serve_request(&self, session: &mut ServerSession, surface: Surface) -> Done {
        let gateway = &self.gateway;
        let config = gateway.config();
        name_request(session, &config.listen.request_id_headers);
        let _running = gateway.begin_request();
        if gateway.is_draining() {
            session.set_keepalive(None);
        }
        let arrived = Instant::now();
        let target = Target::of(surface, &session.req_header().method, session.req_header().uri.path());
        gateway.metrics.door.arrived(target.method_label, target.path_label);
        let mut notes = Notes::default();
        let done = match self.admitted {
            true => serve(gateway, config, session, &target, arrived, &mut notes).await,
            false => {
                gateway.metrics.door.connections_refused.inc();
                session.set_keepalive(None);
                reply::failure(session, &too_many_connections(config.listen.connections_max)).await
            }
        };
        let took = arrived.elapsed();
        let Target { method_label, path_label, .. } = target;
        gateway.metrics.door.answered(method_label, path_label, done.status, done.code, took.as_secs_f64());
        if let Some(log) = &gateway.door.access {
            notes.write(log, session, &done, arrived, took);
        }
        done
    }

    async fn serve_metrics(&self, session: &mut ServerSession) -> Done {
        let gateway = &self.gateway;
        if gateway.is_draining() {
            session.set_keepalive(None);
        }
        match session.req_header().uri.path() {
            "/metrics" => {
                let (running, waiting) = gateway.door.admission.counts();
                gateway.metrics.door.look_at(gateway.door.clients.open(), running, waiting);
                match gateway.metrics.render(&gateway.fleet) {
                    Ok(text) => reply::text(session, 200, "text/plain; version=0.0.4", text).await,
                    Err(error) => reply::text(session, 500, "text/plain", error.to_string()).await,
                }
            }
            path => {
                let failure = not_found(path);
                reply::failure(session, &failure).await
            }
        }
    }

    /// Reads a request's head. One that is none, is ambiguous, too large or too slow is answered, and the connection ends. It
    /// ends without a word where nothing came in time, the wait for a connection's next request included.
    async fn head_arrived(&self, session: &mut ServerSession) -> bool {
        if session.is_http2() {
            // Read and judged by the connection's codec, which knows no ambiguous framing.
            return true;
        }
        // The wait for a connection's next request may be long: it begins under these settings, the request under those of
        // its own time.
        let limit = self.gateway.config().deadlines.client_read;
        let limit = if self.admitted { limit } else { limit.min(REFUSAL_WAIT) };
        let failure = match self.read_head(session, limit).await {
            Head::Read => match judge(session, self.gauge.head_bytes_max()) {
                None => return true,
                Some(failure) => failure,
            },
            Head::Nothing => return false,
            Head::Refused(failure) => failure,
        };
        session.set_keepalive(None);
        reply::failure(session, &failure).await;
        self.gateway.metrics.door.head_refused(failure.code);
        self.gauge.linger();
        session.shutdown().await;
        false
    }

    /// The first byte must come within `limit`, and the whole head within `limit` of its first byte.
    async fn read_head(&self, session: &mut ServerSession, limit: Duration) -> Head {
        self.gauge.begin_head();
        let mut until = Instant::now() + limit;
        let read = {
            let reading = session.read_request();
            tokio::pin!(reading);
            loop {
                match timeout_at(until.into(), &mut reading).await {
                    Ok(read) => break Some(read),
                    Err(_) => match self.gauge.head_began().map(|began| began + limit) {
                        Some(later) if later > until => until = later,
                        _ => break None,
                    },
                }
            }
        };
        self.gauge.end_head();
        match read {
            Some(Ok(true)) => Head::Read,
            Some(Ok(false)) => Head::Nothing,
            Some(Err(_)) if self.gauge.head_is_too_large() => {
                Head::Refused(head_too_large(self.gauge.head_bytes_max()))
            }
            Some(Err(error)) if error.root_cause().downcast_ref() == Some(&httparse::Error::TooManyHeaders) => {
                let what = "the request head has more than 256 header fields";
                Head::Refused(Failure::client(431, "head_too_large", what))
            }
            Some(Err(error)) => {
                tracing::debug!(%error, "malformed request head");
                Head::Refused(malformed("the bytes received are not an HTTP request"))
            }
            None if self.gauge.head_began().is_some() => {
                let what = format!("the request head did not arrive within {} s; send it again", limit.as_secs());
                Head::Refused(Failure::client(408, "client_head_timeout", what))
            }
            None => Head::Nothing,
        }
    }

    async fn next_request(&self, mut session: ServerSession, done: Done) -> Option<ReusedHttpStream> {
        if session.is_http2() {
            // A stream that was not answered to its end is reset when the session is dropped.
            if done.whole {
                let _ = session.finish().await;
            }
            return None;
        }
        if !done.whole {
            session.shutdown().await;
            return None;
        }
        if !session.is_body_done() {
            let drained = timeout(DRAIN_WAIT, session.drain_request_body()).await;
            if !matches!(drained, Ok(Ok(()))) {
                self.gauge.linger();
                session.shutdown().await;
                return None;
            }
        }
        let settings = HttpPersistentSettings::for_session(&session);
        let reusable = session.finish().await.ok().flatten()?;
        let (stream, ahead) = reusable.into_parts();
        self.gauge.carry(ahead.as_ref().map_or(0, |bytes| bytes.len()));
        let mut settings = settings;
        if let Some(ahead) = ahead {
            settings.set_pipelined_prefix(ahead);
        }
        Some(ReusedHttpStream::new(stream, Some(settings)))
    }
}

/// What came of reading a head.
enum Head {
    Read,
    /// The client closed or sent nothing.
    Nothing,
    Refused(Failure),
}

fn judge(session: &ServerSession, bytes_max: usize) -> Option<Failure> {
    let raw = session.to_h1_raw();
    if raw.len() > bytes_max {
        return Some(head_too_large(bytes_max));
    }
    head::fault(&raw, session.req_header().version).map(malformed)
}

fn malformed(fault: &str) -> Failure {
    Failure::client(400, "malformed_request", format!("malformed request head: {fault}"))
}

fn head_too_large(bytes_max: usize) -> Failure {
    let what = format!("the request head is larger than {bytes_max} bytes (--max-header-size)");
    Failure::client(431, "head_too_large", what)
}

fn too_many_connections(max: usize) -> Failure {
    let what = format!("the gateway has {max} client connections, its limit (--max-connections); retry in a moment");
    let mut failure = Failure::new(503, "too_many_connections", crate::error::Blame::Gateway, what);
    failure.retry_after_secs = Some(1);
    failure
}

/// Gives the request an id under [`reply::REQUEST_ID`]: the client's own from the first of `names` that holds one which can
/// be logged and passed on, else a new one.
fn name_request(session: &mut ServerSession, names: &[http::HeaderName]) {
    let usable =
        |given: &[u8]| (1..=REQUEST_ID_BYTES_MAX).contains(&given.len()) && given.iter().all(u8::is_ascii_graphic);
    let given = names.iter().find(|name| usable(session.get_header_bytes(*name)));
    if given == Some(&reply::REQUEST_ID) {
        return;
    }
    let id = match given.and_then(|name| session.get_header(name)) {
        Some(id) => id.clone(),
        None => format!("{:032x}", rand::random::<u128>()).try_into().expect("hex digits are a header value"),
    };
    session.req_header_mut().insert_header(reply::REQUEST_ID, id).expect("an id is a header value");
}

async fn serve(
    gateway: &Gateway,
    config: Arc<Config>,
    session: &mut ServerSession,
    target: &Target,
    arrived: Instant,
    notes: &mut Notes,
) -> Done {
    let caller = match checked_head(gateway, session, target) {
        Ok(caller) => caller,
        Err(failure) => {
            if failure.status == 429 {
                gateway.metrics.door.shed();
            }
            return reply::failure(session, &failure).await;
        }
    };
    let (bytes_max, limit) = (config.listen.body_bytes_max, config.deadlines.client_read);
    let read = tokio::select! {
        read = body::read(session, bytes_max, limit) => read,
        () = gateway.until_grace_ends() => Err(Failure::stopping()),
    };
    let body = match read {
        Ok(Some(body)) => body,
        Ok(None) => return Done::broken(499, "client_gone"),
        Err(failure) => {
            // Where the next request begins is not known.
            session.set_keepalive(None);
            return reply::failure(session, &failure).await;
        }
    };
    let done = match target.kind {
        Kind::Admin(route) => admin::answer(gateway, session, route, body, caller.key.as_deref()).await,
        Kind::Data(endpoint) => match checked(gateway, config, session, &caller, endpoint, body, arrived) {
            Ok(request) => {
                let done = admitted(gateway, session, &caller, &request, notes).await;
                notes.request = Some(request);
                done
            }
            Err(failure) => reply::failure(session, &failure).await,
        },
        Kind::Unknown => reply::failure(session, &not_found(session.req_header().uri.path())).await,
    };
    if let Some(key) = caller.key {
        gateway.metrics.door.answered_key(key.name(), done.status);
        notes.key = Some(key);
    }
    done
}

/// What the access log tells beside a request's head and outcome.
#[derive(Default)]
struct Notes {
    key: Option<Arc<Key>>,
    queued: Option<Duration>,
    request: Option<drive::Request>,
}

impl Notes {
    fn write(&self, log: &AccessLog, session: &ServerSession, done: &Done, arrived: Instant, took: Duration) {
        let head = session.req_header();
        let served = self.request.as_ref().map(|request| &request.served);
        let by = served.map(|served| served.by.lock().expect("no panic under this lock").clone()).unwrap_or_default();
        let [prefill, decode] = by.each_ref().map(|worker| worker.as_ref().map(|worker| worker.url()));
        let first_byte = served.and_then(|served| served.first_byte.get());
        let model = self.request.as_ref().and_then(|request| request.scanned.model());
        log.write(&Line {
            ts: access::now(),
            id: reply::request_id(session).and_then(|id| id.to_str().ok()).unwrap_or(""),
            key: self.key.as_ref().map(|key| key.name()),
            client: session.client_addr().map(|address| address.to_string()),
            method: head.method.as_str(),
            path: access::short(head.uri.path()),
            status: done.status,
            code: done.code,
            model: model.as_deref().map(access::short),
            prefill,
            decode,
            queue_ms: self.queued.map(access::ms),
            first_byte_ms: first_byte.map(|at| access::ms(at.saturating_duration_since(arrived))),
            total_ms: access::ms(took),
            request_bytes: session.body_bytes_read(),
            response_bytes: session.body_bytes_sent(),
        });
    }
}

/// Runs a request once it may, or says why it may not. The place is given back at the answer's end.
async fn admitted(
    gateway: &Gateway,
    session: &mut ServerSession,
    caller: &Caller,
    request: &drive::Request,
    notes: &mut Notes,
) -> Done {
    let wish = request.scanned.priority().map(|wish| match wish {
        ..0 => Class::Low,
        0 => Class::Normal,
        1.. => Class::High,
    });
    let class = caller.key.as_ref().map_or(wish.unwrap_or_default(), |key| key.class(wish));
    let began = Instant::now();
    let entered = tokio::select! {
        biased;
        entered = gateway.door.admission.enter(class, queue_wait(request)) => entered,
        () = poll_fn(|cx| client::poll_gone(session, cx)) => return drive::left(gateway),
        () = gateway.until_grace_ends() => Err(Failure::stopping()),
    };
    notes.queued = Some(began.elapsed());
    gateway.metrics.door.admitted(class, began.elapsed(), entered.is_ok());
    match entered {
        Ok(_permit) => drive::run(gateway, session, request).await,
        Err(failure) => reply::failure(session, &failure).await,
    }
}

/// How long a request waits for a place to run: what it asks for, and no longer than the gateway lets it.
fn queue_wait(request: &drive::Request) -> Duration {
    let max = request.config.admission.queue_wait;
    let asked = request.headers.get(QUEUE_TIMEOUT).and_then(|value| value.to_str().ok()?.parse().ok());
    asked.map_or(max, |ms| Duration::from_millis(ms).min(max))
}

/// Checks that come before the body is read.
fn checked_head(gateway: &Gateway, session: &ServerSession, target: &Target) -> Result<Caller, Failure> {
    if matches!(target.kind, Kind::Unknown) {
        return Err(not_found(session.req_header().uri.path()));
    }
    if target.method != target.allowed {
        let what = format!("{} takes {}", target.path_label, target.allowed);
        return Err(Failure::client(405, "method_not_allowed", what));
    }
    let caller = gateway.door.caller(&session.req_header().headers, target.right)?;
    if matches!(target.kind, Kind::Data(_)) {
        gateway.door.refuses_prompts()?;
    }
    Ok(caller)
}

fn checked(
    gateway: &Gateway,
    config: Arc<Config>,
    session: &ServerSession,
    caller: &Caller,
    endpoint: Endpoint,
    body: Bytes,
    arrived: Instant,
) -> Result<drive::Request, Failure> {
    let scanned = request::scan(endpoint, body)?;
    let model = scanned.model();
    if let Some(key) = &caller.key {
        key.allows(model.as_deref())?;
    }
    let pool = gateway.fleet.snapshot().pool(model.as_deref())?.clone();
    if pool.is_split() {
        config.fleet.backend.check(&scanned)?;
    }
    let mut headers = session.req_header().headers.clone();
    if caller.key.is_some() {
        // The client's key is the gateway's business; workers get the gateway's own.
        headers.remove(header::AUTHORIZATION);
        if let Some(key) = &config.security.api_key {
            let value = HeaderValue::try_from(format!("Bearer {}", key.reveal()));
            headers.extend(value.ok().map(|value| (Some(header::AUTHORIZATION), value)));
        }
    }
    Ok(drive::Request { config, pool, endpoint, headers, scanned, arrived, served: drive::Served::default() })
}

fn not_found(path: &str) -> Failure {
    let shown: String = path.chars().take(200).collect();
    Failure::client(404, "not_found", format!("there is no {shown} here"))
}
