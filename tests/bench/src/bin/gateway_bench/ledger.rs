//! What the mock workers saw: legs by side, whether both legs of a request bore the same room, and times of watched legs.
//! *Pure.*

use std::collections::HashMap;

use memchr::memmem;
use serde_json::{Value, json};

use crate::script::Side;

/// Watched happenings kept until they are fetched.
const NOTES_MAX: usize = 100_000;

/// What ties a leg to its twin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Tie {
    /// SGLang: the same room in both bodies.
    Room(u64),
    /// vLLM's P: asked to keep its pages for a later D.
    Handoff,
    /// vLLM's D: bears the id that P answered with.
    Transfer(u64),
    /// A plain request.
    Nothing,
}

impl Tie {
    /// Looks into the first and the last bytes of a body, since gateways write their fields at one of the ends.
    pub fn find(front: &[u8], tail: &[u8]) -> Tie {
        let after = |name: &str| [front, tail].into_iter().find_map(|part| digits_after(part, name));
        if let Some(room) = after("\"bootstrap_room\":") {
            return Tie::Room(room);
        }
        if let Some(id) = after("\"remote_request_id\":\"r") {
            return Tie::Transfer(id);
        }
        let asked = |part| memmem::find(part, b"\"do_remote_decode\":true").is_some();
        if asked(front) || asked(tail) { Tie::Handoff } else { Tie::Nothing }
    }
}

fn digits_after(part: &[u8], name: &str) -> Option<u64> {
    let rest = &part[memmem::find(part, name.as_bytes())? + name.len()..];
    let end = rest.iter().position(|b| !b.is_ascii_digit())?;
    std::str::from_utf8(&rest[..end]).ok()?.parse().ok()
}

#[derive(Clone, Copy, Debug)]
pub enum Note {
    /// The request is there, whole.
    Arrived,
    /// The script's failure.
    Failed,
    /// The gateway closed the connection in the middle of an answer or before it.
    Cut,
    Answered,
}

impl Note {
    fn name(self) -> &'static str {
        match self {
            Note::Arrived => "arrived",
            Note::Failed => "failed",
            Note::Cut => "cut",
            Note::Answered => "answered",
        }
    }
}

#[derive(Default)]
pub struct Ledger {
    legs: [u64; 2],
    /// First legs that wait for their twin.
    waiting: HashMap<u64, (Side, Tie)>,
    rooms: u64,
    transfers: u64,
    plain: u64,
    wrong: u64,
    cut: u64,
    sent_bytes: u64,
    strange: u64,
    last_strange: String,
    notes: Vec<(u64, Side, Note, u64)>,
}

impl Ledger {
    /// A leg's request came whole.
    pub fn leg(&mut self, id: u64, side: Side, tie: Tie) {
        self.legs[(side == Side::Decode) as usize] += 1;
        match (side, tie) {
            (Side::Prefill, Tie::Handoff) => {}
            (Side::Decode, Tie::Transfer(of)) if of == id => self.transfers += 1,
            (Side::Decode, Tie::Nothing) => self.plain += 1,
            (side, tie @ Tie::Room(_)) => match self.waiting.remove(&id) {
                None => {
                    self.waiting.insert(id, (side, tie));
                }
                Some((other, same)) if other != side && same == tie => self.rooms += 1,
                Some(_) => self.wrong += 1,
            },
            _ => self.wrong += 1,
        }
    }

    pub fn note(&mut self, id: u64, side: Side, note: Note, now_ns: u64) {
        if self.notes.len() < NOTES_MAX {
            self.notes.push((id, side, note, now_ns));
        }
    }

    pub fn cut(&mut self) {
        self.cut += 1;
    }

    pub fn sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes as u64;
    }

    /// Something that no gateway should send.
    pub fn strange(&mut self, what: String) {
        self.strange += 1;
        self.last_strange = what;
    }

    /// Counts since the last reset.
    pub fn stats(&self) -> Value {
        json!({
            "prefill_legs": self.legs[0], "decode_legs": self.legs[1],
            "rooms": self.rooms, "transfers": self.transfers, "plain": self.plain,
            "wrong_pairs": self.wrong, "half_pairs": self.waiting.len(), "cut": self.cut,
            "sent_bytes": self.sent_bytes, "strange": self.strange, "last_strange": self.last_strange,
        })
    }

    pub fn notes(&self) -> Value {
        let notes = self.notes.iter();
        notes.map(|(id, side, note, ns)| json!([id, side.name(), note.name(), ns])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_stand_at_either_end() {
        assert_eq!(Tie::find(b"{\"bootstrap_room\":77,", b""), Tie::Room(77));
        assert_eq!(Tie::find(b"{", b"\"bootstrap_room\":9223372036854775807}"), Tie::Room(i64::MAX as u64));
        assert_eq!(Tie::find(b"\"kv_transfer_params\":{\"remote_request_id\":\"r0000000007\"", b""), Tie::Transfer(7));
        assert_eq!(Tie::find(b"\"do_remote_decode\":true", b""), Tie::Handoff);
        assert_eq!(Tie::find(b"{}", b"{}"), Tie::Nothing);
    }

    #[test]
    fn wrong_pairs_are_counted() {
        let mut ledger = Ledger::default();
        ledger.leg(1, Side::Prefill, Tie::Room(5));
        ledger.leg(1, Side::Decode, Tie::Room(5));
        ledger.leg(2, Side::Decode, Tie::Room(5));
        ledger.leg(2, Side::Prefill, Tie::Room(6));
        ledger.leg(3, Side::Decode, Tie::Transfer(4));
        ledger.leg(4, Side::Prefill, Tie::Nothing);
        ledger.leg(5, Side::Prefill, Tie::Room(1));
        let stats = ledger.stats();
        assert_eq!((&stats["rooms"], &stats["wrong_pairs"], &stats["half_pairs"]), (&json!(1), &json!(3), &json!(1)));
    }
}
