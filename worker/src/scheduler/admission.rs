//! Who gets pages: first admission, the return of preempted sequences, and D's reservations. *Pure.*

use tandem_handoff::fence::PublishedPages;

use super::{Scheduler, Sequence};
use crate::{config::Role, kv::page::Pages, request::SeqId};

impl Scheduler {
    /// Why a prompt of `prompt` tokens can never be computed here.
    ///
    /// # Errors
    /// The message names both numbers.
    pub fn fits(&self, prompt: usize) -> Result<(), String> {
        let context = self.limits.context;
        let pool = self.pool.total() * self.limits.page_size;
        if prompt == 0 {
            return Err("the prompt has no tokens".into());
        }
        if prompt >= context {
            return Err(format!(
                "the prompt has {prompt} tokens, the context length is {context}, of which the answer needs at least one: \
                 shorten the prompt"
            ));
        }
        if prompt >= pool {
            return Err(format!(
                "the prompt has {prompt} tokens, the KV pool of this worker holds {pool}, of which the answer needs at \
                 least one: shorten the prompt or raise --max-total-tokens"
            ));
        }
        Ok(())
    }

    /// Prompt and output tokens of one sequence at most.
    pub fn tokens_max(&self) -> usize {
        self.limits.context.min(self.pool.total() * self.limits.page_size)
    }

    /// Queues a new sequence; [`fits`](Self::fits) was asked before.
    pub fn add(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    /// P: D has reserved pages for `id`. Nothing changes when the sequence is gone.
    pub fn reserved(&mut self, id: SeqId) {
        if let Some(sequence) = self.waiting.iter_mut().find(|sequence| sequence.id == id) {
            sequence.reserved = true;
        }
    }

    /// Returns preempted sequences, then admits waiting ones, while pages and slots last.
    pub(super) fn admit(&mut self) {
        while self.has_slot() && self.retracted.front().is_some_and(|first| self.has_room(first)) {
            let sequence = self.retracted.pop_front().expect("the queue has a front");
            self.start(sequence);
        }
        if self.limits.role == Role::Decode || !self.retracted.is_empty() {
            return;
        }
        while self.has_slot() {
            // A sequence that is not reserved yet never blocks a reserved one.
            let ready = |sequence: &Sequence| self.limits.role == Role::Null || sequence.reserved;
            let Some(place) = self.waiting.iter().position(ready) else { return };
            if !self.has_room(&self.waiting[place]) {
                return;
            }
            let sequence = self.waiting.remove(place).expect("the place was just found");
            self.start(sequence);
        }
    }

    fn has_slot(&self) -> bool {
        self.running.len() < self.limits.running_max
    }

    /// Pages for all its tokens, and one more for each running sequence that may grow, so that an admission does not
    /// cause a preemption at once.
    fn has_room(&self, sequence: &Sequence) -> bool {
        let growth = if self.limits.role == Role::Prefill { 0 } else { self.running.len() };
        self.pool.free() >= self.limits.pages_for(sequence.tokens.len()) + growth
    }

    fn start(&mut self, mut sequence: Sequence) {
        let need = self.limits.pages_for(sequence.tokens.len());
        sequence.pages = self.pool.allocate_many(need).expect("has_room was asked");
        self.insert_running(sequence);
    }

    /// D: the next sequence whose whole prompt gets pages, with the pages to offer. The sequence is in handoff then.
    ///
    /// Keeps `num_reserved_decode_tokens`, or what is left to say, for each live sequence, and reserves nothing while a
    /// preempted sequence waits to return.
    pub fn next_reserve(&mut self) -> Option<(&Sequence, PublishedPages)> {
        let live = self.running.len() + self.handoff.len();
        let first = self.waiting.front()?;
        if !self.retracted.is_empty() || live >= self.limits.running_max {
            return None;
        }
        let kept: usize = self.running.iter().chain(self.handoff.values()).map(|other| self.growth_of(other)).sum();
        let own = if live == 0 { 0 } else { self.growth_of(first) };
        let need = self.limits.pages_for(first.prompt_len);
        if self.pool.free() < need + kept + own {
            return None;
        }
        let sequence = self.waiting.pop_front()?;
        let pages = self.pool.allocate_many(need).expect("the free pages were counted");
        let published = self.pool.publish(pages);
        let id = sequence.id;
        self.handoff.insert(id, sequence);
        Some((&self.handoff[&id], published))
    }

    /// Pages that an output may still grow into, as far as they are kept free for it.
    fn growth_of(&self, sequence: &Sequence) -> usize {
        let left = sequence.tokens_max.saturating_sub(sequence.tokens.len());
        let held = self.limits.pages_for(sequence.tokens.len());
        self.limits.pages_for(sequence.tokens.len() + left.min(self.limits.reserved_decode_tokens)) - held
    }

    /// D: the pages of `id` landed with the KV of its whole prompt. Gives the pages back when the sequence is gone.
    ///
    /// # Errors
    /// The pages, when nobody waits for them.
    pub fn landed(&mut self, id: SeqId, pages: Pages) -> Result<(), Pages> {
        let Some(mut sequence) = self.handoff.remove(&id) else { return Err(pages) };
        assert_eq!(pages.len(), self.limits.pages_for(sequence.prompt_len), "the landed pages are the reserved ones");
        sequence.pages = pages;
        sequence.computed = sequence.prompt_len;
        self.newest_landed = Some(id);
        self.insert_running(sequence);
        Ok(())
    }
}
