//! One attempt in progress: waits for what happens, and does what the machine of [`crate::exchange::machine`] says about
//! it. All waiting is here, all deciding is there.
//!
//! While the client takes a piece nothing more is read from D, so that a slow client slows its worker and costs one piece;
//! P is read on, and each failure, deadline, leaving and stop is seen and acted upon at once.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Version;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use tokio::time::{Sleep, sleep_until, timeout};

use crate::backend::Order;
use crate::door::reply::{Done, REQUEST_ID};
use crate::error::{Failure, Side};
use crate::exchange::afterwards;
use crate::exchange::client::{self, Outgoing};
use crate::exchange::drive::{self, Request};
use crate::exchange::limits::{Clock, Limits};
use crate::exchange::machine::{Action, Deadline, Exchange, Fact, Plan};
use crate::exchange::open::{Legs, Opener};
use crate::fleet::{Outcome, Picked, Worker};
use crate::gateway::Gateway;
use crate::leg::http1::ResponseHead;
use crate::leg::{ConnectLimits, Leg, LegEvent};
use crate::pair::WorkerId;
use crate::stream::{Answer, Meaning, Merge, PrefillAnswer, Step};

/// How long a client may take for the event that tells it of a failure.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// What came of an attempt.
pub enum End {
    Done(Done),
    /// Another attempt may do better, best without this worker.
    StartOver(Failure, Option<WorkerId>),
}

/// The outcome that the machine chose, to be told to the client once it took what is on its way.
enum Ending {
    Answer(Failure),
    BreakOff(Failure),
    StartOver(Failure),
    Finish,
    Leave,
}

/// What woke the exchange.
enum Wake {
    Prefill(LegEvent),
    Decode(LegEvent),
    DecodeOpened(Result<Leg, Failure>),
    ClientGone,
    Deadline(Deadline),
    GatewayStops,
}

/// One attempt in progress.
pub struct Run<'a> {
    gateway: &'a Gateway,
    request: &'a Request,
    machine: Exchange,
    clock: Clock,
    /// P's leg may go on until then without the client.
    prefill_until: Instant,
    prefill_worker: Option<Arc<Worker>>,
    prefill: Option<Leg>,
    prefill_answer: Option<Answer>,
    /// What of P's answer belongs into D's.
    merge: Merge,
    /// P's answer, as far as D's needs it, until D's is there.
    part: Option<PrefillAnswer>,
    decode_worker: Arc<Worker>,
    decode: Option<Leg>,
    /// D, while P goes first.
    decode_next: Option<DecodeNext>,
    opening: Option<Opening<'a>>,
    decode_answer: Option<Answer>,
    decode_head: Option<Box<ResponseHead>>,
    /// Status of the head that goes before the first piece.
    opened: Option<u16>,
    head_sent: bool,
    /// The end of D's answer, until the machine lets it go.
    rest: Bytes,
    out: Option<Outgoing>,
    ending: Option<Ending>,
    stop_seen: bool,
    /// A deadline that the client shortened says nothing about a worker.
    shortened: bool,
    /// D's leg failed, but whose fault it was P is still to tell.
    accused: Option<(Picked, Outcome)>,
    /// Whose failure the outcome is.
    culprit: Option<WorkerId>,
}

/// A decode leg that is being opened.
type Opening<'a> = Pin<Box<dyn Future<Output = Result<Leg, Failure>> + Send + 'a>>;

/// The decode worker that was picked, for when the prefill leg ended.
struct DecodeNext {
    picked: Picked,
    fresh: bool,
}

/// What an attempt waits for besides its legs and its client.
struct Waits<'a, S> {
    timer: Pin<&'a mut Sleep>,
    stop: Pin<&'a mut S>,
}

impl<'a> Run<'a> {
    pub fn new(gateway: &'a Gateway, request: &'a Request, limits: Limits, legs: Legs) -> Self {
        let merge = request.backend().merge(&request.scanned);
        let (order, prefill, decode, decode_next) = match legs {
            Legs::One(decode) => (Order::DecodeOnly, None, Some(decode), None),
            Legs::Both(prefill, decode) => (Order::Parallel, Some(prefill), Some(decode), None),
            Legs::PrefillFirst { prefill, decode, fresh } => {
                (Order::PrefillFirst, Some(prefill), None, Some(DecodeNext { picked: decode, fresh }))
            }
        };
        let samples = request.scanned.samples.count();
        let plan = Plan { order, samples, needs_prefill: merge.prompt_logprobs.is_some() };
        let decode_worker = decode.as_ref().map(|leg| leg.worker().clone());
        let decode_worker = decode_worker.or_else(|| decode_next.as_ref().map(|next| next.picked.worker.clone()));
        Run {
            gateway,
            request,
            machine: Exchange::new(plan),
            clock: Clock::new(limits, request.arrived, request.scanned.stream, Instant::now()),
            prefill_until: request.arrived + limits.prefill,
            prefill_worker: prefill.as_ref().map(|leg| leg.worker().clone()),
            prefill,
            prefill_answer: None,
            merge,
            part: None,
            decode_worker: decode_worker.expect("each order has a decode worker"),
            decode,
            decode_next,
            opening: None,
            decode_answer: None,
            decode_head: None,
            opened: None,
            head_sent: false,
            rest: Bytes::new(),
            out: None,
            ending: None,
            stop_seen: false,
            shortened: limits.shortened,
            accused: None,
            culprit: None,
        }
    }

    pub async fn until_end(&mut self, session: &mut ServerSession) -> End {
        let gateway = self.gateway;
        let first = self.clock.next(self.machine.waits_for_prefill()).0;
        let mut waits = Waits { timer: pin!(sleep_until(first.into())), stop: pin!(gateway.until_grace_ends()) };
        let version = session.req_header().version;
        loop {
            if let Some(out) = self.out.take() {
                let out = self.with_head(session, version, out);
                self.clock.write_begins(Instant::now());
                let mut writing = pin!(client::write(session, out));
                let taken = poll_fn(|cx| self.poll_written(cx, writing.as_mut(), &mut waits)).await;
                self.clock.write_ended(Instant::now());
                if !taken {
                    self.on(Fact::ClientGone);
                    self.ending = Some(Ending::Leave);
                }
            }
            if let Some(ending) = self.ending.take() {
                return self.end(session, ending).await;
            }
            let wake = poll_fn(|cx| self.poll_wake(session, cx, &mut waits)).await;
            self.handle(wake);
        }
    }

    /// The next thing that happens while nothing is on its way to the client. P comes before D, since P's failure is the
    /// root cause.
    fn poll_wake(
        &mut self,
        session: &mut ServerSession,
        cx: &mut Context,
        waits: &mut Waits<'_, impl Future<Output = ()>>,
    ) -> Poll<Wake> {
        if let Poll::Ready(wake) = self.poll_others(cx, waits) {
            return Poll::Ready(wake);
        }
        if client::poll_gone(session, cx).is_ready() {
            return Poll::Ready(Wake::ClientGone);
        }
        if let Some(opening) = &mut self.opening {
            return opening.as_mut().poll(cx).map(Wake::DecodeOpened);
        }
        let waits = self.decode_answer.as_ref().is_some_and(Answer::waits_for_prefill);
        match &mut self.decode {
            Some(leg) if waits => leg.poll_cut(cx).map(Wake::Decode),
            Some(leg) => leg.poll_next(cx).map(Wake::Decode),
            None => Poll::Pending,
        }
    }

    /// Drives a write. What happens meanwhile is handled, and only the client hears of it later.
    fn poll_written(
        &mut self,
        cx: &mut Context,
        mut writing: Pin<&mut impl Future<Output = bool>>,
        waits: &mut Waits<'_, impl Future<Output = ()>>,
    ) -> Poll<bool> {
        if let Poll::Ready(taken) = writing.as_mut().poll(cx) {
            return Poll::Ready(taken);
        }
        loop {
            if matches!(self.ending, Some(Ending::Leave)) {
                return Poll::Ready(false);
            }
            let cut = self.decode.as_mut().map_or(Poll::Pending, |leg| leg.poll_cut(cx));
            let wake = match cut {
                Poll::Ready(event) => Wake::Decode(event),
                Poll::Pending => std::task::ready!(self.poll_others(cx, waits)),
            };
            self.handle(wake);
        }
    }

    /// Deadlines, the gateway's stop, and P.
    fn poll_others(&mut self, cx: &mut Context, waits: &mut Waits<'_, impl Future<Output = ()>>) -> Poll<Wake> {
        if let Poll::Ready(deadline) = self.poll_deadline(cx, waits.timer.as_mut()) {
            return Poll::Ready(Wake::Deadline(deadline));
        }
        if !self.stop_seen && waits.stop.as_mut().poll(cx).is_ready() {
            self.stop_seen = true;
            return Poll::Ready(Wake::GatewayStops);
        }
        match &mut self.prefill {
            Some(leg) => leg.poll_next(cx).map(Wake::Prefill),
            None => Poll::Pending,
        }
    }

    /// The timer is set anew only where it would ring too late, or rang too early: most deadlines move away with each
    /// piece.
    fn poll_deadline(&mut self, cx: &mut Context, mut timer: Pin<&mut Sleep>) -> Poll<Deadline> {
        loop {
            let (at, deadline) = self.clock.next(self.machine.waits_for_prefill());
            if Instant::now() >= at {
                return Poll::Ready(deadline);
            }
            if timer.deadline().into_std() > at || timer.is_elapsed() {
                timer.as_mut().reset(at.into());
            }
            std::task::ready!(timer.as_mut().poll(cx));
        }
    }

    fn handle(&mut self, wake: Wake) {
        match wake {
            Wake::Prefill(event) => self.on_prefill(event),
            Wake::Decode(event) => self.on_decode(event),
            Wake::DecodeOpened(opened) => {
                self.opening = None;
                match opened {
                    Ok(leg) => {
                        self.decode_worker = leg.worker().clone();
                        self.decode = Some(leg);
                    }
                    Err(failure) => self.decode_failed(failure),
                }
            }
            Wake::ClientGone => self.on(Fact::ClientGone),
            Wake::GatewayStops => self.on(Fact::GatewayStops),
            Wake::Deadline(deadline) => {
                if deadline != Deadline::Verdict {
                    self.gateway.metrics.exchange.timed_out(deadline.name());
                }
                if self.machine.is_over() {
                    // The client had its time to take the end.
                    self.ending = Some(Ending::Leave);
                }
                self.blame_slow_worker(deadline);
                self.on(Fact::TimedOut(deadline));
            }
        }
    }

    fn blame_slow_worker(&self, deadline: Deadline) {
        let leg = match deadline {
            Deadline::Prefill => &self.prefill,
            Deadline::FirstToken if self.prefill.is_some() => &self.prefill,
            Deadline::FirstToken | Deadline::Silence => &self.decode,
            Deadline::Whole | Deadline::Verdict | Deadline::ClientWrite => &None,
        };
        if !self.shortened {
            report(leg, Outcome::Failed);
        }
    }

    /// P's bytes go nowhere; they are only judged.
    fn on_prefill(&mut self, event: LegEvent) {
        let meaning = match event {
            LegEvent::Head(head) => {
                let worker = self.prefill_worker.as_ref().map_or("", |worker| worker.url());
                let answer = Answer::new(Side::Prefill, worker, &head, self.request.expected());
                self.prefill_answer = Some(if self.needs_part() { answer.keeping() } else { answer });
                return;
            }
            LegEvent::Data(data) => self.prefill_answer.as_mut().map(|answer| answer.push(data).meaning),
            LegEvent::End { clean } => self.prefill_answer.as_mut().map(|answer| answer.end(clean).meaning),
            LegEvent::Broken(failure) => Some(Meaning::Failed(failure)),
        };
        match meaning {
            Some(Meaning::Complete) => {
                report(&self.prefill, Outcome::Good);
                if let Some(leg) = self.prefill.take() {
                    afterwards::tidy(leg);
                }
                let needs_part = self.needs_part();
                self.part = self.prefill_answer.as_mut().filter(|_| needs_part).map(Answer::take_prefill);
                self.on(Fact::PrefillEnded);
                self.hand_part_over();
            }
            Some(Meaning::Failed(failure)) => {
                let failure = of_worker(failure, self.prefill_worker.as_ref());
                self.gateway.metrics.exchange.leg_failed(Side::Prefill, &failure);
                report(&self.prefill, Outcome::of(&failure));
                self.culprit = self.prefill_worker.as_ref().map(|worker| worker.id());
                self.forget_engine();
                self.accused = None;
                self.prefill = None;
                self.on(Fact::PrefillFailed(failure));
            }
            Some(Meaning::None | Meaning::Token) | None => {}
        }
    }

    /// D's answer, or its body, is made with P's.
    fn needs_part(&self) -> bool {
        self.merge != Merge::default() || self.decode_next.is_some()
    }

    /// What waited for P's answer goes on.
    fn hand_part_over(&mut self) {
        let Some(answer) = self.decode_answer.as_mut().filter(|_| self.part.is_some()) else { return };
        let step = answer.prefill(self.part.take().unwrap_or_default());
        self.clock.hold(false, Instant::now());
        self.on_step(step);
    }

    fn on_decode(&mut self, event: LegEvent) {
        self.clock.piece(Instant::now());
        let step = match event {
            LegEvent::Head(head) => {
                let expected = self.request.expected();
                let answer = Answer::new(Side::Decode, self.decode_worker.url(), &head, expected);
                self.decode_answer = Some(answer.merging(self.merge));
                self.decode_head = Some(Box::new(head));
                return self.hand_part_over();
            }
            LegEvent::Data(data) => self.decode_answer.as_mut().map(|answer| answer.push(data)),
            LegEvent::End { clean } => self.decode_answer.as_mut().map(|answer| answer.end(clean)),
            LegEvent::Broken(failure) => return self.decode_failed(failure),
        };
        if let Some(step) = step {
            self.on_step(step);
        }
        if self.decode_answer.as_ref().is_some_and(Answer::waits_for_prefill) {
            self.clock.hold(true, Instant::now());
        }
    }

    fn on_step(&mut self, step: Step) {
        match step.meaning {
            Meaning::Complete => {
                report(&self.decode, Outcome::Good);
                self.rest = step.forward;
                let streamed = self.decode_head.as_ref().is_some_and(|head| head.is_event_stream());
                self.on(Fact::DecodeEnded { streamed });
            }
            Meaning::Failed(failure) => {
                self.send(step.forward);
                self.decode_failed(failure);
            }
            Meaning::Token => {
                self.clock.token();
                report(&self.decode, Outcome::Good);
                self.on(Fact::DecodeToken);
                self.send(step.forward);
            }
            Meaning::None => self.send(step.forward),
        }
    }

    /// D may have looked for an engine that is gone.
    fn forget_engine(&self) {
        if let Some(worker) = self.prefill_worker.as_ref().filter(|_| self.request.backend().needs_engine_id()) {
            self.gateway.engines.forget(worker.id());
        }
    }

    fn decode_failed(&mut self, failure: Failure) {
        let failure = of_worker(failure, Some(&self.decode_worker));
        self.gateway.metrics.exchange.leg_failed(Side::Decode, &failure);
        self.culprit = Some(self.decode_worker.id());
        self.forget_engine();
        self.accused = self.decode.take().map(|leg| (leg.into_picked(), Outcome::of(&failure)));
        self.on(Fact::DecodeFailed(failure));
    }

    /// A piece that is not the last.
    fn send(&mut self, piece: Bytes) {
        if piece.is_empty() || self.machine.is_over() {
            return;
        }
        self.out = Some(Outgoing { head: None, piece, last: false });
        if self.opened.is_none() {
            self.opened = Some(self.status());
            self.on(Fact::AnswerOpened);
        }
    }

    fn status(&self) -> u16 {
        self.decode_head.as_ref().map_or(200, |head| head.status)
    }

    fn on(&mut self, fact: Fact) {
        for action in self.machine.on(fact) {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Cancel(Side::Prefill) => {
                let leg = self.prefill.take();
                self.abort(leg);
            }
            Action::Cancel(Side::Decode) => {
                let leg = self.decode.take();
                self.abort(leg);
                self.decode_next = None;
                self.opening = None;
            }
            Action::SendDecode => self.send_decode(),
            Action::DetachPrefill => {
                if let Some(leg) = self.prefill.take() {
                    let (answer, expected) = (self.prefill_answer.take(), self.request.expected());
                    afterwards::detach(self.gateway, leg, answer, expected, self.prefill_until);
                }
            }
            Action::AwaitVerdict => self.clock.await_verdict(Instant::now()),
            Action::CountLatePrefillFailure(failure) => {
                let worker = failure.detail.as_deref();
                tracing::warn!(failure = failure.message, worker, "prefill failed after decode had committed");
                self.gateway.metrics.exchange.late_prefill_failures.inc();
                // D's answer leaves without P's part.
                self.part = Some(PrefillAnswer::default());
                self.hand_part_over();
            }
            Action::Finish => {
                if let Some(leg) = self.decode.take() {
                    afterwards::tidy(leg);
                }
                self.clock.finished();
                self.out = Some(Outgoing { head: None, piece: std::mem::take(&mut self.rest), last: true });
                self.ending = Some(Ending::Finish);
            }
            Action::Leave => self.fail(Ending::Leave),
            Action::StartOver(failure) => self.fail(Ending::StartOver(failure)),
            Action::Answer(failure) => self.fail(Ending::Answer(failure)),
            Action::BreakOff(failure) => self.fail(Ending::BreakOff(failure)),
        }
    }

    /// Closes a leg that its worker still works at.
    fn abort(&self, leg: Option<Leg>) {
        let Some(worker) = leg.map(|leg| leg.worker().clone()) else { return };
        if self.request.config.fleet.backend.aborts_by_rid()
            && let Some(rid) = self.request.scanned.rid()
        {
            let limits = ConnectLimits::of(&self.request.config.deadlines);
            self.gateway.aborts.send(&self.gateway.connector, &worker, &rid, limits);
        }
    }

    /// P ended: D's body can be made of its answer.
    fn send_decode(&mut self) {
        let Some(DecodeNext { picked, fresh }) = self.decode_next.take() else { return };
        let part = self.part.get_or_insert_default();
        let body = self.request.backend().decode_after(&self.request.scanned, part);
        let opener = Opener::new(self.gateway, self.request);
        self.opening = Some(Box::pin(opener.open_decode(picked, body, fresh)));
    }

    /// Both connections are closed before the client hears of it.
    fn fail(&mut self, ending: Ending) {
        self.prefill = None;
        self.decode = None;
        self.opening = None;
        if let Some((picked, outcome)) = self.accused.take() {
            picked.report(outcome);
        }
        self.clock.failed(Instant::now());
        self.ending = Some(ending);
    }

    async fn end(&mut self, session: &mut ServerSession, ending: Ending) -> End {
        End::Done(match ending {
            Ending::Leave => drive::left(self.gateway),
            Ending::Finish => Done::ok(self.opened.unwrap_or_else(|| self.status())),
            Ending::Answer(failure) => drive::answer(session, self.request, &failure).await,
            Ending::BreakOff(failure) => {
                drive::log(self.request, &failure);
                let events = self.decode_head.as_ref().is_some_and(|head| head.is_event_stream());
                break_off(session, self.opened.unwrap_or(200), events, &failure).await
            }
            Ending::StartOver(failure) => return End::StartOver(failure, self.culprit),
        })
    }

    /// The first piece brings D's status and headers along; the framing is ours: a length, chunks, or for HTTP/1.0, which
    /// has no chunks, the close.
    fn with_head(&mut self, session: &mut ServerSession, version: Version, out: Outgoing) -> Outgoing {
        if std::mem::replace(&mut self.head_sent, true) {
            return out;
        }
        let _ = self.request.served.first_byte.set(Instant::now());
        let waited = self.request.arrived.elapsed().as_secs_f64();
        self.gateway.metrics.exchange.first_byte(self.request.endpoint, waited);
        let mut head = ResponseHeader::build(self.status(), None).expect("a parsed status is one");
        let headers = self.decode_head.iter().flat_map(|h| &h.headers);
        for (name, value) in headers {
            head.append_header(name.clone(), value.clone()).expect("a parsed header is one");
        }
        if let Some(id) = self.request.headers.get(REQUEST_ID) {
            head.insert_header(REQUEST_ID, id.clone()).expect("a parsed header is one");
        }
        let framed = match out.last {
            true => head.insert_header(CONTENT_LENGTH, out.piece.len()),
            false if version == Version::HTTP_10 => {
                session.set_keepalive(None);
                Ok(())
            }
            false => head.insert_header(TRANSFER_ENCODING, "chunked"),
        };
        framed.expect("both are headers");
        Outgoing { head: Some(Box::new(head)), ..out }
    }
}

/// Bytes were sent already: a stream of events ends with one that tells what happened, anything else by a cut connection,
/// which a client sees as an incomplete body.
async fn break_off(session: &mut ServerSession, status: u16, events: bool, failure: &Failure) -> Done {
    if !events {
        return Done::broken(status, failure.code);
    }
    let event = Outgoing { head: None, piece: failure.event(), last: true };
    let said = timeout(LAST_WORDS, client::write(session, event)).await;
    Done { status, code: failure.code, whole: said == Ok(true) }
}

fn report(leg: &Option<Leg>, outcome: Outcome) {
    if let Some(leg) = leg {
        leg.report(outcome);
    }
}

/// The log names the worker that failed.
fn of_worker(failure: Failure, worker: Option<&Arc<Worker>>) -> Failure {
    match worker {
        Some(worker) => failure.with_detail(worker.url()),
        None => failure,
    }
}
