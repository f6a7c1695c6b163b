//! One attempt in progress: waits for what happens, and does what the machine of [`crate::exchange::machine`] says about
//! it. All waiting is here, all deciding is there.
//!
//! While the client takes a piece nothing more is read from D, so that a slow client slows its worker and costs one piece;
//! P is read on, and each failure, deadline, leaving and stop is seen and acted upon at once.

mod legs;
mod reply;

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use pingora::protocols::http::ServerSession;
use tokio::time::{Sleep, sleep_until};

use crate::backend::Order;
use crate::door::reply::Done;
use crate::error::{Failure, Side};
use crate::exchange::afterwards;
use crate::exchange::client::{self, Outgoing};
use crate::exchange::drive::Request;
use crate::exchange::limits::{Clock, Limits};
use crate::exchange::machine::{Action, Deadline, Exchange, Fact, Plan};
use crate::exchange::open::Legs;
use crate::fleet::{Outcome, Picked, Worker};
use crate::gateway::Gateway;
use crate::leg::http1::ResponseHead;
use crate::leg::{Leg, LegEvent};
use crate::pair::WorkerId;
use crate::stream::{Answer, Merge, PrefillAnswer};

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
}
