//! One client's connection: its heads read and judged under the listener's limits, its requests served one after another,
//! or over HTTP/2 several at a time, and what becomes of it after each answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use pingora::apps::{HttpPersistentSettings, HttpServerApp, HttpServerOptions, ReusedHttpStream};
use pingora::protocols::Stream;
use pingora::protocols::http::ServerSession;
use pingora::protocols::http::v2::server::{H2Options, default_h2_options};
use pingora::server::ShutdownWatch;
use tokio::time::{timeout, timeout_at};

use crate::door::head;
use crate::door::reply::{self, Done};
use crate::door::serve::{Notes, not_found, serve};
use crate::door::target::{Surface, Target};
use crate::door::wire::{Gauge, Wire};
use crate::error::{Blame, Failure};
use crate::gateway::Gateway;

/// How long the rest of a refused body is read before the connection is closed, so that the client sees the answer.
const DRAIN_WAIT: Duration = Duration::from_secs(1);
/// How long a connection beyond the cap may take to send the head that its refusal answers.
const REFUSAL_WAIT: Duration = Duration::from_secs(5);
const REQUEST_ID_BYTES_MAX: usize = 128;
/// Requests that one HTTP/2 connection may have open at a time.
const H2_STREAMS_MAX: u32 = 1000;
/// What one HTTP/2 stream's answer may have waiting in this process for a slow client.
const H2_SEND_BUFFER_BYTES: usize = 32 * 1024;
/// What a client may send of one body, and of all bodies of its HTTP/2 connection, before it hears that more is welcome.
const H2_WINDOW_BYTES: [u32; 2] = [256 * 1024, 1 << 20];

/// What a listener is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Requests(Surface),
    Metrics,
}

/// One client's connection: one request after another, or over HTTP/2 several at a time.
pub struct Connection {
    gateway: Arc<Gateway>,
    purpose: Purpose,
    admitted: bool,
    gauge: Arc<Gauge>,
    options: HttpServerOptions,
}

impl Connection {
    pub fn new(gateway: Arc<Gateway>, purpose: Purpose, admitted: bool, stream: Stream) -> (Arc<Self>, Stream) {
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
    let mut failure = Failure::new(503, "too_many_connections", Blame::Gateway, what);
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
