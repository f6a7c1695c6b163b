//! What is kept of P's answer for D's: its messages as JSON text, as long as they fit. *Pure.*

use bytes::Bytes;

use crate::json::Cursor;
use crate::stream::HELD_ANSWER_BYTES_MAX;

/// P's answer, as far as D's needs it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PrefillAnswer {
    /// A whole answer, each of a list of them, or each event, with its sample.
    pub(super) messages: Vec<(u64, Bytes)>,
    /// vLLM's word about where the pages are, as it stands in the answer.
    pub kv_transfer_params: Option<Bytes>,
    /// Tokens of the prompt that P had already.
    pub cached_tokens: Option<u64>,
    /// There was more than can be kept.
    pub(super) is_cut: bool,
}

impl PrefillAnswer {
    /// Of a whole answer.
    pub fn of(body: &Bytes) -> Self {
        let mut answer = PrefillAnswer::default();
        let mut cursor = Cursor::new(body);
        let mut first = true;
        match cursor.enter(b'[') {
            Ok(true) => {
                while let Ok(true) = cursor.item(&mut first) {
                    let Ok(item) = cursor.skip() else { break };
                    answer.messages.push((answer.messages.len() as u64, body.slice(item)));
                }
            }
            _ => answer.messages.push((0, body.clone())),
        }
        answer.kv_transfer_params =
            find(body, &[b"kv_transfer_params"]).filter(|raw| raw.starts_with(b"{")).map(|raw| body.slice_ref(raw));
        answer.cached_tokens = cached_tokens(body);
        answer
    }
}

/// Messages that are kept while they pass.
#[derive(Debug, Default)]
pub struct Kept {
    bytes: usize,
    answer: PrefillAnswer,
}

impl Kept {
    pub fn message(&mut self, message: &[u8]) {
        if self.answer.is_cut || self.bytes + message.len() > HELD_ANSWER_BYTES_MAX {
            self.answer = Kept::cut();
            return;
        }
        self.bytes += message.len();
        self.answer.cached_tokens = cached_tokens(message).or(self.answer.cached_tokens);
        let sample = find(message, &[b"index"]).and_then(number).unwrap_or(0);
        self.answer.messages.push((sample, Bytes::copy_from_slice(message)));
    }

    pub fn cut() -> PrefillAnswer {
        PrefillAnswer { is_cut: true, ..PrefillAnswer::default() }
    }

    pub fn take(&mut self) -> PrefillAnswer {
        std::mem::take(self).answer
    }
}

fn cached_tokens(message: &[u8]) -> Option<u64> {
    let of = |details| find(message, &[b"usage", details, b"cached_tokens"]);
    of(b"prompt_tokens_details").or_else(|| of(b"input_tokens_details")).and_then(number)
}

/// A JSON text that is a whole number.
pub fn number(raw: &[u8]) -> Option<u64> {
    std::str::from_utf8(raw).ok()?.parse().ok()
}

/// The JSON text of the value at this path of field names.
pub fn find<'a>(text: &'a [u8], path: &[&[u8]]) -> Option<&'a [u8]> {
    let Some((wanted, deeper)) = path.split_first() else { return Some(text) };
    let mut cursor = Cursor::new(text);
    if !cursor.enter(b'{').ok()? {
        return None;
    }
    let mut first = true;
    let mut found = None;
    while let Some(name) = cursor.field(&mut first).ok()? {
        let is_wanted = &*name.name() == *wanted;
        let value = cursor.value().ok()?;
        if is_wanted {
            found = Some(value);
        }
    }
    find(found?, deeper)
}
