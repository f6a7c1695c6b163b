//! Which faults struck in which states, over many seeds; and which pairs cannot be, each with its reason. *Pure.*

use std::fmt::Write;

use tandem_handoff::state::AttemptState;

use crate::{
    faults::{Fault, Spot},
    node::Side,
};

/// Counts of (state, fault).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage([[u64; Fault::ALL.len()]; Spot::ALL.len()]);

impl Default for Coverage {
    fn default() -> Self {
        Self([[0; Fault::ALL.len()]; Spot::ALL.len()])
    }
}

impl Coverage {
    pub fn count(&mut self, spot: Spot, fault: Fault) {
        // P closes the channel as it quarantines, which settles what it posted: a moment of draining.
        let spot = match spot {
            Spot { side: Side::Prefill, state: AttemptState::Quarantined } => {
                Spot { side: Side::Prefill, state: AttemptState::Draining }
            }
            other => other,
        };
        if let Some(row) = Spot::ALL.iter().position(|&known| known == spot) {
            self.0[row][fault as usize] += 1;
        }
    }

    pub fn add(&mut self, other: &Coverage) {
        for (row, others) in self.0.iter_mut().zip(&other.0) {
            for (count, more) in row.iter_mut().zip(others) {
                *count += more;
            }
        }
    }

    /// Pairs that never struck and have no reason to be impossible.
    pub fn gaps(&self) -> Vec<(Spot, Fault)> {
        let empty = |&(spot, fault): &(Spot, Fault)| self.of(spot, fault) == 0 && impossible(spot, fault).is_none();
        pairs().filter(empty).collect()
    }

    fn of(&self, spot: Spot, fault: Fault) -> u64 {
        let row = Spot::ALL.iter().position(|&known| known == spot).unwrap_or(0);
        self.0[row][fault as usize]
    }

    /// One line per fault, one column per state.
    pub fn table(&self) -> String {
        let mut text = format!("{:<16}", "fault \\ state");
        for spot in Spot::ALL {
            write!(text, "{:>14}", spot.name()).expect("a string takes all");
        }
        text.push('\n');
        for fault in Fault::ALL {
            write!(text, "{:<16}", fault.name()).expect("a string takes all");
            for spot in Spot::ALL {
                let count = match (self.of(spot, fault), impossible(spot, fault)) {
                    (0, Some(_)) => "-".to_owned(),
                    (count, _) => count.to_string(),
                };
                write!(text, "{count:>14}").expect("a string takes all");
            }
            text.push('\n');
        }
        text.push_str("- impossible: ");
        let mut reasons: Vec<String> = pairs()
            .filter(|&(spot, fault)| self.of(spot, fault) == 0)
            .filter_map(|(spot, fault)| Some(format!("{}: {}", spot.name(), impossible(spot, fault)?)))
            .collect();
        reasons.sort();
        reasons.dedup();
        text.push_str(&if reasons.is_empty() { "no pair".to_owned() } else { reasons.join("; ") });
        text.push('\n');
        text
    }
}

fn pairs() -> impl Iterator<Item = (Spot, Fault)> {
    Spot::ALL.into_iter().flat_map(|spot| Fault::ALL.into_iter().map(move |fault| (spot, fault)))
}

/// Why a fault cannot strike in a state; `None` where it can.
pub fn impossible(spot: Spot, _: Fault) -> Option<&'static str> {
    (spot == Spot { side: Side::Decode, state: AttemptState::Verifying })
        .then_some("the checksums are compared within one turn of the engine, and nothing strikes inside a turn")
}
