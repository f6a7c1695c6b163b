//! The engine without its thread: each turn takes mail and handoff facts, plans a step, runs it, and judges what came.
//!
//! It has no clock, no thread and no randomness of its own: the same parts, given the same mail at the same times, take
//! the same turns. The thread of [`spawn`](super::spawn) and the simulator drive it alike.
//!
//! Promises: every accepted sample ends by exactly one event (H7); its pages go back to the pool, or stay with an
//! attempt until that is proven quiet (H2, H5); a failed step ends the samples in it and nothing else.
mod decode;
mod intake;
mod prefill;

use std::{collections::BTreeMap, sync::Arc};

use tandem_handoff::ids::Time;

use super::{
    inbox::{Mail, Submission},
    loads::{Loads, Rate},
    quarantine::{Excess, Quarantine},
    sample::Sample,
    thread::{EngineParts, RoleDriver},
};
use crate::{
    backend::{Backend, LogitRows, Slice},
    kv::page::Lease,
    output::Detokenizers,
    request::{SampleError, SampleErrorKind, SeqId},
    sampling::{self, SamplingFault, Scratch},
    scheduler::{Limits, Plan, Planned, Scheduler},
};

/// What a client is told by a worker whose quarantine passed its limit.
const CONDEMNED: &str =
    "this worker is about to exit, since too many of its KV pages are in quarantine; retry on another worker";

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A step ran: the next turn is due at once.
    Worked,
    /// Nothing to compute before mail, a wake-up, or this time.
    Idle { until: Time },
}

/// See the module's documentation.
pub struct Core {
    scheduler: Scheduler,
    backend: Box<dyn Backend>,
    role: RoleDriver,
    text: Arc<dyn Detokenizers>,
    eos: Arc<[u32]>,
    samples: BTreeMap<SeqId, Sample>,
    /// P: pages that the transfer reads, per sample, until it is quiet (H5).
    sources: BTreeMap<SeqId, Lease>,
    logits: Vec<f32>,
    scratch: Scratch,
    queue_max: u32,
    quarantine: Quarantine,
    totals: Totals,
    rate: Rate,
}

#[derive(Debug, Default)]
struct Totals {
    preemptions: u64,
    steps: u64,
    prompt_tokens: u64,
    generated_tokens: u64,
    finished: u64,
    failed: u64,
    aborted: u64,
}

impl Core {
    pub fn new(parts: EngineParts) -> Self {
        let limits = Limits::new(&parts.config);
        let pages = parts.config.max_total_tokens / parts.config.page_size;
        Self {
            scheduler: Scheduler::new(limits, pages),
            backend: parts.backend,
            role: parts.role,
            text: parts.text,
            eos: parts.eos,
            samples: BTreeMap::new(),
            sources: BTreeMap::new(),
            logits: Vec::new(),
            scratch: Scratch::default(),
            queue_max: parts.config.queue_requests_max,
            quarantine: Quarantine::new(parts.config.quarantine_pages_max, pages),
            totals: Totals::default(),
            rate: Rate::default(),
        }
    }

    /// One turn: at most one step.
    pub fn turn(&mut self, now: Time, mail: Mail) -> Turn {
        self.take_mail(now, mail);
        self.poll_prefill(now);
        self.poll_decode(now);
        self.watch_quarantine(now);
        self.reserve(now);
        let plan = self.scheduler.plan();
        self.totals.preemptions += plan.preempted as u64;
        if plan.slices.is_empty() {
            self.rate.idle(now, self.totals.generated_tokens);
            return if plan.preempted > 0 { Turn::Worked } else { Turn::Idle { until: self.next_deadline() } };
        }
        self.step(now, &plan);
        self.rate.worked(now, self.totals.generated_tokens);
        Turn::Worked
    }

    fn next_deadline(&self) -> Time {
        match &self.role {
            RoleDriver::Null => Time::NEVER,
            RoleDriver::Prefill(role) => role.next_deadline(),
            RoleDriver::Decode(role) => role.next_deadline(),
        }
    }

    /// Plants a fault in this engine; the machine of its role has its own.
    #[cfg(feature = "sabotage")]
    pub fn plant(&mut self, planted: tandem_handoff::sabotage::Planted) {
        self.scheduler.plant(planted);
    }

    /// For looks and checks from outside.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Past the limit nothing more is admitted, and what waits for its first pages ends at once, so that it can go elsewhere;
    /// what holds pages goes on.
    fn watch_quarantine(&mut self, now: Time) {
        let quarantined = match &self.role {
            RoleDriver::Null => 0,
            RoleDriver::Prefill(role) => role.queues().quarantined_pages,
            RoleDriver::Decode(role) => role.queues().quarantined_pages,
        };
        if !self.quarantine.see(quarantined) {
            return;
        }
        let waiting: Vec<SeqId> = self.scheduler.waiting().iter().map(|sequence| sequence.id).collect();
        for id in waiting {
            self.end(now, id, SampleErrorKind::Unavailable, CONDEMNED.into());
        }
    }

    /// Why nothing more is admitted.
    pub fn excess(&self) -> Option<Excess> {
        self.quarantine.excess()
    }

    /// Samples that wait for their first pages.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting().len()
    }

    fn step(&mut self, now: Time, plan: &Plan) {
        let mut logits = std::mem::take(&mut self.logits);
        logits.clear();
        let freed = self.free_under_step(now, plan);
        let slices: Vec<Slice<'_>> =
            plan.slices.iter().map(|planned| slice(&self.scheduler, planned, &freed)).collect();
        let outcome = self.backend.step(&slices, &mut logits);
        drop(slices);
        self.totals.steps += 1;
        match outcome {
            Ok(()) => self.take_rows(now, plan, &logits),
            Err(error) => {
                tracing::error!(%error, sequences = plan.slices.len(), "a step failed, its samples end");
                for planned in &plan.slices {
                    let message = format!("a step of the model failed: {error}");
                    self.end(now, planned.id, SampleErrorKind::Internal, message);
                }
            }
        }
        self.logits = logits;
    }

    fn take_rows(&mut self, now: Time, plan: &Plan, logits: &[f32]) {
        let vocab = self.backend.vocab();
        let mut rest = logits;
        for planned in &plan.slices {
            let rows = match planned.rows {
                LogitRows::None => 0,
                LogitRows::Last => 1,
                LogitRows::All => planned.len,
            };
            let (own, others) = rest.split_at(rows * vocab);
            rest = others;
            self.advance(now, planned, own, vocab);
        }
    }

    /// Books one slice of a finished step, and samples where it was the last of its sequence.
    fn advance(&mut self, now: Time, planned: &Planned, rows: &[f32], vocab: usize) {
        let id = planned.id;
        let from = self.scheduler.get(id).prompt_rows_from;
        let prompt_len = self.scheduler.get(id).prompt_len;
        self.scheduler.computed(id, planned.len);
        self.totals.prompt_tokens += prompt_len.min(planned.start + planned.len).saturating_sub(planned.start) as u64;
        if let (LogitRows::All, Some(from)) = (planned.rows, from) {
            let sample = self.samples.get_mut(&id).expect("a running sequence has a sample");
            let next = sample.take_prompt_rows(from, planned.start, rows, vocab);
            self.scheduler.prompt_rows_seen(id, next);
        }
        if planned.last {
            self.sample(now, id, &rows[rows.len() - vocab..]);
        } else {
            self.push_chunk(now, id);
        }
    }

    fn sample(&mut self, now: Time, id: SeqId, row: &[f32]) {
        let sample = self.samples.get_mut(&id).expect("a running sequence has a sample");
        let is_prefill = matches!(self.role, RoleDriver::Prefill(_));
        if !is_prefill {
            sample.send_prompt();
            if sample.max_tokens == 0 {
                return self.finish_unsaid(id);
            }
        }
        match sampling::sample(row, &sample.sampler, &mut self.scratch) {
            Ok(token) => {
                let logprob = sample.output_logprob(row, token);
                match is_prefill {
                    true => self.prefilled(now, id, token, logprob),
                    false => self.put_out(id, token, logprob),
                }
            }
            Err(fault) => {
                let kind = match fault {
                    SamplingFault::AllBanned(_) => SampleErrorKind::BadRequest,
                    SamplingFault::NotANumber(_) | SamplingFault::NothingLeft(_) => SampleErrorKind::Internal,
                };
                self.end(now, id, kind, format!("no token could be sampled: {fault}"));
            }
        }
    }

    /// Ends a sample by a failure, wherever it is. Its pages stay with an attempt that may still touch them.
    fn end(&mut self, now: Time, id: SeqId, kind: SampleErrorKind, message: String) {
        let Some(sample) = self.samples.remove(&id) else { return };
        match kind {
            SampleErrorKind::Aborted => self.totals.aborted += 1,
            _ => self.totals.failed += 1,
        }
        let stage = self.scheduler.remove(id);
        self.cancel_handoff(now, id, stage, kind, &message);
        sample.fail(SampleError { kind, message });
    }

    /// Ends every sample because the worker stops, those in `submissions` too.
    pub fn shut_down(&mut self, now: Time, submissions: Vec<Submission>) {
        for submission in submissions {
            self.accept(now, submission);
        }
        let ids: Vec<SeqId> = self.samples.keys().copied().collect();
        for id in ids {
            let message = "the worker is shutting down; retry on another worker".into();
            self.end(now, id, SampleErrorKind::Unavailable, message);
        }
        self.poll_prefill(now);
        self.poll_decode(now);
    }

    /// What the engine tells about itself after a turn.
    pub fn loads(&self) -> Loads {
        let scheduler = &self.scheduler;
        let counts = scheduler.pool().counts();
        let queues = scheduler.waiting().iter().chain(scheduler.retracted());
        let live = queues.chain(scheduler.running()).chain(scheduler.handoff().values());
        let mut loads = Loads {
            running: scheduler.running().len() as u32,
            waiting: (scheduler.waiting().len() + scheduler.retracted().len()) as u32,
            used_tokens: scheduler.running().iter().map(|sequence| sequence.computed as u64).sum(),
            total_tokens: live.map(|sequence| sequence.tokens.len() as u64).sum(),
            page_size: scheduler.limits().page_size as u32,
            total_pages: scheduler.pool().total() as u32,
            free_pages: counts.free as u32,
            used_pages: (counts.sequences + counts.attempts + counts.pinned) as u32,
            running_max: scheduler.limits().running_max as u32,
            queue_max: self.queue_max,
            quarantine_pages_max: self.quarantine.max(),
            excess: self.excess(),
            gen_throughput: self.rate.per_second(),
            retracted: scheduler.retracted().len() as u32,
            retracted_total: self.totals.preemptions,
            steps_total: self.totals.steps,
            prompt_tokens_total: self.totals.prompt_tokens,
            generated_tokens_total: self.totals.generated_tokens,
            finished_total: self.totals.finished,
            failed_total: self.totals.failed,
            aborted_total: self.totals.aborted,
            ..Loads::default()
        };
        match &self.role {
            RoleDriver::Null => {}
            RoleDriver::Prefill(role) => {
                let queues = role.queues();
                loads.bootstrap_queue = queues.bootstrap;
                loads.inflight_queue = queues.inflight;
                loads.draining_pages = counts.pinned as u32;
                loads.quarantined_pages = queues.quarantined_pages;
            }
            RoleDriver::Decode(role) => {
                let queues = role.queues();
                loads.prealloc_queue = queues.prealloc + scheduler.waiting().len() as u32;
                loads.transfer_queue = queues.transfer;
                loads.draining_pages = queues.draining_pages;
                loads.quarantined_pages = queues.quarantined_pages;
            }
        }
        loads
    }
}

/// `freed` are the pages of sequences that have let go of them too early, which only a planted fault does.
fn slice<'a>(scheduler: &'a Scheduler, planned: &Planned, freed: &'a [(SeqId, Vec<u32>)]) -> Slice<'a> {
    let sequence = scheduler.get(planned.id);
    let early = freed.iter().find(|(id, _)| *id == planned.id);
    Slice {
        tokens: &sequence.tokens[planned.start..planned.start + planned.len],
        start: planned.start as u32,
        pages: early.map_or(sequence.pages.indices(), |(_, pages)| pages),
        logits: planned.rows,
    }
}

#[cfg(test)]
mod tests;
