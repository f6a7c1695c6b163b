//! P's books of posted pieces: which D knows of, which it does not, and how each came to its end. *Pure.*
//!
//! ```text
//!              announce                   answer: copied
//!   queued ----------------> announced ---------------------------> Sent
//!     | stop, close,            |  | answer: passed over
//!     | peer settled            |  +--------------> passed ---+
//!     v                         |  stop, peer settled, close  v
//!   Dropped                     |                          Dropped
//!                               +-- peer settled: Dropped; D's end of the socket closed, or D's process gone: Unknown
//! ```
//!
//! Each posted piece is settled exactly once. D passes a piece over when it has ended the attempt; its Abort is on its way
//! then, and the piece stays open until P has ended the attempt too, so that D's cause wins and not a vague one of P.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use tandem_handoff::{
    ids::{Attempt, Channel},
    source::{Piece, Settlement},
};

use super::messages::{Answer, Outcome, Post};
use crate::{SourceReport, tally::Tally};

/// Posts of one channel that D has not answered, at most. Their answers fit into a socket's buffer, so that D's copier
/// need not wait for P to read them; the rest can be taken back at once by a stop.
pub(super) const ANNOUNCED_MAX: usize = 1024;

#[derive(Default)]
pub(super) struct Ledger {
    lanes: HashMap<Channel, Lane>,
    attempts: BTreeMap<Attempt, Posts>,
    broken: Vec<(Channel, String)>,
    /// Something happened that the engine waits for.
    wake: bool,
}

/// The posts of one channel with a socket.
#[derive(Default)]
struct Lane {
    queued: VecDeque<(Attempt, Piece)>,
    announced: HashSet<(Attempt, u32)>,
    closed: bool,
}

/// The posts of one attempt, until all are settled and reported.
#[derive(Default)]
struct Posts {
    stopped: bool,
    tally: Tally,
    /// Pieces that D has passed over; they are outstanding.
    passed: u64,
}

impl Posts {
    fn settle_passed(&mut self) {
        let passed = std::mem::take(&mut self.passed);
        self.tally.settle(passed, Settlement::Dropped);
    }
}

impl Ledger {
    /// False when the channel has a lane already.
    pub fn open(&mut self, channel: Channel) -> bool {
        let fresh = !self.lanes.contains_key(&channel);
        self.lanes.entry(channel).or_default();
        fresh
    }

    pub fn has(&self, channel: Channel) -> bool {
        self.lanes.contains_key(&channel)
    }

    pub fn post(&mut self, attempt: Attempt, pieces: Vec<Piece>) {
        let posts = self.attempts.entry(attempt).or_default();
        posts.tally.posted(pieces.len());
        match self.lanes.get_mut(&attempt.channel()).filter(|lane| !lane.closed && !posts.stopped) {
            Some(lane) => lane.queued.extend(pieces.into_iter().map(|piece| (attempt, piece))),
            None => self.settle(attempt, pieces.len() as u64, Settlement::Dropped),
        }
    }

    /// The next posts that D is to hear of, so many at most. From here on D may read their ranges.
    pub fn announce(&mut self, channel: Channel, posts_max: usize) -> Vec<Post> {
        let Some(lane) = self.lanes.get_mut(&channel) else {
            return Vec::new();
        };
        let room = ANNOUNCED_MAX.saturating_sub(lane.announced.len()).min(posts_max).min(lane.queued.len());
        let next: Vec<(Attempt, Piece)> = lane.queued.drain(..room).collect();
        let mut posts = Vec::with_capacity(room);
        for (attempt, piece) in next {
            let fresh = lane.announced.insert((attempt, piece.index));
            assert!(fresh, "H5: piece {} of {attempt:?} is posted twice", piece.index);
            posts.push(Post {
                attempt,
                piece: piece.index,
                rank: piece.source_rank,
                offset: piece.source_offset as u64,
                bytes: piece.bytes as u64,
            });
        }
        posts
    }

    /// D has dealt with a post. Of one that is settled already, or never was, this changes nothing (H3).
    pub fn answered(&mut self, channel: Channel, answer: Answer) {
        let Answer { attempt, piece, outcome } = answer;
        let known = self.lanes.get_mut(&channel).is_some_and(|lane| lane.announced.remove(&(attempt, piece)));
        if !known {
            return;
        }
        let Some(posts) = self.attempts.get_mut(&attempt) else {
            return;
        };
        match outcome {
            Outcome::Copied => self.settle(attempt, 1, Settlement::Sent),
            Outcome::PassedOver if posts.stopped => self.settle(attempt, 1, Settlement::Dropped),
            Outcome::PassedOver => posts.passed += 1,
        }
    }

    /// P ended the attempt: announces nothing more of it.
    pub fn stop(&mut self, attempt: Attempt) {
        let Some(posts) = self.attempts.get_mut(&attempt) else {
            return;
        };
        posts.stopped = true;
        posts.settle_passed();
        let queued = self.lanes.get_mut(&attempt.channel()).map_or(0, |lane| {
            let before = lane.queued.len();
            lane.queued.retain(|(of, _)| *of != attempt);
            before - lane.queued.len()
        });
        self.settle(attempt, queued as u64, Settlement::Dropped);
    }

    /// D says that its copier reads nothing of the attempt any more.
    pub fn peer_settled(&mut self, attempt: Attempt) {
        self.stop(attempt);
        let announced = self.lanes.get_mut(&attempt.channel()).map_or(0, |lane| {
            let before = lane.announced.len();
            lane.announced.retain(|(of, _)| *of != attempt);
            before - lane.announced.len()
        });
        self.settle(attempt, announced as u64, Settlement::Dropped);
    }

    /// The channel takes no further posts; those that D knows of stay open until it is proven that D reads no more.
    pub fn close(&mut self, channel: Channel) {
        let Some(lane) = self.lanes.get_mut(&channel) else {
            return;
        };
        lane.closed = true;
        for (attempt, _) in std::mem::take(&mut lane.queued) {
            self.settle(attempt, 1, Settlement::Dropped);
        }
        let of_channel: Vec<Attempt> =
            self.attempts.keys().filter(|attempt| attempt.channel() == channel).copied().collect();
        for attempt in of_channel {
            self.stop(attempt);
        }
    }

    /// It is proven that D reads nothing of the channel any more.
    pub fn gone(&mut self, channel: Channel) {
        let Some(lane) = self.lanes.get_mut(&channel) else {
            return;
        };
        for (attempt, _) in std::mem::take(&mut lane.announced) {
            self.settle(attempt, 1, Settlement::Unknown);
        }
        if lane_is_over(self.lanes.get(&channel)) {
            self.lanes.remove(&channel);
        }
    }

    pub fn broke(&mut self, channel: Channel, why: String) {
        self.broken.push((channel, why));
        self.wake = true;
    }

    pub fn is_closed(&self, channel: Channel) -> bool {
        self.lanes.get(&channel).is_none_or(|lane| lane.closed)
    }

    /// Closed, and nothing of it is known to D: the lane is forgotten.
    pub fn end_if_over(&mut self, channel: Channel) -> bool {
        let over = lane_is_over(self.lanes.get(&channel));
        if over {
            self.lanes.remove(&channel);
        }
        over
    }

    pub fn reports(&mut self) -> Vec<SourceReport> {
        let mut reports = Vec::new();
        self.attempts.retain(|&attempt, posts| {
            posts.tally.report(attempt, &mut reports);
            !posts.tally.is_settled()
        });
        reports.extend(self.broken.drain(..).map(|(channel, why)| SourceReport::Broken { channel, why }));
        reports
    }

    /// Whether the engine is to be woken for what happened since the last call.
    pub fn take_wake(&mut self) -> bool {
        std::mem::take(&mut self.wake)
    }

    fn settle(&mut self, attempt: Attempt, pieces: u64, how: Settlement) {
        if let Some(posts) = self.attempts.get_mut(&attempt) {
            posts.tally.settle(pieces, how);
            self.wake |= posts.tally.is_settled();
        }
    }
}

fn lane_is_over(lane: Option<&Lane>) -> bool {
    lane.is_none_or(|lane| lane.closed && lane.announced.is_empty())
}

#[cfg(test)]
mod tests {
    use tandem_handoff::ids::{Incarnation, SessionId};

    use super::*;

    const CHANNEL: Channel = Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3) };

    fn piece(index: u32) -> Piece {
        Piece { index, source_rank: 0, source_offset: 64, target_rank: 0, target_offset: 0, bytes: 8 }
    }

    fn posted(pieces: u32, announced: usize) -> (Ledger, Attempt) {
        let (mut ledger, attempt) = (Ledger::default(), CHANNEL.attempt(1));
        assert!(ledger.open(CHANNEL) && !ledger.open(CHANNEL));
        ledger.post(attempt, (0..pieces).map(piece).collect());
        assert_eq!(ledger.announce(CHANNEL, announced).len(), announced);
        (ledger, attempt)
    }

    fn answer(attempt: Attempt, piece: u32, outcome: Outcome) -> Answer {
        Answer { attempt, piece, outcome }
    }

    fn settled(attempt: Attempt, pieces: u64, how: Settlement) -> SourceReport {
        SourceReport::Settled { attempt, pieces, how }
    }

    #[test]
    fn a_stop_takes_back_what_d_does_not_know_and_the_rest_waits_for_d() {
        let (mut ledger, attempt) = posted(5, 2);
        ledger.stop(attempt);
        ledger.stop(attempt);
        assert_eq!(ledger.reports(), [settled(attempt, 3, Settlement::Dropped)]);
        ledger.answered(CHANNEL, answer(attempt, 0, Outcome::Copied));
        assert!(!ledger.take_wake());
        ledger.answered(CHANNEL, answer(attempt, 1, Outcome::PassedOver));
        assert!(ledger.take_wake());
        ledger.answered(CHANNEL, answer(attempt, 1, Outcome::Copied));
        let both = [settled(attempt, 1, Settlement::Sent), settled(attempt, 1, Settlement::Dropped)];
        assert_eq!(ledger.reports(), both);
        assert_eq!(ledger.reports(), []);
    }

    #[test]
    fn a_piece_that_d_passed_over_waits_for_the_end_of_the_attempt_at_p() {
        let (mut ledger, attempt) = posted(1, 1);
        ledger.answered(CHANNEL, answer(attempt, 0, Outcome::PassedOver));
        assert!(!ledger.take_wake() && ledger.reports().is_empty());
        ledger.stop(attempt);
        assert_eq!(ledger.reports(), [settled(attempt, 1, Settlement::Dropped)]);
    }

    #[test]
    fn settled_of_one_attempt_leaves_another_alone() {
        let (mut ledger, attempt) = posted(3, 3);
        let other = CHANNEL.attempt(2);
        ledger.post(other, vec![piece(0)]);
        ledger.announce(CHANNEL, 9);
        ledger.peer_settled(attempt);
        ledger.peer_settled(CHANNEL.attempt(7));
        assert_eq!(ledger.reports(), [settled(attempt, 3, Settlement::Dropped)]);
        ledger.answered(CHANNEL, answer(attempt, 0, Outcome::Copied));
        ledger.answered(CHANNEL, answer(other, 0, Outcome::Copied));
        assert_eq!(ledger.reports(), [settled(other, 1, Settlement::Sent)]);
    }

    #[test]
    fn after_a_close_the_announced_pieces_wait_for_proof() {
        let (mut ledger, attempt) = posted(3, 1);
        ledger.close(CHANNEL);
        assert_eq!(ledger.reports(), [settled(attempt, 2, Settlement::Dropped)]);
        assert!(!ledger.end_if_over(CHANNEL));
        ledger.post(attempt, vec![piece(9)]);
        assert_eq!(ledger.reports(), [settled(attempt, 1, Settlement::Dropped)]);
        ledger.gone(CHANNEL);
        assert_eq!(ledger.reports(), [settled(attempt, 1, Settlement::Unknown)]);
        assert!(!ledger.has(CHANNEL));
    }

    #[test]
    fn d_hears_of_so_many_posts_at_once() {
        let (mut ledger, attempt) = posted(ANNOUNCED_MAX as u32 + 5, ANNOUNCED_MAX);
        assert_eq!(ledger.announce(CHANNEL, 9), []);
        ledger.answered(CHANNEL, answer(attempt, 0, Outcome::Copied));
        assert_eq!(ledger.announce(CHANNEL, 9).len(), 1);
    }
}
