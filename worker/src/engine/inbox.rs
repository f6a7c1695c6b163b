//! The one way into the engine thread: submissions, ends and wake-ups, under one short lock.
//!
//! Bounds: submissions count against `queue_max` together with what already waits in the scheduler; streams that went
//! away are at most as many as there are live samples; aborts by name are capped.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::mpsc;

use crate::request::{SampleError, SampleErrorKind, SampleEvent, SampleRequest, SeqId};

/// Aborts by name that may wait for the engine's next turn.
const ABORTS_MAX: usize = 4096;

/// One accepted sample on its way to the engine.
#[derive(Debug)]
pub struct Submission {
    pub id: SeqId,
    pub request: SampleRequest,
    pub events: mpsc::Sender<SampleEvent>,
}

/// Which samples `POST /abort_request` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Abort {
    Request(String),
    All,
}

/// What came in since the last turn.
#[derive(Debug, Default)]
pub struct Mail {
    pub submissions: Vec<Submission>,
    /// Streams that were dropped before their end.
    pub gone: Vec<SeqId>,
    pub aborts: Vec<Abort>,
    pub woken: bool,
    pub shutdown: bool,
}

impl Mail {
    fn is_empty(&self) -> bool {
        let quiet = self.submissions.is_empty() && self.gone.is_empty() && self.aborts.is_empty();
        quiet && !self.woken && !self.shutdown
    }
}

#[derive(Debug, Default)]
struct State {
    mail: Mail,
    /// Samples in the scheduler that wait for their first admission.
    waiting: usize,
    closed: bool,
}

#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

/// Makes the engine poll its role soon. Given to the role before the engine starts.
#[derive(Clone, Debug)]
pub struct EngineWaker(pub(crate) Arc<Inbox>);

impl EngineWaker {
    pub fn new() -> Self {
        Self(Arc::new(Inbox { state: Mutex::default(), changed: Condvar::new() }))
    }

    pub fn wake(&self) {
        self.0.post(|mail| mail.woken = true);
    }

    /// The waker as the handoff roles take it.
    pub fn into_fn(self) -> Arc<dyn Fn() + Send + Sync> {
        Arc::new(move || self.wake())
    }
}

impl Default for EngineWaker {
    fn default() -> Self {
        Self::new()
    }
}

impl Inbox {
    /// A panic of the engine thread must not take its callers with it: the state is valid after every statement.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, change: impl FnOnce(&mut Mail)) {
        let mut state = self.lock();
        if !state.closed {
            change(&mut state.mail);
            self.changed.notify_one();
        }
    }

    /// Accepts all or none.
    pub fn submit(&self, submissions: Vec<Submission>, queue_max: usize) -> Result<(), SampleError> {
        let mut state = self.lock();
        if state.closed || state.mail.shutdown {
            return Err(SampleError {
                kind: SampleErrorKind::Unavailable,
                message: "the worker is shutting down; retry on another worker".into(),
            });
        }
        let queued = state.waiting + state.mail.submissions.len();
        if queued + submissions.len() > queue_max {
            return Err(SampleError {
                kind: SampleErrorKind::Unavailable,
                message: format!(
                    "the queue is full: {queued} samples wait, {} more do not fit into {queue_max}; retry later",
                    submissions.len()
                ),
            });
        }
        state.mail.submissions.extend(submissions);
        self.changed.notify_one();
        Ok(())
    }

    pub fn gone(&self, id: SeqId) {
        self.post(|mail| mail.gone.push(id));
    }

    pub fn abort(&self, abort: Abort) -> Result<(), SampleError> {
        let mut full = false;
        self.post(|mail| {
            if abort == Abort::All {
                mail.aborts.clear();
            }
            full = mail.aborts.len() >= ABORTS_MAX;
            if !full {
                mail.aborts.push(abort);
            }
        });
        match full {
            false => Ok(()),
            true => Err(SampleError {
                kind: SampleErrorKind::Unavailable,
                message: format!("{ABORTS_MAX} aborts wait already; retry later"),
            }),
        }
    }

    pub fn shutdown(&self) {
        self.post(|mail| mail.shutdown = true);
    }

    /// Takes what came. With `patience` it waits that long for something to come. Nothing is accepted after a shutdown
    /// was taken.
    pub fn take(&self, patience: Option<Duration>) -> Mail {
        let mut state = self.lock();
        if let Some(patience) = patience {
            let wait = self.changed.wait_timeout_while(state, patience, |state| state.mail.is_empty());
            (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        }
        let mail = std::mem::take(&mut state.mail);
        state.waiting += mail.submissions.len();
        state.closed |= mail.shutdown;
        mail
    }

    /// Tells how many samples wait in the scheduler, for the bound of [`submit`](Self::submit).
    pub fn set_waiting(&self, waiting: usize) {
        self.lock().waiting = waiting;
    }

    /// The engine has ended: nothing is accepted any more, and what was not taken is dropped, which ends its streams.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.mail = Mail::default();
    }
}
