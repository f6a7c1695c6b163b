//! Control frames after Hello. Any bytes are a frame or an error, a frame has one encoding, and no length that the bytes
//! claim takes memory.

use tandem_handoff::{
    ids::{Attempt, Channel, Incarnation, Room, SessionId},
    wire::{
        Cause, CauseKind, Done, FirstLogprob, FirstToken, Frame, Phases, Reserve, Sent, Side, WireError, prompt_hash,
    },
};

use crate::Target;

type Decode = fn(&[u8]) -> Result<Frame, WireError>;

pub struct Frames(pub Decode);

impl Frames {
    pub fn real() -> Self {
        Self(Frame::decode)
    }
}

/// An attempt with numbers that are easy to recognise.
pub fn attempt(number: u64) -> Attempt {
    Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3) }.attempt(number)
}

impl Target for Frames {
    fn name(&self) -> &'static str {
        "frames"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let room = Room::new(5).expect("in range");
        let cause = Cause::new(Side::Decode, CauseKind::Aborted, "the client left");
        let logprob = FirstLogprob { logprob: -0.5, top: vec![(7, -0.5), (8, -1.5)] };
        let reserve = Reserve {
            attempt: attempt(4),
            room,
            prompt_tokens: 6,
            prompt_hash: prompt_hash(&[1, 2, 3, 4, 5, 6]),
            held_tokens: 0,
            held_hash: prompt_hash(&[]),
            checksums: true,
            pages: vec![7, 3],
        };
        let done = Done {
            attempt: attempt(4),
            first: FirstToken { token: 7, logprob: Some(logprob), cached_tokens: 0 },
            account: vec![Sent { rank: 0, rail: 0, pieces: 2, bytes: 128 }],
            phases: Phases { rendezvous_us: 9, prefill_us: 10 },
            checksums: vec![1, 2, 3, 4],
        };
        let frames = [
            Frame::Reserve(reserve),
            Frame::Done(done),
            Frame::Failed { attempt: attempt(4), cause: cause.clone() },
            Frame::Abort { attempt: attempt(4), room, cause },
            Frame::Drained { attempt: attempt(4) },
            Frame::Settled { attempt: attempt(4) },
            Frame::Ping { from: Incarnation(1), to: Incarnation(2) },
        ];
        frames.iter().map(Frame::encode).collect()
    }

    /// Decoded lists hold little more than their bytes, and grow by doubling.
    fn memory_bytes_max(&self, input_bytes: usize) -> usize {
        (16 << 10) + 16 * input_bytes
    }

    fn run(&self, input: &[u8]) -> String {
        match (self.0)(input) {
            Ok(frame) => {
                assert!(frame.encode() == input, "{frame:?} has another encoding than the bytes it came from");
                let attempt = frame.attempt();
                let kind = format!("{frame:?}");
                let kind = kind.split([' ', '(', '{']).next().unwrap_or_default();
                format!("{kind} {}", attempt.is_some())
            }
            Err(error) => error.to_string(),
        }
    }
}
