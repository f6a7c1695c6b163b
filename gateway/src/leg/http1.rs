//! HTTP/1.1 as the legs speak it: a request head from an allow-list, a response head, and body framing decoded piece by
//! piece. *Pure*: bytes in, bytes out.

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};

/// Bytes of a response head at most.
pub const RESPONSE_HEAD_BYTES_MAX: usize = 64 * 1024;
const RESPONSE_HEADERS_MAX: usize = 128;
/// Bytes of one chunk-size line or trailer line at most.
const LINE_BYTES_MAX: usize = 4096;

/// A peer that does not speak HTTP/1.1 as it should.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadResponse {
    #[error("its response head is malformed ({0})")]
    Head(&'static str),
    #[error("its response head is larger than {RESPONSE_HEAD_BYTES_MAX} bytes")]
    HeadTooLarge,
    #[error("its chunked body is malformed ({0})")]
    Chunk(&'static str),
}

/// Headers of the client that reach a worker; all others stop here.
fn is_forwarded(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "authorization" | "x-request-id" | "x-correlation-id" | "traceparent" | "tracestate" | "x-smg-routing-key"
    ) || name.as_str().starts_with("x-request-id-")
}

/// What a leg's head says beside what the client said.
#[derive(Clone, Debug, Default)]
pub struct Beside<'a> {
    /// The worker's own key, instead of the client's.
    pub api_key: Option<&'a str>,
    pub header: Option<(HeaderName, HeaderValue)>,
}

/// The head of a leg's request: a fresh one, with the gateway's own length and only allowed headers of the client.
pub fn request_head(path: &str, authority: &str, client: &HeaderMap, beside: &Beside, body_bytes: usize) -> Bytes {
    let mut head = BytesMut::with_capacity(512);
    for part in ["POST ", path, " HTTP/1.1\r\nhost: ", authority] {
        head.extend_from_slice(part.as_bytes());
    }
    if let Some(key) = beside.api_key {
        for part in ["\r\nauthorization: Bearer ", key] {
            head.extend_from_slice(part.as_bytes());
        }
    }
    let framing = format!("\r\ncontent-type: application/json\r\ncontent-length: {body_bytes}\r\n");
    head.extend_from_slice(framing.as_bytes());
    let replaced = |name: &HeaderName| beside.api_key.is_some() && *name == http::header::AUTHORIZATION;
    let forwarded = client.iter().filter(|(name, _)| is_forwarded(name) && !replaced(name));
    for (name, value) in forwarded.chain(beside.header.iter().map(|(name, value)| (name, value))) {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            head.extend_from_slice(part);
        }
    }
    head.extend_from_slice(b"\r\n");
    head.freeze()
}

/// A worker's response head.
#[derive(Clone, Debug)]
pub struct ResponseHead {
    pub status: u16,
    /// Without hop-by-hop and framing headers.
    pub headers: HeaderMap,
    pub framing: Framing,
    pub keep_alive: bool,
    /// How long the worker keeps an idle connection, where it says so.
    pub keep_alive_secs: Option<u64>,
}

impl ResponseHead {
    pub fn is_event_stream(&self) -> bool {
        let kind = self.headers.get(http::header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
        kind.trim_start().to_ascii_lowercase().starts_with("text/event-stream")
    }

    pub fn retry_after_secs(&self) -> Option<u32> {
        self.headers.get(http::header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Framing {
    Length(u64),
    Chunked,
    /// Until the peer closes.
    Close,
}

/// Headers that describe one hop or the framing of a body, which the gateway decides anew.
const DROPPED: [&str; 13] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "trailers",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "date",
    "server",
];

/// Takes one final response head off the front of `buf`; `None` while it is incomplete. Informational heads are skipped.
pub fn take_response_head(buf: &mut BytesMut) -> Result<Option<ResponseHead>, BadResponse> {
    loop {
        let mut slots = [httparse::EMPTY_HEADER; RESPONSE_HEADERS_MAX];
        let mut parsed = httparse::Response::new(&mut slots);
        let length = match parsed.parse(buf) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) if buf.len() > RESPONSE_HEAD_BYTES_MAX => {
                return Err(BadResponse::HeadTooLarge);
            }
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err(BadResponse::Head("not HTTP/1")),
        };
        let status = parsed.code.unwrap_or(0);
        if (100..200).contains(&status) && status != 101 {
            buf.advance(length);
            continue;
        }
        let head = response_head(status, parsed.version == Some(1), parsed.headers)?;
        buf.advance(length);
        return Ok(Some(head));
    }
}

fn response_head(status: u16, http11: bool, raw: &[httparse::Header<'_>]) -> Result<ResponseHead, BadResponse> {
    let mut headers = HeaderMap::with_capacity(raw.len());
    let mut length: Option<u64> = None;
    let mut chunked = false;
    let mut keep_alive = http11;
    let mut keep_alive_secs = None;
    for header in raw {
        let name = HeaderName::from_bytes(header.name.as_bytes()).map_err(|_| BadResponse::Head("header name"))?;
        let value = HeaderValue::from_bytes(header.value).map_err(|_| BadResponse::Head("header value"))?;
        let text = value.to_str().unwrap_or("").trim().to_ascii_lowercase();
        match name.as_str() {
            "content-length" => {
                let parsed = text.parse().map_err(|_| BadResponse::Head("content-length"))?;
                if length.is_some_and(|l| l != parsed) {
                    return Err(BadResponse::Head("two content-lengths"));
                }
                length = Some(parsed);
            }
            "transfer-encoding" if text == "chunked" => chunked = true,
            "transfer-encoding" => return Err(BadResponse::Head("transfer-encoding")),
            "connection" if text.split(',').any(|t| t.trim() == "close") => keep_alive = false,
            "connection" if text.split(',').any(|t| t.trim() == "keep-alive") => keep_alive = true,
            "keep-alive" => keep_alive_secs = keep_alive_timeout(&text).or(keep_alive_secs),
            _ => {}
        }
        if !DROPPED.contains(&name.as_str()) {
            headers.append(name, value);
        }
    }
    let framing = match (chunked, length) {
        _ if matches!(status, 204 | 304) => Framing::Length(0),
        (true, _) => Framing::Chunked,
        (false, Some(length)) => Framing::Length(length),
        (false, None) => Framing::Close,
    };
    let keep_alive = keep_alive && framing != Framing::Close;
    Ok(ResponseHead { status, headers, framing, keep_alive, keep_alive_secs })
}

/// The seconds of `timeout=5, max=100`.
fn keep_alive_timeout(text: &str) -> Option<u64> {
    text.split(',').find_map(|part| part.trim().strip_prefix("timeout=")?.trim().parse().ok())
}

/// What is left of a body.
///
/// `Length ──all bytes──▶ Done`, and for chunks `Size ─▶ Data ─▶ DataEnd ─▶ Size … ─▶ Trailer ─▶ Done`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body {
    Length(u64),
    Size,
    Data(u64),
    DataEnd,
    Trailer,
    UntilClose,
    Done,
}

impl Body {
    pub fn new(framing: Framing) -> Self {
        match framing {
            Framing::Length(0) => Body::Done,
            Framing::Length(length) => Body::Length(length),
            Framing::Chunked => Body::Size,
            Framing::Close => Body::UntilClose,
        }
    }

    /// Moves what `input` holds of the body into `out`, without framing; leaves an incomplete line in `input`.
    pub fn decode(&mut self, input: &mut BytesMut, out: &mut BytesMut) -> Result<(), BadResponse> {
        loop {
            *self = match *self {
                Body::Done => return Ok(()),
                Body::UntilClose => {
                    append(out, input.split());
                    return Ok(());
                }
                Body::Length(left) | Body::Data(left) if left > 0 => {
                    if input.is_empty() {
                        return Ok(());
                    }
                    let take = left.min(input.len() as u64);
                    append(out, input.split_to(take as usize));
                    if matches!(self, Body::Length(_)) { Body::Length(left - take) } else { Body::Data(left - take) }
                }
                Body::Length(_) => Body::Done,
                Body::Data(_) => Body::DataEnd,
                Body::Size => match take_line(input)? {
                    None => return Ok(()),
                    Some(line) => match chunk_size(&line)? {
                        0 => Body::Trailer,
                        size => Body::Data(size),
                    },
                },
                Body::DataEnd => match take_line(input)? {
                    None => return Ok(()),
                    Some(line) if line.is_empty() => Body::Size,
                    Some(_) => return Err(BadResponse::Chunk("no line end behind a chunk")),
                },
                Body::Trailer => match take_line(input)? {
                    None => return Ok(()),
                    Some(line) if line.is_empty() => Body::Done,
                    Some(_) => Body::Trailer,
                },
            }
        }
    }

    /// Whether a close of the connection here ends the body as it should.
    pub fn ends_by_close(self) -> bool {
        matches!(self, Body::UntilClose | Body::Done)
    }
}

/// The first piece moves without a copy; later ones of the same read join it.
fn append(out: &mut BytesMut, piece: BytesMut) {
    if out.is_empty() { *out = piece } else { out.extend_from_slice(&piece) }
}

fn take_line(input: &mut BytesMut) -> Result<Option<BytesMut>, BadResponse> {
    match input.iter().position(|b| *b == b'\n') {
        Some(end) => {
            let mut line = input.split_to(end + 1);
            line.truncate(end);
            if line.last() == Some(&b'\r') {
                line.truncate(end - 1);
            }
            Ok(Some(line))
        }
        None if input.len() > LINE_BYTES_MAX => Err(BadResponse::Chunk("a line is too long")),
        None => Ok(None),
    }
}

fn chunk_size(line: &[u8]) -> Result<u64, BadResponse> {
    let text = std::str::from_utf8(line).unwrap_or("");
    let digits = text.split(';').next().unwrap_or("").trim();
    let valid = !digits.is_empty() && digits.len() <= 15 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if !valid {
        return Err(BadResponse::Chunk("a size is not a hexadecimal number"));
    }
    u64::from_str_radix(digits, 16).map_err(|_| BadResponse::Chunk("a size is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(text: &str) -> Result<Option<ResponseHead>, BadResponse> {
        take_response_head(&mut BytesMut::from(text))
    }

    #[test]
    fn request_heads_carry_only_allowed_headers() {
        let mut client = HeaderMap::new();
        for (name, value) in [("authorization", "Bearer k"), ("cookie", "c"), ("host", "x"), ("x-request-id", "r")] {
            client.insert(name, value.parse().unwrap());
        }
        let head = request_head("/generate", "[::1]:80", &client, &Beside::default(), 12);
        let text = std::str::from_utf8(&head).unwrap();
        assert!(text.starts_with("POST /generate HTTP/1.1\r\nhost: [::1]:80\r\n"), "{text}");
        assert!(text.contains("content-length: 12\r\n") && text.contains("authorization: Bearer k\r\n"));
        assert!(text.contains("x-request-id: r\r\n") && !text.contains("cookie") && text.ends_with("\r\n\r\n"));
        let header = (HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(3));
        let beside = Beside { api_key: Some("workers-own"), header: Some(header) };
        let head = request_head("/generate", "h:80", &client, &beside, 0);
        let text = std::str::from_utf8(&head).unwrap();
        assert!(text.contains("authorization: Bearer workers-own\r\n") && !text.contains("Bearer k"), "{text}");
        assert!(text.contains("x-data-parallel-rank: 3\r\n"), "{text}");
    }

    #[test]
    fn response_heads() {
        let ok = head("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\n").unwrap().unwrap();
        assert_eq!((ok.status, ok.framing, ok.keep_alive), (200, Framing::Length(5), true));
        assert_eq!((ok.headers.len(), &ok.headers["x-a"]), (1, &HeaderValue::from_static("b")));
        let closing =
            head("HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n").unwrap().unwrap();
        assert_eq!((closing.framing, closing.keep_alive), (Framing::Chunked, false));
        let skipped = head("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n").unwrap().unwrap();
        assert_eq!((skipped.status, skipped.framing), (204, Framing::Length(0)));
        assert!(!head("HTTP/1.1 200 OK\r\n\r\n").unwrap().unwrap().keep_alive);
        let told = head("HTTP/1.1 204 No\r\nKeep-Alive: max=9, timeout=5\r\n\r\n").unwrap().unwrap();
        assert_eq!((told.keep_alive_secs, told.headers.len()), (Some(5), 0));
        assert!(head("HTTP/1.1 200 OK\r\nContent-").unwrap().is_none());
        assert!(head("SSH-2.0-x\r\n\r\n").is_err());
        assert!(head("HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n").is_err());
        assert!(head("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n").is_err());
    }

    #[test]
    fn bad_chunks_are_refused() {
        for text in ["x\r\n", "\r\n", "fffffffffffffffff\r\n", "1\r\nab\r\n", "-1\r\n"] {
            let mut out = BytesMut::new();
            assert!(Body::Size.decode(&mut BytesMut::from(text), &mut out).is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn chunked_bodies_decode_however_they_are_cut(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
            cuts in prop::collection::vec(1usize..9, 1..40),
        ) {
            let mut wire = Vec::new();
            for piece in &pieces {
                wire.extend_from_slice(format!("{:X};ext=1\r\n", piece.len()).as_bytes());
                wire.extend_from_slice(piece);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\nx-trailer: y\r\n\r\nHTTP");
            let (mut body, mut input, mut got, mut at) = (Body::Size, BytesMut::new(), Vec::new(), 0);
            for cut in cuts.iter().cycle() {
                let end = (at + cut).min(wire.len());
                input.extend_from_slice(&wire[at..end]);
                at = end;
                let mut out = BytesMut::new();
                body.decode(&mut input, &mut out).unwrap();
                got.extend_from_slice(&out);
                if at == wire.len() { break }
            }
            prop_assert_eq!(body, Body::Done);
            prop_assert_eq!(got, pieces.concat());
            prop_assert!(b"HTTP".starts_with(&input[..]));
        }

        #[test]
        fn heads_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = take_response_head(&mut BytesMut::from(&bytes[..]));
        }
    }
}
