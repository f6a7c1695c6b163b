//! Who may run, who waits, who is sent away: a cap on requests that run, a bounded queue before it, and permits that give
//! their place back when they are dropped. The queue is *pure*; around it is only what wakes the one whose turn it is.
//!
//! `arrive ─▶ runs ─▶ (permit dropped) ─▶ place to the next`, or `arrive ─▶ waits ─▶ runs | gave up`, or `arrive ─▶ full`.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::config::{AdmissionConfig, Class};
use crate::error::{Blame, Failure};

/// So many places in a row go by class; the next one goes to whoever waits longest, so that no class starves.
const BY_CLASS_IN_A_ROW: u32 = 3;

/// A request's number among all that ever waited: a smaller one came earlier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    Runs,
    Waits(Ticket),
    /// The queue has no room.
    Full,
}

/// First in first out within a class, higher classes first.
#[derive(Debug)]
pub struct Queue {
    running: usize,
    running_max: usize,
    waiting_max: usize,
    /// By class, low to high.
    waiting: [BTreeSet<Ticket>; 3],
    next: u64,
    by_class: u32,
}

impl Queue {
    pub fn new(running_max: usize, waiting_max: usize) -> Self {
        Queue { running: 0, running_max, waiting_max, waiting: Default::default(), next: 0, by_class: 0 }
    }

    pub fn running(&self) -> usize {
        self.running
    }

    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(BTreeSet::len).sum()
    }

    /// Whether one more would find neither a place nor room to wait.
    pub fn is_full(&self) -> bool {
        self.running >= self.running_max && self.waiting() >= self.waiting_max
    }

    pub fn arrive(&mut self, class: Class) -> Arrival {
        if self.running < self.running_max {
            // Nobody waits then: a free place is given away at once.
            self.running += 1;
            return Arrival::Runs;
        }
        if self.waiting() >= self.waiting_max {
            return Arrival::Full;
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.waiting[class as usize].insert(ticket);
        Arrival::Waits(ticket)
    }

    /// A running request ended; its place goes to the one that is named.
    pub fn give_back(&mut self) -> Option<Ticket> {
        self.running -= 1;
        self.call()
    }

    /// One that waited gives up. False: it was called already, so that it has a place to give back.
    pub fn leave(&mut self, ticket: Ticket) -> bool {
        self.waiting.iter_mut().any(|class| class.remove(&ticket))
    }

    /// Other limits from now on; what runs beyond them ends in its own time. Call [`Queue::call`] until nobody is called.
    pub fn resize(&mut self, running_max: usize, waiting_max: usize) {
        (self.running_max, self.waiting_max) = (running_max, waiting_max);
    }

    /// Gives a free place to the one whose turn it is.
    pub fn call(&mut self) -> Option<Ticket> {
        if self.running >= self.running_max {
            return None;
        }
        let ticket = self.whose_turn()?;
        self.leave(ticket);
        self.running += 1;
        Some(ticket)
    }

    fn whose_turn(&mut self) -> Option<Ticket> {
        let first = |class: &BTreeSet<Ticket>| class.first().copied();
        let highest = self.waiting.iter().rev().find_map(first)?;
        let longest = self.waiting.iter().filter_map(first).min()?;
        if highest == longest || self.by_class >= BY_CLASS_IN_A_ROW {
            self.by_class = 0;
            return Some(longest);
        }
        self.by_class += 1;
        Some(highest)
    }
}

/// The queue of one gateway and those that wait in it.
#[derive(Debug)]
pub struct Admission(Mutex<State>);

#[derive(Debug)]
struct State {
    queue: Queue,
    limited: bool,
    calls: HashMap<Ticket, oneshot::Sender<()>>,
}

impl State {
    fn ring(&mut self, called: Option<Ticket>) {
        // Who does not listen any more finds out that it was called when it leaves.
        if let Some(call) = called.and_then(|ticket| self.calls.remove(&ticket)) {
            let _ = call.send(());
        }
    }
}

impl Admission {
    pub fn new(config: &AdmissionConfig) -> Arc<Self> {
        let queue = Queue::new(config.running_max.unwrap_or(usize::MAX), config.queue_max);
        let limited = config.running_max.is_some();
        Arc::new(Admission(Mutex::new(State { queue, limited, calls: HashMap::new() })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Requests that run and that wait.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.state();
        (state.queue.running(), state.queue.waiting())
    }

    /// Takes over new limits.
    pub fn adopt(&self, config: &AdmissionConfig) {
        let mut state = self.state();
        state.limited = config.running_max.is_some();
        state.queue.resize(config.running_max.unwrap_or(usize::MAX), config.queue_max);
        while let Some(called) = state.queue.call() {
            state.ring(Some(called));
        }
    }

    /// A refusal that can be given before the body is read.
    pub fn refuses_now(&self) -> Result<(), Failure> {
        let state = self.state();
        if state.limited && state.queue.is_full() { Err(full()) } else { Ok(()) }
    }

    /// A place to run, at once or within `wait`: 429 where the queue is full, 503 where the wait was in vain. Cancel-safe:
    /// dropping the future gives up the place in the queue, or the place to run that it was just given.
    pub async fn enter(self: &Arc<Self>, class: Class, wait: Duration) -> Result<Permit, Failure> {
        let (ticket, called) = {
            let mut state = self.state();
            match state.queue.arrive(class) {
                Arrival::Runs => return Ok(Permit(self.clone())),
                Arrival::Full => return Err(full()),
                Arrival::Waits(ticket) => {
                    let (call, called) = oneshot::channel();
                    state.calls.insert(ticket, call);
                    (ticket, called)
                }
            }
        };
        let mut place = Place { admission: self, ticket: Some(ticket) };
        match timeout(wait, called).await {
            Ok(Ok(())) => {
                place.ticket = None;
                Ok(Permit(self.clone()))
            }
            _ => Err(waited_in_vain(wait)),
        }
    }
}

fn full() -> Failure {
    let what =
        "the gateway has as many requests running and waiting as it may (--max-concurrent-requests, --queue-size)";
    let mut failure = Failure::new(429, "queue_full", Blame::Gateway, what);
    failure.retry_after_secs = Some(1);
    failure
}

fn waited_in_vain(wait: Duration) -> Failure {
    let what = format!("no place to run became free within {} ms; retry later", wait.as_millis());
    let mut failure = Failure::new(503, "queue_timeout", Blame::Gateway, what);
    failure.retry_after_secs = Some(1);
    failure
}

/// A place in the queue.
struct Place<'a> {
    admission: &'a Admission,
    ticket: Option<Ticket>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.admission.state();
        if state.queue.leave(ticket) {
            state.calls.remove(&ticket);
        } else {
            let called = state.queue.give_back();
            state.ring(called);
        }
    }
}

/// A place to run, until it is dropped.
#[derive(Debug)]
pub struct Permit(Arc<Admission>);

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.0.state();
        let called = state.queue.give_back();
        state.ring(called);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn waits(queue: &mut Queue, class: Class) -> Ticket {
        match queue.arrive(class) {
            Arrival::Waits(ticket) => ticket,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn first_in_first_out_within_a_class_and_no_class_starves() {
        let mut queue = Queue::new(1, 100);
        assert_eq!(queue.arrive(Class::Low), Arrival::Runs);
        let low = waits(&mut queue, Class::Low);
        let normal: Vec<_> = (0..3).map(|_| waits(&mut queue, Class::Normal)).collect();
        let high: Vec<_> = (0..6).map(|_| waits(&mut queue, Class::High)).collect();
        let order: Vec<_> = (0..10).map(|_| queue.give_back().unwrap()).collect();
        // After three by class the longest waiting one, whatever its class.
        let expected = [high[0], high[1], high[2], low, high[3], high[4], high[5], normal[0], normal[1], normal[2]];
        assert_eq!(order, expected);
        assert_eq!((queue.give_back(), queue.running()), (None, 0));
    }

    #[test]
    fn exactly_the_queues_size_waits() {
        let mut queue = Queue::new(2, 3);
        let arrivals: Vec<_> = (0..7).map(|_| queue.arrive(Class::Normal)).collect();
        let count = |wanted: fn(&Arrival) -> bool| arrivals.iter().filter(|a| wanted(a)).count();
        assert_eq!(count(|a| *a == Arrival::Runs), 2);
        assert_eq!(count(|a| matches!(a, Arrival::Waits(_))), 3);
        assert_eq!(count(|a| *a == Arrival::Full), 2);
    }

    #[test]
    fn other_limits_call_those_that_wait() {
        let mut queue = Queue::new(1, 10);
        assert_eq!(queue.arrive(Class::Normal), Arrival::Runs);
        let first = waits(&mut queue, Class::Normal);
        queue.resize(2, 10);
        assert_eq!((queue.call(), queue.call()), (Some(first), None));
        queue.resize(1, 0);
        assert_eq!((queue.give_back(), queue.arrive(Class::High), queue.running()), (None, Arrival::Full, 1));
    }

    proptest! {
        /// Whatever happens: never more than the cap run, and nobody waits while a place is free.
        #[test]
        fn places_are_neither_lost_nor_made(steps in prop::collection::vec((0u8..4, any::<prop::sample::Index>()), 1..200)) {
            let mut queue = Queue::new(3, 5);
            let mut waiting: Vec<Ticket> = Vec::new();
            let mut running = 0usize;
            let called = |waiting: &mut Vec<Ticket>, running: &mut usize, ticket: Option<Ticket>| {
                if let Some(ticket) = ticket {
                    waiting.retain(|w| *w != ticket);
                    *running += 1;
                }
            };
            for (step, which) in steps {
                match step {
                    0 | 1 => match queue.arrive([Class::Low, Class::Normal, Class::High][which.index(3)]) {
                        Arrival::Runs => running += 1,
                        Arrival::Waits(ticket) => waiting.push(ticket),
                        Arrival::Full => prop_assert_eq!((running, waiting.len()), (3, 5)),
                    },
                    2 if running > 0 => {
                        running -= 1;
                        let next = queue.give_back();
                        called(&mut waiting, &mut running, next);
                    }
                    3 if !waiting.is_empty() => {
                        let ticket = waiting.swap_remove(which.index(waiting.len()));
                        prop_assert!(queue.leave(ticket) && !queue.leave(ticket));
                    }
                    _ => {}
                }
                prop_assert_eq!((queue.running(), queue.waiting()), (running, waiting.len()));
                prop_assert!(running <= 3 && (waiting.is_empty() || running == 3));
            }
        }
    }

    fn admission(running_max: usize, queue_max: usize) -> Arc<Admission> {
        let config = AdmissionConfig { running_max: Some(running_max), queue_max, ..AdmissionConfig::default() };
        Admission::new(&config)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_wait_in_vain_is_503_and_a_full_queue_429() {
        let admission = admission(1, 1);
        let permit = admission.enter(Class::Normal, LONG).await.unwrap();
        let waiting = tokio::spawn({
            let admission = admission.clone();
            async move { admission.enter(Class::Normal, LONG).await.map(drop) }
        });
        tokio::task::yield_now().await;
        assert!(admission.refuses_now().is_err());
        let full = admission.enter(Class::High, LONG).await.unwrap_err();
        assert_eq!((full.status, full.code, full.retry_after_secs), (429, "queue_full", Some(1)));
        let late = waiting.await.unwrap().unwrap_err();
        assert_eq!((late.status, late.code, late.retry_after_secs), (503, "queue_timeout", Some(1)));
        drop(permit);
        assert_eq!(admission.counts(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_called_and_gone_gives_its_place_to_the_next() {
        let admission = admission(1, 8);
        let permit = admission.enter(Class::Normal, LONG).await.unwrap();
        let mut first = Box::pin(admission.enter(Class::Normal, LONG));
        let mut second = Box::pin(admission.enter(Class::Normal, LONG));
        assert!(futures_util::poll!(first.as_mut()).is_pending() && futures_util::poll!(second.as_mut()).is_pending());
        drop(permit);
        // The first was called, and leaves before it looks.
        drop(first);
        let permit = second.await.unwrap();
        assert_eq!(admission.counts(), (1, 0));
        drop(permit);
        assert_eq!(admission.counts(), (0, 0));
    }
}
