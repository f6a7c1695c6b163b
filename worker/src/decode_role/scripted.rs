//! A decode role without a network, for tests of the engine: the real role and machine over a scripted channel and a
//! scripted fabric. The test plays the prefill worker through [`DecodeScript`].

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use tandem_fabric::{SinkFabric, SinkReport};
use tandem_handoff::{
    ids::{Attempt, Channel, Incarnation, Room, SessionId},
    layout::{Mapping, PoolShape},
    limits::Limits,
    sink::Sink,
    ticket::Address,
    wire::{Cause, Done, FirstToken, Frame, Phases, Sent},
};

use super::DecodeRole;
use crate::bootstrap::{ControlEvent, ControlPlane, stats::HandoffStats};

#[derive(Default)]
struct State {
    events: Vec<ControlEvent>,
    reports: Vec<SinkReport>,
    offered: BTreeMap<Room, Attempt>,
    pieces: BTreeMap<Attempt, (Vec<u32>, u32)>,
    hold_quiet: bool,
    held: Vec<Attempt>,
}

/// The prefill worker's part, played by a test. After each call the role must be polled.
#[derive(Clone, Default)]
pub struct DecodeScript(Arc<Mutex<State>>);

const CHANNEL: Channel = Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3) };

/// A role whose dials succeed at once.
pub fn decode_role(shape: PoolShape, limits: Limits) -> (DecodeRole, DecodeScript) {
    counted(shape, limits, Arc::default())
}

/// As [`decode_role`], with counters that the test reads.
pub fn counted(shape: PoolShape, limits: Limits, stats: Arc<HandoffStats>) -> (DecodeRole, DecodeScript) {
    let script = DecodeScript::default();
    let sink = Sink::new(shape, limits);
    let control = ScriptedControl { script: script.clone(), shape };
    let role = DecodeRole::over(sink, Box::new(script.clone()), Box::new(control), stats, 1);
    (role, script)
}

impl DecodeScript {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.lock().expect("no test panics while it holds the script"))
    }

    /// The pages that were offered for the room, once they were.
    pub fn pages(&self, room: Room) -> Option<Vec<u32>> {
        self.with(|state| state.pieces.get(state.offered.get(&room)?).map(|(pages, _)| pages.clone()))
    }

    /// Every piece lands and Done comes.
    pub fn deliver(&self, room: Room, first: FirstToken) {
        self.with(|state| {
            let attempt = state.offered[&room];
            let pieces = state.pieces[&attempt].1;
            state.reports.push(SinkReport::Landed { attempt, pieces: (0..pieces).collect() });
            let account = vec![Sent { rank: 0, rail: 0, pieces: pieces.into(), bytes: 0 }];
            let done = Done { attempt, first, account, phases: Phases::default(), checksums: vec![] };
            state.events.push(ControlEvent::Frame { channel: CHANNEL, frame: Frame::Done(done) });
        });
    }

    /// The prefill worker fails the attempt.
    pub fn fail(&self, room: Room, cause: Cause) {
        self.with(|state| {
            let frame = Frame::Failed { attempt: state.offered[&room], cause };
            state.events.push(ControlEvent::Frame { channel: CHANNEL, frame });
        });
    }

    /// The channel breaks.
    pub fn lose_channel(&self) {
        self.with(|state| state.events.push(ControlEvent::Down { channel: CHANNEL, why: "cut by the test".into() }));
    }

    /// While held, no ended attempt is quiet.
    pub fn hold_quiet(&self, hold: bool) {
        self.with(|state| {
            state.hold_quiet = hold;
            if !hold {
                let held = std::mem::take(&mut state.held);
                state.reports.extend(held.into_iter().map(|attempt| SinkReport::Quiet { attempt }));
            }
        });
    }
}

impl SinkFabric for DecodeScript {
    fn expect(&mut self, attempt: Attempt, pages: &[u32], mapping: Mapping) {
        let pieces = mapping.pieces(pages.len()) as u32;
        self.with(|state| state.pieces.insert(attempt, (pages.to_vec(), pieces)));
    }

    fn revoke(&mut self, attempt: Attempt) {
        self.with(|state| match state.hold_quiet {
            true => state.held.push(attempt),
            false => state.reports.push(SinkReport::Quiet { attempt }),
        });
    }

    fn peer_drained(&mut self, _attempt: Attempt) {}

    fn release(&mut self, attempt: Attempt) {
        self.with(|state| state.pieces.remove(&attempt));
    }

    fn close(&mut self, _channel: Channel) {}

    fn poll(&mut self) -> Vec<SinkReport> {
        self.with(|state| std::mem::take(&mut state.reports))
    }
}

struct ScriptedControl {
    script: DecodeScript,
    shape: PoolShape,
}

impl ControlPlane for ScriptedControl {
    fn send(&mut self, _channel: Channel, frame: Frame) {
        if let Frame::Reserve(reserve) = frame {
            self.script.with(|state| state.offered.insert(reserve.room, reserve.attempt));
        }
    }

    fn close(&mut self, channel: Channel, why: &str) {
        self.script.with(|state| state.events.push(ControlEvent::Down { channel, why: why.into() }));
    }

    fn dial(&mut self, address: Address) {
        let up = ControlEvent::Up { channel: CHANNEL, address: Some(address), shape: self.shape };
        self.script.with(|state| state.events.push(up));
    }

    fn poll(&mut self) -> Vec<ControlEvent> {
        self.script.with(|state| std::mem::take(&mut state.events))
    }
}

#[cfg(test)]
mod tests {
    use tandem_handoff::{
        fence::PublishedPages,
        ids::Time,
        ticket::Ticket,
        wire::{CauseKind, Side},
    };

    use super::*;
    use crate::{
        decode_role::{DecodeFact, DecodeHandoff},
        request::SeqId,
    };

    fn shape() -> PoolShape {
        PoolShape { layers: 1, kv_heads: 2, head_dim: 2, page_size: 4, element_bytes: 2, tp: 1, pages: 8 }
    }

    fn ticket(room: u64) -> Ticket {
        Ticket { host: "p".into(), port: 1, room: Room::new(room).expect("in range") }
    }

    #[test]
    fn a_delivered_prompt_commits_and_its_proof_frees_the_pages() {
        let (mut role, script) = decode_role(shape(), Limits::default());
        role.reserve(Time(0), Time(0), SeqId(1), &ticket(9), &[1, 2, 3, 4, 5], PublishedPages::new(vec![6, 2]));
        assert!(role.poll(Time(1)).is_empty());
        assert_eq!(script.pages(ticket(9).room), Some(vec![6, 2]));
        let first = FirstToken { token: 7, logprob: None, cached_tokens: 0 };
        script.deliver(ticket(9).room, first.clone());
        let mut facts = role.poll(Time(2));
        let Some(DecodeFact::Committed { id, pages, proof, first: got }) = facts.pop() else {
            panic!("not committed: {facts:?}");
        };
        assert_eq!((id, got), (SeqId(1), first));
        assert_eq!(pages.redeem(proof).expect("its own proof"), [6, 2]);
    }

    #[test]
    fn a_failed_one_keeps_its_pages_until_quiet_and_tells_the_peers_cause() {
        let (mut role, script) = decode_role(shape(), Limits::default());
        role.reserve(Time(0), Time(0), SeqId(1), &ticket(9), &[1, 2], PublishedPages::new(vec![3]));
        role.poll(Time(1));
        script.hold_quiet(true);
        script.fail(ticket(9).room, Cause::new(Side::Prefill, CauseKind::Internal, "out of paper"));
        let facts = role.poll(Time(2));
        assert!(matches!(&facts[..], [DecodeFact::Failed { error, .. }] if error.message.contains("out of paper")));
        assert_eq!(role.queues().draining_pages, 1);
        script.hold_quiet(false);
        let mut facts = role.poll(Time(3));
        let Some(DecodeFact::Quiet { pages, proof }) = facts.pop() else {
            panic!("not quiet: {facts:?}");
        };
        assert_eq!(pages.redeem(proof).expect("its own proof"), [3]);
    }
}
