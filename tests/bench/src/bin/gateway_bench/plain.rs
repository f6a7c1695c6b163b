//! A blocking HTTP client for everything that is not under load: questions to the mock workers, and the rows that look at
//! one request at a time.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;
use socket2::{Domain, Protocol, Socket, Type};

use crate::Failure;
use crate::answer::Incoming;
use crate::script::{Script, body};

const LIMIT: Duration = Duration::from_secs(20);

/// One connection with one request on it.
pub struct Call {
    pub socket: TcpStream,
    pub incoming: Incoming,
}

pub fn address(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// The head of a request for a chat.
pub fn head(port: u16, body_bytes: usize) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n\
         content-length: {body_bytes}\r\n\r\n"
    )
}

impl Call {
    /// Sends a chat of 1 KiB. `receive_bytes`: the size of the socket's receive buffer.
    pub fn chat(port: u16, script: &Script, receive_bytes: Option<usize>) -> Result<Call, Failure> {
        let (body, _) = body(script, 1024);
        let mut bytes = head(port, body.len()).into_bytes();
        bytes.extend_from_slice(&body);
        Self::send(port, &bytes, receive_bytes)
    }

    fn send(port: u16, bytes: &[u8], receive_bytes: Option<usize>) -> Result<Call, Failure> {
        let io = Failure::io("no connection");
        let connect = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
            if let Some(bytes) = receive_bytes {
                socket.set_recv_buffer_size(bytes)?;
            }
            socket.connect(&address(port).into())?;
            let mut socket = TcpStream::from(socket);
            socket.set_nodelay(true)?;
            socket.set_read_timeout(Some(LIMIT))?;
            socket.write_all(bytes)?;
            Ok(socket)
        };
        Ok(Call { socket: connect().map_err(io)?, incoming: Incoming::default() })
    }

    /// Reads once.
    fn read(&mut self) -> Result<(), Failure> {
        let mut buffer = [0; 64 << 10];
        match self.socket.read(&mut buffer).map_err(Failure::io("no answer"))? {
            0 => Err(Failure::new("the connection was closed in the middle of an answer")),
            got => self.incoming.push(&buffer[..got]),
        }
    }

    /// Reads until the first byte of the body is there; returns when that was.
    pub fn first_byte(&mut self) -> Result<u64, Failure> {
        while self.incoming.body.is_empty() {
            self.read()?;
        }
        Ok(crate::mock::now_ns())
    }

    pub fn whole(&mut self) -> Result<(), Failure> {
        while !self.incoming.is_whole() {
            self.read()?;
        }
        Ok(())
    }
}

/// Asks a mock worker something about all of them.
pub fn ask(port: u16, path: &str) -> Result<Value, Failure> {
    let head = format!("GET {path} HTTP/1.1\r\nhost: mock\r\n\r\n");
    let mut call = Call::send(port, head.as_bytes(), None)?;
    call.whole()?;
    serde_json::from_slice(&call.incoming.body).map_err(|e| Failure::new(format!("the mock workers answer {e}")))
}

/// Looks every few milliseconds until it finds something; `None` after the limit.
pub fn until<T>(limit: Duration, mut look: impl FnMut() -> Result<Option<T>, Failure>) -> Result<Option<T>, Failure> {
    let end = Instant::now() + limit;
    loop {
        match look()? {
            None if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
            found => return Ok(found),
        }
    }
}
