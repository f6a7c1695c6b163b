//! The two messages of the shared-memory backend's stream: fixed sizes, little endian. *Pure.*

use tandem_handoff::ids::{Attempt, Incarnation, SessionId};

pub(super) const POST_BYTES: usize = 64;
pub(super) const ANSWER_BYTES: usize = 48;

const POST_MAGIC: u32 = u32::from_le_bytes(*b"TSP1");
const ANSWER_MAGIC: u32 = u32::from_le_bytes(*b"TSA1");

/// P→D: a piece lies ready in P's pool of `rank`, from `offset` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Post {
    pub attempt: Attempt,
    pub piece: u32,
    pub rank: u32,
    pub offset: u64,
    pub bytes: u64,
}

/// What D's copier did with a post.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// The piece is in its page.
    Copied,
    /// D has ended the attempt, and reads the range no more.
    PassedOver,
}

/// D→P: the post was dealt with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Answer {
    pub attempt: Attempt,
    pub piece: u32,
    pub outcome: Outcome,
}

impl Post {
    pub fn encode(&self) -> [u8; POST_BYTES] {
        let mut out = [0; POST_BYTES];
        put_head(&mut out, POST_MAGIC, self.piece, &self.attempt);
        out[40..44].copy_from_slice(&self.rank.to_le_bytes());
        out[48..56].copy_from_slice(&self.offset.to_le_bytes());
        out[56..64].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    /// `None` when the bytes are no post.
    pub fn decode(bytes: &[u8; POST_BYTES]) -> Option<Self> {
        let (piece, attempt) = head(bytes, POST_MAGIC)?;
        let post =
            Self { attempt, piece, rank: u32_at(bytes, 40), offset: u64_at(bytes, 48), bytes: u64_at(bytes, 56) };
        (u32_at(bytes, 44) == 0).then_some(post)
    }
}

impl Answer {
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut out = [0; ANSWER_BYTES];
        put_head(&mut out, ANSWER_MAGIC, self.piece, &self.attempt);
        let outcome: u64 = match self.outcome {
            Outcome::Copied => 1,
            Outcome::PassedOver => 2,
        };
        out[40..48].copy_from_slice(&outcome.to_le_bytes());
        out
    }

    /// `None` when the bytes are no answer.
    pub fn decode(bytes: &[u8; ANSWER_BYTES]) -> Option<Self> {
        let (piece, attempt) = head(bytes, ANSWER_MAGIC)?;
        let outcome = match u64_at(bytes, 40) {
            1 => Outcome::Copied,
            2 => Outcome::PassedOver,
            _ => return None,
        };
        Some(Self { attempt, piece, outcome })
    }
}

/// What both begin with: magic, piece, attempt.
fn put_head(out: &mut [u8], magic: u32, piece: u32, attempt: &Attempt) {
    out[0..4].copy_from_slice(&magic.to_le_bytes());
    out[4..8].copy_from_slice(&piece.to_le_bytes());
    let Attempt { prefill, decode, session, number } = attempt;
    for (slot, value) in [prefill.0, decode.0, session.0, *number].into_iter().enumerate() {
        let at = 8 + slot * 8;
        out[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

fn head(bytes: &[u8], magic: u32) -> Option<(u32, Attempt)> {
    let attempt = Attempt {
        prefill: Incarnation(u64_at(bytes, 8)),
        decode: Incarnation(u64_at(bytes, 16)),
        session: SessionId(u64_at(bytes, 24)),
        number: u64_at(bytes, 32),
    };
    (u32_at(bytes, 0) == magic).then_some((u32_at(bytes, 4), attempt))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut out = [0; 4];
    out.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(out)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut out = [0; 8];
    out.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_their_bytes_and_others_are_none() {
        let attempt = Attempt { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3), number: 4 };
        let post = Post { attempt, piece: 5, rank: 6, offset: 7, bytes: 8 };
        assert_eq!(Post::decode(&post.encode()), Some(post));
        for outcome in [Outcome::Copied, Outcome::PassedOver] {
            let answer = Answer { attempt, piece: 5, outcome };
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        }
        for at in [0, 44] {
            let mut spoilt = post.encode();
            spoilt[at] ^= 1;
            assert_eq!(Post::decode(&spoilt), None, "byte {at}");
        }
        let mut spoilt = Answer { attempt, piece: 5, outcome: Outcome::Copied }.encode();
        spoilt[40] = 3;
        assert_eq!(Answer::decode(&spoilt), None);
    }
}
