//! The prefill side of the handoff as the engine thread sees it: calls that never block, and facts that come back.

use std::ops::Range;

use tandem_handoff::{
    ids::Time,
    ticket::Ticket,
    wire::{Cause, FirstToken},
};

use crate::request::{SampleError, SeqId};

/// What the prefill side tells the engine. Each request gets exactly one of `Delivered` and `Failed`, and after it
/// exactly one `Quiet`.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillFact {
    /// D holds pages for the whole prompt: prefill may start.
    Reserved {
        id: SeqId,
        /// Tokens that D holds already, whole pages from the start of the prompt; they are computed, not pushed.
        held_tokens: u32,
    },
    /// All pages were pushed and Done was sent: the HTTP leg may answer.
    Delivered {
        id: SeqId,
    },
    Failed {
        id: SeqId,
        error: SampleError,
    },
    /// No write names the request's pages any more: they may be freed (H5).
    Quiet {
        id: SeqId,
    },
}

/// The prefill side of the handoff. All calls are made on the engine thread and never block.
pub trait PrefillHandoff: Send {
    /// Opens the rendezvous of one sample.
    fn request(&mut self, now: Time, id: SeqId, ticket: &Ticket, prompt: &[u32]);

    /// The device has finished `pages[range]`, whole pages, contiguous from the last call's end. `pages` are the
    /// sequence's pages from token 0.
    fn chunk_written(&mut self, now: Time, id: SeqId, pages: &[u32], range: Range<usize>);

    /// The device has finished the last pages (the range may be empty), and `first` was sampled.
    fn finish(&mut self, now: Time, id: SeqId, pages: &[u32], range: Range<usize>, first: FirstToken);

    /// Ends the request. A second cancel, or one after the end, changes nothing. `Failed` (unless the request has ended
    /// already) and `Quiet` follow from `poll`.
    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause);

    /// Takes in frames, fabric facts and passed deadlines.
    fn poll(&mut self, now: Time) -> Vec<PrefillFact>;

    /// When `poll` must be called at the latest, if nothing wakes the engine before.
    fn next_deadline(&self) -> Time;

    /// Requests that wait for their decode worker's Reserve, and requests that are pushing or draining.
    fn queues(&self) -> PrefillQueues;
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillQueues {
    /// Requests without a Reserve.
    pub bootstrap: u32,
    /// Requests whose pages are pinned after their prefill, or after their end, until quiet.
    pub inflight: u32,
}
