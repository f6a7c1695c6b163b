//! A prefill role without a network, for tests of the engine: the real role and machine over a scripted channel and a
//! scripted fabric. The test plays the decode worker through [`PrefillScript`].

use std::sync::{Arc, Mutex};

use tandem_fabric::{SourceFabric, SourceReport};
use tandem_handoff::{
    ids::{Attempt, Channel, Incarnation, Room, SessionId},
    layout::PoolShape,
    limits::Limits,
    source::{Piece, Settlement, Source},
    ticket::Address,
    wire::{Cause, Frame, Reserve, prompt_hash},
};

use super::PrefillRole;
use crate::bootstrap::{ControlEvent, ControlPlane, stats::HandoffStats};

#[derive(Default)]
struct State {
    events: Vec<ControlEvent>,
    reports: Vec<SourceReport>,
    /// Everything that the role sent and posted, in order.
    sent: Vec<Frame>,
    posted: Vec<(Attempt, Piece)>,
    last_number: u64,
    hold_writes: bool,
    held: Vec<(Attempt, u64)>,
    checksums: bool,
    peer_settled: Vec<Attempt>,
}

/// The decode worker's part, played by a test. After each call the role must be polled.
#[derive(Clone, Default)]
pub struct PrefillScript(Arc<Mutex<State>>);

const CHANNEL: Channel = Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3) };

/// A role with one open channel to a decode worker of the same shape.
pub fn prefill_role(shape: PoolShape, limits: Limits) -> (PrefillRole, PrefillScript) {
    counted(shape, limits, Arc::default())
}

/// As [`prefill_role`], with counters that the test reads.
pub fn counted(shape: PoolShape, limits: Limits, stats: Arc<HandoffStats>) -> (PrefillRole, PrefillScript) {
    let script = PrefillScript::default();
    script.with(|state| state.events.push(ControlEvent::Up { channel: CHANNEL, address: None, shape }));
    let source = Source::new(shape, limits);
    let role = PrefillRole::over(source, Box::new(script.clone()), Box::new(script.clone()), stats);
    (role, script)
}

impl PrefillScript {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.lock().expect("no test panics while it holds the script"))
    }

    /// D offers `pages` for the room.
    pub fn reserve(&self, room: Room, prompt: &[u32], pages: Vec<u32>) -> Attempt {
        self.with(|state| {
            state.last_number += 1;
            let attempt = CHANNEL.attempt(state.last_number);
            let reserve = Reserve {
                attempt,
                room,
                prompt_tokens: prompt.len() as u32,
                prompt_hash: prompt_hash(prompt),
                held_tokens: 0,
                held_hash: prompt_hash(&[]),
                checksums: state.checksums,
                pages,
            };
            state.events.push(ControlEvent::Frame { channel: CHANNEL, frame: Frame::Reserve(reserve) });
            attempt
        })
    }

    /// From now on D asks for checksums.
    pub fn ask_checksums(&self) {
        self.with(|state| state.checksums = true);
    }

    /// D says that it reads no page of the attempt any more.
    pub fn settle(&self, attempt: Attempt) {
        let frame = Frame::Settled { attempt };
        self.with(|state| state.events.push(ControlEvent::Frame { channel: CHANNEL, frame }));
    }

    /// Attempts that the fabric was told of as settled by D.
    pub fn peer_settled(&self) -> Vec<Attempt> {
        self.with(|state| state.peer_settled.clone())
    }

    /// D ends the attempt.
    pub fn abort(&self, attempt: Attempt, room: Room, cause: Cause) {
        let frame = Frame::Abort { attempt, room, cause };
        self.with(|state| state.events.push(ControlEvent::Frame { channel: CHANNEL, frame }));
    }

    /// The channel breaks.
    pub fn lose_channel(&self) {
        self.with(|state| state.events.push(ControlEvent::Down { channel: CHANNEL, why: "cut by the test".into() }));
    }

    /// While held, no posted piece settles.
    pub fn hold_writes(&self, hold: bool) {
        self.with(|state| {
            state.hold_writes = hold;
            if !hold {
                let held = std::mem::take(&mut state.held);
                let settled = |(attempt, pieces)| SourceReport::Settled { attempt, pieces, how: Settlement::Sent };
                state.reports.extend(held.into_iter().map(settled));
            }
        });
    }

    /// Frames that the role sent so far.
    pub fn sent(&self) -> Vec<Frame> {
        self.with(|state| state.sent.clone())
    }

    /// Pieces that the role posted so far.
    pub fn posted(&self) -> Vec<(Attempt, Piece)> {
        self.with(|state| state.posted.clone())
    }
}

impl SourceFabric for PrefillScript {
    fn post(&mut self, attempt: Attempt, pieces: Vec<Piece>) {
        self.with(|state| {
            let count = pieces.len() as u64;
            state.posted.extend(pieces.into_iter().map(|piece| (attempt, piece)));
            match state.hold_writes {
                true => state.held.push((attempt, count)),
                false => {
                    state.reports.push(SourceReport::Settled { attempt, pieces: count, how: Settlement::Sent });
                }
            }
        });
    }

    fn stop(&mut self, _attempt: Attempt) {}

    fn peer_settled(&mut self, attempt: Attempt) {
        self.with(|state| state.peer_settled.push(attempt));
    }

    fn close(&mut self, _channel: Channel) {}

    fn poll(&mut self) -> Vec<SourceReport> {
        self.with(|state| std::mem::take(&mut state.reports))
    }
}

impl ControlPlane for PrefillScript {
    fn send(&mut self, _channel: Channel, frame: Frame) {
        self.with(|state| state.sent.push(frame));
    }

    fn close(&mut self, channel: Channel, why: &str) {
        self.with(|state| state.events.push(ControlEvent::Down { channel, why: why.into() }));
    }

    fn dial(&mut self, _address: Address) {}

    fn poll(&mut self) -> Vec<ControlEvent> {
        self.with(|state| std::mem::take(&mut state.events))
    }
}

#[cfg(test)]
mod tests {
    use tandem_handoff::{
        ids::Time,
        ticket::Ticket,
        wire::{CauseKind, FirstToken, Side},
    };

    use super::*;
    use crate::{
        kv::sums::{Checksums, PageSums},
        prefill_role::{PrefillFact, PrefillHandoff},
        request::SeqId,
    };

    fn shape() -> PoolShape {
        PoolShape { layers: 1, kv_heads: 2, head_dim: 2, page_size: 4, element_bytes: 2, tp: 1, pages: 8 }
    }

    fn room() -> Room {
        Room::new(9).expect("in range")
    }

    fn ticket() -> Ticket {
        Ticket { host: "p".into(), port: 1, room: room() }
    }

    #[test]
    fn a_prompt_is_delivered_in_two_chunks() {
        let (mut role, script) = prefill_role(shape(), Limits::default());
        let prompt = [1, 2, 3, 4, 5];
        role.request(Time(0), SeqId(1), &ticket(), &prompt);
        script.reserve(room(), &prompt, vec![6, 2]);
        assert_eq!(role.poll(Time(1)), [PrefillFact::Reserved { id: SeqId(1), held_tokens: 0 }]);
        role.chunk_written(Time(2), SeqId(1), &[4, 0], 0..1);
        role.finish(Time(3), SeqId(1), &[4, 0], 1..2, FirstToken { token: 7, logprob: None, cached_tokens: 0 });
        let facts = role.poll(Time(4));
        assert_eq!(facts, [PrefillFact::Delivered { id: SeqId(1) }, PrefillFact::Quiet { id: SeqId(1) }]);
        assert!(matches!(&script.sent()[..], [Frame::Done(done)] if done.account[0].pieces == 2));
        assert_eq!(script.posted().len(), 2);
    }

    #[test]
    fn an_aborted_one_is_quiet_only_when_its_writes_have_settled() {
        let (mut role, script) = prefill_role(shape(), Limits::default());
        role.request(Time(0), SeqId(1), &ticket(), &[1, 2, 3, 4, 5]);
        let attempt = script.reserve(room(), &[1, 2, 3, 4, 5], vec![6, 2]);
        role.poll(Time(1));
        script.hold_writes(true);
        role.chunk_written(Time(2), SeqId(1), &[4, 0], 0..1);
        script.abort(attempt, room(), Cause::new(Side::Decode, CauseKind::Aborted, "the client left"));
        let facts = role.poll(Time(3));
        assert!(matches!(&facts[..], [PrefillFact::Failed { .. }]), "{facts:?}");
        assert!(script.sent().is_empty(), "Drained waits for the writes");
        script.settle(attempt);
        role.poll(Time(3));
        assert_eq!(script.peer_settled(), [attempt]);
        script.hold_writes(false);
        assert_eq!(role.poll(Time(4)), [PrefillFact::Quiet { id: SeqId(1) }]);
        assert_eq!(script.sent(), [Frame::Drained { attempt }]);
        script.settle(attempt);
        role.poll(Time(5));
        assert_eq!(script.peer_settled(), [attempt], "an attempt that is forgotten is not settled again (H3)");
    }

    struct Counted;

    impl PageSums for Counted {
        fn sum(&self, rank: u32, page: u32, slot: u32) -> u32 {
            rank * 100 + page * 10 + slot
        }
    }

    #[test]
    fn checksums_travel_with_done_where_d_asks_for_them() {
        for asked in [true, false] {
            let (role, script) = prefill_role(shape(), Limits::default());
            let mut role = role.with_checksums(Checksums::over(shape(), Box::new(Counted)));
            if asked {
                script.ask_checksums();
            }
            role.request(Time(0), SeqId(1), &ticket(), &[1, 2, 3, 4, 5]);
            script.reserve(room(), &[1, 2, 3, 4, 5], vec![6, 2]);
            role.poll(Time(1));
            role.chunk_written(Time(2), SeqId(1), &[4, 0], 0..1);
            role.finish(Time(3), SeqId(1), &[4, 0], 1..2, FirstToken { token: 7, logprob: None, cached_tokens: 0 });
            let sent = script.sent();
            let [Frame::Done(done)] = &sent[..] else { panic!("{sent:?}") };
            assert_eq!(done.checksums, if asked { vec![40, 41, 0, 1] } else { vec![] });
        }
    }

    #[test]
    fn a_worker_that_cannot_compute_checksums_says_so() {
        let (mut role, script) = prefill_role(shape(), Limits::default());
        script.ask_checksums();
        role.request(Time(0), SeqId(1), &ticket(), &[1, 2, 3, 4, 5]);
        script.reserve(room(), &[1, 2, 3, 4, 5], vec![6, 2]);
        role.poll(Time(1));
        role.chunk_written(Time(2), SeqId(1), &[4, 0], 0..1);
        let facts = role.poll(Time(3));
        let [PrefillFact::Failed { error, .. }, PrefillFact::Quiet { .. }] = &facts[..] else { panic!("{facts:?}") };
        assert!(error.message.contains("--enable-kv-checksum"), "{}", error.message);
    }
}
