//! A plain HTTP client for the tests: answers with whatever status came, whole or as a stream of events.

use std::time::Duration;

use serde_json::Value;

use crate::sse::SseParser;

/// No request of a test lives longer; a hang becomes a failure with a name.
const REQUEST_LIMIT: Duration = Duration::from_secs(120);

/// One server, seen by its base URL.
#[derive(Clone)]
pub struct Client {
    base: String,
    http: reqwest::Client,
}

/// A whole answer. `broken` says how the body ended when it did not end well.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub content_type: String,
    pub body: Vec<u8>,
    pub broken: Option<String>,
}

impl Answer {
    /// # Panics
    /// When the body is not JSON: every answer of the API but a stream is.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn is_stream(&self) -> bool {
        self.content_type.starts_with("text/event-stream")
    }

    /// The payloads of a streamed answer.
    ///
    /// # Errors
    /// The body broke off, is no event stream, or ends inside an event.
    pub fn events(&self) -> Result<Vec<String>, String> {
        if let Some(broken) = &self.broken {
            return Err(format!("the body broke off: {broken}"));
        }
        let mut parser = SseParser::default();
        let events = parser.push(&self.body)?;
        if parser.has_rest() { Err("the body ends inside an event".into()) } else { Ok(events) }
    }

    /// `error.message`, of an error object in OpenAI's shape: the fields `message`, `type`, `param` and `code`.
    pub fn error_message(&self) -> Option<String> {
        error_message(&self.text())
    }

    /// How the request ended, as a client sees it.
    pub fn outcome(&self) -> Outcome {
        if self.status != 200 {
            let malformed =
                || Outcome::Broken(format!("status {} without an error object: {}", self.status, self.text()));
            return self.error_message().map_or_else(malformed, Outcome::Error);
        }
        if !self.is_stream() {
            return if self.body.is_empty() { Outcome::Broken("an empty success".into()) } else { Outcome::Served };
        }
        match self.events() {
            Err(broken) => Outcome::Broken(broken),
            Ok(events) => match events.iter().find_map(|event| error_message(event)) {
                Some(message) => Outcome::Error(message),
                None if events.len() > 1 && events.last().is_some_and(|last| last == "[DONE]") => Outcome::Served,
                None => Outcome::Broken(format!("a stream that ends neither with [DONE] nor an error: {events:?}")),
            },
        }
    }
}

/// The message of an error object in OpenAI's shape.
pub fn error_message(text: &str) -> Option<String> {
    let error = serde_json::from_str::<Value>(text).ok()?.get("error")?.clone();
    let whole = error["type"].is_string() && error.get("param").is_some() && error.get("code").is_some();
    error["message"].as_str().filter(|message| whole && !message.is_empty()).map(str::to_owned)
}

/// The ends that a client can see. `Broken` is never right: the client cannot tell what happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    Served,
    /// A status with an error object, or a stream with an error event.
    Error(String),
    Broken(String),
}

/// An answer that is read event by event. Dropping it closes the connection, as a client that leaves does.
pub struct Events {
    pub status: u16,
    response: reqwest::Response,
    parser: SseParser,
    ready: std::collections::VecDeque<String>,
}

impl Events {
    /// The next payload; `None` at a clean end.
    ///
    /// # Errors
    /// The connection broke, or the body is no event stream.
    pub async fn next(&mut self) -> Result<Option<String>, String> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            match self.response.chunk().await.map_err(|error| format!("{error:?}"))? {
                Some(bytes) => self.ready.extend(self.parser.push(&bytes)?),
                None if self.parser.has_rest() => return Err("the body ends inside an event".into()),
                None => return Ok(None),
            }
        }
    }
}

impl Client {
    /// Each request on a connection of its own.
    pub fn new(base: impl Into<String>) -> Self {
        Self::with_idle(base, 0)
    }

    /// Keeps idle connections, as real clients do.
    pub fn pooled(base: impl Into<String>) -> Self {
        Self::with_idle(base, 64)
    }

    fn with_idle(base: impl Into<String>, idle: usize) -> Self {
        let http = reqwest::Client::builder()
            .pool_max_idle_per_host(idle)
            .timeout(REQUEST_LIMIT)
            .tcp_nodelay(true)
            .no_proxy()
            .build()
            .expect("a client without special settings");
        Self { base: base.into(), http }
    }

    /// # Errors
    /// No answer at all: refused, reset, or past the limit.
    pub async fn get(&self, path: &str) -> Result<Answer, String> {
        read(self.http.get(self.url(path)).send().await).await
    }

    /// # Errors
    /// As [`Client::get`].
    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer, String> {
        self.post_bytes(path, body.to_string().into_bytes()).await
    }

    /// # Errors
    /// As [`Client::get`].
    pub async fn post_bytes(&self, path: &str, body: Vec<u8>) -> Result<Answer, String> {
        read(self.request(path, body).send().await).await
    }

    /// # Errors
    /// As [`Client::get`].
    pub async fn stream(&self, path: &str, body: &Value) -> Result<Events, String> {
        let response = self.request(path, body.to_string().into_bytes()).send().await.map_err(|e| format!("{e:?}"))?;
        let status = response.status().as_u16();
        Ok(Events { status, response, parser: SseParser::default(), ready: Default::default() })
    }

    fn request(&self, path: &str, body: Vec<u8>) -> reqwest::RequestBuilder {
        self.http.post(self.url(path)).header("content-type", "application/json").body(body)
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

async fn read(response: reqwest::Result<reqwest::Response>) -> Result<Answer, String> {
    let mut response = response.map_err(|error| format!("{error:?}"))?;
    let content_type = response.headers().get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let (status, content_type) = (response.status().as_u16(), content_type.to_owned());
    let (mut body, mut broken) = (Vec::new(), None);
    loop {
        match response.chunk().await {
            Ok(Some(bytes)) => body.extend_from_slice(&bytes),
            Ok(None) => break,
            Err(error) => {
                broken = Some(format!("{error:?}"));
                break;
            }
        }
    }
    Ok(Answer { status, content_type, body, broken })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, content_type: &str, body: &str) -> Answer {
        Answer { status, content_type: content_type.into(), body: body.as_bytes().to_vec(), broken: None }
    }

    const ERROR: &str = r#"{"error":{"message":"m","type":"server_error","param":null,"code":"c"}}"#;

    #[test]
    fn every_end_is_told_apart() {
        let json = |status, body: &str| answer(status, "application/json", body).outcome();
        let sse = |body: &str| answer(200, "text/event-stream", body).outcome();
        assert_eq!(json(200, "{}"), Outcome::Served);
        assert_eq!(json(502, ERROR), Outcome::Error("m".into()));
        assert_eq!(sse(&format!("data: {{}}\n\ndata: {ERROR}\n\n")), Outcome::Error("m".into()));
        assert_eq!(sse("data: {}\n\ndata: [DONE]\n\n"), Outcome::Served);
        let wrong = [
            json(200, ""),
            json(502, "oops"),
            json(400, r#"{"error":{"message":"m"}}"#),
            sse(""),
            sse("data: {}\n\n"),
            sse("data: [DONE]\n\n"),
        ];
        assert!(wrong.iter().all(|outcome| matches!(outcome, Outcome::Broken(_))), "{wrong:?}");
    }
}
