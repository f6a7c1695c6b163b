//! Server-sent events: the response's head is held until the first event is there, so that an early failure keeps its
//! status; a later failure is an error event. Either way the stream ends with `data: [DONE]`.

use axum::{
    body::{Body, Bytes},
    response::Response,
};
use futures_util::stream;
use http::{HeaderValue, header};
use serde::Serialize;

use super::{
    answers::{Answers, Part},
    error::ApiError,
};

/// Bytes that are gathered from events which are ready at once.
const FRAME_BYTES: usize = 32 << 10;

const DONE: &[u8] = b"data: [DONE]\n\n";

/// Turns parts into events. `out` receives whole events, through [`event`] and its like.
pub trait Dialect: Send + 'static {
    fn part(&mut self, index: usize, part: Part, out: &mut Vec<u8>);

    /// After the last part of the last sample.
    fn end(&mut self, out: &mut Vec<u8>);
}

/// One event with `value` as its data.
pub fn event(out: &mut Vec<u8>, value: &impl Serialize) {
    wrapped(out, b"", value, b"");
}

/// One event whose data is `head`, `value`, `tail`, so that what all events share is rendered once.
pub fn wrapped(out: &mut Vec<u8>, head: &[u8], value: &impl Serialize, tail: &[u8]) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(head);
    serde_json::to_writer(&mut *out, value).expect("our own structs serialise, and a Vec takes all bytes");
    out.extend_from_slice(tail);
    out.extend_from_slice(b"\n\n");
}

/// The response to a streamed request.
///
/// # Errors
/// The failure of a sample that comes before any part.
pub async fn respond(mut answers: Answers, mut dialect: impl Dialect) -> Result<Response, ApiError> {
    let mut first = Vec::with_capacity(512);
    let more = match answers.next().await {
        Some(Ok((index, part))) => {
            dialect.part(index, part, &mut first);
            true
        }
        Some(Err(error)) => return Err(error),
        None => {
            dialect.end(&mut first);
            first.extend_from_slice(DONE);
            false
        }
    };
    let flow = Flow { answers, dialect, begun: first, more };
    let mut response = Response::new(Body::from_stream(stream::unfold(flow, Flow::frame)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks nginx not to buffer.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

/// The rest of a stream. Dropped when the client leaves, and the samples with it.
struct Flow<D> {
    answers: Answers,
    dialect: D,
    /// Bytes of the next frame.
    begun: Vec<u8>,
    more: bool,
}

impl<D: Dialect> Flow<D> {
    /// The next frame: whatever is ready, at least one event.
    async fn frame(mut self) -> Option<(Result<Bytes, std::convert::Infallible>, Self)> {
        let mut out = std::mem::take(&mut self.begun);
        while self.more {
            if out.len() >= FRAME_BYTES {
                break;
            }
            match self.answers.ready() {
                Some(next) => self.take(Some(next), &mut out),
                None if out.is_empty() => {
                    let next = self.answers.next().await;
                    self.take(next, &mut out);
                }
                None if self.answers.is_over() => self.take(None, &mut out),
                None => break,
            }
        }
        (!out.is_empty()).then(|| (Ok(out.into()), self))
    }

    fn take(&mut self, next: Option<Result<(usize, Part), ApiError>>, out: &mut Vec<u8>) {
        match next {
            Some(Ok((index, part))) => return self.dialect.part(index, part, out),
            Some(Err(error)) => {
                out.extend_from_slice(b"data: ");
                out.extend_from_slice(&error.json());
                out.extend_from_slice(b"\n\n");
            }
            None => self.dialect.end(out),
        }
        out.extend_from_slice(DONE);
        self.more = false;
    }
}
