//! Which faults struck in which states, over many seeds; and which pairs cannot be, each with its reason. *Pure.*

use std::fmt::Write;

use tandem_handoff::state::AttemptState;

use crate::{
    faults::{Fault, Place, Spot, Stage},
    node::Side,
};

/// Counts of (state, fault) where the fault took effect: when it struck, or when what it had armed came true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    pairs: [[u64; Fault::ALL.len()]; Place::COUNT],
    /// Sequences of decode workers that lost their pages to another one.
    pub preemptions: u64,
}

impl Default for Coverage {
    fn default() -> Self {
        Self { pairs: [[0; Fault::ALL.len()]; Place::COUNT], preemptions: 0 }
    }
}

impl Coverage {
    pub fn count(&mut self, place: Place, fault: Fault) {
        self.pairs[row(place)][fault as usize] += 1;
    }

    pub fn add(&mut self, other: &Coverage) {
        for (row, others) in self.pairs.iter_mut().zip(&other.pairs) {
            for (count, more) in row.iter_mut().zip(others) {
                *count += more;
            }
        }
        self.preemptions += other.preemptions;
    }

    /// Pairs that never struck and have no reason to be impossible.
    pub fn gaps(&self) -> Vec<(Place, Fault)> {
        let empty = |&(place, fault): &(Place, Fault)| self.of(place, fault) == 0 && impossible(place, fault).is_none();
        pairs().filter(empty).collect()
    }

    fn of(&self, place: Place, fault: Fault) -> u64 {
        self.pairs[row(place)][fault as usize]
    }

    /// One line per fault, one column per state.
    pub fn table(&self) -> String {
        let mut text = format!("{:<16}", "fault \\ state");
        for place in Place::all() {
            write!(text, "{:>14}", place.name()).expect("a string takes all");
        }
        text.push('\n');
        for fault in Fault::ALL {
            write!(text, "{:<16}", fault.name()).expect("a string takes all");
            for place in Place::all() {
                let count = match (self.of(place, fault), impossible(place, fault)) {
                    (0, Some(_)) => "-".to_owned(),
                    (count, _) => count.to_string(),
                };
                write!(text, "{count:>14}").expect("a string takes all");
            }
            text.push('\n');
        }
        writeln!(text, "{} preemptions at decode workers; a prefill worker never preempts", self.preemptions)
            .expect("a string takes all");
        text.push_str("- impossible or rare: ");
        let reasons: Vec<String> = pairs()
            .filter(|&(place, fault)| self.of(place, fault) == 0)
            .filter_map(|(place, fault)| {
                Some(format!("\n  {} when {}: {}", fault.name(), place.name(), impossible(place, fault)?))
            })
            .collect();
        text.push_str(&if reasons.is_empty() { "no pair".to_owned() } else { reasons.concat() });
        text.push('\n');
        text
    }
}

fn row(place: Place) -> usize {
    Place::all().position(|known| known == place).expect("every place has a column")
}

fn pairs() -> impl Iterator<Item = (Place, Fault)> {
    Place::all().flat_map(|place| Fault::ALL.into_iter().map(move |fault| (place, fault)))
}

/// Why a fault cannot take effect in a state, or so seldom that no number of seeds is owed it ("rare"); `None` where it
/// must be met.
pub fn impossible(place: Place, fault: Fault) -> Option<&'static str> {
    use AttemptState::{Dialling, Draining, Offered, Open, Pushed, Quarantined, Verifying, Waiting};
    use Stage::{Committed, Decoding, Delivered, Preempted, Unplaced};
    let p = |states: &[AttemptState]| matches!(place, Place::Attempt(Spot { side: Side::Prefill, state }) if states.contains(&state));
    let d = |states: &[AttemptState]| matches!(place, Place::Attempt(Spot { side: Side::Decode, state }) if states.contains(&state));
    let r = |stages: &[Stage]| matches!(place, Place::Request(stage) if stages.contains(&stage));
    let both_quarantined = p(&[Quarantined]) || d(&[Quarantined]);
    let no_attempt = d(&[Dialling]) || r(&[Unplaced]);
    let reason = match fault {
        _ if d(&[Verifying]) => {
            "the checksums are compared within one turn of the engine, and nothing strikes inside a turn"
        }
        Fault::DecodeStepFails if r(&[Committed, Decoding]) => return None,
        _ if r(&[Committed]) => {
            "the first step follows the commit in the same turn, so that only a step can fail there"
        }
        Fault::ClientLeaves | Fault::DeadlinePasses if both_quarantined => {
            "the drain deadline is longer than the gateway takes to end the exchange"
        }
        Fault::PrefillStepFails if p(&[Waiting, Pushed, Draining, Quarantined]) || r(&[Delivered]) => {
            "only prompts that P computes are in its step"
        }
        Fault::PrefillStepFails if no_attempt => "P computes nothing before D has offered pages",
        Fault::PrefillStepFails if r(&[Decoding, Preempted]) => "P has computed all of it before D commits",
        Fault::PrefillStepFails if d(&[Draining, Quarantined]) => {
            "rare: P would compute on while the word of D's end travels"
        }
        Fault::DecodeStepFails if no_attempt || d(&[Offered, Draining, Quarantined]) || r(&[Preempted]) => {
            "only committed requests that hold pages are in D's step"
        }
        Fault::DecodeStepFails if p(&[Waiting, Open]) => "D steps with it after the commit, so after Done",
        Fault::DecodeStepFails if p(&[Draining, Quarantined]) => {
            "rare: P fails after Done with posts unsettled, and D commits"
        }
        Fault::PrefillAborts if p(&[Draining, Quarantined]) || r(&[Delivered]) => {
            "the request has ended at P: an abort finds nothing"
        }
        Fault::PrefillAborts if d(&[Quarantined]) || r(&[Preempted]) => {
            "rare: P's half has ended long before, unless P stood still"
        }
        Fault::DecodeAborts if d(&[Draining, Quarantined]) => "the request has ended at D: an abort finds nothing",
        Fault::DecodeAborts if p(&[Quarantined]) => "rare: D's half has ended long before, unless D stood still",
        Fault::ChannelCut | Fault::ChannelStalls | Fault::DataBreaks | Fault::DataSlow if both_quarantined => {
            "the channel is closed when a side quarantines"
        }
        Fault::AckLost | Fault::BytesChange if p(&[Waiting]) || no_attempt => "nothing of it has been posted",
        Fault::AckLost if r(&[Delivered]) => "each of its posts has settled",
        Fault::BytesChange if r(&[Decoding, Preempted]) => "nothing lands after the commit",
        Fault::AckLost if r(&[Preempted]) => {
            "rare: the acknowledgement of the last piece would come after the commit and a preemption"
        }
        Fault::AckLost | Fault::BytesChange if both_quarantined => {
            "rare: rails and streams are closed by then, only what is on the wire still comes"
        }
        Fault::FenceFails if d(&[Dialling, Offered]) || r(&[Unplaced, Decoding, Preempted]) => {
            "D fences for attempts that have ended"
        }
        Fault::FenceFails if p(&[Quarantined]) => "rare: P's quarantine lasts until its next turn on this fabric",
        _ => return None,
    };
    Some(reason)
}
