//! What can go wrong on the way of a request, as values: what happened, whose fault it is, what the client is told, and
//! whether another pair may try again. *Pure.*

use bytes::Bytes;
use serde_json::json;

/// One of the two legs of an exchange. A plain worker's only leg is the decode leg.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Side {
    Prefill,
    Decode,
}

impl Side {
    pub fn name(self) -> &'static str {
        match self {
            Side::Prefill => "prefill",
            Side::Decode => "decode",
        }
    }
}

/// Whose fault a failure is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Blame {
    Client,
    Gateway,
    Worker(Side),
}

/// Whether the same request may be tried again with new rooms (H8), as long as its client got no byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Retry {
    Never,
    /// A reused connection turned out dead before any byte of the response: one more try on fresh connections.
    StaleConnection,
    /// The worker is in trouble, and another one may not be.
    OtherPair,
}

impl Retry {
    /// Statuses that tell of a worker's trouble rather than of the request's.
    fn by_status(status: u16) -> Self {
        if matches!(status, 502..=504) { Retry::OtherPair } else { Retry::Never }
    }
}

/// A request's one bad outcome.
#[derive(Clone, PartialEq, Debug)]
pub struct Failure {
    pub status: u16,
    /// Stable, from a fixed set: the `code` of the body, the header `x-smg-error-code`, and a metric label.
    pub code: &'static str,
    pub message: String,
    /// What only the operator's log tells: which workers, by address.
    pub detail: Option<Box<str>>,
    pub blame: Blame,
    pub retry: Retry,
    pub retry_after_secs: Option<u32>,
    /// The field of the request that is at fault.
    pub param: Option<&'static str>,
    /// A worker's own error body, which reaches the client as it is.
    pub worker_body: Option<Bytes>,
}

impl Failure {
    pub fn new(status: u16, code: &'static str, blame: Blame, message: impl Into<String>) -> Self {
        Failure {
            status,
            code,
            message: message.into(),
            detail: None,
            blame,
            retry: Retry::Never,
            retry_after_secs: None,
            param: None,
            worker_body: None,
        }
    }

    pub fn client(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        Self::new(status, code, Blame::Client, message)
    }

    pub fn worker(side: Side, code: [&'static str; 2], message: impl Into<String>) -> Self {
        let failure = Self::new(502, pick(side, code), Blame::Worker(side), message);
        Failure { retry: Retry::OtherPair, ..failure }
    }

    /// The error names a field of the request.
    pub fn at(mut self, param: &'static str) -> Self {
        self.param = Some(param);
        self
    }

    /// Adds what the log is to tell, unless more is known already.
    pub fn with_detail(mut self, detail: impl Into<Box<str>>) -> Self {
        self.detail.get_or_insert_with(|| detail.into());
        self
    }

    /// A side that has no worker to offer now; a later try may find one.
    pub fn no_worker(side: &'static str, why: &str) -> Self {
        let code = match side {
            "prefill" => "no_prefill_worker",
            "decode" => "no_decode_worker",
            _ => "no_worker",
        };
        let message = format!("no healthy {side} worker is available ({why}); retry in a few seconds");
        let mut failure = Self::new(503, code, Blame::Gateway, message);
        failure.retry_after_secs = Some(1);
        failure
    }

    /// The gateway's grace is over.
    pub fn stopping() -> Self {
        let message = "the gateway is stopping and the request did not end in its grace period; send it again";
        let mut failure = Self::new(503, "gateway_stopping", Blame::Gateway, message);
        failure.retry_after_secs = Some(1);
        failure
    }

    /// The transport of a leg failed. `unanswered_reuse`: the connection had served before and no response byte came.
    pub fn transport(side: Side, worker: &str, what: &str, unanswered_reuse: bool) -> Self {
        let message = format!("the {} worker failed: {what}", side.name());
        let code = ["prefill_transport_error", "decode_transport_error"];
        let mut failure = Self::worker(side, code, message).with_detail(worker);
        if unanswered_reuse {
            failure.retry = Retry::StaleConnection;
        }
        failure
    }

    /// A worker that answers nothing any more, by what its probes found.
    pub fn silent(side: Side, worker: &str, why: &str) -> Self {
        let message = format!("the {} worker fell silent: {why}", side.name());
        let code = ["prefill_silent", "decode_silent"];
        Failure { status: 504, ..Self::worker(side, code, message) }.with_detail(worker)
    }

    /// The worker was removed from the fleet and had its time to end its legs.
    pub fn removed(side: Side, worker: &str) -> Self {
        let message = format!("the {} worker was removed before the answer's end; send the request again", side.name());
        let code = pick(side, ["prefill_removed", "decode_removed"]);
        let failure = Self::new(503, code, Blame::Gateway, message).with_detail(worker);
        Failure { retry: Retry::OtherPair, ..failure }
    }

    /// A worker's own refusal: its status stays, its message too, and its body when it is an error object.
    pub fn refused(side: Side, status: u16, body: Bytes, retry_after_secs: Option<u32>) -> Self {
        let blame = if status < 500 { Blame::Client } else { Blame::Worker(side) };
        let parsed: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
        let keeps = parsed.as_ref().is_some_and(|v| v["error"].is_object() || v["message"].is_string());
        let message = parsed.as_ref().and_then(message_of).unwrap_or_else(|| {
            let text: String = String::from_utf8_lossy(&body).chars().take(2000).collect();
            if text.is_empty() {
                format!("the {} worker answered {status} without a message", side.name())
            } else {
                text
            }
        });
        let mut failure = Self::new(status, pick(side, ["prefill_refused", "decode_refused"]), blame, message);
        failure.retry = Retry::by_status(status);
        failure.worker_body = keeps.then_some(body);
        failure.retry_after_secs = retry_after_secs;
        failure
    }

    /// A failure that a worker reports inside a 200 answer: an SSE error event or a finish reason `abort`.
    pub fn reported(side: Side, status: Option<u16>, message: Option<String>) -> Self {
        let status = status.filter(|s| (400..600).contains(s)).unwrap_or(502);
        let blame = if status < 500 { Blame::Client } else { Blame::Worker(side) };
        let message =
            message.unwrap_or_else(|| format!("the {} worker reported an error without a message", side.name()));
        let code = pick(side, ["prefill_reported_error", "decode_reported_error"]);
        Failure { retry: Retry::by_status(status), ..Self::new(status, code, blame, message) }
    }

    /// The error object of OpenAI's API.
    pub fn body(&self) -> Bytes {
        match &self.worker_body {
            Some(body) => body.clone(),
            None => self.own_body(),
        }
    }

    fn own_body(&self) -> Bytes {
        let kind = match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        let value = json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}});
        Bytes::from(value.to_string())
    }

    /// One valid server-sent event that tells a client of a stream what happened.
    pub fn event(&self) -> Bytes {
        let value: serde_json::Value = serde_json::from_slice(&self.own_body()).unwrap_or_default();
        let mut error = value["error"].clone();
        error["status"] = self.status.into();
        Bytes::from(format!("data: {}\n\n", json!({"error": error})))
    }
}

fn pick(side: Side, code: [&'static str; 2]) -> &'static str {
    match side {
        Side::Prefill => code[0],
        Side::Decode => code[1],
    }
}

/// The message inside the error shapes that workers use: OpenAI's, SGLang's flat one, FastAPI's `detail`.
pub fn message_of(value: &serde_json::Value) -> Option<String> {
    let candidates = [&value["error"]["message"], &value["error"], &value["message"], &value["detail"]];
    candidates.into_iter().find_map(|v| v.as_str()).map(str::to_owned)
}

/// Why the gateway did not start. Each says what to change.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{0}")]
    Config(String),
    #[error("cannot listen on {address} for {what}: {source}; choose another port or stop what holds it")]
    Listen { what: &'static str, address: String, source: std::io::Error },
    #[error("upgrade: {0}")]
    Upgrade(String),
    #[error("cannot write the address file {path}: {source}")]
    AddressFile { path: String, source: std::io::Error },
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    #[error("cannot build the HTTP client for probes: {0}")]
    Client(#[from] reqwest::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_own_error_object_survives() {
        let body = Bytes::from_static(br#"{"error":{"message":"too long: 9 > 8","type":"x","extra":1}}"#);
        let failure = Failure::refused(Side::Prefill, 400, body.clone(), None);
        assert_eq!((failure.status, failure.body()), (400, body));
        assert_eq!(failure.message, "too long: 9 > 8");
    }

    #[test]
    fn other_bodies_are_wrapped_with_their_message() {
        let failure = Failure::refused(Side::Decode, 500, Bytes::from_static(br#"{"detail":"kv failed"}"#), None);
        let value: serde_json::Value = serde_json::from_slice(&failure.body()).unwrap();
        assert_eq!(value["error"]["message"], "kv failed");
        assert_eq!(value["error"]["code"], "decode_refused");
        let failure = Failure::refused(Side::Decode, 503, Bytes::new(), Some(7));
        assert!(failure.message.contains("503"));
        assert_eq!(failure.retry_after_secs, Some(7));
    }

    #[test]
    fn a_workers_address_is_for_the_log() {
        let failure = Failure::transport(Side::Decode, "http://10.0.0.7:1", "connection reset", false);
        assert_eq!(failure.detail.as_deref(), Some("http://10.0.0.7:1"));
        assert!(!String::from_utf8_lossy(&failure.body()).contains("10.0.0.7"));
        assert!(!String::from_utf8_lossy(&failure.event()).contains("10.0.0.7"));
    }

    #[test]
    fn the_event_is_one_valid_event() {
        let event = Failure::transport(Side::Prefill, "http://p", "line\nbreak \"quoted\"", false).event();
        let text = std::str::from_utf8(&event).unwrap();
        assert!(text.ends_with("\n\n") && text.matches('\n').count() == 2);
        let value: serde_json::Value = serde_json::from_str(text.strip_prefix("data: ").unwrap().trim()).unwrap();
        assert_eq!(value["error"]["status"], 502);
    }
}
