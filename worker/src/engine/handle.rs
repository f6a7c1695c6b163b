//! The engine as HTTP sees it: submit, receive, abort, look. No call blocks on the engine.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, watch};

use super::{
    inbox::{Abort, Inbox, Submission},
    loads::Loads,
    quarantine::Excess,
};
use crate::request::{SampleError, SampleErrorKind, SampleEvent, SampleRequest, SeqId};

/// Events of a sample besides its tokens: the prompt, the end, and one of reserve.
const EVENTS_BESIDE_TOKENS: usize = 3;

/// What the handle and the engine thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub inbox: Arc<Inbox>,
    loads: Mutex<Loads>,
    /// Set once: the quarantine is over its limit.
    excess: watch::Sender<Option<Excess>>,
    pub alive: AtomicBool,
    /// Microseconds since `born` at which the present turn began; 0 while the thread waits for work.
    pub turn_began: AtomicU64,
    pub born: Instant,
    next_id: AtomicU64,
    queue_max: usize,
    /// Prompt and output tokens of one sample at most.
    tokens_max: usize,
}

impl Shared {
    pub fn new(inbox: Arc<Inbox>, queue_max: usize, tokens_max: usize) -> Self {
        Self {
            inbox,
            loads: Mutex::default(),
            excess: watch::Sender::default(),
            alive: AtomicBool::new(true),
            turn_began: AtomicU64::new(0),
            born: Instant::now(),
            next_id: AtomicU64::new(1),
            queue_max,
            tokens_max,
        }
    }

    /// The state after a turn.
    pub fn set_loads(&self, loads: Loads) {
        if loads.excess.is_some() {
            self.excess.send_if_modified(|known| std::mem::replace(known, loads.excess).is_none());
        }
        *self.loads.lock().unwrap_or_else(PoisonError::into_inner) = loads;
    }
}

/// A way to the engine. Cheap to clone; the engine outlives its handles until [`shutdown`](Self::shutdown).
#[derive(Clone, Debug)]
pub struct EngineHandle(pub(super) Arc<Shared>);

impl EngineHandle {
    /// Queues one sample.
    ///
    /// # Errors
    /// `Unavailable` when the queue is full or the engine has ended. What the engine finds wrong with the request itself
    /// (too long, no ticket) comes as the stream's `Failed`.
    pub fn submit(&self, request: SampleRequest) -> Result<SampleStream, SampleError> {
        let mut streams = self.submit_all(vec![request])?;
        Ok(streams.pop().expect("one stream per request"))
    }

    /// Queues samples that belong together: all of them or none. The streams come in the order of the requests.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_all(&self, requests: Vec<SampleRequest>) -> Result<Vec<SampleStream>, SampleError> {
        if !self.is_alive() {
            return Err(engine_ended());
        }
        let (submissions, streams) = requests.into_iter().map(|request| self.open(request)).unzip();
        self.0.inbox.submit(submissions, self.0.queue_max).map(|()| streams)
    }

    fn open(&self, request: SampleRequest) -> (Submission, SampleStream) {
        let id = SeqId(self.0.next_id.fetch_add(1, Ordering::Relaxed));
        // The queue holds a whole answer: the engine never waits for a slow client, and memory is bounded by the
        // answer's length. The channel allocates as it fills.
        let tokens = (request.sampling.max_tokens as usize).min(self.0.tokens_max);
        let (sender, events) = mpsc::channel(tokens + EVENTS_BESIDE_TOKENS);
        let stream = SampleStream { id, events, ended: false, inbox: self.0.inbox.clone() };
        (Submission { id, request, events: sender }, stream)
    }

    /// Ends every sample of the request `rid`, or with an empty `rid` every sample; each of their streams gets `Failed` of
    /// kind `Aborted`.
    ///
    /// # Errors
    /// `Unavailable` when too many aborts wait for the engine.
    pub fn abort(&self, rid: &str) -> Result<(), SampleError> {
        self.0.inbox.abort(if rid.is_empty() { Abort::All } else { Abort::Request(rid.to_owned()) })
    }

    /// The state after the last step.
    pub fn loads(&self) -> Loads {
        self.0.loads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the quarantine is over its limit: the worker must end.
    pub async fn until_excess(&self) -> Excess {
        let mut excess = self.0.excess.subscribe();
        match excess.wait_for(Option::is_some).await.ok().and_then(|excess| *excess) {
            Some(excess) => excess,
            // The sender lives as long as this handle.
            None => std::future::pending().await,
        }
    }

    /// False once the engine thread has ended, by shutdown or by a fault.
    pub fn is_alive(&self) -> bool {
        self.0.alive.load(Ordering::Acquire)
    }

    /// How long the present turn of the engine has been going on; zero while it waits for work. A turn contains one
    /// step, so an age of many seconds means that the backend is stuck.
    pub fn last_step_age(&self) -> Duration {
        match self.0.turn_began.load(Ordering::Acquire) {
            0 => Duration::ZERO,
            began => self.0.born.elapsed().saturating_sub(Duration::from_micros(began)),
        }
    }

    /// Ends the engine: live samples get `Failed` of kind `Unavailable`, new ones are refused. Returns at once;
    /// [`is_alive`](Self::is_alive) turns false when it is done.
    pub fn shutdown(&self) {
        self.0.inbox.shutdown();
    }
}

pub(super) fn engine_ended() -> SampleError {
    SampleError {
        kind: SampleErrorKind::Internal,
        message: "the engine has stopped after a fault of this worker (see its log); retry on another worker".into(),
    }
}

/// The events of one sample. Dropping it before the end aborts the sample.
#[derive(Debug)]
#[must_use = "dropping the stream aborts the sample"]
pub struct SampleStream {
    id: SeqId,
    events: mpsc::Receiver<SampleEvent>,
    ended: bool,
    inbox: Arc<Inbox>,
}

impl SampleStream {
    pub fn id(&self) -> SeqId {
        self.id
    }

    /// The next event; `None` after `Finished` or `Failed`, of which exactly one comes (H7), also when the engine dies.
    pub async fn recv(&mut self) -> Option<SampleEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().await;
        Some(self.seen(event))
    }

    /// As [`recv`](Self::recv), on a thread without a runtime.
    pub fn blocking_recv(&mut self) -> Option<SampleEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.blocking_recv();
        Some(self.seen(event))
    }

    /// What has come already, without waiting: lets several tokens go out in one write.
    pub fn try_recv(&mut self) -> Option<SampleEvent> {
        if self.ended {
            return None;
        }
        match self.events.try_recv() {
            Ok(event) => Some(self.seen(Some(event))),
            Err(mpsc::error::TryRecvError::Empty) => None,
            Err(mpsc::error::TryRecvError::Disconnected) => Some(self.seen(None)),
        }
    }

    fn seen(&mut self, event: Option<SampleEvent>) -> SampleEvent {
        let event = event.unwrap_or_else(|| SampleEvent::Failed(engine_ended()));
        self.ended = matches!(event, SampleEvent::Finished { .. } | SampleEvent::Failed(_));
        event
    }
}

impl Drop for SampleStream {
    fn drop(&mut self) {
        if !self.ended {
            self.inbox.gone(self.id);
        }
    }
}
