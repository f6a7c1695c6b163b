//! The decode side of the handoff as the engine thread sees it: calls that never block, and facts that come back.

use tandem_handoff::{
    fence::{FenceProof, PublishedPages},
    ids::Time,
    ticket::Ticket,
    wire::{Cause, FirstToken},
};

use crate::request::{SampleError, SeqId};

/// What the decode side tells the engine. Each reserved list of pages comes back exactly once, by `Committed` or by
/// `Quiet`; a request gets exactly one of `Committed` and `Failed`.
#[derive(Debug, PartialEq)]
pub enum DecodeFact {
    /// Every piece landed and Done came: the sequence may decode (H4).
    Committed { id: SeqId, pages: PublishedPages, proof: FenceProof, first: FirstToken },
    /// The request is over; its pages stay with the attempt until `Quiet`.
    Failed { id: SeqId, error: SampleError },
    /// No write to these pages is in progress or can begin.
    Quiet { pages: PublishedPages, proof: FenceProof },
}

/// The decode side of the handoff. All calls are made on the engine thread and never block.
pub trait DecodeHandoff: Send {
    /// Offers pages for the whole prompt to the prefill worker that the ticket names.
    fn reserve(&mut self, now: Time, id: SeqId, ticket: &Ticket, prompt: &[u32], pages: PublishedPages);

    /// Ends the request if it is not committed; `Failed` and then `Quiet` follow from `poll`. A second cancel, or one
    /// after the end, changes nothing.
    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause);

    /// Takes in frames, fabric facts and passed deadlines.
    fn poll(&mut self, now: Time) -> Vec<DecodeFact>;

    /// When `poll` must be called at the latest, if nothing wakes the engine before.
    fn next_deadline(&self) -> Time;

    fn queues(&self) -> DecodeQueues;
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeQueues {
    /// Requests that wait for a channel to their prefill worker.
    pub prealloc: u32,
    /// Requests whose pages have been offered.
    pub transfer: u32,
    /// Pages of ended attempts that are not proven quiet yet.
    pub draining_pages: u32,
    /// Of these, pages past the drain deadline.
    pub quarantined_pages: u32,
}
