//! A request as the mock workers read it: the head, then the body, of which only both ends are kept, so that 16 MB cost
//! no memory and little time. *Pure.*

use crate::Failure;
use crate::script::WITHIN_BYTES;

const TAIL_BYTES: usize = 1024;
const HEAD_BYTES_MAX: usize = 64 * 1024;
const HEADERS_MAX: usize = 64;

/// A whole request.
pub struct Request {
    pub post: bool,
    pub path: String,
    pub front: Vec<u8>,
    pub tail: Vec<u8>,
}

#[derive(Default)]
pub struct Intake {
    head: Vec<u8>,
    open: Option<(Request, usize)>,
}

impl Intake {
    pub fn is_empty(&self) -> bool {
        self.head.is_empty() && self.open.is_none()
    }

    /// Takes bytes as they come; returns the request once it is whole. Bytes behind it are refused: nobody pipelines.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<Option<Request>, Failure> {
        if self.open.is_none() {
            let before = self.head.len();
            self.head.extend_from_slice(bytes);
            let Some((length, request, body)) = parse(&self.head)? else { return Ok(None) };
            bytes = &bytes[length - before..];
            self.head.clear();
            self.open = Some((request, body));
        }
        let Some((request, left)) = &mut self.open else { return Ok(None) };
        if bytes.len() > *left {
            return Err(Failure::new("bytes behind the end of a request"));
        }
        let room = (WITHIN_BYTES + 512).saturating_sub(request.front.len()).min(bytes.len());
        request.front.extend_from_slice(&bytes[..room]);
        *left -= bytes.len();
        if *left < TAIL_BYTES {
            let from = bytes.len().saturating_sub(TAIL_BYTES - *left);
            request.tail.extend_from_slice(&bytes[from..]);
        }
        let whole = *left == 0;
        Ok(if whole { self.open.take().map(|(request, _)| request) } else { None })
    }
}

fn parse(head: &[u8]) -> Result<Option<(usize, Request, usize)>, Failure> {
    let mut slots = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut slots);
    let length = match parsed.parse(head) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if head.len() < HEAD_BYTES_MAX => return Ok(None),
        Ok(httparse::Status::Partial) => return Err(Failure::new("a request head without end")),
        Err(error) => return Err(Failure::new(format!("a request head that is none: {error}"))),
    };
    let mut body = 0;
    for header in parsed.headers.iter() {
        if header.name.eq_ignore_ascii_case("content-length") {
            body = crate::script::number(header.value)? as usize;
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(Failure::new("a request in chunks, which the mock workers do not read"));
        }
    }
    let path = parsed.path.unwrap_or("").split('?').next().unwrap_or("").to_owned();
    let post = parsed.method == Some("POST");
    Ok(Some((length, Request { post, path, front: Vec::new(), tail: Vec::new() }, body)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_of_a_body_are_kept_however_it_is_cut() {
        let body: Vec<u8> = (0..9000).map(|i| b'a' + (i % 26) as u8).collect();
        let mut wire = b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nContent-Length: 9000\r\n\r\n".to_vec();
        wire.extend_from_slice(&body);
        for cut in [1, 7, 1000, 20_000] {
            let mut intake = Intake::default();
            let mut whole = None;
            for piece in wire.chunks(cut) {
                assert!(whole.is_none());
                whole = intake.push(piece).unwrap();
            }
            let request = whole.unwrap();
            assert!(request.post && request.path == "/v1/chat/completions" && intake.is_empty());
            assert_eq!(request.front, body[..WITHIN_BYTES + 512]);
            assert!(request.tail.ends_with(&body[8000..]) && request.tail.len() <= 2 * TAIL_BYTES);
        }
        assert!(Intake::default().push(b"GET / HTTP/1.1\r\n\r\nGET").is_err());
    }
}
