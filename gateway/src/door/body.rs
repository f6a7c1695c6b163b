//! Reading a request's body: counted while it arrives, within a limit of bytes and of time, and after a promise to go on
//! only where head and limits pass.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header;
use pingora::ErrorType;
use pingora::protocols::http::ServerSession;
use tokio::time::timeout_at;

use crate::door::head;
use crate::error::Failure;

/// A body may be this slow.
const BYTES_PER_SECOND_MIN: usize = 16 * 1024;
/// The name of pingora's error for a chunk that is none.
const INVALID_CHUNK: &str = "InvalidChunk";
/// Of a body with a declared length this much memory is taken before it has arrived.
const RESERVED_BYTES_MAX: usize = 1 << 20;

/// The whole body; `None` when the client left. It must arrive within `limit`, and another second per piece of
/// [`BYTES_PER_SECOND_MIN`] that came.
pub async fn read(session: &mut ServerSession, bytes_max: usize, limit: Duration) -> Result<Option<Bytes>, Failure> {
    let began = Instant::now();
    let waits = head::expectation(&session.req_header().headers, session.req_header().version)?;
    head::content_coding(&session.req_header().headers)?;
    let declared = session.get_header(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.trim().parse::<u64>().ok());
    if let Some(declared) = declared.filter(|d| *d > bytes_max as u64) {
        return Err(too_large(declared, bytes_max));
    }
    if waits && !session.is_body_done() && session.write_continue_response().await.is_err() {
        return Ok(None);
    }
    let mut body = BytesMut::with_capacity(declared.map_or(0, |d| (d as usize).min(RESERVED_BYTES_MAX)));
    loop {
        let earned = Duration::from_secs((body.len() / BYTES_PER_SECOND_MIN) as u64);
        let Ok(read) = timeout_at((began + limit + earned).into(), session.read_request_body()).await else {
            return Err(too_slow(body.len()));
        };
        match read {
            Ok(Some(piece)) if body.len() + piece.len() > bytes_max => {
                return Err(too_large((body.len() + piece.len()) as u64, bytes_max));
            }
            Ok(Some(piece)) => body.extend_from_slice(&piece),
            Ok(None) => return Ok(Some(body.freeze())),
            Err(error) if *error.etype() == ErrorType::ReadTimedout => return Err(too_slow(body.len())),
            Err(error) if error.etype().as_str() == INVALID_CHUNK => {
                tracing::debug!(%error, "malformed chunk");
                return Err(Failure::client(400, "malformed_body", "the request body's chunked coding is malformed"));
            }
            Err(error) => {
                tracing::debug!(%error, "the client left in the middle of its body");
                return Ok(None);
            }
        }
    }
}

fn too_large(bytes: u64, bytes_max: usize) -> Failure {
    let what = format!("the request body has at least {bytes} bytes, the limit is {bytes_max} (--max-payload-size)");
    Failure::client(413, "payload_too_large", what)
}

fn too_slow(bytes: usize) -> Failure {
    let what = format!("the request body did not arrive in time, {bytes} bytes of it came; send it again, faster");
    Failure::client(408, "client_read_timeout", what)
}
