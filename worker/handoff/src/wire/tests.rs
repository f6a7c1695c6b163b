//! Properties of the wire: what is written is read back, and any bytes give a frame or an error.

use proptest::{collection::vec, option, prelude::*};

use super::{
    hello::{Greeting, Identity},
    transfer::{Backend, Transfer},
    *,
};
use crate::{
    ids::{Channel, SessionId},
    layout::PoolShape,
};

fn attempt() -> impl Strategy<Value = Attempt> {
    any::<(u64, u64, u64, u64)>().prop_map(|(prefill, decode, session, number)| {
        Channel { prefill: Incarnation(prefill), decode: Incarnation(decode), session: SessionId(session) }
            .attempt(number)
    })
}

fn cause() -> impl Strategy<Value = Cause> {
    let kinds = [
        CauseKind::Refused,
        CauseKind::Aborted,
        CauseKind::Unavailable,
        CauseKind::Timeout,
        CauseKind::Lost,
        CauseKind::Internal,
        CauseKind::Unfit,
    ];
    (any::<bool>(), prop::sample::select(kinds.to_vec()), ".{0,2000}").prop_map(|(prefill, kind, message)| {
        Cause::new(if prefill { Side::Prefill } else { Side::Decode }, kind, message)
    })
}

fn room() -> impl Strategy<Value = Room> {
    (0..=Room::MAX).prop_map(|value| Room::new(value).expect("in range"))
}

fn done() -> impl Strategy<Value = Done> {
    let logprob = (-1e6f32..0.0, vec((any::<u32>(), -1e6f32..0.0), 0..=TOP_LOGPROBS_MAX))
        .prop_map(|(logprob, top)| FirstLogprob { logprob, top });
    let sent = any::<(u32, u32, u64, u64)>().prop_map(|(rank, rail, pieces, bytes)| Sent { rank, rail, pieces, bytes });
    let checksums = vec(any::<u32>(), 0..40);
    (attempt(), any::<(u32, u32, u64, u64)>(), option::of(logprob), vec(sent, 0..20), checksums).prop_map(
        |(attempt, (token, cached_tokens, rendezvous_us, prefill_us), logprob, account, checksums)| Done {
            attempt,
            first: FirstToken { token, logprob, cached_tokens },
            account,
            phases: Phases { rendezvous_us, prefill_us },
            checksums,
        },
    )
}

fn frame() -> impl Strategy<Value = Frame> {
    let reserve = (attempt(), room(), any::<(u32, u128, u32, u128, bool)>(), vec(any::<u32>(), 0..300)).prop_map(
        |(attempt, room, (prompt_tokens, prompt_hash, held_tokens, held_hash, checksums), pages)| Reserve {
            attempt,
            room,
            prompt_tokens,
            prompt_hash,
            held_tokens,
            held_hash,
            checksums,
            pages,
        },
    );
    prop_oneof![
        reserve.prop_map(Frame::Reserve),
        done().prop_map(Frame::Done),
        (attempt(), cause()).prop_map(|(attempt, cause)| Frame::Failed { attempt, cause }),
        (attempt(), room(), cause()).prop_map(|(attempt, room, cause)| Frame::Abort { attempt, room, cause }),
        attempt().prop_map(|attempt| Frame::Drained { attempt }),
        attempt().prop_map(|attempt| Frame::Settled { attempt }),
        any::<(u64, u64)>().prop_map(|(from, to)| Frame::Ping { from: Incarnation(from), to: Incarnation(to) }),
    ]
}

fn greeting() -> impl Strategy<Value = Greeting> {
    let transfer = (prop::sample::select(Backend::ALL.to_vec()), "[a-z]{0,90}", "[a-z]{0,90}")
        .prop_map(|(backend, host, socket)| Transfer { backend, host, socket });
    let identity =
        (any::<[u8; 16]>(), 1u32..9, ".{0,60}", transfer).prop_map(|(fingerprint, tp, numerics, transfer)| {
            let shape =
                PoolShape { layers: 3, kv_heads: 4, head_dim: 8, page_size: 16, element_bytes: 4, tp, pages: 9 };
            Identity::new(fingerprint, shape, &numerics, transfer)
        });
    prop_oneof![
        (any::<(u32, [u8; 32], bool, u64)>()).prop_map(|(protocol, nonce, keyed, decode)| Greeting::Challenge {
            protocol,
            nonce,
            keyed,
            decode: Incarnation(decode)
        }),
        (any::<([u8; 32], bool, u64, [u8; 32])>()).prop_map(|(nonce, keyed, prefill, mac)| Greeting::Answer {
            nonce,
            keyed,
            prefill: Incarnation(prefill),
            mac
        }),
        (any::<[u8; 32]>(), identity.clone()).prop_map(|(mac, identity)| Greeting::Hello { mac, identity }),
        (any::<u64>(), identity)
            .prop_map(|(session, identity)| Greeting::Welcome { session: SessionId(session), identity }),
        cause().prop_map(Greeting::Refused),
        (attempt(), any::<u32>(), any::<[u8; 32]>()).prop_map(|(attempt, rank, mac)| Greeting::Bind {
            channel: attempt.channel(),
            rank,
            mac
        }),
        Just(Greeting::Bound),
        (attempt(), any::<[u8; 32]>()).prop_map(|(attempt, mac)| Greeting::Share { channel: attempt.channel(), mac }),
        Just(Greeting::Mapped),
    ]
}

proptest! {
    #[test]
    fn frames_survive_the_wire(frame in frame()) {
        let bytes = frame.encode();
        prop_assert!(bytes.len() <= FRAME_BYTES_MAX);
        prop_assert_eq!(Frame::decode(&bytes), Ok(frame));
    }

    #[test]
    fn greetings_survive_the_wire(greeting in greeting()) {
        prop_assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
    }

    #[test]
    fn any_bytes_give_a_frame_or_an_error(bytes in vec(any::<u8>(), 0..400)) {
        let _ = Frame::decode(&bytes);
        let _ = Greeting::decode(&bytes);
    }

    #[test]
    fn a_damaged_frame_gives_a_frame_or_an_error(
        frame in frame(), at in any::<prop::sample::Index>(), value in any::<u8>(), cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = frame.encode();
        let at = at.index(bytes.len());
        bytes[at] = value;
        let _ = Frame::decode(&bytes);
        let cut = cut.index(bytes.len());
        bytes.truncate(cut);
        let _ = Frame::decode(&bytes);
    }

    #[test]
    fn every_proper_prefix_and_every_longer_frame_is_an_error(frame in frame()) {
        let mut bytes = frame.encode();
        for end in 0..bytes.len().min(200) {
            prop_assert!(Frame::decode(&bytes[..end]).is_err());
        }
        bytes.push(0);
        prop_assert_eq!(Frame::decode(&bytes), Err(WireError::Trailing(1)));
    }
}

#[test]
fn a_claimed_length_allocates_nothing() {
    let mut bytes = Frame::Reserve(Reserve {
        attempt: Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3) }.attempt(4),
        room: Room::new(5).expect("in range"),
        prompt_tokens: 1,
        prompt_hash: 0,
        held_tokens: 0,
        held_hash: 0,
        checksums: false,
        pages: Vec::new(),
    })
    .encode();
    let length_at = bytes.len() - 4;
    bytes[length_at..].copy_from_slice(&(PAGES_MAX as u32).to_le_bytes());
    assert_eq!(Frame::decode(&bytes), Err(WireError::Truncated("pages")));
    bytes[length_at..].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(Frame::decode(&bytes), Err(WireError::TooLong { .. })));
}

#[test]
fn a_done_with_every_list_at_its_limit_fits_into_a_frame() {
    let sent = Sent { rank: 0, rail: 0, pieces: 1, bytes: 1 };
    let top = vec![(1, -1.0); TOP_LOGPROBS_MAX];
    let done = Done {
        attempt: Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3) }.attempt(4),
        first: FirstToken { token: 1, logprob: Some(FirstLogprob { logprob: -1.0, top }), cached_tokens: 0 },
        account: vec![sent; ACCOUNT_MAX],
        phases: Phases::default(),
        checksums: vec![7; CHECKSUMS_MAX],
    };
    assert!(Frame::Done(done).encode().len() <= FRAME_BYTES_MAX);
}

#[test]
fn prompts_that_differ_by_one_token_hash_differently() {
    assert_ne!(prompt_hash(&[1, 2, 3]), prompt_hash(&[1, 2, 4]));
    assert_ne!(prompt_hash(&[1, 2]), prompt_hash(&[1, 2, 0]));
    assert_eq!(prompt_hash(&[1, 2, 3]), prompt_hash(&[1, 2, 3]));
}
