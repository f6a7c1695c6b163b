//! Faults that a test build may plant, one at a time, to show that the checkers of `tests/sim` find them. *Pure.*
//!
//! Without the feature `sabotage` nothing can be planted: [`Planted`] has no contents and [`Planted::is`] is `false` for
//! the compiler too, so that no build of the product has a switch in it. Where types make a fault impossible, such as
//! redeeming pages without a proof, the fault stands one step before: the machine makes a false proof.

/// One planted fault. The text says what it breaks, which invariant that violates, and what traffic shows it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// D frees an ended attempt's pages when the drain deadline passes (H2). Shown by a write that lands after it.
    FreesOnTimer,
    /// D takes the loss of a channel for a fence: pages of its attempts are free at once (H2). Shown by a lost channel
    /// with one-sided writes in flight.
    SkipsFence,
    /// D frees an ended attempt's pages at once when nothing has landed yet, as if they had never been shown (H2). Shown by
    /// an early abort with writes in flight.
    FreesUntouchedPages,
    /// D takes Drained of another attempt for that of one that drains (H3, then H2). Shown by two attempts of one channel
    /// that end together, on a fabric where Drained proves quiet.
    ForgetsAttemptOnDrained,
    /// D lets Failed of an ended attempt end another one (H3). Shown by aborts of both sides that cross, beside a live
    /// attempt of the same channel.
    ForgetsAttemptOnFailed,
    /// D takes Done of an ended attempt for another one's (H3). Shown by an abort of D that crosses Done, beside a live
    /// attempt with as many pages.
    ForgetsAttemptOnDone,
    /// D says Settled when it revokes, not when it is quiet (H5). Shown by an abort on a fabric where D copies.
    SettlesBeforeQuiet,
    /// D counts landed pieces and keeps no set (H4). Shown by a piece that lands twice.
    CountsPieces,
    /// D publishes when everything landed, before Done (H4). Shown by any transfer whose Done comes last.
    CommitsBeforeDone,
    /// D publishes at Done, before everything landed (H4). Shown by any transfer whose Done overtakes a piece.
    CommitsBeforeLanded,
    /// D ignores a Failed that comes after Done (H4). Shown by a P that fails after Done while pieces are still on their
    /// way.
    CommitsAfterFailure,
    /// D compares checksums and takes no notice (H4). Shown by bytes that change on their way.
    SkipsChecksums,
    /// D gives the pages of an ended attempt back once more when it is cancelled late (H1). Shown by a cancel of what is
    /// draining: the engine sends one after each failure that the peer reports.
    FreesTwice,
    /// D gives an attempt the number of the one before while that one drains (H8). Shown by a new request while another
    /// drains.
    NumbersRetryAlike,
    /// D sets no deadline while its pages are offered (H6). Shown by a Done, Failed or piece that never comes, while the
    /// channel lives.
    NoDeadlineWhileOffered,
    /// P says Drained at the end of an attempt, before its posts have settled (H2). Shown by an abort with writes in
    /// flight, on a fabric where Drained proves quiet.
    DrainsBeforeQuiet,
    /// P stops the posts of an attempt whose Done is out: a fabric that fills up a begun piece lets D publish the filling
    /// (H4). Shown by an end at P while its last pieces are under way over tcp.
    StopsAfterDone,
    /// P says Drained though a post's outcome is unknown (H2). Shown by a post that is settled as unknown and lands later.
    DrainsPoisoned,
    /// P books the settlement of one attempt on another that waits for its own (H3, H5). Shown by two attempts of one
    /// channel that settle at different times.
    SettlesAnother,
    /// P compares the lengths of the two prompts and not their tokens (H9). Shown by a prompt that differs by one token.
    SkipsPromptHash,
    /// P and D cut unequal lists of pages to the shorter one instead of refusing (H4). Shown by prompts of different
    /// lengths on the two sides.
    TruncatesPages,
    /// P keeps no tombstone (H6). Shown by one half that ends before the other comes, with nobody to abort that one.
    IgnoresEarlyAbort,
    /// P frees a room when its attempt ends, before that is quiet (H7). Shown by a room that is used again while its old
    /// attempt drains.
    ReusesRoomEarly,
    /// P accepts a Reserve whose number is not above the last one (H3). Shown by a Reserve that comes twice.
    AcceptsOldNumbers,
    /// P sets no deadline while it waits for a Reserve (H6). Shown by a decode leg that never comes, and no abort.
    NoDeadlineWhileWaiting,
    /// P's engine frees the source pages when the request ends, before their posts have settled (H5). Shown by an abort
    /// with posts in flight, and another prompt after it.
    FreesSourceAtEnd,
    /// D's engine frees a sequence's pages under its last step, and shows them to a peer (H10). Shown by a full pool with
    /// requests that wait for pages while others end by length.
    FreesUnderStep,
    /// P's engine pushes one page more than the device has written (H5). Shown by a prompt of more than one chunk.
    PushesUnwritten,
    /// A preempted sequence keeps its count of computed tokens (H4). Shown by a preemption.
    KeepsComputed,
    /// P's engine leaves what an earlier owner wrote behind the last token of a page (the layout's promise, H4). Shown by
    /// a prompt that ends within a page that served before.
    LeavesTail,
    /// D's engine puts the first token out twice (H7). Shown by any split answer of two tokens.
    AppliesFirstTwice,
}

impl Fault {
    pub const ALL: [Fault; 31] = [
        Fault::FreesOnTimer,
        Fault::SkipsFence,
        Fault::FreesUntouchedPages,
        Fault::ForgetsAttemptOnDrained,
        Fault::ForgetsAttemptOnFailed,
        Fault::ForgetsAttemptOnDone,
        Fault::SettlesBeforeQuiet,
        Fault::CountsPieces,
        Fault::CommitsBeforeDone,
        Fault::CommitsBeforeLanded,
        Fault::CommitsAfterFailure,
        Fault::SkipsChecksums,
        Fault::FreesTwice,
        Fault::NumbersRetryAlike,
        Fault::NoDeadlineWhileOffered,
        Fault::DrainsBeforeQuiet,
        Fault::StopsAfterDone,
        Fault::DrainsPoisoned,
        Fault::SettlesAnother,
        Fault::SkipsPromptHash,
        Fault::TruncatesPages,
        Fault::IgnoresEarlyAbort,
        Fault::ReusesRoomEarly,
        Fault::AcceptsOldNumbers,
        Fault::NoDeadlineWhileWaiting,
        Fault::FreesSourceAtEnd,
        Fault::FreesUnderStep,
        Fault::PushesUnwritten,
        Fault::KeepsComputed,
        Fault::LeavesTail,
        Fault::AppliesFirstTwice,
    ];
}

/// Which fault is planted, if any.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Planted {
    #[cfg(feature = "sabotage")]
    fault: Option<Fault>,
}

impl Planted {
    #[cfg(feature = "sabotage")]
    pub const fn fault(fault: Fault) -> Self {
        Self { fault: Some(fault) }
    }

    #[cfg(feature = "sabotage")]
    pub fn is(self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(feature = "sabotage"))]
    pub const fn is(self, _fault: Fault) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_fault_is_listed_once() {
        assert_eq!(BTreeSet::from(Fault::ALL).len(), Fault::ALL.len());
        assert_eq!(Fault::ALL.map(|fault| fault as usize), std::array::from_fn::<_, { Fault::ALL.len() }, _>(|at| at));
    }

    #[test]
    fn nothing_is_planted_unless_it_is_asked_for() {
        assert!(Fault::ALL.iter().all(|&fault| !Planted::default().is(fault)));
        #[cfg(not(feature = "sabotage"))]
        assert_eq!(size_of::<Planted>(), 0);
        #[cfg(feature = "sabotage")]
        assert!(Fault::ALL.iter().all(|&fault| Planted::fault(fault).is(fault)));
    }
}
