//! One worker. What is fixed about it for a while ([`Worker`]: where it is, its role, what was learnt of it) is a value in a
//! snapshot that requests hold; how it does ([`Live`]) is shared by all its values for as long as any source names it.
//! [`Picked`] is the guard of one leg there.

use std::sync::Arc;

use crate::config::WorkerSpec;
use crate::error::{Blame, Failure, Retry, Side};
use crate::fleet::Source;
use crate::fleet::breaker::Trial;
use crate::fleet::health::{Health, Standing};
use crate::fleet::learn::Facts;
use crate::fleet::live::{Cut, Live};
use crate::fleet::load::Slot;
use crate::pair::{Load, WorkerId};

/// One data-parallel rank of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rank {
    pub index: u16,
    pub size: u16,
}

/// One worker as a snapshot knows it.
#[derive(Debug)]
pub struct Worker {
    /// Where it is, and the role it has now.
    pub spec: WorkerSpec,
    /// `host:port`, for the Host header.
    pub authority: String,
    pub facts: Facts,
    /// Who names it; empty while it drains.
    pub sources: Vec<Source>,
    /// One per rank that may be picked.
    pub(super) slots: Arc<[Slot]>,
    pub(super) live: Arc<Live>,
}

impl Worker {
    pub(super) fn new(
        spec: WorkerSpec,
        facts: Facts,
        sources: Vec<Source>,
        slots: Arc<[Slot]>,
        live: Arc<Live>,
    ) -> Self {
        Worker { authority: format!("{}:{}", spec.host, spec.port), spec, facts, sources, slots, live }
    }

    pub fn url(&self) -> &str {
        &self.spec.url
    }

    pub fn id(&self) -> WorkerId {
        self.live.id
    }

    /// Names it in the REST interface: the same in each gateway and after each restart.
    pub fn uuid(&self) -> &str {
        &self.live.uuid
    }

    pub fn live(&self) -> &Arc<Live> {
        &self.live
    }

    /// The names of its model; empty while nobody told.
    pub fn models(&self) -> &[String] {
        match &self.spec.model {
            Some(model) => std::slice::from_ref(model),
            None => &self.facts.models,
        }
    }

    pub fn bootstrap_port(&self) -> Option<u16> {
        self.spec.bootstrap_port.or(self.facts.bootstrap_port)
    }

    pub fn is_draining(&self) -> bool {
        self.live.is_draining()
    }

    pub fn health(&self) -> Health {
        self.live.health()
    }

    pub fn is_healthy(&self) -> bool {
        self.live.standing() == Standing::Healthy
    }

    /// Legs of this gateway that have not ended.
    pub fn legs(&self) -> u32 {
        self.live.legs()
    }

    /// Over all ranks.
    pub fn load(&self) -> Load {
        let mut tokens = self.slots.iter().map(|slot| slot.load().tokens);
        let tokens = tokens.try_fold(0u64, |sum, tokens| Some(sum.saturating_add(tokens?)));
        Load { tokens, legs: self.legs() }
    }

    /// Returns once the worker's open legs must end, at once if they must, with what their clients are told. Cancel-safe.
    pub async fn until_cut(&self, side: Side) -> Failure {
        match self.live.until_cut().await {
            Cut::Silent => Failure::silent(side, self.url(), self.health().reason()),
            Cut::Removed => Failure::removed(side, self.url()),
        }
    }

    pub(super) fn report_load(&self, reported: &[(usize, u64)]) {
        if let [slot] = &*self.slots {
            return slot.report(super::load::total(reported));
        }
        for (index, slot) in self.slots.iter().enumerate() {
            slot.report(reported.iter().find(|(rank, _)| *rank == index).map(|(_, tokens)| *tokens));
        }
    }

    /// Counts a leg until the guard is dropped; `None` where the breaker lets none through.
    pub fn begin(self: &Arc<Self>, slot: usize) -> Option<Picked> {
        let trial = self.live.admit()?;
        self.slots[slot].begin_leg();
        self.live.begin_leg();
        let size = self.slots.len() as u16;
        let rank = (size > 1).then_some(Rank { index: slot as u16, size });
        let picked = Picked { worker: self.clone(), rank, slot, trial };
        // Counted first and looked at then, so that a drain that misses this leg is not missed by it.
        (!self.live.is_draining()).then_some(picked)
    }
}

/// How a leg ended, for the breaker of its worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Good,
    Failed,
    /// Says nothing about the worker: the client's mistake, a full worker (429), our own cancel.
    Neutral,
}

impl Outcome {
    /// What a failure says about the worker it happened at. A reused connection that turned out dead says nothing.
    pub fn of(failure: &Failure) -> Self {
        let is_stale = failure.retry == Retry::StaleConnection;
        match failure.blame {
            Blame::Worker(_) if failure.status != 429 && !is_stale => Outcome::Failed,
            _ => Outcome::Neutral,
        }
    }

    pub const ALL: [Outcome; 3] = [Outcome::Good, Outcome::Failed, Outcome::Neutral];

    pub fn name(self) -> &'static str {
        match self {
            Outcome::Good => "success",
            Outcome::Failed => "failure",
            Outcome::Neutral => "neutral",
        }
    }
}

/// A worker, and a rank where it has several, for one leg. It counts as busy until this is dropped, which is when the leg
/// really ended.
#[derive(Debug)]
pub struct Picked {
    pub worker: Arc<Worker>,
    pub rank: Option<Rank>,
    slot: usize,
    trial: Option<Trial>,
}

impl Picked {
    /// This much of a body goes to the worker.
    pub fn sent(&self, body_bytes: usize) {
        self.worker.slots[self.slot].sent(body_bytes);
    }

    /// Tells the worker's breaker how the leg did; without a word it is neutral. A leg that did well so far may still fail.
    pub fn report(&self, outcome: Outcome) {
        self.worker.live.record(outcome, self.trial);
    }
}

impl Drop for Picked {
    fn drop(&mut self) {
        self.worker.slots[self.slot].end_leg();
        self.worker.live.end_leg(self.trial);
    }
}
