//! What comes in by the inbox: new samples, streams that went away, aborts by name.

use tandem_handoff::{
    ids::Time,
    sabotage::Fault,
    ticket::Ticket,
    wire::{Cause, CauseKind, Side, TOP_LOGPROBS_MAX},
};

use super::{CONDEMNED, Core, RoleDriver};
use crate::{
    engine::{
        inbox::{Abort, Mail, Submission},
        sample::Sample,
    },
    output::Output,
    request::{SampleError, SampleErrorKind, SampleEvent, SampleRequest, SeqId},
    sampling::SamplerState,
    scheduler::{Sequence, Stage},
};

const ROLE_SERVER: &str = "this is a role server, send requests to the gateway (the request has no bootstrap_host, \
                           bootstrap_port and bootstrap_room)";

impl Core {
    pub(super) fn take_mail(&mut self, now: Time, mail: Mail) {
        for submission in mail.submissions {
            self.accept(now, submission);
        }
        for id in mail.gone {
            self.end(now, id, SampleErrorKind::Aborted, "the client left".into());
        }
        for abort in mail.aborts {
            let named = |rid: &str| match &abort {
                Abort::Request(named) => named == rid,
                Abort::All => true,
            };
            let ids: Vec<SeqId> = self.samples.iter().filter(|(_, s)| named(&s.rid)).map(|(&id, _)| id).collect();
            for id in ids {
                self.end(now, id, SampleErrorKind::Aborted, "the request was aborted by /abort_request".into());
            }
        }
    }

    /// Takes a sample in, or refuses it by its first and last event.
    pub(super) fn accept(&mut self, now: Time, submission: Submission) {
        let Submission { id, mut request, events } = submission;
        if let Err(error) = self.admissible(&request) {
            self.totals.failed += 1;
            // A refused event means that the client has left already.
            let _ = events.try_send(SampleEvent::Failed(error));
            return;
        }
        let room = self.scheduler.tokens_max() - request.prompt.len();
        let max_tokens = request.sampling.max_tokens.min(room as u32);
        let tokens_max = request.prompt.len() + max_tokens as usize;
        if matches!(self.role, RoleDriver::Decode(_)) {
            // D does not compute the prompt; its logprobs stay on P's leg.
            request.logprobs.prompt_from = None;
        }
        let rows_from = Sample::prompt_rows_from(&request);
        let mut sequence = Sequence::new(id, now, &request.prompt, tokens_max, rows_from);
        sequence.ticket = request.ticket.clone();
        let sampler = SamplerState::new(&request.sampling, request.sample_index, &request.prompt, &self.eos);
        let text = self.text.start(request.sampling.skip_special_tokens);
        let output = Output::new(text, &request.sampling, &self.eos, max_tokens);
        if let (RoleDriver::Prefill(role), Some(ticket)) = (&mut self.role, &request.ticket) {
            role.request(now, id, ticket, &request.prompt);
        }
        self.scheduler.add(sequence);
        self.samples.insert(id, Sample::new(request, events, sampler, output, max_tokens));
    }

    fn admissible(&self, request: &SampleRequest) -> Result<(), SampleError> {
        if self.excess().is_some() {
            return Err(SampleError { kind: SampleErrorKind::Unavailable, message: CONDEMNED.into() });
        }
        self.sound(request).map_err(|message| SampleError { kind: SampleErrorKind::BadRequest, message })
    }

    /// # Errors
    /// What is wrong with the request itself.
    fn sound(&self, request: &SampleRequest) -> Result<(), String> {
        if !matches!(self.role, RoleDriver::Null) {
            if request.ticket.is_none() {
                return Err(ROLE_SERVER.into());
            }
            if request.logprobs.top as usize > TOP_LOGPROBS_MAX {
                let asked = request.logprobs.top;
                return Err(format!("{asked} top logprobs were asked for, {TOP_LOGPROBS_MAX} is the most"));
            }
        }
        let vocab = self.backend.vocab();
        if let Some(token) = request.prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(format!("the prompt has the token id {token}, the model's vocabulary has {vocab} tokens"));
        }
        self.scheduler.fits(request.prompt.len())
    }

    /// Tells the handoff that a sample has ended, where it knows of it.
    pub(super) fn cancel_handoff(
        &mut self,
        now: Time,
        id: SeqId,
        stage: Option<Stage>,
        kind: SampleErrorKind,
        message: &str,
    ) {
        let cause = |side| Cause::new(side, cause_kind(kind), message);
        match &mut self.role {
            RoleDriver::Null => {}
            RoleDriver::Prefill(role) => {
                role.cancel(now, id, cause(Side::Prefill));
                if self.scheduler.limits().planted.is(Fault::FreesSourceAtEnd) {
                    self.quiet(id);
                }
            }
            RoleDriver::Decode(role) if stage == Some(Stage::Handoff) => role.cancel(now, id, cause(Side::Decode)),
            RoleDriver::Decode(_) => {}
        }
    }
}

fn cause_kind(kind: SampleErrorKind) -> CauseKind {
    match kind {
        SampleErrorKind::BadRequest => CauseKind::Refused,
        SampleErrorKind::Aborted => CauseKind::Aborted,
        SampleErrorKind::Unavailable => CauseKind::Unavailable,
        SampleErrorKind::Timeout => CauseKind::Timeout,
        SampleErrorKind::Peer => CauseKind::Lost,
        SampleErrorKind::Internal => CauseKind::Internal,
    }
}

/// The ticket of a sequence on a role server; `accept` refuses one without.
pub(super) fn ticket(ticket: &Option<Ticket>) -> &Ticket {
    ticket.as_ref().expect("a sequence of a role server has a ticket")
}
