//! A worker that is healthy and then misbehaves: it answers every GET, and does with a POST what the test says.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::{net, wait};

/// A sight that a test waits for comes within this.
const SIGHT_LIMIT: Duration = Duration::from_secs(10);
const SIGHTS_MAX: usize = 1024;

/// What the mock does with a POST, after it read the whole request.
#[derive(Clone, Debug)]
pub enum Behaviour {
    /// Never answers and keeps the connection open.
    Silent,
    /// Sends these bytes and then waits for the other side to close.
    Raw(Vec<u8>),
    /// Closes the connection without a byte.
    Close,
}

impl Behaviour {
    /// A whole JSON answer.
    pub fn json(status: u16, body: &serde_json::Value) -> Self {
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {status} Mock\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        Self::Raw((head + &body).into_bytes())
    }
}

/// What the mock saw.
#[derive(Debug, PartialEq, Eq)]
pub enum Sight {
    Request {
        path: String,
        body: Vec<u8>,
    },
    /// The other side closed the connection of a POST.
    Closed,
}

/// A listening mock; its threads end with the test's process.
pub struct Mock {
    pub port: u16,
    sights: Receiver<Sight>,
}

impl Mock {
    pub fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind(SocketAddr::from((net::host(), 0))).expect("a free port");
        let port = listener.local_addr().expect("a bound socket").port();
        let (seen, sights) = channel(SIGHTS_MAX);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (behaviour, seen) = (behaviour.clone(), seen.clone());
                // A connection that breaks is the test's wish, not an error.
                thread::spawn(move || drop(serve(stream, &behaviour, &seen)));
            }
        });
        Self { port, sights }
    }

    pub fn url(&self) -> String {
        format!("http://{}:{}", net::host(), self.port)
    }

    /// The next thing that happened to a POST.
    pub async fn sight(&mut self) -> Sight {
        let sight = wait::within("the mock to see something", SIGHT_LIMIT, self.sights.recv()).await;
        sight.expect("the mock listens as long as the test runs")
    }
}

/// Requests of one connection, one after the other.
fn serve(mut stream: TcpStream, behaviour: &Behaviour, seen: &Sender<Sight>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut posted = false;
    while let Some((method, path, body)) = read_request(&mut reader)? {
        if method == "GET" {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")?;
            continue;
        }
        posted = true;
        // The test may not be interested.
        let _ = seen.try_send(Sight::Request { path, body });
        match behaviour {
            Behaviour::Silent => {}
            Behaviour::Raw(bytes) => stream.write_all(bytes)?,
            Behaviour::Close => return Ok(()),
        }
        if !matches!(behaviour, Behaviour::Raw(_)) {
            let closed = reader.read(&mut [0])? == 0;
            let _ = closed.then(|| seen.try_send(Sight::Closed));
            return Ok(());
        }
    }
    let _ = posted.then(|| seen.try_send(Sight::Closed));
    Ok(())
}

/// Method, path and body; `None` when the other side closed between two requests.
fn read_request(reader: &mut impl BufRead) -> std::io::Result<Option<(String, String, Vec<u8>)>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        match header.trim_end().split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = value.trim().parse().unwrap_or(0)
            }
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some((method, path, body)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Client;
    use serde_json::json;

    #[tokio::test(flavor = "multi_thread")]
    async fn the_mock_is_healthy_answers_and_sees() {
        let error = json!({"error": {"message": "tea", "type": "server_error", "param": null, "code": "teapot"}});
        let mut mock = Mock::start(Behaviour::json(418, &error));
        let client = Client::new(mock.url());
        assert_eq!(client.get("/health").await.unwrap().status, 200);
        let answer = client.post("/generate", &json!({"text": "x"})).await.unwrap();
        assert_eq!((answer.status, answer.error_message()), (418, Some("tea".to_owned())));
        let seen = mock.sight().await;
        assert_eq!(seen, Sight::Request { path: "/generate".into(), body: b"{\"text\":\"x\"}".to_vec() });
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_mock_streams_and_sees_a_client_leave() {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
        let mut mock = Mock::start(Behaviour::Raw(format!("{head}data: 1\n\ndata: 2\n\nda").into_bytes()));
        let mut events = Client::new(mock.url()).stream("/generate", &json!({})).await.unwrap();
        assert_eq!(events.next().await.unwrap().as_deref(), Some("1"));
        assert_eq!(events.next().await.unwrap().as_deref(), Some("2"));
        drop(events);
        mock.sight().await;
        assert_eq!(mock.sight().await, Sight::Closed);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn silence_and_a_closed_connection_are_no_answers() {
        let closing = Mock::start(Behaviour::Close);
        assert!(Client::new(closing.url()).post("/generate", &json!({})).await.is_err());
        let silent = Mock::start(Behaviour::Silent);
        let client = Client::new(silent.url());
        let body = json!({});
        let answer = client.post("/generate", &body);
        assert!(tokio::time::timeout(std::time::Duration::from_millis(50), answer).await.is_err());
    }
}
