//! The second criterion: what comes twice, late, or for an attempt that is over changes nothing (H3).

use std::time::Duration;

use tandem_handoff::{
    cause::{CauseKind, Side},
    fence::Basis,
    ids::{Attempt, RequestId},
    source::Settlement,
    wire::{Done, FirstToken, Frame, Phases, Sent},
};

use super::{MIB, large, small};
use crate::{
    Backend, Failure,
    backend::Flow,
    ensure,
    lab::{Lab, cause, limits, room, user},
    pattern::Prompt,
};

pub fn a_second_completion_changes_nothing(backend: &dyn Backend) -> Result<(), Failure> {
    let shape = small(1, 16);
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Held);
    lab.open(1, 1, &Prompt::new(1, 5 * 4), 0)?;
    lab.finish(1)?;
    let attempt = lab.d.last_attempt();
    // Done twice before the pieces are there, and again, with everything else, after the commit.
    lab.until("Done", |lab| lab.to_d.arrived.iter().any(|frame| matches!(frame, Frame::Done(_))))?;
    again(&mut lab)?;
    ensure!(lab.d.requests[&RequestId(1)].committed.is_none(), "H4: a second Done stood for pieces");
    lab.link.flow(Flow::Open);
    lab.committed(1)?;
    again(&mut lab)?;
    let now = lab.now();
    lab.d.machine.landed(attempt, &[0, 1, 2, 3, 4]);
    lab.p.machine.settled(now, attempt, 5, Settlement::Sent);
    lab.d.fabric.release(attempt);
    lab.d.fabric.revoke(attempt);
    lab.p.fabric.stop(attempt);
    lab.pass(Duration::from_millis(50))?;
    lab.d.release(RequestId(1));
    // The room is free again, and so is everything else.
    lab.transfer(2, 1, &Prompt::new(2, 5 * 4), 0)?;
    lab.assert_over()
}

/// Delivers every frame that arrived once more.
fn again(lab: &mut Lab) -> Result<(), Failure> {
    let Some(channel) = lab.channel else {
        return Err(Failure::new("the channel is closed"));
    };
    let now = lab.now();
    for frame in lab.to_d.arrived.clone() {
        lab.d.machine.frame(now, channel, frame);
    }
    for frame in lab.to_p.arrived.clone() {
        lab.p.machine.frame(now, channel, frame);
    }
    lab.turn()
}

pub fn a_second_cancel_changes_nothing(backend: &dyn Backend) -> Result<(), Failure> {
    let shape = large(8);
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Bytes(MIB / 2));
    lab.open(1, 1, &Prompt::new(1, 4 * 16), 0)?;
    lab.compute(1, 2)?;
    let attempt = lab.d.last_attempt();
    for _ in 0..3 {
        lab.cancel_d(1, user())?;
        lab.cancel_p(1, cause(Side::Prefill, CauseKind::Internal, "the device failed"))?;
        lab.d.fabric.revoke(attempt);
        lab.p.fabric.stop(attempt);
        lab.turn()?;
    }
    let failed = lab.d.requests[&RequestId(1)].failed.as_ref();
    ensure!(failed.is_some_and(|cause| cause.kind == CauseKind::Aborted), "the first cause did not win: {failed:?}");
    lab.link.flow(Flow::Open);
    lab.until("D's quiet", |lab| lab.d.requests[&RequestId(1)].back.is_some())?;
    for _ in 0..3 {
        lab.d.fabric.revoke(attempt);
        lab.p.fabric.stop(attempt);
        lab.cancel_d(1, user())?;
    }
    lab.pass(Duration::from_millis(50))?;
    lab.assert_over()
}

pub fn a_delayed_drain_frees_once(backend: &dyn Backend) -> Result<(), Failure> {
    let shape = large(8);
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Bytes(MIB + MIB / 2));
    lab.open(1, 1, &Prompt::new(1, 4 * 16), 0)?;
    lab.compute(1, 3)?;
    let attempt = lab.d.last_attempt();
    lab.until("the first piece", |lab| lab.d.landed(attempt) >= 1)?;
    // Neither Drained nor the fabric's word reaches D's machine, for longer than the drain deadline.
    lab.d.deaf = true;
    lab.to_d.held = true;
    lab.cancel_d(1, user())?;
    for _ in 0..3 {
        lab.skip_ms(limits().drain_timeout_ms);
        lab.turn()?;
        ensure!(lab.d.requests[&RequestId(1)].back.is_none(), "H2: the drain deadline freed pages");
    }
    ensure!(lab.d.machine.draining_pages() == (4, 4), "the pages are not counted as quarantined");
    lab.d.deaf = false;
    lab.to_d.held = false;
    lab.link.flow(Flow::Open);
    lab.until("D's quiet", |lab| lab.d.requests[&RequestId(1)].back == Some(Basis::Quiet))?;
    let now = lab.now();
    lab.d.machine.quiet(attempt);
    lab.d.machine.tick(now);
    lab.pass(Duration::from_millis(50))?;
    lab.connect()?;
    lab.transfer(2, 1, &Prompt::new(2, 4 * 16), 0)?;
    lab.assert_over()
}

pub fn callbacks_of_an_old_attempt_after_its_room_is_reused(backend: &dyn Backend) -> Result<(), Failure> {
    let shape = large(8);
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Bytes(MIB / 2));
    lab.open(1, 7, &Prompt::new(1, 4 * 16), 0)?;
    lab.compute(1, 2)?;
    let old = lab.d.last_attempt();
    lab.cancel_d(1, user())?;
    lab.link.flow(Flow::Open);
    lab.until("quiet", |lab| lab.d.requests[&RequestId(1)].back.is_some() && lab.p.requests[&RequestId(1)].quiet)?;

    lab.link.flow(Flow::Held);
    lab.open(2, 7, &Prompt::new(2, 4 * 16), 0)?;
    lab.compute(2, 2)?;
    let young = lab.d.last_attempt();
    haunt(&mut lab, old)?;
    lab.pass(Duration::from_millis(50))?;
    // What the old attempt had begun may still be on the way, before the young one's first piece.
    lab.until("a piece", |lab| {
        lab.link.flow(Flow::Bytes(MIB / 4));
        lab.d.landed(young) >= 1
    })?;
    haunt(&mut lab, old)?;
    lab.link.flow(Flow::Open);
    lab.finish(2)?;
    lab.committed(2)?;
    let first = lab.d.requests[&RequestId(2)].committed.as_ref().map(|first| first.token);
    ensure!(first == Some(2), "the first token is another attempt's: {first:?}");
    ensure!(lab.d.requests[&RequestId(1)].committed.is_none(), "an aborted attempt was published");
    haunt(&mut lab, old)?;
    haunt(&mut lab, young)?;
    lab.assert_over()
}

/// Everything that anyone may still say about an attempt that is over.
fn haunt(lab: &mut Lab, old: Attempt) -> Result<(), Failure> {
    let Some(channel) = lab.channel else {
        return Err(Failure::new("the channel is closed"));
    };
    let now = lab.now();
    let first = FirstToken { token: 666, logprob: None, cached_tokens: 0 };
    let account = vec![Sent { rank: 0, rail: 0, pieces: 4, bytes: 4 * MIB }];
    let broke = cause(Side::Prefill, CauseKind::Lost, "late");
    for frame in [
        Frame::Done(Done { attempt: old, first, account, phases: Phases::default(), checksums: Vec::new() }),
        Frame::Failed { attempt: old, cause: broke.clone() },
        Frame::Drained { attempt: old },
    ] {
        lab.d.machine.frame(now, channel, frame);
    }
    for frame in [Frame::Abort { attempt: old, room: room(7), cause: broke }, Frame::Settled { attempt: old }] {
        lab.p.machine.frame(now, channel, frame);
    }
    lab.d.machine.landed(old, &[0, 1, 2, 3]);
    lab.d.machine.quiet(old);
    lab.p.machine.settled(now, old, 2, Settlement::Unknown);
    lab.p.fabric.stop(old);
    lab.p.fabric.peer_settled(old);
    lab.d.fabric.revoke(old);
    lab.d.fabric.peer_drained(old);
    lab.d.fabric.release(old);
    lab.turn()
}
