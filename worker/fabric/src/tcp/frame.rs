//! The header of a piece on a data stream: 48 bytes, little endian. Pure.

use tandem_handoff::ids::{Attempt, Incarnation, SessionId};

/// Bytes of an encoded header.
pub const HEADER_BYTES: usize = 48;
const MAGIC: u32 = u32::from_le_bytes(*b"TKV1");

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
/// What a piece is, in front of its bytes.
pub struct Header {
    pub attempt: Attempt,
    pub piece: u32,
    /// Bytes of the piece that follow.
    pub bytes: u64,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..8].copy_from_slice(&self.piece.to_le_bytes());
        let Attempt { prefill, decode, session, number } = self.attempt;
        for (slot, value) in [prefill.0, decode.0, session.0, number, self.bytes].into_iter().enumerate() {
            let at = 8 + slot * 8;
            out[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    /// `None` when the bytes do not begin a frame.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |at: usize| {
            let mut out = [0; 8];
            out.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(out)
        };
        let first = word(0);
        (first as u32 == MAGIC).then(|| Self {
            attempt: Attempt {
                prefill: Incarnation(word(8)),
                decode: Incarnation(word(16)),
                session: SessionId(word(24)),
                number: word(32),
            },
            piece: (first >> 32) as u32,
            bytes: word(40),
        })
    }
}
