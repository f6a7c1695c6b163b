//! What goes wrong: kinds of faults, and when they strike: at a time, or when an attempt enters a state. *Pure.*

use std::fmt;

use tandem_handoff::state::AttemptState;

use crate::{fabric::Kind, node::Side, rng::Rng};

/// Kinds of faults. Each strikes one exchange, its workers or their channel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// Reason user: the client leaves.
    ClientLeaves,
    /// Reason timeout: the gateway's deadline passes.
    DeadlinePasses,
    /// Reason P failed: its device fails a step.
    PrefillStepFails,
    /// Reason D failed.
    DecodeStepFails,
    /// `POST /abort_request` on one worker.
    PrefillAborts,
    DecodeAborts,
    PrefillCrashes,
    DecodeCrashes,
    PrefillPauses,
    DecodePauses,
    /// Orderly stop, then exit.
    PrefillStops,
    DecodeStops,
    ChannelCut,
    /// Nothing passes on the control channel for a while.
    ChannelStalls,
    /// The data path breaks.
    DataBreaks,
    /// Writes land late and in parts.
    DataSlow,
    /// rdma: an acknowledgement is lost, the slice is resent on the other rail.
    AckLost,
    /// rdma: the next fence of the channel fails, and the channel is cut so that one is needed.
    FenceFails,
    /// Another client uses the room of a live exchange.
    RoomDoubled,
    /// Bytes change on their way, where checksums are on.
    BytesChange,
}

impl Fault {
    pub const ALL: [Fault; 20] = [
        Fault::ClientLeaves,
        Fault::DeadlinePasses,
        Fault::PrefillStepFails,
        Fault::DecodeStepFails,
        Fault::PrefillAborts,
        Fault::DecodeAborts,
        Fault::PrefillCrashes,
        Fault::DecodeCrashes,
        Fault::PrefillPauses,
        Fault::DecodePauses,
        Fault::PrefillStops,
        Fault::DecodeStops,
        Fault::ChannelCut,
        Fault::ChannelStalls,
        Fault::DataBreaks,
        Fault::DataSlow,
        Fault::AckLost,
        Fault::FenceFails,
        Fault::RoomDoubled,
        Fault::BytesChange,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Fault::ClientLeaves => "client leaves",
            Fault::DeadlinePasses => "deadline passes",
            Fault::PrefillStepFails => "P step fails",
            Fault::DecodeStepFails => "D step fails",
            Fault::PrefillAborts => "P aborts",
            Fault::DecodeAborts => "D aborts",
            Fault::PrefillCrashes => "P crashes",
            Fault::DecodeCrashes => "D crashes",
            Fault::PrefillPauses => "P pauses",
            Fault::DecodePauses => "D pauses",
            Fault::PrefillStops => "P stops",
            Fault::DecodeStops => "D stops",
            Fault::ChannelCut => "channel cut",
            Fault::ChannelStalls => "channel stalls",
            Fault::DataBreaks => "data breaks",
            Fault::DataSlow => "data slow",
            Fault::AckLost => "ack lost",
            Fault::FenceFails => "fence fails",
            Fault::RoomDoubled => "room doubled",
            Fault::BytesChange => "bytes change",
        }
    }
}

/// Where an exchange is, on one side: what faults are aimed at and coverage is counted by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Spot {
    pub side: Side,
    pub state: AttemptState,
}

impl Spot {
    pub const ALL: [Spot; 10] = [
        Spot { side: Side::Prefill, state: AttemptState::Waiting },
        Spot { side: Side::Prefill, state: AttemptState::Open },
        Spot { side: Side::Prefill, state: AttemptState::Pushed },
        Spot { side: Side::Prefill, state: AttemptState::Draining },
        Spot { side: Side::Prefill, state: AttemptState::Quarantined },
        Spot { side: Side::Decode, state: AttemptState::Dialling },
        Spot { side: Side::Decode, state: AttemptState::Offered },
        Spot { side: Side::Decode, state: AttemptState::Verifying },
        Spot { side: Side::Decode, state: AttemptState::Draining },
        Spot { side: Side::Decode, state: AttemptState::Quarantined },
    ];

    pub fn name(self) -> String {
        let side = if self.side == Side::Prefill { "P" } else { "D" };
        format!("{side} {}", self.state)
    }
}

/// Where a request is outside its attempt: before its pages are offered, and after the commit or the delivery.
///
/// Only D preempts: an output grows into a new page, a prefill has all its pages from admission on. So there is no
/// preempted producer, and a cancel never meets one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Stage {
    /// P: Done is out and settled, the attempt is forgotten, and D has not answered yet.
    Delivered,
    /// D: no pages for the prompt yet.
    Unplaced,
    /// D: committed, and no step has taken it up. Seen by a step that fails with it; between turns it does not exist.
    Committed,
    Decoding,
    /// D: retracted, its pages are gone, it comes back and recomputes.
    Preempted,
}

impl Stage {
    pub const ALL: [Stage; 5] =
        [Stage::Delivered, Stage::Unplaced, Stage::Committed, Stage::Decoding, Stage::Preempted];
}

/// What coverage has a column for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Place {
    Attempt(Spot),
    Request(Stage),
}

impl Place {
    pub const COUNT: usize = Spot::ALL.len() + Stage::ALL.len();

    pub fn all() -> impl Iterator<Item = Place> {
        let attempts = Spot::ALL.into_iter().map(Place::Attempt);
        attempts.chain(Stage::ALL.into_iter().map(Place::Request))
    }

    pub fn side(self) -> Side {
        match self {
            Place::Attempt(spot) => spot.side,
            Place::Request(Stage::Delivered) => Side::Prefill,
            Place::Request(_) => Side::Decode,
        }
    }

    pub fn name(self) -> String {
        match self {
            Place::Attempt(spot) => spot.name(),
            Place::Request(Stage::Delivered) => "P delivered".into(),
            Place::Request(Stage::Unplaced) => "D unplaced".into(),
            Place::Request(Stage::Committed) => "D committed".into(),
            Place::Request(Stage::Decoding) => "D decoding".into(),
            Place::Request(Stage::Preempted) => "D preempted".into(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Trigger {
    At(u64),
    /// The `nth` attempt, counted from 0, enters the spot; the fault strikes so many microseconds later.
    Entered {
        spot: Spot,
        nth: u64,
        delay: u64,
    },
    /// The same of a request that enters a stage outside its attempt.
    Reached {
        stage: Stage,
        nth: u64,
        delay: u64,
    },
}

impl Trigger {
    /// Which place it waits for, at which entry it fires, and how long after.
    pub fn waits_for(self) -> Option<(Place, u64, u64)> {
        match self {
            Trigger::At(_) => None,
            Trigger::Entered { spot, nth, delay } => Some((Place::Attempt(spot), nth, delay)),
            Trigger::Reached { stage, nth, delay } => Some((Place::Request(stage), nth, delay)),
        }
    }

    fn in_place(place: Place, nth: u64, delay: u64) -> Self {
        match place {
            Place::Attempt(spot) => Trigger::Entered { spot, nth, delay },
            Place::Request(stage) => Trigger::Reached { stage, nth, delay },
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct FaultSetup {
    pub fault: Fault,
    pub trigger: Trigger,
}

impl fmt::Display for FaultSetup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fault = self.fault.name();
        match self.trigger {
            Trigger::At(micros) => write!(f, "{fault} at {micros} us"),
            Trigger::Entered { spot, nth: 0, delay } => write!(f, "{fault} {delay} us after {}", spot.name()),
            Trigger::Entered { spot, nth, delay } => {
                write!(f, "{fault} {delay} us after {} (attempt {nth} there)", spot.name())
            }
            Trigger::Reached { stage, nth, delay } => {
                write!(f, "{fault} {delay} us after {} (request {nth} there)", Place::Request(stage).name())
            }
        }
    }
}

/// The faults of one seed.
pub fn plan(rng: &mut Rng, kind: Kind, checksums: bool) -> Vec<FaultSetup> {
    let kinds: Vec<Fault> = Fault::ALL
        .into_iter()
        .filter(|fault| kind == Kind::Rdma || !matches!(fault, Fault::AckLost | Fault::FenceFails))
        .filter(|fault| checksums || *fault != Fault::BytesChange)
        .collect();
    let mut faults = Vec::new();
    for _ in 0..rng.range(1, 6) {
        let fault = kinds[rng.index(kinds.len())];
        let trigger = if rng.percent(35) {
            Trigger::At(rng.range(0, 120_000))
        } else {
            let place = Place::all().nth(rng.index(Place::COUNT)).expect("the index is below the count");
            let nth = if rng.percent(50) { 0 } else { rng.range(0, 8) };
            let delay = if rng.percent(50) { rng.range(0, 60) } else { rng.range(0, 2500) };
            Trigger::in_place(place, nth, delay)
        };
        faults.push(FaultSetup { fault, trigger });
    }
    // Ends that cross writes which are still under way: a slow data path, and an end just after Done.
    if rng.percent(20) {
        let nth = rng.range(0, 4);
        let offered = Spot { side: Side::Decode, state: AttemptState::Offered };
        let slow = Trigger::Entered { spot: offered, nth, delay: 0 };
        faults.push(FaultSetup { fault: Fault::DataSlow, trigger: slow });
        let pushed = Spot { side: Side::Prefill, state: AttemptState::Pushed };
        let trigger = Trigger::Entered { spot: pushed, nth, delay: rng.range(0, 4000) };
        let fault = rng.pick(&[Fault::ClientLeaves, Fault::PrefillAborts, Fault::DecodeAborts, Fault::ChannelCut]);
        faults.push(FaultSetup { fault, trigger });
    }
    // A room that is used again while its old attempt drains.
    if rng.percent(15) {
        let nth = rng.range(0, 3);
        let at = |side, state, nth, delay| Trigger::Entered { spot: Spot { side, state }, nth, delay };
        let slow = at(Side::Decode, AttemptState::Offered, nth, 0);
        faults.push(FaultSetup { fault: Fault::DataSlow, trigger: slow });
        let leaves = at(Side::Prefill, AttemptState::Open, nth, rng.range(100, 1500));
        faults.push(FaultSetup { fault: Fault::ClientLeaves, trigger: leaves });
        let again = at(Side::Prefill, AttemptState::Draining, 0, 0);
        faults.push(FaultSetup { fault: Fault::RoomDoubled, trigger: again });
    }
    // An acknowledgement that is lost while the attempt ends.
    if kind == Kind::Rdma && rng.percent(25) {
        let at = |side, state, nth, delay| Trigger::Entered { spot: Spot { side, state }, nth, delay };
        let nth = rng.range(0, 3);
        for (fault, trigger) in [
            (Fault::AckLost, at(Side::Decode, AttemptState::Offered, nth, 0)),
            (Fault::DataSlow, at(Side::Decode, AttemptState::Offered, nth, 0)),
            (
                rng.pick(&[Fault::PrefillAborts, Fault::DecodeAborts, Fault::ClientLeaves]),
                at(Side::Prefill, AttemptState::Open, nth, rng.range(300, 4000)),
            ),
        ] {
            faults.push(FaultSetup { fault, trigger });
        }
    }
    // P's quarantine is rarer still: D stands still with posts unsettled while P ends, and then something else strikes.
    if rng.percent(25) {
        let at = |side, state, nth, delay| Trigger::Entered { spot: Spot { side, state }, nth, delay };
        let nth = rng.range(0, 3);
        let open = at(Side::Prefill, AttemptState::Open, nth, rng.range(0, 1000));
        let stands = rng.pick(&[Fault::DecodePauses, Fault::DataSlow]);
        faults.push(FaultSetup { fault: stands, trigger: open });
        let ends = at(Side::Prefill, AttemptState::Open, nth, rng.range(1000, 3000));
        let end = rng.pick(&[Fault::PrefillAborts, Fault::ClientLeaves, Fault::PrefillStepFails]);
        faults.push(FaultSetup { fault: end, trigger: ends });
        let quarantined = at(Side::Prefill, AttemptState::Quarantined, 0, rng.range(0, 100));
        faults.push(FaultSetup { fault: kinds[rng.index(kinds.len())], trigger: quarantined });
    }
    // Quarantine is rare: a fence that fails is what leads there.
    if kind == Kind::Rdma && rng.percent(30) {
        let spot = Spot { side: Side::Decode, state: AttemptState::Offered };
        let trigger = Trigger::Entered { spot, nth: rng.range(0, 5), delay: rng.range(0, 3000) };
        faults.push(FaultSetup { fault: Fault::FenceFails, trigger });
        let spot = Spot { side: Side::Decode, state: AttemptState::Quarantined };
        let trigger = Trigger::Entered { spot, nth: 0, delay: rng.range(0, 1000) };
        faults.push(FaultSetup { fault: kinds[rng.index(kinds.len())], trigger });
    }
    faults
}

/// Clients that leave before D has offered pages, and nothing else: their ends are to be remembered.
pub fn early_ends(rng: &mut Rng) -> Vec<FaultSetup> {
    let spot = Spot { side: Side::Prefill, state: AttemptState::Waiting };
    let strike = |rng: &mut Rng| {
        let trigger = Trigger::Entered { spot, nth: rng.range(0, 10), delay: rng.range(0, 200) };
        FaultSetup { fault: Fault::ClientLeaves, trigger }
    };
    (0..rng.range(1, 4)).map(|_| strike(rng)).collect()
}
