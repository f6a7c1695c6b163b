//! Carries one request through all its attempts: each picks a pair, opens both connections and runs; the failure of one
//! is the request's outcome, unless [`crate::exchange::retry`] allows another one. The client is watched from here to the
//! last byte of the answer.

use std::future::{Future, poll_fn};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use http::HeaderMap;
use pingora::protocols::http::ServerSession;
use tokio::time::{sleep_until, timeout};

use crate::backend::Backend;
use crate::config::Config;
use crate::door::reply::{self, Done};
use crate::error::{Failure, Retry};
use crate::exchange::client;
use crate::exchange::limits::Limits;
use crate::exchange::machine::Deadline;
use crate::exchange::open::Opener;
use crate::exchange::retry::Tries;
use crate::exchange::run::{End, Run};
use crate::fleet::{Pool, Worker};
use crate::gateway::Gateway;
use crate::request::{Endpoint, Scanned};
use crate::stream::Expected;

/// A request as it arrived.
pub struct Request {
    /// The settings it began under.
    pub config: Arc<Config>,
    /// Who may serve it, as of its time.
    pub pool: Arc<Pool>,
    pub endpoint: Endpoint,
    pub headers: HeaderMap,
    pub scanned: Scanned,
    pub arrived: Instant,
    pub served: Served,
}

/// Who served a request and when, for the access log.
#[derive(Debug, Default)]
pub struct Served {
    /// Of the last attempt: prefill, and decode or plain.
    pub by: Mutex<[Option<Arc<Worker>>; 2]>,
    pub first_byte: OnceLock<Instant>,
}

impl Request {
    /// A pool that is not split now needs no handoff, whoever its workers are.
    pub fn backend(&self) -> Backend {
        if self.pool.is_split() { self.config.fleet.backend } else { Backend::Plain }
    }

    pub fn expected(&self) -> Expected {
        Expected { endpoint: self.endpoint, samples: self.scanned.samples.count() }
    }
}

/// Answers the client, whatever happens.
pub async fn run(gateway: &Gateway, session: &mut ServerSession, request: &Request) -> Done {
    gateway.metrics.exchange.routed(request.endpoint, request.pool.is_split(), request.scanned.stream);
    let limits = match Limits::new(&request.config.deadlines, &request.headers) {
        Ok(limits) => limits,
        Err(failure) => return answer(session, request, &failure).await,
    };
    let retries = &request.config.retries;
    gateway.retry_budget.earn(retries.budget_percent);
    let mut tries = Tries::default();
    let mut opener = Opener::new(gateway, request);
    let mut fresh = false;
    // Why the attempt before failed.
    let mut cause = None;
    loop {
        let opened = match meanwhile(gateway, session, request, &limits, opener.open(fresh, &mut tries)).await {
            Ok(opened) => opened,
            Err(Ended::ClientGone) => return left(gateway),
            Err(Ended::Failed(failure)) => return answer(session, request, &failure).await,
        };
        let failure = match opened {
            Ok(legs) => {
                *request.served.by.lock().expect("no panic under this lock") = legs.workers();
                match Run::new(gateway, request, limits, legs).until_end(session).await {
                    End::Done(done) => return done,
                    End::StartOver(failure, worker) => {
                        if failure.retry == Retry::OtherPair {
                            opener.avoid(worker);
                        }
                        failure
                    }
                }
            }
            // The root cause says more than that nobody else could be found.
            Err(failure) => return answer(session, request, &cause.unwrap_or(failure)).await,
        };
        let Some(again) = tries.again(retries, &gateway.retry_budget, &failure, rand::random()) else {
            if failure.retry != Retry::Never {
                gateway.metrics.exchange.gave_up(request.endpoint);
            }
            return answer(session, request, &failure).await;
        };
        tracing::debug!(failure = failure.message, pause = ?again.pause, "another attempt");
        fresh = again.fresh;
        if again.pause.is_zero() {
            gateway.metrics.exchange.stale_connections.inc();
        } else {
            gateway.metrics.exchange.retried(request.endpoint);
            gateway.metrics.exchange.paused(again.pause);
            match meanwhile(gateway, session, request, &limits, tokio::time::sleep(again.pause)).await {
                Ok(()) => {}
                Err(Ended::ClientGone) => return left(gateway),
                Err(Ended::Failed(_)) => return answer(session, request, &failure).await,
            }
        }
        cause = Some(failure);
    }
}

enum Ended {
    ClientGone,
    Failed(Failure),
}

/// The work between two attempts, unless something ends the request first.
async fn meanwhile<T>(
    gateway: &Gateway,
    session: &mut ServerSession,
    request: &Request,
    limits: &Limits,
    work: impl Future<Output = T>,
) -> Result<T, Ended> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = poll_fn(|cx| client::poll_gone(session, cx)) => Err(Ended::ClientGone),
        () = sleep_until((request.arrived + limits.whole).into()) => {
            gateway.metrics.exchange.timed_out(Deadline::Whole.name());
            Err(Ended::Failed(Deadline::Whole.failure()))
        }
        () = gateway.until_grace_ends() => Err(Ended::Failed(Failure::stopping())),
    }
}

pub fn left(gateway: &Gateway) -> Done {
    gateway.metrics.exchange.clients_gone.inc();
    Done::broken(499, "client_gone")
}

/// Nothing was sent yet: the failure is the answer.
pub async fn answer(session: &mut ServerSession, request: &Request, failure: &Failure) -> Done {
    log(request, failure);
    let limit = request.config.deadlines.client_write;
    timeout(limit, Box::pin(reply::failure(session, failure)))
        .await
        .unwrap_or_else(|_| Done::broken(failure.status, failure.code))
}

pub fn log(request: &Request, failure: &Failure) {
    if failure.status >= 500 {
        let Failure { code, status, message, detail, .. } = failure;
        let id = request.headers.get(reply::REQUEST_ID).and_then(|id| id.to_str().ok());
        tracing::warn!(id, code, status, message, worker = detail.as_deref(), "request failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;
    use crate::request;
    use bytes::Bytes;
    use tokio::net::{TcpListener, TcpStream};

    /// Thousands of streams wait at one time: what one of them holds while it does must stay small.
    #[tokio::test]
    async fn an_exchange_is_small() {
        let config = config("--prefill http://127.0.0.1:1 --decode http://127.0.0.1:2").unwrap();
        let gateway = Gateway::new(config).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut session = ServerSession::new_http1(Box::new(pingora::protocols::l4::stream::Stream::from(stream)));
        let request = Request {
            config: gateway.config(),
            pool: gateway.fleet.snapshot().pool(None).unwrap().clone(),
            endpoint: Endpoint::Chat,
            headers: HeaderMap::new(),
            scanned: request::scan(Endpoint::Chat, Bytes::from_static(b"{}")).unwrap(),
            arrived: Instant::now(),
            served: Served::default(),
        };
        let exchange = run(&gateway, &mut session, &request);
        let bytes = std::mem::size_of_val(&exchange);
        assert!(bytes < 8 * 1024, "{bytes} bytes");
    }
}
