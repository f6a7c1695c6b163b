//! Carries one request through: picks a pair, opens both connections, sends both legs, and does what the machine of
//! [`crate::exchange`] says about each thing that happens. All waiting is here, all deciding is there.
//!
//! Nothing is sent to either worker before both connections stand, so a worker that cannot be reached costs nobody
//! anything, and another pair may be tried. The client is watched from the first byte of a leg to the last byte of the
//! answer; its leaving closes both legs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, Version};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use tokio::time::{sleep_until, timeout};

use crate::config::{Config, Role};
use crate::door::reply::{self, Done};
use crate::error::{Failure, Side};
use crate::exchange::machine::{Action, Deadline, Exchange, Fact, Plan};
use crate::exchange::ticket;
use crate::fleet::{NoWorker, Outcome, Picked, Pool, role_of};
use crate::gateway::Gateway;
use crate::leg::http1::{ResponseHead, request_head};
use crate::leg::{Leg, LegEvent, Line};
use crate::pair::{Ask, WorkerId};
use crate::request::{Endpoint, Scanned};
use crate::stream::{Answer, Expected, Meaning};

/// How long an accused D waits for P's word about the root cause.
const VERDICT_WAIT: Duration = Duration::from_millis(100);
/// A worker may take this long to end an answer whose last event was seen, for its connection to be kept.
const TIDY_WAIT: Duration = Duration::from_secs(1);

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
}

impl Request {
    fn samples(&self) -> usize {
        self.scanned.samples.count()
    }

    fn expected(&self) -> Expected {
        Expected { endpoint: self.endpoint, samples: self.samples() }
    }
}

/// Answers the client, whatever happens.
pub async fn run(gateway: &Gateway, session: &mut ServerSession, request: &Request) -> Done {
    gateway.metrics.exchange.routed(request.endpoint, request.pool.is_split(), request.scanned.stream);
    let mut stale = false;
    loop {
        let opened = tokio::select! {
            opened = open(gateway, request, stale) => opened,
            _ = session.read_body_or_idle(true) => return left(gateway),
            () = gateway.until_grace_ends() => Err(Failure::stopping()),
        };
        let legs = match opened {
            Ok(legs) => legs,
            Err(failure) => {
                log_failure(request, &failure);
                return reply::failure(session, &failure).await;
            }
        };
        let end = Run::new(gateway, request, legs, !stale).until_end(session).await;
        match end {
            End::Done(done) => return done,
            End::StartOver(failure) => {
                tracing::debug!(failure = failure.message, "a reused connection was dead, starting over");
                gateway.metrics.exchange.retried(request.endpoint);
                stale = true;
            }
        }
    }
}

fn left(gateway: &Gateway) -> Done {
    gateway.metrics.exchange.clients_gone.inc();
    Done::broken(499, "client_gone")
}

struct Legs {
    prefill: Option<Leg>,
    decode: Leg,
}

/// Picks pairs until both connections of one stand. `fresh`: none from the pool.
async fn open(gateway: &Gateway, request: &Request, fresh: bool) -> Result<Legs, Failure> {
    let mut unreachable: Vec<WorkerId> = Vec::new();
    let mut last_error: Option<(Role, String)> = None;
    for attempt in 0..=request.config.retries.max {
        if attempt > 0 {
            gateway.metrics.exchange.retried(request.endpoint);
        }
        let split = request.pool.is_split();
        let prefill = match split {
            true => Some(pick(gateway, request, Role::Prefill, &unreachable, &last_error).await?),
            false => None,
        };
        let decode = pick(gateway, request, role_of(Side::Decode, split), &unreachable, &last_error).await?;
        let open_prefill = async {
            match &prefill {
                Some(picked) => gateway.connector.open(&picked.worker, fresh).await.map(Some),
                None => Ok(None),
            }
        };
        match tokio::join!(open_prefill, gateway.connector.open(&decode.worker, fresh)) {
            (Ok(prefill_line), Ok(decode_line)) => {
                let prefill = prefill.zip(prefill_line);
                return Ok(legs(request, prefill, (decode, decode_line)));
            }
            (Err(why), _) => {
                last_error = Some((Role::Prefill, why));
                unreachable.extend(prefill.map(|picked| picked.worker.id()));
            }
            (_, Err(why)) => {
                last_error = Some((decode.worker.spec.role, why));
                unreachable.push(decode.worker.id());
            }
        }
    }
    let (role, why) = last_error.unwrap_or((Role::Decode, "no attempt was made".into()));
    Err(NoWorker { why, ..request.pool.nobody(role) }.into())
}

/// A worker for one leg. Where none may serve, those of the role are asked once more before the client is turned away.
async fn pick(
    gateway: &Gateway,
    request: &Request,
    role: Role,
    unreachable: &[WorkerId],
    last_error: &Option<(Role, String)>,
) -> Result<Picked, Failure> {
    let body_bytes = request.scanned.plain().len();
    let ask = || Ask { text: None, prompt_bytes: body_bytes, key: None, now: Instant::now() };
    let mut picked = request.pool.pick(role, &ask(), unreachable);
    if picked.is_err() && last_error.is_none() {
        gateway.prober.look_again(&request.pool, role).await;
        picked = request.pool.pick(role, &ask(), unreachable);
    }
    picked.map_err(|nobody| match last_error {
        Some((tried, why)) if *tried == role => NoWorker { why: why.clone(), ..nobody }.into(),
        _ => nobody.into(),
    })
}

/// New rooms, the bodies, and both legs, ready to be sent.
fn legs(request: &Request, prefill: Option<(Picked, Line)>, decode: (Picked, Line)) -> Legs {
    let body = match &prefill {
        None => request.scanned.plain(),
        Some((picked, _)) => {
            let samples = request.scanned.samples;
            let rooms = ticket::mint(samples, &mut rand::rng());
            let (host, port) = (&picked.worker.spec.host, picked.worker.bootstrap_port());
            request.scanned.splice(&ticket::fields(host, port, samples, &rooms))
        }
    };
    let leg = |side, (picked, line): (Picked, Line)| {
        let head = request_head(request.endpoint.path(), &picked.worker.authority, &request.headers, body.len());
        Leg::new(side, picked, line, head, body.clone())
    };
    Legs { prefill: prefill.map(|p| leg(Side::Prefill, p)), decode: leg(Side::Decode, decode) }
}

enum End {
    Done(Done),
    StartOver(Failure),
}

/// What woke the exchange.
enum Wake {
    Prefill(LegEvent),
    Decode(LegEvent),
    ClientGone,
    Deadline,
    GatewayStops,
}

/// One attempt in progress.
struct Run<'a> {
    gateway: &'a Gateway,
    request: &'a Request,
    machine: Exchange,
    prefill: Option<Leg>,
    prefill_answer: Option<Answer>,
    decode: Option<Leg>,
    decode_answer: Option<Answer>,
    decode_head: Option<ResponseHead>,
    /// Status of the head that went to the client.
    opened: Option<u16>,
    token_seen: bool,
    last_piece: Instant,
    verdict_at: Option<Instant>,
}

impl<'a> Run<'a> {
    fn new(gateway: &'a Gateway, request: &'a Request, legs: Legs, may_retry: bool) -> Self {
        let plan = Plan { split: legs.prefill.is_some(), samples: request.samples(), may_retry };
        Run {
            gateway,
            request,
            machine: Exchange::new(plan),
            prefill: legs.prefill,
            prefill_answer: None,
            decode: Some(legs.decode),
            decode_answer: None,
            decode_head: None,
            opened: None,
            token_seen: false,
            last_piece: Instant::now(),
            verdict_at: None,
        }
    }

    async fn until_end(mut self, session: &mut ServerSession) -> End {
        loop {
            let wake = self.wait(session).await;
            if let Some(end) = self.handle(session, wake).await {
                return end;
            }
        }
    }

    /// Waits for the next thing. Each source is cancel-safe. P comes before D, since P's failure is the root cause.
    async fn wait(&mut self, session: &mut ServerSession) -> Wake {
        let (deadline, _) = self.next_deadline();
        if Instant::now() >= deadline {
            return Wake::Deadline;
        }
        if self.gateway.grace_is_over() {
            return Wake::GatewayStops;
        }
        tokio::select! {
            biased;
            _ = session.read_body_or_idle(true) => Wake::ClientGone,
            event = next_of(&mut self.prefill) => Wake::Prefill(event),
            event = next_of(&mut self.decode) => Wake::Decode(event),
            _ = sleep_until(deadline.into()) => Wake::Deadline,
            () = self.gateway.until_grace_ends() => Wake::GatewayStops,
        }
    }

    fn next_deadline(&self) -> (Instant, Deadline) {
        let limits = &self.request.config.deadlines;
        let mut next = (self.request.arrived + limits.whole, Deadline::Whole);
        let streams = self.request.scanned.stream;
        let candidates = [
            (streams && !self.token_seen).then(|| (self.request.arrived + limits.first_token, Deadline::FirstToken)),
            (streams && self.token_seen).then(|| (self.last_piece + limits.silence, Deadline::Silence)),
            self.verdict_at.map(|at| (at, Deadline::Verdict)),
        ];
        for candidate in candidates.into_iter().flatten() {
            if candidate.0 < next.0 {
                next = candidate;
            }
        }
        next
    }

    async fn handle(&mut self, session: &mut ServerSession, wake: Wake) -> Option<End> {
        let fact = match wake {
            Wake::ClientGone => Fact::ClientGone,
            Wake::GatewayStops => Fact::GatewayStops,
            Wake::Deadline => Fact::TimedOut(self.next_deadline().1),
            Wake::Prefill(event) => self.on_prefill(event)?,
            Wake::Decode(event) => {
                let (forward, meaning) = self.on_decode(event);
                if meaning == Meaning::Token {
                    self.token_seen = true;
                    report(&self.decode, Outcome::Good);
                    self.act(session, Fact::DecodeToken).await;
                }
                let last = meaning == Meaning::Complete;
                if (!forward.is_empty() || (last && self.opened.is_none()))
                    && let Err(gone) = self.forward(session, forward, last).await
                {
                    return self.act(session, gone).await;
                }
                match meaning {
                    Meaning::Complete => Fact::DecodeEnded,
                    Meaning::Failed(failure) => {
                        let failure = of_leg(failure, &self.decode);
                        report(&self.decode, Outcome::of(&failure));
                        self.gateway.metrics.exchange.leg_failed(Side::Decode, &failure);
                        Fact::DecodeFailed(failure)
                    }
                    Meaning::None | Meaning::Token => return None,
                }
            }
        };
        self.act(session, fact).await
    }

    /// P's bytes go nowhere; they are only judged.
    fn on_prefill(&mut self, event: LegEvent) -> Option<Fact> {
        let meaning = match event {
            LegEvent::Head(head) => {
                let worker = self.prefill.as_ref().map_or("", |leg| leg.worker().url());
                self.prefill_answer = Some(Answer::new(Side::Prefill, worker, &head, self.request.expected()));
                return None;
            }
            LegEvent::Data(data) => self.prefill_answer.as_mut()?.push(data).meaning,
            LegEvent::End { clean } => self.prefill_answer.as_mut()?.end(clean).meaning,
            LegEvent::Broken(failure) => Meaning::Failed(failure),
        };
        match meaning {
            Meaning::Complete => {
                report(&self.prefill, Outcome::Good);
                if let Some(leg) = self.prefill.take() {
                    tidy(leg);
                }
                Some(Fact::PrefillEnded)
            }
            Meaning::Failed(failure) => {
                let failure = of_leg(failure, &self.prefill);
                report(&self.prefill, Outcome::of(&failure));
                self.gateway.metrics.exchange.leg_failed(Side::Prefill, &failure);
                self.prefill = None;
                Some(Fact::PrefillFailed(failure))
            }
            Meaning::None | Meaning::Token => None,
        }
    }

    fn on_decode(&mut self, event: LegEvent) -> (Bytes, Meaning) {
        self.last_piece = Instant::now();
        let step = match event {
            LegEvent::Head(head) => {
                let worker = self.decode.as_ref().map_or("", |leg| leg.worker().url());
                self.decode_answer = Some(Answer::new(Side::Decode, worker, &head, self.request.expected()));
                self.decode_head = Some(head);
                return (Bytes::new(), Meaning::None);
            }
            LegEvent::Broken(failure) => return (Bytes::new(), Meaning::Failed(failure)),
            LegEvent::Data(data) => self.decode_answer.as_mut().map(|a| a.push(data)),
            LegEvent::End { clean } => self.decode_answer.as_mut().map(|a| a.end(clean)),
        };
        step.map_or((Bytes::new(), Meaning::None), |step| (step.forward, step.meaning))
    }

    /// Sends a piece of D's answer, its head first. `Err`: the client takes nothing any more.
    async fn forward(&mut self, session: &mut ServerSession, piece: Bytes, last: bool) -> Result<(), Fact> {
        let limit = self.request.config.deadlines.client_write;
        let gone = |_| Fact::ClientGone;
        if self.opened.is_none() {
            let whole = last.then_some(piece.len());
            let head = self.client_head(whole, session.req_header().version);
            if whole.is_none() && !head.headers.contains_key(TRANSFER_ENCODING) {
                session.set_keepalive(None);
            }
            self.opened = Some(head.status.as_u16());
            self.machine.on(Fact::AnswerOpened);
            self.gateway
                .metrics
                .exchange
                .first_byte(self.request.endpoint, self.request.arrived.elapsed().as_secs_f64());
            timeout(limit, session.write_response_header(Box::new(head)))
                .await
                .map_err(gone)?
                .map_err(|_| Fact::ClientGone)?;
        }
        timeout(limit, session.write_response_body(piece, last)).await.map_err(gone)?.map_err(|_| Fact::ClientGone)?;
        // The time a slow client takes is not D's silence.
        self.last_piece = Instant::now();
        Ok(())
    }

    /// D's status and headers; the framing is ours: a length, chunks, or for HTTP/1.0, which has no chunks, the close.
    fn client_head(&self, whole: Option<usize>, version: Version) -> ResponseHeader {
        let status = self.decode_head.as_ref().map_or(200, |h| h.status);
        let mut head = ResponseHeader::build(status, None).expect("a parsed status is one");
        let headers = self.decode_head.iter().flat_map(|h| &h.headers);
        for (name, value) in headers {
            head.append_header(name.clone(), value.clone()).expect("a parsed header is one");
        }
        if let Some(id) = self.request.headers.get(reply::REQUEST_ID) {
            head.insert_header(reply::REQUEST_ID, id.clone()).expect("a parsed header is one");
        }
        let framed = match whole {
            Some(length) => head.insert_header(CONTENT_LENGTH, length),
            None if version == Version::HTTP_10 => Ok(()),
            None => head.insert_header(TRANSFER_ENCODING, "chunked"),
        };
        framed.expect("both are headers");
        head
    }

    async fn act(&mut self, session: &mut ServerSession, fact: Fact) -> Option<End> {
        let mut end = None;
        for action in self.machine.on(fact) {
            match action {
                Action::Cancel(Side::Prefill) => self.prefill = None,
                Action::Cancel(Side::Decode) => self.decode = None,
                Action::DetachPrefill => self.detach_prefill(),
                Action::AwaitVerdict => self.verdict_at = Some(Instant::now() + VERDICT_WAIT),
                Action::CountLatePrefillFailure(failure) => {
                    tracing::warn!(
                        failure = failure.message,
                        worker = failure.detail.as_deref(),
                        "prefill failed after decode had committed"
                    );
                    self.gateway.metrics.exchange.late_prefill_failures.inc();
                }
                Action::StartOver(failure) => end = Some(End::StartOver(failure)),
                Action::Leave => end = Some(End::Done(left(self.gateway))),
                Action::Finish => {
                    if let Some(leg) = self.decode.take() {
                        tidy(leg);
                    }
                    end = Some(End::Done(Done::ok(self.opened.unwrap_or(200))));
                }
                Action::Answer(failure) => {
                    // Both connections are closed before the client hears of it.
                    self.decode = None;
                    self.prefill = None;
                    log_failure(self.request, &failure);
                    end = Some(End::Done(reply::failure(session, &failure).await));
                }
                Action::BreakOff(failure) => {
                    self.decode = None;
                    self.prefill = None;
                    log_failure(self.request, &failure);
                    end = Some(End::Done(self.break_off(session, &failure).await));
                }
            }
        }
        end
    }

    /// P goes on without the client; its leg counts until it really ended.
    fn detach_prefill(&mut self) {
        let (Some(leg), answer) = (self.prefill.take(), self.prefill_answer.take()) else { return };
        let deadline = self.request.arrived + self.request.config.deadlines.whole;
        let late = self.gateway.metrics.exchange.late_prefill_failures.clone();
        tokio::spawn(async move {
            if let Ok(false) = timeout(deadline.saturating_duration_since(Instant::now()), drain(leg, answer)).await {
                late.inc();
            }
        });
    }

    /// Bytes were sent already: a stream of events ends with one that tells what happened, anything else by a cut
    /// connection, which a client sees as an incomplete body.
    async fn break_off(&mut self, session: &mut ServerSession, failure: &Failure) -> Done {
        let events = self.decode_head.as_ref().is_some_and(ResponseHead::is_event_stream);
        let status = self.opened.unwrap_or(200);
        if !events {
            return Done::broken(status, failure.code);
        }
        let limit = self.request.config.deadlines.client_write;
        let said = timeout(limit, session.write_response_body(failure.event(), true)).await;
        Done { status, code: failure.code, whole: matches!(said, Ok(Ok(()))) }
    }
}

fn log_failure(request: &Request, failure: &Failure) {
    if failure.status >= 500 {
        let Failure { code, status, message, detail, .. } = failure;
        let id = request.headers.get(reply::REQUEST_ID).and_then(|id| id.to_str().ok());
        tracing::warn!(id, code, status, message, worker = detail.as_deref(), "request failed");
    }
}

/// The log names the worker that failed.
fn of_leg(failure: Failure, leg: &Option<Leg>) -> Failure {
    match leg {
        Some(leg) => failure.with_detail(leg.worker().url()),
        None => failure,
    }
}

fn report(leg: &Option<Leg>, outcome: Outcome) {
    if let Some(leg) = leg {
        leg.report(outcome);
    }
}

async fn next_of(leg: &mut Option<Leg>) -> LegEvent {
    match leg {
        Some(leg) => leg.next().await,
        None => std::future::pending().await,
    }
}

/// Reads a leg whose answer is complete to its framing's end and keeps the connection, if that comes soon.
fn tidy(leg: Leg) {
    tokio::spawn(async move {
        let _ = timeout(TIDY_WAIT, drain(leg, None)).await;
    });
}

/// Reads a leg to its end and gives the connection back; false when it failed.
async fn drain(mut leg: Leg, mut answer: Option<Answer>) -> bool {
    loop {
        let meaning = match leg.next().await {
            LegEvent::Head(head) => {
                let expected = Expected { endpoint: Endpoint::Generate, samples: 1 };
                answer = Some(Answer::new(Side::Prefill, leg.worker().url(), &head, expected));
                Meaning::None
            }
            LegEvent::Data(data) => answer.as_mut().map_or(Meaning::None, |a| a.push(data).meaning),
            LegEvent::End { clean } => {
                let meaning = answer.as_mut().map_or(Meaning::Complete, |a| a.end(clean).meaning);
                leg.release();
                return !matches!(meaning, Meaning::Failed(_));
            }
            LegEvent::Broken(_) => return false,
        };
        if matches!(meaning, Meaning::Failed(_)) {
            return false;
        }
    }
}
