//! What a request asks of the mock workers, as words in its prompt: text of the prompt passes every gateway unchanged, and
//! so the mocks hold no state that a row could forget to reset. *Pure.*

use std::time::Duration;

use memchr::memmem;

use crate::Failure;

/// Digits of an id, so that it can be written over another.
pub const ID_DIGITS: usize = 10;
const BEGIN: &str = "gateway-bench id=";
const END: &str = "end";
/// The words begin within this many bytes of the body, whatever a gateway put before them.
pub const WITHIN_BYTES: usize = 2048;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Prefill,
    Decode,
}

impl Side {
    pub fn name(self) -> &'static str {
        match self {
            Side::Prefill => "prefill",
            Side::Decode => "decode",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Script {
    pub id: u64,
    pub stream: bool,
    /// Events with a token, of a streamed answer.
    pub events: u32,
    /// One write per event, rather than one for all that fit into 64 KiB.
    pub each: bool,
    pub gap: Duration,
    /// After this many events D says nothing more.
    pub silent_after: Option<u32>,
    /// How long P works before it answers.
    pub prefill: Duration,
    /// How long D works before it answers.
    pub decode: Duration,
    /// This side closes its connection, this long after the request came.
    pub fails: Option<(Side, Duration)>,
    /// What happens to its legs is logged.
    pub watched: bool,
}

impl Default for Script {
    fn default() -> Self {
        Script {
            id: 0,
            stream: false,
            events: 64,
            each: false,
            gap: Duration::ZERO,
            silent_after: None,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            fails: None,
            watched: false,
        }
    }
}

impl Script {
    /// The words; what is as by default is left out.
    pub fn words(&self) -> String {
        let plain = Script::default();
        let mut words = format!("{BEGIN}{:010}", self.id);
        let mut word = |name: &str, value: u128, default: u128| {
            if value != default {
                words += &format!(" {name}={value}");
            }
        };
        word("stream", self.stream.into(), 0);
        word("events", self.events.into(), plain.events.into());
        word("each", self.each.into(), 0);
        word("gap_us", self.gap.as_micros(), 0);
        word("silent_after", self.silent_after.map_or(u128::MAX, u128::from), u128::MAX);
        word("prefill_us", self.prefill.as_micros(), 0);
        word("decode_us", self.decode.as_micros(), 0);
        if let Some((side, after)) = self.fails {
            word(&format!("{}_fails_us", side.name()), after.as_micros(), u128::MAX);
        }
        word("watched", self.watched.into(), 0);
        words + " " + END
    }

    /// Finds the words in the front of a body.
    pub fn find(front: &[u8]) -> Result<Script, Failure> {
        let at =
            memmem::find(front, BEGIN.as_bytes()).ok_or_else(|| Failure::new("a leg without the bench's words"))?;
        let digits = at + BEGIN.len()..at + BEGIN.len() + ID_DIGITS;
        let mut script = Script { id: number(front.get(digits.clone()).unwrap_or_default())?, ..Script::default() };
        for word in front[digits.end..].split(|b| *b == b' ') {
            if word == END.as_bytes() {
                return Ok(script);
            }
            if !word.is_empty() {
                script.take(word)?;
            }
        }
        Err(Failure::new("the bench's words do not end"))
    }

    fn take(&mut self, word: &[u8]) -> Result<(), Failure> {
        let equals = word.iter().position(|b| *b == b'=').unwrap_or(0);
        let (name, value) = (&word[..equals], number(&word[(equals + 1).min(word.len())..])?);
        let time = Duration::from_micros(value);
        match name {
            b"stream" => self.stream = value == 1,
            b"events" => self.events = value as u32,
            b"each" => self.each = value == 1,
            b"gap_us" => self.gap = time,
            b"silent_after" => self.silent_after = Some(value as u32),
            b"prefill_us" => self.prefill = time,
            b"decode_us" => self.decode = time,
            b"prefill_fails_us" => self.fails = Some((Side::Prefill, time)),
            b"decode_fails_us" => self.fails = Some((Side::Decode, time)),
            b"watched" => self.watched = value == 1,
            _ => return Err(Failure::new(format!("unknown word {:?}", String::from_utf8_lossy(name)))),
        }
        Ok(())
    }
}

/// Decimal digits and nothing else.
pub fn number(digits: &[u8]) -> Result<u64, Failure> {
    let text = std::str::from_utf8(digits).unwrap_or_default();
    text.parse().map_err(|_| Failure::new(format!("{text:?} is no number")))
}

/// Writes an id over the digits of another.
pub fn write_id(place: &mut [u8], mut id: u64) {
    for digit in place[..ID_DIGITS].iter_mut().rev() {
        *digit = b'0' + (id % 10) as u8;
        id /= 10;
    }
}

/// A request's body of exactly `bytes` bytes (or as few as the words allow), and where its id stands.
pub fn body(script: &Script, bytes: usize) -> (Vec<u8>, usize) {
    let before = r#"{"model":"mock","messages":[{"role":"user","content":""#;
    let after = format!(r#""}}],"max_tokens":{},"stream":{}}}"#, script.events, script.stream);
    let mut body = format!("{before}{} ", script.words());
    let id_at = before.len() + BEGIN.len();
    // Prose with an escape now and then, as prompts have it; the padding avoids to end inside an escape.
    let line = r"The quick brown fox jumps over the lazy dog, and nobody minds.\n";
    while body.len() + line.len() + after.len() <= bytes {
        body += line;
    }
    while body.len() + after.len() < bytes {
        body.push('x');
    }
    ((body + &after).into_bytes(), id_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_out_of_a_body_of_the_asked_size() {
        let script = Script {
            id: 42,
            stream: true,
            silent_after: Some(1),
            prefill: Duration::from_millis(50),
            fails: Some((Side::Decode, Duration::from_micros(7))),
            watched: true,
            ..Script::default()
        };
        for (script, bytes) in [(script, 4096), (Script::default(), 1024)] {
            let (mut body, id_at) = body(&script, bytes);
            assert_eq!(body.len(), bytes);
            serde_json::from_slice::<serde_json::Value>(&body).unwrap();
            assert_eq!(Script::find(&body).unwrap(), script);
            write_id(&mut body[id_at..], 9_876_543_210);
            assert_eq!(Script::find(&body).unwrap().id, 9_876_543_210);
        }
    }

    #[test]
    fn strangers_are_refused() {
        for text in
            ["{}", "gateway-bench id=12", "gateway-bench id=0000000001 sleep=1 end", "gateway-bench id=0000000001"]
        {
            assert!(Script::find(text.as_bytes()).is_err(), "{text}");
        }
    }
}
