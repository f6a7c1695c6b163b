//! Load on one thread that waits in epoll. Closed: each connection sends its next request when the last is answered. Open:
//! requests are due at random times of a fixed rate, whether earlier ones are answered or not, and their time counts from
//! when they were due.
//!
//! A run in which anything goes wrong has no result: an answer that is not whole or not the right one, a connection that is
//! closed, an arrival rate that was not kept, legs that do not add up.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token, Waker};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::client::{Client, Sample, Shape};
use crate::histogram::Histogram;
use crate::plain::{address, ask};
use crate::process::Tree;
use crate::script::Script;
use crate::{Failure, Target};

const READ_BYTES: usize = 256 << 10;
/// Requests that are due and find no connection.
const BACKLOG_MAX: usize = 20_000;
/// Answers in the window, as a share of the requests that were due in it.
const KEPT_MIN: f64 = 0.95;
/// How long the last answers may take.
const DRAIN: Duration = Duration::from_secs(10);
const WAKER: Token = Token(usize::MAX);

pub struct Plan {
    pub script: Script,
    pub body_bytes: usize,
    pub connections: usize,
    /// Requests per second of an open loop.
    pub rate: Option<f64>,
    pub warmup: Duration,
    pub measure: Duration,
}

struct Load {
    shape: Shape,
    clients: Vec<Client>,
    idle: Vec<usize>,
    backlog: VecDeque<Instant>,
    next_id: u64,
    begin: Instant,
    end: Instant,
    whole: Histogram,
    first: Histogram,
    in_window: u64,
    /// Requests of an open loop that were due in the window.
    due: u64,
    events: u64,
}

/// Times at which requests are due: exponential gaps from a fixed seed.
struct Arrivals {
    rng: ChaCha8Rng,
    rate: f64,
    at: Instant,
}

impl Arrivals {
    fn new(rate: f64, at: Instant) -> Self {
        Arrivals { rng: ChaCha8Rng::seed_from_u64(4), rate, at }
    }
}

impl Iterator for Arrivals {
    type Item = Instant;

    fn next(&mut self) -> Option<Instant> {
        let gap = -(1.0 - self.rng.random::<f64>()).ln() / self.rate;
        self.at += Duration::from_secs_f64(gap);
        Some(self.at)
    }
}

/// Runs the plan and returns its result as JSON.
pub fn run(target: &Target, plan: &Plan) -> Result<Value, Failure> {
    ask(target.mock, "/bench/reset")?;
    let mut poll = Poll::new().map_err(Failure::io("no epoll"))?;
    let shape = Shape::new(target.port, &plan.script, plan.body_bytes);
    let begin = Instant::now() + plan.warmup;
    let mut load = Load {
        clients: Vec::new(),
        idle: Vec::new(),
        backlog: VecDeque::new(),
        next_id: 1,
        begin,
        end: begin + plan.measure,
        whole: Histogram::default(),
        first: Histogram::default(),
        in_window: 0,
        due: 0,
        events: 0,
        shape,
    };
    for i in 0..plan.connections {
        let mut socket =
            mio::net::TcpStream::connect(address(target.port)).map_err(Failure::io("the gateway is not reached"))?;
        socket.set_nodelay(true).map_err(Failure::io("no socket option"))?;
        let interest = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut socket, Token(i), interest).map_err(Failure::io("a socket in epoll"))?;
        load.clients.push(Client::new(socket, &load.shape));
    }
    let pacer = match plan.rate {
        Some(rate) => Some(Pacer::start(&poll, rate, load.end)?),
        None => {
            for i in 0..plan.connections {
                load.begin(i, Instant::now())?;
            }
            None
        }
    };
    let costs = load.drive(&mut poll, target, pacer)?;
    load.result(target, plan, costs)
}

/// Wakes the driver when a request is due, since epoll's own time is in milliseconds.
struct Pacer {
    arrivals: Arrivals,
    next: Instant,
    stop: Arc<AtomicBool>,
}

impl Pacer {
    fn start(poll: &Poll, rate: f64, end: Instant) -> Result<Pacer, Failure> {
        let waker = Waker::new(poll.registry(), WAKER).map_err(Failure::io("no waker"))?;
        let now = Instant::now();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        std::thread::spawn(move || {
            for at in Arrivals::new(rate, now).take_while(|at| *at < end) {
                std::thread::sleep(at.saturating_duration_since(Instant::now()));
                if stopped.load(Relaxed) || waker.wake().is_err() {
                    return;
                }
            }
        });
        let mut arrivals = Arrivals::new(rate, now);
        let next = arrivals.next().unwrap_or(end);
        Ok(Pacer { arrivals, next, stop })
    }
}

impl Drop for Pacer {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// Processor time in the window: of the gateway, the mock workers, and this process.
type Costs = [Duration; 3];

impl Load {
    fn begin(&mut self, client: usize, from: Instant) -> Result<(), Failure> {
        let id = self.next_id;
        self.next_id += 1;
        self.clients[client].begin(&self.shape, id, from)
    }

    fn drive(&mut self, poll: &mut Poll, target: &Target, mut pacer: Option<Pacer>) -> Result<Costs, Failure> {
        let mut events = Events::with_capacity(1024);
        let mut scratch = vec![0; READ_BYTES];
        let (mut at_begin, mut at_end) = (None, None);
        if pacer.is_some() {
            self.idle = (0..self.clients.len()).collect();
        }
        loop {
            let now = Instant::now();
            if now >= self.begin && at_begin.is_none() {
                target.gateway.map(Tree::forget_peak).transpose()?;
                at_begin = Some(spent(target)?);
            }
            if now >= self.end && at_end.is_none() {
                at_end = Some(spent(target)?);
            }
            if let Some(pacer) = &mut pacer {
                self.dispatch(pacer, now)?;
            }
            let done = self.backlog.is_empty() && !self.clients.iter().any(Client::is_busy);
            if let (Some(from), Some(to), true) = (at_begin, at_end, done) {
                return Ok(std::array::from_fn(|i| to[i] - from[i]));
            }
            if now > self.end + DRAIN {
                return Err(Failure::new(format!("answers are missing {} s after the end", DRAIN.as_secs())));
            }
            let limit = if at_begin.is_none() { self.begin } else { self.end };
            let wait = limit.saturating_duration_since(now).min(Duration::from_millis(100));
            poll.poll(&mut events, Some(wait)).map_err(Failure::io("epoll"))?;
            for event in events.iter().filter(|event| event.token() != WAKER) {
                self.on_event(event, &mut scratch, pacer.is_some())?;
            }
        }
    }

    fn dispatch(&mut self, pacer: &mut Pacer, now: Instant) -> Result<(), Failure> {
        while pacer.next <= now.min(self.end) {
            self.backlog.push_back(pacer.next);
            self.due += u64::from(pacer.next >= self.begin);
            pacer.next = pacer.arrivals.next().unwrap_or(self.end);
        }
        if self.backlog.len() > BACKLOG_MAX {
            return Err(Failure::new("the rate is not kept: too many requests wait for a connection"));
        }
        while !self.backlog.is_empty()
            && let Some(client) = self.idle.pop()
        {
            let from = self.backlog.pop_front().unwrap_or(now);
            self.begin(client, from)?;
        }
        Ok(())
    }

    fn on_event(&mut self, event: &mio::event::Event, scratch: &mut [u8], open: bool) -> Result<(), Failure> {
        let index = event.token().0;
        if event.is_writable() {
            let client = &mut self.clients[index];
            if client.is_busy() {
                client.write(&self.shape)?;
            }
        }
        if !event.is_readable() && !event.is_read_closed() {
            return Ok(());
        }
        let Some(sample) = self.clients[index].read(&self.shape, scratch)? else { return Ok(()) };
        self.note(&sample);
        let now = Instant::now();
        match (open, self.backlog.pop_front()) {
            (true, Some(due)) => self.begin(index, due),
            (true, None) => {
                self.idle.push(index);
                Ok(())
            }
            (false, _) if now < self.end => self.begin(index, now),
            (false, _) => Ok(()),
        }
    }

    fn note(&mut self, sample: &Sample) {
        let ended = sample.from + sample.whole;
        if ended >= self.begin && ended < self.end {
            self.in_window += 1;
            self.events += sample.events as u64;
        }
        if sample.from >= self.begin {
            self.whole.record(sample.whole);
            self.first.record(sample.first);
        }
    }

    fn result(&self, target: &Target, plan: &Plan, costs: Costs) -> Result<Value, Failure> {
        let seconds = plan.measure.as_secs_f64();
        if self.in_window == 0 {
            return Err(Failure::new("no answer came in the window"));
        }
        if plan.rate.is_some() && (self.in_window as f64) < self.due as f64 * KEPT_MIN {
            let what = format!("the rate is not kept: {} answers while {} requests were due", self.in_window, self.due);
            return Err(Failure::new(what));
        }
        target.legs_add_up(self.next_id - 1)?;
        let per_answer = |cost: Duration| cost.as_nanos() as f64 / 1e3 / self.in_window as f64;
        let memory = target.gateway.map(Tree::cost).transpose()?.unwrap_or_default();
        Ok(json!({
            "answers": self.in_window,
            "per_s": self.in_window as f64 / seconds,
            "events_per_s": self.events as f64 / seconds,
            "p50_us": self.whole.quantile_us(0.5),
            "p90_us": self.whole.quantile_us(0.9),
            "p99_us": self.whole.quantile_us(0.99),
            "max_us": self.whole.max_us(),
            "samples": self.whole.count(),
            "first_p50_us": self.first.quantile_us(0.5),
            "first_p99_us": self.first.quantile_us(0.99),
            "cpu_us": per_answer(costs[0]),
            "mock_cpu_us": per_answer(costs[1]),
            "load_cpu_us": per_answer(costs[2]),
            "rss_kib": memory.resident_kib,
            "peak_kib": memory.peak_kib,
        }))
    }
}

fn spent(target: &Target) -> Result<Costs, Failure> {
    let cpu = |tree: Option<Tree>| Ok(tree.map(Tree::cost).transpose()?.unwrap_or_default().cpu);
    Ok([cpu(target.gateway)?, cpu(target.mocks)?, cpu(Some(Tree(std::process::id())))?])
}
