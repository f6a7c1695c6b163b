//! The event trace of one world: who, what, which attempt, why. Empty unless it was asked for. *Pure.*

use std::fmt::{self, Write};

use tandem_handoff::wire::Frame;

use crate::ground::Ground;

#[derive(Debug, Default)]
pub struct Trace {
    on: bool,
    text: String,
}

impl Trace {
    pub fn new(on: bool) -> Self {
        Self { on, text: String::new() }
    }

    pub fn is_on(&self) -> bool {
        self.on
    }

    /// One line: `      12.345 ms  d0  what`.
    pub fn line(&mut self, now: u64, who: &str, what: fmt::Arguments<'_>) {
        if self.on {
            let (millis, micros) = (now / 1000, now % 1000);
            writeln!(self.text, "{millis:>7}.{micros:03} ms  {who:<8} {what}").expect("a string takes every line");
        }
    }

    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.text)
    }
}

/// `0, 1, 2`, or `none`.
pub fn numbers(numbers: &[u32]) -> String {
    if numbers.is_empty() {
        return "none".to_owned();
    }
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A frame in words.
pub fn frame(ground: &Ground, frame: &Frame) -> String {
    let name = |attempt| ground.attempt_name(attempt);
    match frame {
        Frame::Reserve(reserve) => format!(
            "Reserve of {}: room {}, {} tokens, pages {}",
            name(reserve.attempt),
            reserve.room,
            reserve.prompt_tokens,
            numbers(&reserve.pages)
        ),
        Frame::Done(done) => format!("Done of {}: first token {}", name(done.attempt), done.first.token),
        Frame::Failed { attempt, cause } => format!("Failed of {}: {cause}", name(*attempt)),
        Frame::Abort { attempt, cause, .. } => format!("Abort of {}: {cause}", name(*attempt)),
        Frame::Drained { attempt } => format!("Drained of {}", name(*attempt)),
        Frame::Settled { attempt } => format!("Settled of {}", name(*attempt)),
        Frame::Ping { .. } => "Ping".to_owned(),
    }
}
