//! Peers that stop, restart, or are cut off.

use std::time::{Duration, Instant};

use tandem_handoff::{
    cause::CauseKind,
    ids::{Attempt, RequestId},
    wire::Frame,
};

use super::{MIB, large};
use crate::{
    Backend, Failure,
    backend::Flow,
    ensure,
    lab::{Lab, limits, user},
    pattern::Prompt,
};

/// No call of a worker's thread may wait for its peer; a second is long enough for a busy machine.
const CALL_LIMIT: Duration = Duration::from_secs(1);

pub fn a_peer_that_stops_reading(backend: &dyn Backend) -> Result<(), Failure> {
    let (id, shape) = (RequestId(1), large(64));
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.open(1, 1, &Prompt::new(1, 64 * 16), 0)?;
    lab.link.flow(Flow::Held);
    for end in 1..=64 {
        let begun = Instant::now();
        lab.compute(1, end)?;
        ensure!(begun.elapsed() < CALL_LIMIT, "a post waited {:?} for a peer that reads nothing", begun.elapsed());
    }
    lab.pass(Duration::from_millis(200))?;
    let taken = lab.p.settled() * MIB;
    let most = lab.proofs.in_flight_bytes_max as u64;
    ensure!(taken <= most, "H5: {taken} bytes settled although the peer reads nothing and the way holds {most}");
    // What D says would be a proof where P needs one; the way to P is closed too until P has been looked at.
    lab.to_p.held = true;
    let begun = Instant::now();
    lab.cancel_p(1, user())?;
    ensure!(begun.elapsed() < CALL_LIMIT, "a stop waited {:?} for a peer that reads nothing", begun.elapsed());
    lab.until("D's quiet", |lab| lab.d.requests[&id].back.is_some())?;
    if lab.proofs.source_needs_peer {
        lab.pass(Duration::from_millis(200))?;
        ensure!(!lab.p.requests[&id].quiet, "H5: P's pages were freed although the peer may still read them");
    }
    lab.to_p.held = !lab.proofs.source_needs_peer;
    lab.until("P's quiet", |lab| lab.p.requests[&id].quiet)?;
    lab.to_p.held = false;
    // The peer reads again: the path still carries whole pieces.
    lab.link.flow(Flow::Open);
    lab.transfer(2, 2, &Prompt::new(2, 4 * 16), 0)?;
    lab.assert_over()
}

pub fn a_prefill_worker_restarts_on_the_same_address(backend: &dyn Backend) -> Result<(), Failure> {
    let (id, shape) = (RequestId(1), large(16));
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Bytes(MIB + MIB / 2));
    lab.open(1, 7, &Prompt::new(1, 8 * 16), 0)?;
    lab.compute(1, 4)?;
    let old = lab.d.last_attempt();
    lab.until("the first piece", |lab| lab.d.landed(old) >= 1)?;
    lab.restart_prefill()?;
    let channel = lab.connect()?;
    lab.until("D's quiet", |lab| lab.d.requests[&id].back.is_some())?;
    let failed = lab.d.requests[&id].failed.as_ref();
    ensure!(failed.is_some_and(|cause| cause.kind == CauseKind::Lost), "D ended with {failed:?}");
    // Bytes of the old process come in while the new one sends; its frames come over the new channel too.
    lab.link.flow(Flow::Open);
    old_frames(&mut lab, old)?;
    lab.transfer(2, 7, &Prompt::new(2, 8 * 16), 0)?;
    old_frames(&mut lab, old)?;
    ensure!(lab.channel == Some(channel), "a frame of the old process ended the new one's channel");
    lab.pass(Duration::from_millis(200))?;
    lab.assert_over()
}

fn old_frames(lab: &mut Lab, old: Attempt) -> Result<(), Failure> {
    let now = lab.now();
    for of in [lab.channel, Some(old.channel())].into_iter().flatten() {
        for frame in [Frame::Drained { attempt: old }, Frame::Failed { attempt: old, cause: user() }] {
            lab.d.machine.frame(now, of, frame);
        }
    }
    lab.turn()
}

pub fn a_decode_worker_restarts_on_the_same_address(backend: &dyn Backend) -> Result<(), Failure> {
    let (id, shape) = (RequestId(1), large(16));
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Bytes(MIB + MIB / 2));
    lab.open(1, 7, &Prompt::new(1, 8 * 16), 0)?;
    lab.compute(1, 8)?;
    let old = lab.d.last_attempt();
    lab.until("the first piece", |lab| lab.d.landed(old) >= 1)?;
    lab.restart_decode()?;
    lab.link.flow(Flow::Open);
    lab.until("P's quiet", |lab| lab.p.requests[&id].quiet)?;
    ensure!(lab.p.requests[&id].failed.is_some(), "P delivered to a process that is gone");
    lab.connect()?;
    let now = lab.now();
    if let Some(channel) = lab.channel {
        lab.p.machine.frame(now, channel, Frame::Settled { attempt: old });
    }
    lab.transfer(2, 7, &Prompt::new(2, 8 * 16), 0)?;
    lab.assert_over()
}

/// The data path breaks and nobody says so: both fabrics notice.
pub fn a_cut_in_the_middle_of_a_piece(backend: &dyn Backend) -> Result<(), Failure> {
    let (id, shape) = (RequestId(1), large(16));
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Bytes(MIB + MIB / 2));
    lab.open(1, 1, &Prompt::new(1, 8 * 16), 0)?;
    lab.compute(1, 4)?;
    let attempt = lab.d.last_attempt();
    lab.until("the first piece", |lab| lab.d.landed(attempt) >= 1)?;
    lab.link.cut();
    lab.until("a report that the path is broken", |lab| lab.channel.is_none())?;
    lab.until("quiet", |lab| lab.d.requests[&id].back.is_some() && lab.p.requests[&id].quiet)?;
    let (p, d) = (&lab.p.requests[&id], &lab.d.requests[&id]);
    ensure!(p.failed.is_some() && d.failed.is_some(), "a cut attempt did not fail: {:?}, {:?}", p.failed, d.failed);
    lab.link.flow(Flow::Open);
    lab.connect()?;
    lab.transfer(2, 2, &Prompt::new(2, 8 * 16), 0)?;
    lab.assert_over()
}
