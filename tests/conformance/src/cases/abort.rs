//! The first criterion: whatever ends an attempt, both sides keep its pages until the fabric has proven quiet, and
//! nothing of it is published.

use std::time::Duration;

use tandem_handoff::{
    cause::{CauseKind, Side},
    fence::Basis,
    ids::RequestId,
};

use super::{MIB, large};
use crate::{
    Backend, Failure,
    backend::Flow,
    ensure,
    lab::{Lab, cause, limits, user},
    pattern::{Prompt, mix},
};

pub fn the_client_aborts(backend: &dyn Backend) -> Result<(), Failure> {
    aborted(backend, CauseKind::Aborted, |lab| {
        lab.cancel_d(1, user())?;
        lab.cancel_p(1, user())
    })
}

pub fn a_deadline_passes(backend: &dyn Backend) -> Result<(), Failure> {
    aborted(backend, CauseKind::Timeout, |lab| {
        lab.skip_ms(limits().waiting_timeout_ms);
        lab.turn()
    })
}

pub fn the_prefill_worker_fails(backend: &dyn Backend) -> Result<(), Failure> {
    aborted(backend, CauseKind::Internal, |lab| {
        lab.cancel_p(1, cause(Side::Prefill, CauseKind::Internal, "the device failed"))
    })
}

pub fn the_decode_worker_fails(backend: &dyn Backend) -> Result<(), Failure> {
    aborted(backend, CauseKind::Internal, |lab| {
        lab.cancel_d(1, cause(Side::Decode, CauseKind::Internal, "the device failed"))
    })
}

fn aborted(
    backend: &dyn Backend,
    kind: CauseKind,
    end: impl FnOnce(&mut Lab) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (id, shape) = (RequestId(1), large(16));
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Held);
    lab.open(1, 1, &Prompt::new(1, 12 * 16), 0)?;
    lab.p.deaf = true;
    lab.compute(1, 6)?;
    lab.link.flow(Flow::Bytes(2 * MIB + MIB / 2));
    let attempt = lab.d.last_attempt();
    lab.until("the first pieces", |lab| lab.d.landed(attempt) >= 2)?;
    lab.d.deaf = true;
    end(&mut lab)?;
    lab.pass(Duration::from_millis(50))?;
    let (p, d) = (&lab.p.requests[&id], &lab.d.requests[&id]);
    ensure!(d.failed.as_ref().is_some_and(|cause| cause.kind == kind), "D ended with {:?}", d.failed);
    ensure!(p.failed.as_ref().is_some_and(|cause| cause.kind == kind), "P ended with {:?}", p.failed);
    ensure!(d.back.is_none() && lab.d.pages.free() == 4, "H2: D's pages were freed without a proof");
    ensure!(!p.quiet && lab.p.pages.free() == 4, "H5: P's pages were freed before the posts had settled");

    lab.d.deaf = false;
    lab.p.deaf = false;
    // The rest of the prompt changes nothing: the attempt is over.
    lab.finish(1)?;
    lab.until("quiet on both sides", |lab| lab.d.requests[&id].back.is_some() && lab.p.requests[&id].quiet)?;
    let d = &lab.d.requests[&id];
    ensure!(d.back == Some(Basis::Quiet), "the pages came back by {:?}", d.back);
    ensure!(d.committed.is_none(), "an aborted attempt was published");
    // What is still on its way reaches no page.
    lab.link.flow(Flow::Open);
    lab.pass(Duration::from_millis(100))?;
    lab.assert_over()
}

/// Sixteen prompts at a time in a pool that holds six, each ended at another point or not at all.
pub fn interleaved_attempts_end_at_every_point(backend: &dyn Backend) -> Result<(), Failure> {
    const PAGES: usize = 4;
    let shape = large(6 * PAGES as u32);
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    let mut live: Vec<(u64, usize)> = Vec::new();
    let (mut next, mut committed) = (1, 0);
    while next <= 96 || !live.is_empty() {
        while next <= 96 && lab.p.pages.free() >= PAGES && lab.d.pages.free() >= PAGES {
            let prompt = Prompt::new(next, PAGES * 16);
            lab.request(next, next, &prompt)?;
            lab.reserve(next, next, &prompt, 0)?;
            live.push((next, 0));
            next += 1;
        }
        let mut rest = Vec::new();
        for (id, done) in live {
            rest.extend(step(&mut lab, id, done, &mut committed)?);
        }
        live = rest;
        lab.d.pages.check()?;
        lab.pass(Duration::from_micros(300))?;
    }
    ensure!(committed > 8, "only {committed} of 96 prompts committed");
    lab.assert_over()
}

/// One step of one prompt: the next page, or its end. `None` when it is over.
fn step(lab: &mut Lab, id: u64, done: usize, committed: &mut u64) -> Result<Option<(u64, usize)>, Failure> {
    let (request, dice) = (RequestId(id), mix(id << 8 | done as u64));
    if lab.d.requests[&request].is_over() {
        if lab.d.requests[&request].committed.is_some() {
            *committed += 1;
            lab.d.release(request);
        }
        return Ok(None);
    }
    if !lab.p.requests[&request].reserved || done > 4 {
        return Ok(Some((id, done)));
    }
    match dice % 16 {
        0 | 1 => lab.cancel_d(id, user())?,
        2 | 3 => lab.cancel_p(id, cause(Side::Prefill, CauseKind::Internal, "the device failed"))?,
        _ if done < 4 => lab.compute(id, done + 1)?,
        _ => lab.finish(id)?,
    }
    Ok(Some((id, done + 1)))
}
