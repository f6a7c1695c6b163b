//! A write in flight when its attempt is revoked: after Quiet it reaches no page.

use std::time::{Duration, Instant};

use tandem_handoff::ids::RequestId;

use super::{MIB, large};
use crate::{
    Backend, Failure,
    backend::Flow,
    ensure,
    lab::{Lab, limits, user},
    pattern::Prompt,
};

/// How long the pages are watched while the peer keeps sending.
const WATCHED: Duration = Duration::from_secs(2);

pub fn after_quiet_no_byte_changes_for_two_seconds(backend: &dyn Backend) -> Result<(), Failure> {
    let (id, shape) = (RequestId(1), large(48));
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Bytes(2 * MIB + MIB / 2));
    lab.open(1, 1, &Prompt::new(1, 40 * 16), 0)?;
    lab.compute(1, 8)?;
    let attempt = lab.d.last_attempt();
    lab.until("the first pieces", |lab| lab.d.landed(attempt) >= 2)?;
    // P does not hear of the end: it goes on computing and sending.
    lab.to_p.held = true;
    lab.cancel_d(1, user())?;
    lab.until("D's quiet", |lab| lab.d.requests[&id].back.is_some())?;
    let (begun, before, mut computed) = (Instant::now(), lab.p.posted(), 8);
    while begun.elapsed() < WATCHED {
        lab.link.flow(Flow::Bytes(MIB / 4));
        lab.pass(Duration::from_millis(15))?;
        if computed < 40 && begun.elapsed() > (computed - 8) as u32 * WATCHED / 40 {
            computed += 1;
            lab.compute(1, computed)?;
        }
        lab.d.pages.check()?;
    }
    ensure!(lab.p.posted() > before, "the peer did not go on sending: the case shows nothing");
    lab.to_p.held = false;
    lab.assert_over()
}

/// The peer falls silent in the middle of a piece. The proof needs no byte of it, the closed path writes none, and what
/// comes after all goes nowhere.
pub fn a_reader_in_mid_read_gives_its_borrow_back(backend: &dyn Backend) -> Result<(), Failure> {
    let (id, shape) = (RequestId(1), large(8));
    for close in [false, true] {
        let mut lab = Lab::new(backend, shape, shape, limits())?;
        lab.link.flow(Flow::Bytes(MIB / 2));
        lab.open(1, 1, &Prompt::new(1, 4 * 16), 0)?;
        lab.compute(1, 1)?;
        lab.pass(Duration::from_millis(100))?;
        lab.to_p.held = true;
        if close {
            let channel = lab.channel.ok_or_else(|| Failure::new("the channel is open"))?;
            lab.lose(channel, "the case closes it");
        } else {
            lab.cancel_d(1, user())?;
        }
        lab.until_within(Duration::from_secs(10), "D's quiet without another byte", |lab| {
            lab.d.requests[&id].back.is_some()
        })?;
        lab.link.flow(Flow::Open);
        lab.pass(Duration::from_millis(200))?;
        lab.d.pages.check()?;
        lab.to_p.held = false;
        if close {
            lab.connect()?;
        }
        lab.until("P's quiet", |lab| lab.p.requests[&id].quiet || lab.p.requests[&id].failed.is_none())?;
        lab.cancel_p(1, user())?;
        lab.transfer(2, 2, &Prompt::new(2, 4 * 16), 0)?;
        lab.assert_over()?;
    }
    Ok(())
}
