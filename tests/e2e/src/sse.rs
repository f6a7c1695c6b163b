//! Server-sent events as the OpenAI and SGLang APIs use them: `data:` lines, a blank line after each event, comments
//! begin with a colon. *Pure.*

/// Bytes in, the payloads of whole events out.
#[derive(Default)]
pub struct SseParser {
    rest: Vec<u8>,
}

impl SseParser {
    /// Takes the next bytes of the body and gives the payload of each event that they complete.
    ///
    /// # Errors
    /// A line that is neither `data:`, another known field, a comment nor blank; an event that is not UTF-8.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, String> {
        self.rest.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some((end, next)) = event_end(&self.rest) {
            let event = std::str::from_utf8(&self.rest[..end]).map_err(|error| format!("not UTF-8: {error}"))?;
            events.extend(payload(event)?);
            self.rest.drain(..next);
        }
        Ok(events)
    }

    /// Whether the body ended in the middle of an event.
    pub fn has_rest(&self) -> bool {
        self.rest.iter().any(|byte| !byte.is_ascii_whitespace())
    }
}

/// Where the first event ends and where the next one begins.
fn event_end(bytes: &[u8]) -> Option<(usize, usize)> {
    let find =
        |mark: &[u8]| bytes.windows(mark.len()).position(|window| window == mark).map(|at| (at, at + mark.len()));
    [find(b"\n\n"), find(b"\r\n\r\n")].into_iter().flatten().min()
}

/// The joined data lines, or none for an event of comments alone.
fn payload(event: &str) -> Result<Option<String>, String> {
    let mut data: Vec<&str> = Vec::new();
    for line in event.lines() {
        match line.split_once(':') {
            Some(("data", value)) => data.push(value.strip_prefix(' ').unwrap_or(value)),
            Some(("" | "event" | "id" | "retry", _)) => {}
            _ if line.is_empty() => {}
            _ => return Err(format!("not a line of an event stream: {line:?}")),
        }
    }
    Ok((!data.is_empty()).then(|| data.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &str = ": hello\n\ndata: {\"a\": 1}\n\ndata: x\ndata: ü\n\ndata: [DONE]\n\n";

    #[test]
    fn every_cut_of_the_bytes_gives_the_same_events() {
        for cut in 0..BODY.len() {
            let mut parser = SseParser::default();
            let mut events = parser.push(&BODY.as_bytes()[..cut]).unwrap();
            events.extend(parser.push(&BODY.as_bytes()[cut..]).unwrap());
            assert_eq!(events, ["{\"a\": 1}", "x\nü", "[DONE]"], "cut at {cut}");
            assert!(!parser.has_rest());
        }
    }

    #[test]
    fn an_unfinished_event_and_a_wrong_line_are_seen() {
        let mut parser = SseParser::default();
        assert!(parser.push(b"data: {\"a\"").unwrap().is_empty());
        assert!(parser.has_rest());
        assert!(SseParser::default().push(b"{\"error\": 1}\n\n").is_err());
    }
}
