//! Which sequences compute what in the next step, and who holds which pages. *Pure*: no clock, no I/O, no device.
//!
//! ```text
//!   null      waiting ──pages for all of it──▶ running ──▶ end        retracted: preempted, returns before any waiting one
//!   prefill   waiting ──Reserve and pages────▶ running ──▶ handoff ──▶ end
//!   decode    waiting ──pages, Reserve──▶ handoff ──Committed──▶ running ──▶ end     (retracted as in null)
//! ```
//!
//! First come, first served throughout: `waiting` and `retracted` are in order of arrival, and the first that does not
//! fit stops the scan. A sequence holds pages for all its tokens from admission on, so a prefill once begun is never
//! short of pages; only an output that grows into a new page can be, and then a null or decode worker preempts.
mod admission;
mod plan;
mod sequence;

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
};

pub use plan::{Plan, Planned};
pub use sequence::Sequence;
use tandem_handoff::sabotage::{Fault, Planted};

use crate::{
    config::{EngineConfig, Role},
    kv::{page::Pages, pool::Pool},
    request::SeqId,
};

/// Rows of logits per step at most for sequences that want them all: a row is as long as the vocabulary.
const PROMPT_ROWS_MAX: usize = 256;

/// The scheduler's settings, in tokens and sequences.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub role: Role,
    pub page_size: usize,
    /// Prompt tokens per step, over all sequences; at least a page.
    pub chunk_tokens: usize,
    pub running_max: usize,
    /// Decode: free tokens kept per live sequence before a new Reserve.
    pub reserved_decode_tokens: usize,
    /// Prompt rows of logits per step; at least a page.
    pub prompt_rows: usize,
    /// Prompt and output tokens of one sequence at most.
    pub context: usize,
    /// A fault for the simulator to find; none in any other build.
    pub planted: Planted,
}

impl Limits {
    pub fn new(config: &EngineConfig) -> Self {
        let page_size = config.page_size as usize;
        Self {
            role: config.role,
            page_size,
            chunk_tokens: (config.chunked_prefill_size as usize).max(page_size),
            running_max: (config.max_running_requests as usize).max(1),
            reserved_decode_tokens: config.num_reserved_decode_tokens as usize,
            prompt_rows: PROMPT_ROWS_MAX.max(page_size),
            context: config.context_length as usize,
            planted: Planted::default(),
        }
    }

    fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size)
    }
}

/// Where a removed sequence was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    Waiting,
    Running,
    Retracted,
    Handoff,
}

#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pool: Pool,
    waiting: VecDeque<Sequence>,
    retracted: VecDeque<Sequence>,
    /// In order of arrival.
    running: Vec<Sequence>,
    /// P: prefilled, not yet delivered. D: reserved, not yet committed.
    handoff: BTreeMap<SeqId, Sequence>,
    /// D: the sequence that landed last; its pages were just paid for, so it is preempted last.
    newest_landed: Option<SeqId>,
}

impl Scheduler {
    pub fn new(limits: Limits, pages: u32) -> Self {
        Self {
            limits,
            pool: Pool::new(pages),
            waiting: VecDeque::new(),
            retracted: VecDeque::new(),
            running: Vec::new(),
            handoff: BTreeMap::new(),
            newest_landed: None,
        }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    #[cfg(feature = "sabotage")]
    pub fn plant(&mut self, planted: Planted) {
        self.limits.planted = planted;
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// For leases and redemptions; sequences' own pages move through the scheduler's methods.
    pub fn pool_mut(&mut self) -> &mut Pool {
        &mut self.pool
    }

    pub fn waiting(&self) -> &VecDeque<Sequence> {
        &self.waiting
    }

    pub fn retracted(&self) -> &VecDeque<Sequence> {
        &self.retracted
    }

    pub fn running(&self) -> &[Sequence] {
        &self.running
    }

    pub fn handoff(&self) -> &BTreeMap<SeqId, Sequence> {
        &self.handoff
    }

    /// The running sequence `id`.
    ///
    /// # Panics
    /// When it is not running: the caller got the id from a plan of this turn.
    pub fn get(&self, id: SeqId) -> &Sequence {
        &self.running[self.place(id)]
    }

    fn place(&self, id: SeqId) -> usize {
        self.running.binary_search_by_key(&id, |sequence| sequence.id).expect("a planned sequence is running")
    }

    fn insert_running(&mut self, sequence: Sequence) {
        let place = self.running.partition_point(|other| other.id < sequence.id);
        self.running.insert(place, sequence);
    }

    /// The step computed `count` more tokens of `id`.
    pub fn computed(&mut self, id: SeqId, count: usize) {
        let place = self.place(id);
        self.running[place].computed += count;
    }

    /// `token` was put out by `id`; it is computed in a later step.
    pub fn append(&mut self, id: SeqId, token: u32) {
        let place = self.place(id);
        self.running[place].tokens.push(token);
    }

    /// The logprobs of `id`'s prompt are known up to position `next`.
    pub fn prompt_rows_seen(&mut self, id: SeqId, next: usize) {
        let place = self.place(id);
        let sequence = &mut self.running[place];
        sequence.prompt_rows_from = (next < sequence.prompt_len).then_some(next);
    }

    /// P: the whole pages of `id` that are computed and not pushed yet; they count as pushed from now on.
    pub fn push(&mut self, id: SeqId) -> Range<usize> {
        let page_size = self.limits.page_size;
        let place = self.place(id);
        let sequence = &mut self.running[place];
        let ahead = usize::from(self.limits.planted.is(Fault::PushesUnwritten));
        let whole = if sequence.pending() == 0 { sequence.pages.len() } else { sequence.computed / page_size + ahead };
        let range = sequence.pushed..whole;
        sequence.pushed = whole;
        range
    }

    /// P: the prefill of `id` is over, its pages wait for the transfer.
    pub fn prefilled(&mut self, id: SeqId) {
        let place = self.place(id);
        let sequence = self.running.remove(place);
        self.handoff.insert(id, sequence);
    }

    /// What [`Fault::FreesUnderStep`] does: the pages of a running sequence go back, and their numbers stay with the step.
    pub fn let_go(&mut self, id: SeqId) -> Vec<u32> {
        let place = self.place(id);
        let pages = self.running[place].pages.take();
        let numbers = pages.indices().to_vec();
        self.pool.release(pages);
        numbers
    }

    /// Takes a sequence out, wherever it is, and its pages back into the pool (leased ones stay pinned).
    pub fn remove(&mut self, id: SeqId) -> Option<Stage> {
        let (mut sequence, stage) = self.take(id)?;
        self.pool.release(sequence.pages.take());
        if self.newest_landed == Some(id) {
            self.newest_landed = None;
        }
        Some(stage)
    }

    fn take(&mut self, id: SeqId) -> Option<(Sequence, Stage)> {
        let among = |queue: &VecDeque<Sequence>| queue.iter().position(|sequence| sequence.id == id);
        if let Ok(place) = self.running.binary_search_by_key(&id, |sequence| sequence.id) {
            return Some((self.running.remove(place), Stage::Running));
        }
        if let Some(sequence) = self.handoff.remove(&id) {
            return Some((sequence, Stage::Handoff));
        }
        if let Some(place) = among(&self.waiting) {
            return Some((self.waiting.remove(place)?, Stage::Waiting));
        }
        let place = among(&self.retracted)?;
        Some((self.retracted.remove(place)?, Stage::Retracted))
    }

    /// Pages that came back from an attempt whose sequence is gone.
    pub fn release(&mut self, pages: Pages) {
        self.pool.release(pages);
    }

    /// Asserts H1 over pool and sequences.
    pub fn check(&self) {
        let queues = self.waiting.iter().chain(&self.retracted);
        let sequences = queues.chain(&self.running).chain(self.handoff.values());
        self.pool.check(sequences.map(|sequence| &sequence.pages));
    }
}

#[cfg(test)]
mod tests;
