//! One client connection under load: it writes a request, reads the answer, checks it. It never blocks; the driver in
//! [`crate::load`] says when.

use std::io::{self, IoSlice, Read, Write};
use std::time::{Duration, Instant};

use mio::net::TcpStream;

use crate::Failure;
use crate::answer::{Incoming, Wanted};
use crate::plain;
use crate::script::{Script, body, write_id};

/// Of a body this much is each connection's own, since the id lies in it; the rest is shared.
const OWN_BYTES: usize = 2048;

/// What all requests of a run have in common.
pub struct Shape {
    /// Head and the front of the body.
    front: Vec<u8>,
    id_at: usize,
    rest: Vec<u8>,
    events: Option<usize>,
}

impl Shape {
    pub fn new(port: u16, script: &Script, body_bytes: usize) -> Shape {
        let (body, id_at) = body(script, body_bytes);
        let mut front = plain::head(port, body.len()).into_bytes();
        let id_at = front.len() + id_at;
        let own = body.len().min(OWN_BYTES);
        front.extend_from_slice(&body[..own]);
        let events = script.stream.then_some(script.events as usize);
        Shape { front, id_at, rest: body[own..].to_vec(), events }
    }
}

/// One answered request.
pub struct Sample {
    pub from: Instant,
    pub first: Duration,
    pub whole: Duration,
    pub events: usize,
}

pub struct Client {
    pub socket: TcpStream,
    front: Vec<u8>,
    written: usize,
    incoming: Incoming,
    busy: Option<(u64, Instant)>,
    first: Option<Duration>,
}

impl Client {
    pub fn new(socket: TcpStream, shape: &Shape) -> Client {
        let incoming = Incoming::default();
        Client { socket, front: shape.front.clone(), written: 0, incoming, busy: None, first: None }
    }

    pub fn is_busy(&self) -> bool {
        self.busy.is_some()
    }

    /// Begins a request whose time counts from `from`.
    pub fn begin(&mut self, shape: &Shape, id: u64, from: Instant) -> Result<(), Failure> {
        write_id(&mut self.front[shape.id_at..], id);
        (self.written, self.first) = (0, None);
        self.incoming.reset();
        self.busy = Some((id, from));
        self.write(shape)
    }

    pub fn write(&mut self, shape: &Shape) -> Result<(), Failure> {
        let total = self.front.len() + shape.rest.len();
        while self.written < total {
            let own = &self.front[self.written.min(self.front.len())..];
            let shared = &shape.rest[self.written.saturating_sub(self.front.len())..];
            match self.socket.write_vectored(&[IoSlice::new(own), IoSlice::new(shared)]) {
                Ok(some) => self.written += some,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // Where a connection is not through yet.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(()),
                Err(error) => return Err(Failure::new(format!("a request is not taken: {error}"))),
            }
        }
        Ok(())
    }

    /// Reads what is there; returns the sample if the answer became whole.
    pub fn read(&mut self, shape: &Shape, scratch: &mut [u8]) -> Result<Option<Sample>, Failure> {
        loop {
            let got = match self.socket.read(scratch) {
                Ok(0) => return Err(Failure::new("the gateway closed a connection")),
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(Failure::new(format!("an answer breaks off: {error}"))),
            };
            let Some((id, from)) = self.busy else { return Err(Failure::new("bytes that nobody asked for")) };
            self.incoming.push(&scratch[..got])?;
            if self.first.is_none() && !self.incoming.body.is_empty() {
                self.first = Some(from.elapsed());
            }
            if self.incoming.is_whole() {
                let whole = from.elapsed();
                self.incoming.check(Wanted { id, events: shape.events })?;
                if self.incoming.closes {
                    return Err(Failure::new("the gateway does not keep the connection"));
                }
                self.busy = None;
                let events = shape.events.unwrap_or(0);
                return Ok(Some(Sample { from, first: self.first.unwrap_or(whole), whole, events }));
            }
            // A short read has emptied the socket; what comes later is a new event.
            if got < scratch.len() {
                return Ok(None);
            }
        }
    }
}
