//! The mock workers: any number of prefill and decode workers in one process, on one thread that waits in epoll. They
//! compute nothing and answer at once, or as the script in the prompt says.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mio::event::Event;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Registry, Token};
use serde_json::json;
use socket2::SockRef;

use crate::Failure;
use crate::answers::{Answers, Progress, Then, json_answer};
use crate::intake::{Intake, Request};
use crate::ledger::{Ledger, Note, Tie};
use crate::script::{Script, Side};

const CONNECTIONS_MAX: usize = 16_384;
const READ_BYTES: usize = 256 << 10;
/// A send buffer that does not grow, so that what a worker could push lies in the gateway and not here.
const SEND_BYTES: usize = 128 << 10;

/// Nanoseconds since 1970, comparable between the processes of one machine.
pub fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}

/// Serves for ever; prints the ports as one line of JSON first.
pub fn serve(pairs: usize) -> Result<(), Failure> {
    let mut listeners = Vec::new();
    for i in 0..2 * pairs {
        let side = if i < pairs { Side::Prefill } else { Side::Decode };
        let any = "127.0.0.1:0".parse().expect("an address");
        listeners.push((side, TcpListener::bind(any).map_err(Failure::io("no listener for a mock worker"))?));
    }
    let ports = |side| -> Vec<u16> {
        let of_side = listeners.iter().filter(|(s, _)| *s == side);
        of_side.filter_map(|(_, listener)| Some(listener.local_addr().ok()?.port())).collect()
    };
    println!("{}", json!({"prefill": ports(Side::Prefill), "decode": ports(Side::Decode)}));
    let poll = Poll::new().map_err(Failure::io("no epoll"))?;
    let mut mocks = Mocks::new(listeners, poll.registry().try_clone().map_err(Failure::io("no registry"))?)?;
    mocks.run(poll)
}

/// A connection of a gateway, or of the bench itself.
struct Connection {
    socket: TcpStream,
    side: Side,
    intake: Intake,
    answer: Option<(Script, Progress)>,
    /// Where the script says to wait.
    waits: bool,
    out: Vec<u8>,
    written: usize,
    generation: u64,
}

/// What a timer is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Due {
    Answer,
    Fail,
}

struct Mocks {
    listeners: Vec<(Side, TcpListener)>,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    timers: BinaryHeap<Reverse<(Instant, usize, u64, Due)>>,
    registry: Registry,
    answers: Answers,
    ledger: Ledger,
    scratch: Vec<u8>,
    generation: u64,
}

/// A connection goes on, or is to be dropped.
enum Fate {
    Lives,
    Ends,
}

impl Mocks {
    fn new(mut listeners: Vec<(Side, TcpListener)>, registry: Registry) -> Result<Self, Failure> {
        for (i, (_, listener)) in listeners.iter_mut().enumerate() {
            registry.register(listener, Token(i), Interest::READABLE).map_err(Failure::io("a listener in epoll"))?;
        }
        Ok(Mocks {
            listeners,
            connections: Vec::new(),
            free: Vec::new(),
            timers: BinaryHeap::new(),
            registry,
            answers: Answers::default(),
            ledger: Ledger::default(),
            scratch: vec![0; READ_BYTES],
            generation: 0,
        })
    }

    fn run(&mut self, mut poll: Poll) -> Result<(), Failure> {
        let mut events = Events::with_capacity(1024);
        loop {
            let next = self.timers.peek().map(|Reverse((at, ..))| at.saturating_duration_since(Instant::now()));
            match poll.poll(&mut events, next) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result.map_err(Failure::io("epoll"))?,
            }
            for event in &events {
                match event.token().0 {
                    i if i < self.listeners.len() => self.accept(i),
                    i => self.on_event(i - self.listeners.len(), event),
                }
            }
            self.fire();
        }
    }

    fn accept(&mut self, listener: usize) {
        while let Ok((mut socket, _)) = self.listeners[listener].1.accept() {
            let slot = self.free.pop().unwrap_or(self.connections.len());
            if slot == CONNECTIONS_MAX {
                self.ledger.strange("more connections than the mock workers take".into());
                continue;
            }
            let token = Token(slot + self.listeners.len());
            let _ = socket.set_nodelay(true);
            let _ = SockRef::from(&socket).set_send_buffer_size(SEND_BYTES);
            if self.registry.register(&mut socket, token, Interest::READABLE | Interest::WRITABLE).is_err() {
                self.free.push(slot);
                continue;
            }
            self.generation += 1;
            let connection = Connection {
                socket,
                side: self.listeners[listener].0,
                intake: Intake::default(),
                answer: None,
                waits: false,
                out: Vec::new(),
                written: 0,
                generation: self.generation,
            };
            if slot == self.connections.len() {
                self.connections.push(None);
            }
            self.connections[slot] = Some(connection);
        }
    }

    fn on_event(&mut self, slot: usize, event: &Event) {
        let Some(mut connection) = self.connections.get_mut(slot).and_then(Option::take) else { return };
        let mut fate = Fate::Lives;
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            fate = self.read(slot, &mut connection);
        }
        if matches!(fate, Fate::Lives) && event.is_writable() && !connection.waits && connection.answer.is_some() {
            fate = self.go_on(slot, &mut connection);
        }
        self.settle(slot, connection, fate);
    }

    fn settle(&mut self, slot: usize, connection: Connection, fate: Fate) {
        match fate {
            Fate::Lives => self.connections[slot] = Some(connection),
            Fate::Ends => self.free.push(slot),
        }
    }

    fn read(&mut self, slot: usize, connection: &mut Connection) -> Fate {
        loop {
            let got = match connection.socket.read(&mut self.scratch) {
                Ok(0) => return self.closed(connection),
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Fate::Lives,
                Err(_) => return self.closed(connection),
            };
            if connection.answer.is_some() {
                self.ledger.strange("a request before the last one was answered".into());
                return Fate::Ends;
            }
            match connection.intake.push(&self.scratch[..got]) {
                Ok(None) => {}
                Ok(Some(request)) => {
                    if matches!(self.begin(slot, connection, &request), Fate::Ends) {
                        return Fate::Ends;
                    }
                }
                Err(failure) => {
                    self.ledger.strange(failure.to_string());
                    return Fate::Ends;
                }
            }
            // A short read has emptied the socket; what comes later is a new event.
            if got < READ_BYTES {
                return Fate::Lives;
            }
        }
    }

    fn closed(&mut self, connection: &Connection) -> Fate {
        if let Some((script, _)) = &connection.answer {
            self.ledger.cut();
            if script.watched {
                self.ledger.note(script.id, connection.side, Note::Cut, now_ns());
            }
        } else if !connection.intake.is_empty() {
            self.ledger.strange("a connection closed in the middle of a request".into());
        }
        Fate::Ends
    }

    fn begin(&mut self, slot: usize, connection: &mut Connection, request: &Request) -> Fate {
        if !(request.post && matches!(request.path.as_str(), "/v1/chat/completions" | "/generate")) {
            let answer = self.about(connection.side, request);
            connection.out.extend_from_slice(answer.as_bytes());
            return self.write(connection);
        }
        let script = match Script::find(&request.front) {
            Ok(script) => script,
            Err(failure) => {
                self.ledger.strange(failure.to_string());
                return Fate::Ends;
            }
        };
        let tie = Tie::find(&request.front, &request.tail);
        let transfer = connection.side == Side::Prefill && tie == Tie::Handoff;
        self.ledger.leg(script.id, connection.side, tie);
        if script.watched {
            self.ledger.note(script.id, connection.side, Note::Arrived, now_ns());
        }
        let works = if connection.side == Side::Prefill { script.prefill } else { script.decode };
        let fails = script.fails.filter(|(side, _)| *side == connection.side);
        let progress = Progress::new(connection.side, &script, transfer);
        connection.answer = Some((script, progress));
        if let Some((_, after)) = fails {
            self.later(slot, connection, after, Due::Fail);
        }
        if works.is_zero() {
            return self.go_on(slot, connection);
        }
        self.later(slot, connection, works, Due::Answer);
        Fate::Lives
    }

    fn later(&mut self, slot: usize, connection: &mut Connection, after: Duration, due: Due) {
        connection.waits |= due == Due::Answer;
        self.timers.push(Reverse((Instant::now() + after, slot, connection.generation, due)));
    }

    fn fire(&mut self) {
        let now = Instant::now();
        while self.timers.peek().is_some_and(|Reverse((at, ..))| *at <= now) {
            let Some(Reverse((_, slot, generation, due))) = self.timers.pop() else { return };
            let same = |connection: &Connection| connection.generation == generation;
            if !self.connections[slot].as_ref().is_some_and(same) {
                continue;
            }
            let Some(mut connection) = self.connections[slot].take() else { continue };
            let fate = match due {
                Due::Answer => {
                    connection.waits = false;
                    self.go_on(slot, &mut connection)
                }
                Due::Fail => {
                    if let Some((script, _)) = &connection.answer {
                        self.ledger.note(script.id, connection.side, Note::Failed, now_ns());
                    }
                    Fate::Ends
                }
            };
            self.settle(slot, connection, fate);
        }
    }

    /// Produces and writes until the answer ends, has to wait, or the socket takes no more.
    fn go_on(&mut self, slot: usize, connection: &mut Connection) -> Fate {
        loop {
            if matches!(self.write(connection), Fate::Ends) {
                return self.closed(connection);
            }
            if connection.written < connection.out.len() {
                return Fate::Lives;
            }
            let Some((script, progress)) = &mut connection.answer else { return Fate::Lives };
            if progress.ended {
                if script.watched {
                    self.ledger.note(script.id, connection.side, Note::Answered, now_ns());
                }
                connection.answer = None;
                return Fate::Lives;
            }
            let gap = script.gap;
            match progress.produce(&self.answers, &mut connection.out, now_ns()) {
                Then::More | Then::End => {}
                Then::Silence if connection.out.is_empty() => return Fate::Lives,
                Then::Silence => {}
                Then::Pause => {
                    if matches!(self.write(connection), Fate::Ends) {
                        return self.closed(connection);
                    }
                    self.later(slot, connection, gap, Due::Answer);
                    return Fate::Lives;
                }
            }
        }
    }

    fn write(&mut self, connection: &mut Connection) -> Fate {
        while connection.written < connection.out.len() {
            match connection.socket.write(&connection.out[connection.written..]) {
                Ok(0) => return Fate::Ends,
                Ok(some) => {
                    connection.written += some;
                    self.ledger.sent(some);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Fate::Lives,
                Err(_) => return Fate::Ends,
            }
        }
        connection.out.clear();
        connection.written = 0;
        Fate::Lives
    }

    /// What workers say of themselves, and what the bench asks the mocks.
    fn about(&mut self, side: Side, request: &Request) -> String {
        let json = match request.path.as_str() {
            "/health" | "/health_generate" | "/ready" => json!({}),
            "/server_info" | "/get_server_info" => json!({
                "disaggregation_mode": side.name(), "disaggregation_bootstrap_port": 8998, "version": "0.5.23",
                "model_path": "mock", "served_model_name": "mock", "tp_size": 1, "dp_size": 1, "status": "ready",
                "max_total_num_tokens": 1 << 20, "internal_states": [{}],
            }),
            "/model_info" | "/get_model_info" => json!({
                "model_path": "mock", "tokenizer_path": "mock", "served_model_name": "mock", "is_generation": true,
            }),
            "/v1/models" => json!({"object": "list", "data": [{
                "id": "mock", "object": "model", "created": 1764547200, "owned_by": "bench", "root": "mock",
                "max_model_len": 1 << 20,
            }]}),
            "/v1/loads" => json!({"loads": [{
                "dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_tokens": 0,
            }]}),
            "/get_load" => json!([{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]),
            "/abort_request" | "/flush_cache" => json!({"success": true}),
            "/bench/stats" => self.ledger.stats(),
            "/bench/notes" => self.ledger.notes(),
            "/bench/reset" => {
                self.ledger = Ledger::default();
                json!({})
            }
            _ => return json_answer(404, "{}"),
        };
        json_answer(200, &json.to_string())
    }
}
