//! The prefill worker's side of a sample: pages pushed as they are computed, the first token handed over, the source
//! pages kept until the transfer is quiet (H5). Does nothing in other roles.

use tandem_handoff::{
    ids::Time,
    sabotage::Fault,
    wire::{FirstLogprob, FirstToken},
};

use super::{Core, RoleDriver};
use crate::{
    prefill_role::PrefillFact,
    request::{SeqId, TokenLogprob},
};

impl Core {
    pub(super) fn poll_prefill(&mut self, now: Time) {
        let RoleDriver::Prefill(role) = &mut self.role else { return };
        for fact in role.poll(now) {
            match fact {
                PrefillFact::Reserved { id, .. } => self.scheduler.reserved(id),
                PrefillFact::Delivered { id } => self.delivered(id),
                PrefillFact::Failed { id, error } => self.end(now, id, error.kind, error.message),
                PrefillFact::Quiet { id } => self.quiet(id),
            }
        }
    }

    /// The device has written the chunk: its whole pages go out while the next chunk computes.
    pub(super) fn push_chunk(&mut self, now: Time, id: SeqId) {
        if !matches!(self.role, RoleDriver::Prefill(_)) {
            return;
        }
        let range = self.scheduler.push(id);
        if range.is_empty() {
            return;
        }
        let pages = self.scheduler.get(id).pages.indices().to_vec();
        self.lease_source(id, &pages[range.clone()]);
        if let RoleDriver::Prefill(role) = &mut self.role {
            role.chunk_written(now, id, &pages, range);
        }
    }

    /// The prompt is computed and `token` sampled: the last pages go out, without a byte of their earlier owners.
    pub(super) fn prefilled(&mut self, now: Time, id: SeqId, token: u32, logprob: Option<TokenLogprob>) {
        let range = self.scheduler.push(id);
        let sequence = self.scheduler.get(id);
        let page_size = self.scheduler.limits().page_size;
        let pages = sequence.pages.indices().to_vec();
        let used = sequence.tokens.len() % page_size;
        if used > 0
            && !self.scheduler.limits().planted.is(Fault::LeavesTail)
            && let Some(&last) = pages.last()
        {
            self.backend.zero_tail(last, used as u32);
        }
        self.lease_source(id, &pages[range.clone()]);
        let first = FirstToken {
            token,
            logprob: logprob.clone().map(|logprob| FirstLogprob { logprob: logprob.logprob, top: logprob.top }),
            cached_tokens: 0,
        };
        if let Some(sample) = self.samples.get_mut(&id) {
            sample.first = Some((token, logprob));
        }
        self.totals.generated_tokens += 1;
        self.scheduler.prefilled(id);
        if let RoleDriver::Prefill(role) = &mut self.role {
            role.finish(now, id, &pages, range, first);
        }
    }

    fn lease_source(&mut self, id: SeqId, pages: &[u32]) {
        let pool = self.scheduler.pool_mut();
        match self.sources.get_mut(&id) {
            Some(lease) => pool.extend(lease, pages),
            None => {
                let lease = pool.lease(pages);
                self.sources.insert(id, lease);
            }
        }
    }

    /// Done was sent: the HTTP leg answers. The pages stay leased until `Quiet`.
    fn delivered(&mut self, id: SeqId) {
        if let Some(sample) = self.samples.remove(&id) {
            self.scheduler.remove(id);
            self.totals.finished += 1;
            sample.finish_first();
        }
    }

    pub(super) fn quiet(&mut self, id: SeqId) {
        if let Some(lease) = self.sources.remove(&id) {
            self.scheduler.pool_mut().end_lease(lease);
        }
    }
}
