//! A good backend with one fault planted into what its ends do or say.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tandem_conformance::{
    Failure,
    backend::{Backend, Ends, Flow, Link, Proofs, SinkEnd, SourceEnd},
};
use tandem_fabric::{SinkFabric, SinkReport, SourceFabric, SourceReport, Waker, memory::PoolMemory, probe};
use tandem_handoff::{
    ids::{Attempt, Channel},
    layout::{Mapping, PoolShape},
    source::{Piece, Settlement},
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// D's end reports quiet at once, and goes on writing.
    QuietWithoutRevoking,
    /// D's end takes the close of the path for a proof, while a reader still holds its buffer.
    CloseIsQuiet,
    /// D's end reports quiet for each call of revoke.
    QuietPerRevoke,
    /// D's end never reports quiet.
    ForgetsQuiet,
    /// D's end revokes whatever attempt is the youngest.
    BlursAttempts,
    /// D's end reports each piece twice.
    LandsTwice,
    /// D's end reports pieces when it expects them.
    LandsEarly,
    /// D's end puts each page into the place of its neighbour.
    LandsInWrongPage,
    /// D's end damages a word of a page that has landed.
    ScribblesOnTarget,
    /// P's end settles pieces when they are posted, and reads them later.
    SettlesBeforeCopying,
    /// P's end settles pieces twice.
    SettlesTwice,
    /// P's end says that a piece was sent and loses it.
    DropsAPiece,
    /// P's end goes on sending a stopped attempt.
    IgnoresStop,
    /// P's end forgets to settle what was stopped.
    ForgetsSettlement,
    /// P's end settles a stopped attempt without D's word.
    SettlesAtStop,
    /// P's end writes into the source of a stopped attempt.
    ScribblesOnSource,
    /// P's end lets the caller wait while the peer is slow.
    BlocksInPost,
    /// Neither end says that its path is broken.
    SilentBreak,
}

/// How long a fault delays what it delays.
const DELAY: Duration = Duration::from_millis(60);

pub struct Broken<B> {
    pub inner: B,
    pub fault: Fault,
}

impl<B: Backend> Backend for Broken<B> {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn proofs(&self) -> Proofs {
        self.inner.proofs()
    }

    /// Short where the fault shows by something that never comes; else as long as a good backend gets on a busy machine.
    fn patience(&self) -> Duration {
        let silent = matches!(
            self.fault,
            Fault::ForgetsQuiet
                | Fault::DropsAPiece
                | Fault::IgnoresStop
                | Fault::ForgetsSettlement
                | Fault::SilentBreak
        );
        if silent { Duration::from_secs(4) } else { self.inner.patience() }
    }

    fn pair(&self, prefill: PoolShape, decode: PoolShape, waker: Waker) -> Result<Ends, Failure> {
        let fault = self.fault;
        let ends = self.inner.pair(prefill, decode, waker)?;
        let link = Box::new(BrokenLink { inner: ends.link, fault });
        Ok(Ends { prefill: broken_source(ends.prefill, fault), decode: broken_sink(ends.decode, fault), link })
    }
}

struct BrokenLink {
    inner: Box<dyn Link>,
    fault: Fault,
}

impl Link for BrokenLink {
    fn open(&mut self, channel: Channel) -> Result<(), Failure> {
        self.inner.open(channel)
    }

    fn cut(&mut self) {
        self.inner.cut();
    }

    fn flow(&mut self, flow: Flow) {
        self.inner.flow(flow);
    }

    fn restart_prefill(&mut self) -> Result<SourceEnd, Failure> {
        Ok(broken_source(self.inner.restart_prefill()?, self.fault))
    }

    fn restart_decode(&mut self) -> Result<SinkEnd, Failure> {
        Ok(broken_sink(self.inner.restart_decode()?, self.fault))
    }
}

fn broken_source(end: SourceEnd, fault: Fault) -> SourceEnd {
    let SourceEnd { fabric: inner, pools } = end;
    let source = BrokenSource {
        inner,
        pools: pools.clone(),
        fault,
        said: Vec::new(),
        late: Vec::new(),
        stopped: Vec::new(),
        posted: Vec::new(),
        outstanding: 0,
    };
    SourceEnd { fabric: Box::new(source), pools }
}

fn broken_sink(end: SinkEnd, fault: Fault) -> SinkEnd {
    let SinkEnd { fabric: inner, pools } = end;
    let sink = BrokenSink { inner, pools: pools.clone(), fault, said: Vec::new(), expected: Vec::new() };
    SinkEnd { fabric: Box::new(sink), pools }
}

struct BrokenSource {
    inner: Box<dyn SourceFabric>,
    pools: Vec<Arc<PoolMemory>>,
    fault: Fault,
    /// Reports that the fault makes up.
    said: Vec<SourceReport>,
    /// Posts that the fault delays.
    late: Vec<(Instant, Attempt, Vec<Piece>)>,
    stopped: Vec<Attempt>,
    posted: Vec<(Attempt, Piece)>,
    outstanding: u64,
}

impl SourceFabric for BrokenSource {
    fn post(&mut self, attempt: Attempt, mut pieces: Vec<Piece>) {
        self.posted.extend(pieces.iter().map(|piece| (attempt, *piece)));
        self.outstanding += pieces.len() as u64;
        match self.fault {
            Fault::SettlesBeforeCopying => {
                let count = pieces.len() as u64;
                self.said.push(SourceReport::Settled { attempt, pieces: count, how: Settlement::Sent });
                self.late.push((Instant::now() + DELAY, attempt, pieces));
                return;
            }
            Fault::DropsAPiece if pieces.pop().is_some() => {
                self.said.push(SourceReport::Settled { attempt, pieces: 1, how: Settlement::Sent });
            }
            Fault::BlocksInPost if self.outstanding > 8 => thread::sleep(Duration::from_millis(1500)),
            _ => {}
        }
        self.inner.post(attempt, pieces);
    }

    fn stop(&mut self, attempt: Attempt) {
        self.stopped.push(attempt);
        match self.fault {
            Fault::IgnoresStop => return,
            Fault::SettlesAtStop => {
                let pieces = std::mem::take(&mut self.outstanding);
                self.said.push(SourceReport::Settled { attempt, pieces, how: Settlement::Dropped });
            }
            Fault::ScribblesOnSource => {
                if let Some((_, piece)) = self.posted.iter().rfind(|(of, _)| *of == attempt) {
                    probe::fill(&self.pools[piece.source_rank as usize], piece.source_offset, 8, |_| 0);
                }
            }
            _ => {}
        }
        self.inner.stop(attempt);
    }

    fn peer_settled(&mut self, attempt: Attempt) {
        self.inner.peer_settled(attempt);
    }

    fn close(&mut self, channel: Channel) {
        let posted = self.posted.iter().map(|(attempt, _)| *attempt);
        self.stopped.extend(posted.filter(|attempt| attempt.channel() == channel));
        self.inner.close(channel);
    }

    fn poll(&mut self) -> Vec<SourceReport> {
        let now = Instant::now();
        let (due, late) = std::mem::take(&mut self.late).into_iter().partition(|(at, ..)| *at <= now);
        self.late = late;
        let due: Vec<(Instant, Attempt, Vec<Piece>)> = due;
        for (_, attempt, pieces) in due {
            self.inner.post(attempt, pieces);
        }
        let mut reports = std::mem::take(&mut self.said);
        for report in self.inner.poll() {
            match (&report, self.fault) {
                (SourceReport::Settled { .. }, Fault::SettlesBeforeCopying) => continue,
                (SourceReport::Settled { .. }, Fault::SettlesTwice) => reports.push(report.clone()),
                (SourceReport::Settled { attempt, .. }, Fault::ForgetsSettlement) if self.stopped.contains(attempt) => {
                    continue;
                }
                (SourceReport::Settled { pieces, .. }, _) => {
                    self.outstanding = self.outstanding.saturating_sub(*pieces)
                }
                (SourceReport::Broken { .. }, Fault::SilentBreak) => continue,
                _ => {}
            }
            reports.push(report);
        }
        reports
    }
}

struct BrokenSink {
    inner: Box<dyn SinkFabric>,
    pools: Vec<Arc<PoolMemory>>,
    fault: Fault,
    said: Vec<SinkReport>,
    /// Attempts, in the order in which they were expected.
    expected: Vec<Attempt>,
}

impl SinkFabric for BrokenSink {
    fn expect(&mut self, attempt: Attempt, pages: &[u32], mapping: Mapping) {
        self.expected.push(attempt);
        let mut pages = pages.to_vec();
        match self.fault {
            Fault::LandsEarly => {
                let pieces = (0..mapping.pieces(pages.len()) as u32).collect();
                self.said.push(SinkReport::Landed { attempt, pieces });
            }
            Fault::LandsInWrongPage if pages.len() > 1 => pages.rotate_left(1),
            _ => {}
        }
        self.inner.expect(attempt, &pages, mapping);
    }

    fn revoke(&mut self, attempt: Attempt) {
        match self.fault {
            Fault::QuietWithoutRevoking => {
                if let Some(at) = self.expected.iter().position(|of| *of == attempt) {
                    self.expected.remove(at);
                    self.said.push(SinkReport::Quiet { attempt });
                }
            }
            Fault::CloseIsQuiet => {}
            Fault::QuietPerRevoke => {
                self.said.push(SinkReport::Quiet { attempt });
                self.inner.revoke(attempt);
            }
            Fault::BlursAttempts => {
                if let Some(youngest) = self.expected.last() {
                    self.inner.revoke(*youngest);
                }
            }
            _ => self.inner.revoke(attempt),
        }
    }

    fn peer_drained(&mut self, attempt: Attempt) {
        self.inner.peer_drained(attempt);
    }

    fn release(&mut self, attempt: Attempt) {
        if self.fault == Fault::CloseIsQuiet {
            self.expected.retain(|of| *of != attempt);
        }
        self.inner.release(attempt);
    }

    fn close(&mut self, channel: Channel) {
        if self.fault == Fault::CloseIsQuiet {
            let (gone, left) = self.expected.iter().partition(|attempt| attempt.channel() == channel);
            self.expected = left;
            let gone: Vec<Attempt> = gone;
            self.said.extend(gone.into_iter().map(|attempt| SinkReport::Quiet { attempt }));
            return;
        }
        self.inner.close(channel);
    }

    fn poll(&mut self) -> Vec<SinkReport> {
        let mut reports = std::mem::take(&mut self.said);
        for report in self.inner.poll() {
            match (&report, self.fault) {
                (SinkReport::Quiet { .. }, Fault::ForgetsQuiet | Fault::QuietPerRevoke) => continue,
                (SinkReport::Broken { .. }, Fault::SilentBreak) => continue,
                (SinkReport::Landed { .. }, Fault::LandsTwice) => reports.push(report.clone()),
                (SinkReport::Landed { .. }, Fault::ScribblesOnTarget) => {
                    for pool in &self.pools {
                        probe::fill(pool, pool.len() / 2, 8, |_| 1);
                    }
                }
                _ => {}
            }
            reports.push(report);
        }
        reports
    }
}
