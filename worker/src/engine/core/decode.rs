//! Output tokens: each judged as it comes, whether it was sampled here or landed with the prompt's pages. And the
//! decode worker's side of a sample: pages offered, pages landed, pages proven quiet.

use tandem_handoff::{
    fence::{FenceProof, PublishedPages},
    ids::Time,
    sabotage::Fault,
    wire::FirstToken,
};

use super::{Core, RoleDriver, intake::ticket};
use crate::{
    decode_role::DecodeFact,
    kv::page::Pages,
    output::End,
    request::{FinishReason, SeqId, TokenLogprob},
    scheduler::{Plan, Planned},
};

impl Core {
    /// Applies an output token once: to the sampler, the text and the stream; and ends the sample or goes on.
    pub(super) fn put_out(&mut self, id: SeqId, token: u32, logprob: Option<TokenLogprob>) {
        let Some(sample) = self.samples.get_mut(&id) else { return };
        sample.sampler.apply(token);
        let said = sample.output.push(token);
        sample.send_token(token, said.text, logprob);
        self.totals.generated_tokens += 1;
        match said.end {
            Some(end) => self.finish(id, end),
            None => self.scheduler.append(id, token),
        }
    }

    /// An answer of no tokens (`max_tokens` 0).
    pub(super) fn finish_unsaid(&mut self, id: SeqId) {
        self.finish(id, End { reason: FinishReason::Length, text: String::new() });
    }

    fn finish(&mut self, id: SeqId, end: End) {
        self.scheduler.remove(id);
        if let Some(sample) = self.samples.remove(&id) {
            self.totals.finished += 1;
            sample.finish(end);
        }
    }

    pub(super) fn poll_decode(&mut self, now: Time) {
        let RoleDriver::Decode(role) = &mut self.role else { return };
        for fact in role.poll(now) {
            match fact {
                DecodeFact::Committed { id, pages, proof, first } => {
                    if let Some(pages) = self.redeem(pages, proof) {
                        self.committed(id, pages, first);
                    }
                }
                DecodeFact::Failed { id, error } => self.end(now, id, error.kind, error.message),
                DecodeFact::Quiet { pages, proof } => {
                    if let Some(pages) = self.redeem(pages, proof) {
                        self.scheduler.release(pages);
                    }
                }
            }
        }
    }

    /// Offers pages to the prefill workers of waiting samples, first come, first served.
    pub(super) fn reserve(&mut self, now: Time) {
        let RoleDriver::Decode(role) = &mut self.role else { return };
        while let Some((sequence, pages)) = self.scheduler.next_reserve() {
            role.reserve(now, sequence.arrived, sequence.id, ticket(&sequence.ticket), &sequence.tokens, pages);
        }
    }

    /// What [`Fault::FreesUnderStep`] does to sequences that end with this step; returns the pages that the step goes on
    /// using.
    pub(super) fn free_under_step(&mut self, now: Time, plan: &Plan) -> Vec<(SeqId, Vec<u32>)> {
        if !self.scheduler.limits().planted.is(Fault::FreesUnderStep) {
            return Vec::new();
        }
        let ends = |planned: &&Planned| {
            let sequence = self.scheduler.get(planned.id);
            sequence.decodes() && sequence.tokens.len() + 1 >= sequence.tokens_max
        };
        let ids: Vec<SeqId> = plan.slices.iter().filter(ends).map(|planned| planned.id).collect();
        let freed = ids.into_iter().map(|id| (id, self.scheduler.let_go(id))).collect();
        self.reserve(now);
        freed
    }

    /// H2: a mismatch is a fault of this worker; the pages stay pinned, for nothing proves them quiet.
    fn redeem(&mut self, pages: PublishedPages, proof: FenceProof) -> Option<Pages> {
        self.scheduler
            .pool_mut()
            .redeem(pages, proof)
            .inspect_err(|mismatch| tracing::error!(%mismatch, "pages are lost to the pool"))
            .ok()
    }

    /// The prompt's KV landed. Token 0 is judged before any step (H7): a sample that it ends never decodes.
    fn committed(&mut self, id: SeqId, pages: Pages, first: FirstToken) {
        if let Err(pages) = self.scheduler.landed(id, pages) {
            return self.scheduler.release(pages);
        }
        let Some(sample) = self.samples.get_mut(&id) else { return };
        sample.cached_tokens = first.cached_tokens;
        if sample.max_tokens == 0 {
            return self.finish_unsaid(id);
        }
        let top = sample.logprobs.top as usize;
        let logprob = first.logprob.filter(|_| sample.logprobs.output).map(|mut logprob| {
            logprob.top.truncate(top);
            TokenLogprob { token: first.token, logprob: logprob.logprob, top: logprob.top }
        });
        if self.scheduler.limits().planted.is(Fault::AppliesFirstTwice) {
            self.put_out(id, first.token, logprob.clone());
        }
        self.put_out(id, first.token, logprob);
    }
}
