//! What an attempt tells the client: the head before the first piece, and how it ends.

use std::time::{Duration, Instant};

use http::Version;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use tokio::time::timeout;

use crate::door::reply::{Done, REQUEST_ID};
use crate::error::Failure;
use crate::exchange::client::{self, Outgoing};
use crate::exchange::drive;
use crate::exchange::run::{End, Ending, Run};

/// How long a client may take for the event that tells it of a failure.
const LAST_WORDS: Duration = Duration::from_secs(5);

impl Run<'_> {
    pub(super) async fn end(&mut self, session: &mut ServerSession, ending: Ending) -> End {
        End::Done(match ending {
            Ending::Leave => drive::left(self.gateway),
            Ending::Finish => Done::ok(self.opened.unwrap_or_else(|| self.status())),
            Ending::Answer(failure) => drive::answer(session, self.request, &failure).await,
            Ending::BreakOff(failure) => {
                drive::log(self.request, &failure);
                let events = self.decode_head.as_ref().is_some_and(|head| head.is_event_stream());
                break_off(session, self.opened.unwrap_or(200), events, &failure).await
            }
            Ending::StartOver(failure) => return End::StartOver(failure, self.culprit),
        })
    }

    /// The first piece brings D's status and headers along; the framing is ours: a length, chunks, or for HTTP/1.0, which
    /// has no chunks, the close.
    pub(super) fn with_head(&mut self, session: &mut ServerSession, version: Version, out: Outgoing) -> Outgoing {
        if std::mem::replace(&mut self.head_sent, true) {
            return out;
        }
        let _ = self.request.served.first_byte.set(Instant::now());
        let waited = self.request.arrived.elapsed().as_secs_f64();
        self.gateway.metrics.exchange.first_byte(self.request.endpoint, waited);
        let mut head = ResponseHeader::build(self.status(), None).expect("a parsed status is one");
        let headers = self.decode_head.iter().flat_map(|h| &h.headers);
        for (name, value) in headers {
            head.append_header(name.clone(), value.clone()).expect("a parsed header is one");
        }
        if let Some(id) = self.request.headers.get(REQUEST_ID) {
            head.insert_header(REQUEST_ID, id.clone()).expect("a parsed header is one");
        }
        let framed = match out.last {
            true => head.insert_header(CONTENT_LENGTH, out.piece.len()),
            false if version == Version::HTTP_10 => {
                session.set_keepalive(None);
                Ok(())
            }
            false => head.insert_header(TRANSFER_ENCODING, "chunked"),
        };
        framed.expect("both are headers");
        Outgoing { head: Some(Box::new(head)), ..out }
    }
}

/// Bytes were sent already: a stream of events ends with one that tells what happened, anything else by a cut connection,
/// which a client sees as an incomplete body.
async fn break_off(session: &mut ServerSession, status: u16, events: bool, failure: &Failure) -> Done {
    if !events {
        return Done::broken(status, failure.code);
    }
    let event = Outgoing { head: None, piece: failure.event(), last: true };
    let said = timeout(LAST_WORDS, client::write(session, event)).await;
    Done { status, code: failure.code, whole: said == Ok(true) }
}
