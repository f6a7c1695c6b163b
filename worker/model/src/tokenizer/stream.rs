//! Tokens to text, one at a time, never cutting a character. *Pure.*

use super::Tokenizer;

/// Turns the tokens of one sequence into text as they come. What [`push`](Self::push) returned, joined, and
/// [`finish`](Self::finish) last, is the text of the whole sequence; bytes that can no more become a character are
/// U+FFFD, as `String::from_utf8_lossy` counts them. A token costs a copy of its bytes.
#[derive(Debug)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The beginning of a character whose end has not come: at most 3 bytes between calls.
    pending: Vec<u8>,
    text: String,
}

impl StreamDecoder {
    pub(super) fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, pending: Vec::new(), text: String::new() }
    }

    /// The text that this token completes; empty while a character is unfinished.
    pub fn push(&mut self, token: u32) -> &str {
        self.text.clear();
        if !(self.skip_special && self.tokenizer.is_special(token)) {
            self.pending.extend_from_slice(self.tokenizer.token_bytes(token));
            drain_complete(&mut self.pending, &mut self.text);
        }
        &self.text
    }

    /// What is left: U+FFFD if the last character never ended.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Moves all but an unfinished last character from `pending` to `text`.
fn drain_complete(pending: &mut Vec<u8>, text: &mut String) {
    let mut done = 0;
    loop {
        let rest = &pending[done..];
        let error = match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                done = pending.len();
                break;
            }
            Err(error) => error,
        };
        let valid = error.valid_up_to();
        text.push_str(&String::from_utf8_lossy(&rest[..valid]));
        done += valid;
        match error.error_len() {
            Some(invalid) => {
                text.push(char::REPLACEMENT_CHARACTER);
                done += invalid;
            }
            None => break,
        }
    }
    pending.drain(..done);
}
