//! What the processes of a world share: the ground, the fabric between them, and the control channels. *Pure.*

use crate::{
    fabric::{self, Kind, Model},
    ground::Ground,
    network::{Manners, Network},
};

pub struct Wire {
    pub ground: Ground,
    pub fabric: Box<dyn Model>,
    pub network: Network,
}

impl Wire {
    pub fn new(seed: u64, kind: Kind, manners: Manners, trace: bool) -> Self {
        let fabric = fabric::model(kind);
        Self { ground: Ground::new(seed, trace), fabric, network: Network::new(manners) }
    }

    /// Lets the fabric go on up to `until`: memory changes while a step runs (H10).
    pub fn run_writes(&mut self, until: u64) {
        while self.ground.writes.next().is_some_and(|due| due <= until) {
            let (due, event) = self.ground.writes.pop().expect("the agenda has a next event");
            self.ground.now = self.ground.now.max(due);
            self.fabric.event(&mut self.ground, event);
        }
        self.ground.now = self.ground.now.max(until);
    }
}
