//! One request: who asks, its body, the route it names, the pool of its model, its place to run, and what the access log
//! tells of it.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use pingora::protocols::http::ServerSession;

use crate::admin;
use crate::config::{Class, Config};
use crate::door::access::{self, AccessLog, Line};
use crate::door::keys::Key;
use crate::door::reply::{self, Done};
use crate::door::target::{Kind, Target};
use crate::door::{Caller, body};
use crate::error::Failure;
use crate::exchange::{client, drive};
use crate::gateway::Gateway;
use crate::request::{self, Endpoint};

/// A request's own limit for its wait in the queue, in milliseconds.
const QUEUE_TIMEOUT: HeaderName = HeaderName::from_static("x-tandem-queue-timeout-ms");

/// Answers the request, whatever it is.
pub async fn serve(
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
pub struct Notes {
    key: Option<Arc<Key>>,
    queued: Option<Duration>,
    request: Option<drive::Request>,
}

impl Notes {
    pub fn write(&self, log: &AccessLog, session: &ServerSession, done: &Done, arrived: Instant, took: Duration) {
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

pub fn not_found(path: &str) -> Failure {
    let shown: String = path.chars().take(200).collect();
    Failure::client(404, "not_found", format!("there is no {shown} here"))
}
