//! How the posted pieces of one attempt came to their ends, until that is reported. *Pure.*

use tandem_handoff::{ids::Attempt, source::Settlement};

use crate::SourceReport;

#[derive(Default)]
pub(crate) struct Tally {
    outstanding: u64,
    sent: u64,
    dropped: u64,
    unknown: u64,
}

impl Tally {
    pub fn posted(&mut self, pieces: usize) {
        self.outstanding += pieces as u64;
    }

    pub fn settle(&mut self, pieces: u64, how: Settlement) {
        self.outstanding -= pieces;
        match how {
            Settlement::Sent => self.sent += pieces,
            Settlement::Dropped => self.dropped += pieces,
            Settlement::Unknown => self.unknown += pieces,
        }
    }

    /// Every posted piece has come to its end.
    pub fn is_settled(&self) -> bool {
        self.outstanding == 0
    }

    /// Reports what has settled since the last call.
    pub fn report(&mut self, attempt: Attempt, reports: &mut Vec<SourceReport>) {
        let ended = [
            (&mut self.sent, Settlement::Sent),
            (&mut self.dropped, Settlement::Dropped),
            (&mut self.unknown, Settlement::Unknown),
        ];
        for (count, how) in ended {
            let pieces = std::mem::take(count);
            if pieces > 0 {
                reports.push(SourceReport::Settled { attempt, pieces, how });
            }
        }
    }
}
