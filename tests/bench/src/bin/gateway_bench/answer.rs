//! An answer as the client takes it: framing decoded, and checked once it is whole: the status, the right id everywhere,
//! every event there, a proper end. *Pure.*

use memchr::memmem;

use crate::Failure;
use crate::answers::{STAMP_DIGITS, id_text};
use crate::script::number;

const HEADERS_MAX: usize = 64;
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// What an answer has to be.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub id: u64,
    /// Events with this id, of a stream; `None` for a whole answer.
    pub events: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Head,
    Length(usize),
    /// In front of a chunk's size.
    Size,
    Chunk(usize),
    /// In front of the line end behind a chunk.
    ChunkEnd,
    Trailer,
    Whole,
}

pub struct Incoming {
    state: State,
    /// A head or a line that is not whole yet.
    partial: Vec<u8>,
    pub body: Vec<u8>,
    pub closes: bool,
}

impl Default for Incoming {
    fn default() -> Self {
        Incoming { state: State::Head, partial: Vec::new(), body: Vec::new(), closes: false }
    }
}

impl Incoming {
    pub fn is_whole(&self) -> bool {
        self.state == State::Whole
    }

    /// For the next answer, with the memory of the last.
    pub fn reset(&mut self) {
        self.partial.clear();
        self.body.clear();
        self.state = State::Head;
    }

    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let mut rest = bytes;
        if self.state == State::Head {
            let before = self.partial.len();
            self.partial.extend_from_slice(bytes);
            let Some((length, state, closes)) = head(&self.partial)? else { return Ok(()) };
            (self.state, self.closes) = (state, closes);
            rest = &bytes[length - before..];
            self.partial.clear();
        }
        while !rest.is_empty() {
            self.state = match self.state {
                State::Length(left) | State::Chunk(left) => {
                    let take = left.min(rest.len());
                    self.body.extend_from_slice(&rest[..take]);
                    rest = &rest[take..];
                    match (self.state, left - take) {
                        (State::Length(_), 0) => State::Whole,
                        (State::Length(_), left) => State::Length(left),
                        (_, 0) => State::ChunkEnd,
                        (_, left) => State::Chunk(left),
                    }
                }
                State::Size | State::ChunkEnd | State::Trailer => self.line(&mut rest)?,
                State::Head | State::Whole => return Err(Failure::new("bytes behind the end of an answer")),
            };
        }
        Ok(())
    }

    fn line(&mut self, rest: &mut &[u8]) -> Result<State, Failure> {
        let Some(end) = memchr::memchr(b'\n', rest) else {
            self.partial.extend_from_slice(rest);
            *rest = &[];
            return Ok(self.state);
        };
        self.partial.extend_from_slice(&rest[..end]);
        *rest = &rest[end + 1..];
        let text = std::str::from_utf8(&self.partial).unwrap_or("?").trim_end();
        let next = match self.state {
            State::Size => match usize::from_str_radix(text, 16) {
                Ok(0) => State::Trailer,
                Ok(size) => State::Chunk(size),
                Err(_) => return Err(Failure::new(format!("{text:?} is no chunk size"))),
            },
            State::ChunkEnd if text.is_empty() => State::Size,
            State::ChunkEnd => return Err(Failure::new("no line end behind a chunk")),
            _ if text.is_empty() => State::Whole,
            _ => State::Trailer,
        };
        self.partial.clear();
        Ok(next)
    }

    /// What a whole answer lacks.
    pub fn check(&self, wanted: Wanted) -> Result<(), Failure> {
        let shown = || String::from_utf8_lossy(&self.body[..self.body.len().min(300)]).into_owned();
        let id = id_text(wanted.id);
        let ids = memmem::find_iter(&self.body, &id).count();
        let good = match wanted.events {
            None => ids == 1 && self.body.ends_with(b"}") && has(&self.body, b"\"finish_reason\":\"length\""),
            Some(events) => {
                let end = &self.body[self.body.len().saturating_sub(400)..];
                ids == events + 1 && end.ends_with(b"data: [DONE]\n\n") && has(end, b"\"finish_reason\":\"length\"")
            }
        };
        let what = || format!("an answer to {} that is not whole ({ids} events of {wanted:?}): {}", wanted.id, shown());
        if good { Ok(()) } else { Err(Failure::new(what())) }
    }

    /// When D made the first event, in nanoseconds since 1970.
    pub fn stamp_ns(&self) -> Result<u64, Failure> {
        let name = b"\"created\":";
        let at = memmem::find(&self.body, name).ok_or_else(|| Failure::new("an event without its time"))? + name.len();
        number(self.body.get(at..at + STAMP_DIGITS).unwrap_or_default())
    }
}

fn has(text: &[u8], what: &[u8]) -> bool {
    memmem::find(text, what).is_some()
}

/// The head's length, what follows it, and whether the connection ends with the answer. Only 200 is an answer.
fn head(bytes: &[u8]) -> Result<Option<(usize, State, bool)>, Failure> {
    let mut slots = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut slots);
    let length = match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() < HEAD_BYTES_MAX => return Ok(None),
        _ => return Err(Failure::new("an answer without a proper head")),
    };
    if parsed.code != Some(200) {
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(600)]).into_owned();
        return Err(Failure::new(format!("not 200: {text}")));
    }
    let mut state = None;
    let mut closes = parsed.version == Some(0);
    for header in parsed.headers.iter() {
        if header.name.eq_ignore_ascii_case("content-length") {
            let length = number(header.value)? as usize;
            state = Some(if length == 0 { State::Whole } else { State::Length(length) });
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            state = Some(State::Size);
        } else if header.name.eq_ignore_ascii_case("connection") {
            closes |= header.value.eq_ignore_ascii_case(b"close");
        }
    }
    let state = state.ok_or_else(|| Failure::new("an answer without a length"))?;
    Ok(Some((length, state, closes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answers::{Answers, Progress};
    use crate::script::{Script, Side};

    fn answer(stream: bool) -> Vec<u8> {
        let mut out = Vec::new();
        let script = Script { id: 77, stream, ..Script::default() };
        let mut progress = Progress::new(Side::Decode, &script, false);
        while !progress.ended {
            progress.produce(&Answers::default(), &mut out, 1_700_000_000_123_456_789);
        }
        out
    }

    #[test]
    fn answers_are_whole_however_they_are_cut() {
        for (stream, events) in [(true, Some(64)), (false, None)] {
            let wire = answer(stream);
            for cut in [1, 2, 9, 100, 100_000] {
                let mut incoming = Incoming::default();
                for (i, piece) in wire.chunks(cut).enumerate() {
                    incoming.push(piece).unwrap();
                    assert_eq!(incoming.is_whole(), (i + 1) * cut >= wire.len());
                }
                incoming.check(Wanted { id: 77, events }).unwrap();
                assert!(incoming.check(Wanted { id: 78, events }).is_err());
                assert!(incoming.push(b"x").is_err());
                if stream {
                    assert_eq!(incoming.stamp_ns().unwrap(), 1_700_000_000_123_456_789);
                }
            }
        }
    }

    #[test]
    fn a_lost_event_and_a_lost_end_are_seen() {
        let wire = answer(true);
        let mut incoming = Incoming::default();
        incoming.push(&wire).unwrap();
        assert!(incoming.check(Wanted { id: 77, events: Some(65) }).is_err());
        let mut cut = Incoming::default();
        cut.push(&wire[..wire.len() - 30]).unwrap();
        assert!(!cut.is_whole() && cut.check(Wanted { id: 77, events: Some(64) }).is_err());
        assert!(Incoming::default().push(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n").is_err());
    }
}
