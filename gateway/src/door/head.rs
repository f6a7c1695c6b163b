//! What a client's request head says, judged before anything acts on it: whether it says one thing to everybody (who reads a
//! body's length or the host otherwise than the next hop lets a request be smuggled past it), and whether the gateway can
//! meet what it asks for. *Pure.*

use http::{HeaderMap, Version, header};

use crate::error::Failure;

/// What is ambiguous about an HTTP/1 head, given as received; `None` for a good one. What pingora refuses itself (differing
/// or signed lengths, blanks before a colon, folded lines, codings that do not end in `chunked`) does not come here.
pub fn fault(raw: &[u8], version: Version) -> Option<&'static str> {
    if has_bare_line_feed(raw) {
        return Some("a line of it ends without CR");
    }
    let (mut hosts, mut lengths, mut codings, mut keys) = (0, 0, 0, 0);
    let mut plain_chunked = true;
    for line in raw.trim_ascii_start().split(|b| *b == b'\n').skip(1) {
        let Some(colon) = line.iter().position(|b| *b == b':') else { continue };
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        // Of all names only these four are looked at, and their lengths tell most others apart.
        match name.len() {
            4 if name.eq_ignore_ascii_case(b"host") => hosts += 1,
            13 if name.eq_ignore_ascii_case(b"authorization") => keys += 1,
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                lengths += 1 + value.iter().filter(|b| **b == b',').count();
            }
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                codings += 1;
                plain_chunked &= value.trim_ascii().eq_ignore_ascii_case(b"chunked");
            }
            _ => {}
        }
    }
    match (hosts, lengths, codings) {
        (0, _, _) if version == Version::HTTP_11 => Some("it has no Host header"),
        (2.., _, _) => Some("it has several Host headers"),
        (_, 1.., 1..) => Some("it has both Content-Length and Transfer-Encoding"),
        (_, 2.., _) => Some("it has several values of Content-Length"),
        (_, _, 2..) => Some("it has several Transfer-Encoding headers"),
        (_, _, 1) if !plain_chunked => Some("its Transfer-Encoding is another than `chunked`"),
        _ if keys > 1 => Some("it has several Authorization headers"),
        _ => None,
    }
}

fn has_bare_line_feed(raw: &[u8]) -> bool {
    memchr::memchr_iter(b'\n', raw).any(|at| at == 0 || raw[at - 1] != b'\r')
}

/// Whether the client waits for `100 Continue` before it sends its body. Fails with 417 for any other expectation. HTTP/1.0
/// knows none.
pub fn expectation(headers: &HeaderMap, version: Version) -> Result<bool, Failure> {
    let mut waits = false;
    if version == Version::HTTP_10 {
        return Ok(false);
    }
    for value in headers.get_all(header::EXPECT) {
        if !value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"100-continue") {
            let what = "the only expectation this gateway can meet is `100-continue`; leave `Expect` out";
            return Err(Failure::client(417, "expectation_failed", what));
        }
        waits = true;
    }
    Ok(waits)
}

/// Refuses a body that is compressed: it is scanned and sent on as JSON, and its size is limited as such.
pub fn content_coding(headers: &HeaderMap) -> Result<(), Failure> {
    let encoded = |value: &[u8]| !matches!(value.trim_ascii(), b"" | b"identity");
    if headers.get_all(header::CONTENT_ENCODING).iter().any(|v| encoded(&v.as_bytes().to_ascii_lowercase())) {
        let what = "the request body has a Content-Encoding, which this gateway does not take; send plain JSON";
        return Err(Failure::client(415, "unsupported_content_encoding", what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_hops_may_read_differently() {
        let cases = [
            ("Host: x\r\nContent-Length: 2", true),
            ("host: x\r\ntransfer-encoding: chunked", true),
            ("host: x\r\ntransfer-encoding: Chunked ", true),
            ("host:x\r\nx-content-length: 1, 2\r\ncontent-length:2", true),
            ("content-length: 2", false),
            ("host: x\r\nHOST: y", false),
            ("host: x\r\ncontent-length: 2, 2", false),
            ("host: x\r\ncontent-length: 2\r\nContent-Length: 2", false),
            ("host: x\r\ncontent-length: 2\r\nTransfer-Encoding: chunked", false),
            ("host: x\r\ntransfer-encoding: identity, chunked", false),
            ("host: x\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked", false),
            ("host: x\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked", false),
            ("host: x\ncontent-length: 2", false),
            ("host: x\r\nauthorization: Bearer a\r\nAuthorization: Bearer b", false),
        ];
        for (headers, good) in cases {
            let raw = format!("POST / HTTP/1.1\r\n{headers}\r\n\r\n");
            assert_eq!(fault(raw.as_bytes(), Version::HTTP_11).is_none(), good, "{headers}");
        }
        assert_eq!(fault(b"GET / HTTP/1.0\r\n\r\n", Version::HTTP_10), None, "1.0 knows no Host");
        assert!(fault(b"\r\nGET /host: HTTP/1.1\r\n\r\n", Version::HTTP_11).is_some(), "a request line is no header");
    }

    fn headers(name: &'static str, values: &[&str]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for value in values {
            map.append(name, value.parse().unwrap());
        }
        map
    }

    #[test]
    fn expectations() {
        let judge = |values: &[&str], version| expectation(&headers("expect", values), version).map_err(|f| f.status);
        assert_eq!(judge(&[], Version::HTTP_11), Ok(false));
        assert_eq!(judge(&["100-Continue"], Version::HTTP_11), Ok(true));
        assert_eq!(judge(&["200-ok"], Version::HTTP_11), Err(417));
        assert_eq!(judge(&["100-continue", "x"], Version::HTTP_11), Err(417));
        assert_eq!(judge(&["100-continue"], Version::HTTP_10), Ok(false));
    }

    #[test]
    fn codings_of_the_body() {
        let judge = |value| content_coding(&headers("content-encoding", &[value])).map_err(|f| f.status);
        assert_eq!((judge("identity"), judge("gzip"), judge("identity, br")), (Ok(()), Err(415), Err(415)));
    }
}
