//! The client's side of an exchange: taking what it is sent, and its leaving. A write may take as long as the client wants
//! and never blinds the exchange, since it is a future beside others, and watches the client itself.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use pingora::http::ResponseHeader;
use pingora::protocols::http::{HttpTask, ServerSession};

/// A piece of an answer on its way out.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// Before the first piece.
    pub head: Option<Box<ResponseHeader>>,
    pub piece: Bytes,
    pub last: bool,
}

/// Returns once the client took it; false when it is gone. A dropped write cannot be followed by another one.
pub async fn write(session: &mut ServerSession, out: Outgoing) -> bool {
    if session.is_http2() {
        // Pingora has no tasks for HTTP/2. There a client's leaving ends the write by itself.
        return Box::pin(write_http2(session, out)).await;
    }
    if let Some(head) = out.head {
        session.send_downstream_proxy_task(HttpTask::Header(head, false));
    }
    session.send_downstream_proxy_task(HttpTask::Body(Some(out.piece), out.last));
    poll_fn(|cx| poll_http1(session, cx)).await
}

async fn write_http2(session: &mut ServerSession, out: Outgoing) -> bool {
    if let Some(head) = out.head
        && session.write_response_header(head).await.is_err()
    {
        return false;
    }
    session.write_response_body(out.piece, out.last).await.is_ok()
}

/// Both are cancel-safe: what they did is kept in the session, so that a future of each may live for one poll only.
fn poll_http1(session: &mut ServerSession, cx: &mut Context) -> Poll<bool> {
    if let Poll::Ready(written) = pin!(session.write_downstream_proxy_tasks()).poll(cx) {
        return Poll::Ready(written.is_ok());
    }
    poll_gone(session, cx).map(|()| false)
}

/// Ready once the client left, or sent an end of its own, which counts as leaving.
pub fn poll_gone(session: &mut ServerSession, cx: &mut Context) -> Poll<()> {
    pin!(session.read_body_or_idle(true)).poll(cx).map(|_| ())
}
