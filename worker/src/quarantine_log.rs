//! What an operator reads of a role's quarantine: one warning for each peer that holds pages past the drain deadline, and
//! one line when all pages are back. Promises that a peer is named once until then, however many of its attempts follow.

use std::collections::BTreeMap;

use tandem_handoff::ids::{Attempt, Incarnation};

/// What a prefill worker waits for.
pub(crate) const WRITES_END: &str =
    "its word that nothing reads or writes them for it any more, or the end of its process";
/// What a decode worker waits for.
pub(crate) const FENCED: &str = "proof that no write of it is under way, or the end of its process";

pub(crate) struct QuarantineLog {
    /// Of this worker.
    role: &'static str,
    waits_for: &'static str,
    /// Peers that were named since the quarantine was empty.
    named: Vec<Incarnation>,
    /// The most pages since then.
    most: usize,
}

/// The pages that one peer holds.
struct Held {
    pages: usize,
    attempts: usize,
    first: Attempt,
}

impl QuarantineLog {
    pub fn new(role: &'static str, waits_for: &'static str) -> Self {
        Self { role, waits_for, named: Vec::new(), most: 0 }
    }

    /// Takes in the quarantined attempts with their pages, and `peer`, which tells an attempt's other side.
    pub fn look(&mut self, quarantined: impl Iterator<Item = (Attempt, usize)>, peer: fn(&Attempt) -> Incarnation) {
        let mut by_peer = BTreeMap::<Incarnation, Held>::new();
        for (attempt, pages) in quarantined {
            let held = by_peer.entry(peer(&attempt)).or_insert(Held { pages: 0, attempts: 0, first: attempt });
            held.pages += pages;
            held.attempts += 1;
        }
        let pages: usize = by_peer.values().map(|held| held.pages).sum();
        self.most = self.most.max(pages);
        for (peer, held) in &by_peer {
            if held.pages > 0 && !self.named.contains(peer) {
                self.named.push(*peer);
                self.warn(*peer, held);
            }
        }
        if pages == 0 && !self.named.is_empty() {
            let (role, most) = (self.role, self.most);
            tracing::info!(role, most, "all quarantined KV pages are back");
            self.named.clear();
            self.most = 0;
        }
    }

    fn warn(&self, peer: Incarnation, held: &Held) {
        let Held { pages, attempts, first } = held;
        tracing::warn!(
            role = self.role,
            pages,
            attempts,
            %peer,
            // The lines about the channel name the session too, with the peer's address and its process.
            session = first.session.0,
            first = %format_args!("{}.{}", first.decode, first.number),
            waits_for = self.waits_for,
            "KV pages of ended handoffs are in quarantine: their peer is lost or stopped; kill it if it does not run again"
        );
    }
}

#[cfg(test)]
mod tests {
    use tandem_handoff::ids::SessionId;

    use super::*;
    use crate::log_lines::logged;

    fn attempt(decode: u64, number: u64) -> Attempt {
        Attempt { prefill: Incarnation(1), decode: Incarnation(decode), session: SessionId(3), number }
    }

    #[test]
    fn each_peer_is_named_once_and_the_way_back_is_told() {
        let lines = logged("info", || {
            let mut log = QuarantineLog::new("prefill", WRITES_END);
            let mut look = |held: &[(Attempt, usize)]| log.look(held.iter().copied(), |attempt| attempt.decode);
            look(&[]);
            look(&[(attempt(0xab, 7), 5), (attempt(0xab, 8), 6)]);
            look(&[(attempt(0xab, 7), 5), (attempt(0xab, 8), 6), (attempt(0xab, 9), 1)]);
            look(&[(attempt(0xab, 7), 5), (attempt(0xcd, 2), 4)]);
            look(&[(attempt(0xcd, 2), 4)]);
            look(&[]);
            look(&[]);
            look(&[(attempt(0xab, 10), 2)]);
        });
        assert_eq!(lines.len(), 4, "{lines:#?}");
        for part in ["WARN", "pages=11 attempts=2 peer=00000000000000ab session=3 first=00000000000000ab.7", WRITES_END]
        {
            assert!(lines[0].contains(part), "{lines:#?}");
        }
        assert!(
            lines[1].contains("WARN") && lines[1].contains("pages=4 attempts=1 peer=00000000000000cd"),
            "{lines:#?}"
        );
        assert!(lines[2].contains("INFO") && lines[2].contains("most=12"), "{lines:#?}");
        assert!(lines[3].contains("WARN"), "a new quarantine is news: {lines:#?}");
    }

    #[test]
    fn attempts_without_pages_are_no_news() {
        let lines = logged("info", || {
            QuarantineLog::new("prefill", WRITES_END).look([(attempt(1, 1), 0)].into_iter(), |a| a.decode)
        });
        assert!(lines.is_empty(), "{lines:?}");
    }
}
