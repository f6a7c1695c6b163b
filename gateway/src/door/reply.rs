//! Answers of the gateway's own, written to a client's session: JSON, text, and errors in OpenAI's shape.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use serde_json::Value;

use crate::error::Failure;

/// Joins a client's request with the log lines of gateway and worker; each request past the door has one.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What came of a request, for its metrics and for the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    pub status: u16,
    /// Empty when all went well.
    pub code: &'static str,
    /// The client has a whole answer, so its connection may serve on.
    pub whole: bool,
}

impl Done {
    pub fn ok(status: u16) -> Self {
        Done { status, code: "", whole: true }
    }

    /// The client left, or must be told by a closed connection.
    pub fn broken(status: u16, code: &'static str) -> Self {
        Done { status, code, whole: false }
    }
}

pub async fn json(session: &mut ServerSession, status: u16, value: &Value) -> Done {
    whole(session, status, "application/json", HeaderMap::new(), Bytes::from(value.to_string())).await
}

pub async fn text(
    session: &mut ServerSession,
    status: u16,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Done {
    whole(session, status, content_type, HeaderMap::new(), body.into()).await
}

/// The failure's status, body and code. A request whose body was not read to its end loses its connection.
pub async fn failure(session: &mut ServerSession, failure: &Failure) -> Done {
    let mut headers = HeaderMap::new();
    headers.insert("x-smg-error-code", HeaderValue::from_static(failure.code));
    if let Some(secs) = failure.retry_after_secs {
        headers.insert(http::header::RETRY_AFTER, secs.into());
    }
    if failure.status == 405 {
        let allowed = if failure.message.ends_with("GET") { "GET" } else { "POST" };
        headers.insert(http::header::ALLOW, HeaderValue::from_static(allowed));
    }
    let done = whole(session, failure.status, "application/json", headers, failure.body()).await;
    Done { code: failure.code, ..done }
}

/// The request's id; none where no head could be read.
pub fn request_id(session: &ServerSession) -> Option<&HeaderValue> {
    match session.as_http1() {
        Some(http1) => http1.get_header(REQUEST_ID),
        None => session.get_header(REQUEST_ID),
    }
}

/// A whole answer in one write.
pub async fn whole(
    session: &mut ServerSession,
    status: u16,
    content_type: &'static str,
    headers: HeaderMap,
    body: Bytes,
) -> Done {
    let sent = async {
        let mut head = ResponseHeader::build(status, Some(headers.len() + 5))?;
        for (name, value) in &headers {
            head.append_header(name.clone(), value.clone())?;
        }
        if !headers.contains_key(http::header::CONTENT_TYPE) {
            head.insert_header(http::header::CONTENT_TYPE, content_type)?;
        }
        if let Some(id) = request_id(session) {
            head.insert_header(REQUEST_ID, id.clone())?;
        }
        head.insert_header(http::header::CONTENT_LENGTH, body.len())?;
        session.write_response_header(Box::new(head)).await?;
        session.write_response_body(body, true).await
    };
    match sent.await {
        Ok(()) => Done::ok(status),
        Err(_) => Done::broken(status, "client_gone"),
    }
}
