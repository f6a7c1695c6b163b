//! One step: which tokens of which sequences. *Pure.*
//!
//! All decoding sequences take part; prompts (and the recomputation of preempted sequences) share the token budget in
//! order of arrival. A chunk that is not a prompt's last ends on a page boundary, so that its pages can be pushed.

use tandem_handoff::sabotage::Fault;

use super::Scheduler;
use crate::{backend::LogitRows, config::Role, request::SeqId};

/// Consecutive tokens of one running sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Planned {
    pub id: SeqId,
    pub start: usize,
    pub len: usize,
    pub rows: LogitRows,
    /// The slice ends at the sequence's last token: a token is sampled from its last row.
    pub last: bool,
}

#[derive(Debug, Default)]
pub struct Plan {
    pub slices: Vec<Planned>,
    /// Sequences that lost their pages before this step.
    pub preempted: usize,
}

impl Scheduler {
    /// Makes room, admits, and plans the next step. An empty plan means that nothing can be computed before something
    /// arrives, lands or ends.
    pub fn plan(&mut self) -> Plan {
        let preempted = self.grow();
        if preempted == 0 {
            self.admit();
        }
        let mut slices = Vec::with_capacity(self.running.len());
        let mut budget = self.limits.chunk_tokens;
        let mut rows_left = self.limits.prompt_rows;
        for sequence in &self.running {
            let (start, pending) = (sequence.computed, sequence.pending());
            let mut len = if sequence.decodes() { 1 } else { pending.min(budget) };
            if sequence.wants_prompt_rows(start, start + len) {
                len = len.min(rows_left);
            }
            if len < pending {
                len = ((start + len) / self.limits.page_size * self.limits.page_size).saturating_sub(start);
            }
            if len == 0 {
                continue;
            }
            let last = len == pending;
            let all = sequence.wants_prompt_rows(start, start + len);
            let rows = match (all, last) {
                (true, _) => LogitRows::All,
                (false, true) => LogitRows::Last,
                (false, false) => LogitRows::None,
            };
            if !sequence.decodes() {
                budget -= len;
            }
            if all {
                rows_left -= len;
            }
            slices.push(Planned { id: sequence.id, start, len, rows, last });
        }
        self.assert_writable(&slices);
        Plan { slices, preempted }
    }

    /// Gives each running sequence pages for all its tokens, the oldest first, at the cost of the newest.
    fn grow(&mut self) -> usize {
        let mut preempted = 0;
        let mut at = 0;
        while at < self.running.len() {
            let sequence = &mut self.running[at];
            if self.limits.pages_for(sequence.tokens.len()) <= sequence.pages.len() {
                at += 1;
            } else if let Some(page) = self.pool.allocate() {
                sequence.pages.push(page);
            } else {
                assert!(self.limits.role != Role::Prefill, "a prefill has pages for all of its prompt");
                let victim = self.victim();
                self.preempt(victim);
                preempted += 1;
                if victim < at {
                    at -= 1;
                }
            }
        }
        preempted
    }

    /// The newest running sequence, but for the one that landed last, which goes only when it is alone.
    fn victim(&self) -> usize {
        let spared = |place: &usize| Some(self.running[*place].id) != self.newest_landed;
        (0..self.running.len()).rev().find(spared).unwrap_or(self.running.len() - 1)
    }

    /// Takes a sequence's pages. It keeps its tokens and its place in the stream, and recomputes when it returns.
    fn preempt(&mut self, place: usize) {
        let mut sequence = self.running.remove(place);
        self.pool.release(sequence.pages.take());
        if !self.limits.planted.is(Fault::KeepsComputed) {
            sequence.computed = 0;
        }
        let place = self.retracted.partition_point(|other| other.id < sequence.id);
        self.retracted.insert(place, sequence);
    }

    /// H1: a step writes only to pages that its sequence owns and nobody else reads.
    fn assert_writable(&self, slices: &[super::Planned]) {
        for slice in slices {
            let pages = self.get(slice.id).pages.indices();
            let end = self.limits.pages_for(slice.start + slice.len);
            for &page in &pages[slice.start / self.limits.page_size..end] {
                assert!(self.pool.may_write(page), "H1: page {page} is written under a foreign lease");
            }
        }
    }
}
