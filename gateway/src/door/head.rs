//! Whether a client's request head says one thing to everybody: who reads a body's length or the host otherwise than the
//! next hop lets a request be smuggled past it. *Pure.*

use http::Version;

/// What is ambiguous about a head, given as received; `None` for a good one. Names that are no such headers are not looked at.
pub fn fault(raw: &[u8], version: Version) -> Option<&'static str> {
    let (mut hosts, mut lengths, mut codings) = (0, 0, 0);
    for line in raw.split(|b| *b == b'\n').skip(1) {
        let Some(colon) = line.iter().position(|b| *b == b':') else { continue };
        let (name, value) = (line[..colon].trim_ascii(), &line[colon + 1..]);
        if name.eq_ignore_ascii_case(b"host") {
            hosts += 1;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            lengths += 1 + value.iter().filter(|b| **b == b',').count();
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            codings += 1;
        }
    }
    match (hosts, lengths, codings) {
        (0, _, _) if version == Version::HTTP_11 => Some("it has no Host header"),
        (2.., _, _) => Some("it has several Host headers"),
        (_, 1.., 1..) => Some("it has both Content-Length and Transfer-Encoding"),
        (_, 2.., _) => Some("it has several values of Content-Length"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_hops_may_read_differently() {
        let cases = [
            ("Host: x\r\nContent-Length: 2", true),
            ("host: x\r\ntransfer-encoding: chunked", true),
            ("host:x\r\nx-content-length: 1, 2\r\ncontent-length:2", true),
            ("content-length: 2", false),
            ("host: x\r\nHOST: y", false),
            ("host: x\r\ncontent-length: 2, 2", false),
            ("host: x\r\ncontent-length: 2\r\nContent-Length: 2", false),
            ("host: x\r\ncontent-length: 2\r\nTransfer-Encoding: chunked", false),
        ];
        for (headers, good) in cases {
            let raw = format!("POST / HTTP/1.1\r\n{headers}\r\n\r\n");
            assert_eq!(fault(raw.as_bytes(), Version::HTTP_11).is_none(), good, "{headers}");
        }
        assert_eq!(fault(b"GET / HTTP/1.0\r\n\r\n", Version::HTTP_10), None, "1.0 knows no Host");
    }
}
