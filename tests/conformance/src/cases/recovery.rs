//! The fifth criterion: safety apart from cleanup. What is missing frees nothing; what recovers is the drain deadline.

use std::time::{Duration, Instant};

use tandem_handoff::{fence::Basis, ids::RequestId, limits::Limits};

use super::{MIB, large};
use crate::{
    Backend, Failure,
    backend::Flow,
    ensure,
    lab::{Lab, limits, user},
    pattern::Prompt,
};

pub fn a_missing_acknowledgement_frees_nothing(backend: &dyn Backend) -> Result<(), Failure> {
    let (id, shape) = (RequestId(1), large(8));
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Held);
    lab.open(1, 1, &Prompt::new(1, 4 * 16), 0)?;
    lab.compute(1, 3)?;
    // Abort, Failed and Drained never arrive, and neither fabric says a word.
    for queue in [&mut lab.to_p, &mut lab.to_d] {
        queue.held = true;
    }
    lab.p.deaf = true;
    lab.d.deaf = true;
    lab.cancel_d(1, user())?;
    lab.cancel_p(1, user())?;
    lab.to_p.lose();
    lab.to_d.lose();
    for _ in 0..100 {
        lab.skip_ms(limits().drain_timeout_ms);
        lab.turn()?;
    }
    let quarantined = lab.d.machine.draining_pages();
    ensure!(lab.d.requests[&id].back.is_none(), "H2: D's pages were freed without a proof");
    ensure!(!lab.p.requests[&id].quiet, "H5: P's pages were freed before the posts had settled");
    ensure!(quarantined == (4, 4), "{quarantined:?} pages drain and are quarantined, 4 should");
    ensure!(lab.channel.is_none(), "the drain deadline did not end the channel");
    lab.assert_over()
}

/// D and P are silent towards each other; each comes to its own proof, within the deadline and what the fabric takes.
pub fn the_drain_deadline_recovers(backend: &dyn Backend) -> Result<(), Failure> {
    let (id, shape) = (RequestId(1), large(8));
    let drain = Limits { drain_timeout_ms: 300, ..limits() };
    let mut lab = Lab::new(backend, shape, shape, drain)?;
    lab.link.flow(Flow::Bytes(MIB + MIB / 2));
    lab.open(1, 1, &Prompt::new(1, 4 * 16), 0)?;
    lab.compute(1, 3)?;
    let attempt = lab.d.last_attempt();
    lab.until("the first piece", |lab| lab.d.landed(attempt) >= 1)?;
    lab.to_p.held = true;
    lab.to_d.held = true;
    // The deadline, and on a busy machine some seconds for the fabric.
    let limit = Duration::from_millis(drain.drain_timeout_ms) + Duration::from_secs(10);
    let begun = Instant::now();
    lab.cancel_d(1, user())?;
    lab.until_within(limit, "D's own proof", |lab| lab.d.requests[&id].back == Some(Basis::Quiet))?;
    let d_took = begun.elapsed();
    let begun = Instant::now();
    lab.cancel_p(1, user())?;
    lab.until_within(limit, "P's own proof", |lab| lab.p.requests[&id].quiet)?;
    let p_took = begun.elapsed();
    println!(
        "{}: with a silent peer and a drain deadline of {} ms D was quiet after {d_took:?}, P after {p_took:?}",
        backend.name(),
        drain.drain_timeout_ms,
    );
    lab.to_p.held = false;
    lab.to_d.held = false;
    lab.link.flow(Flow::Open);
    lab.turn()?;
    lab.connect()?;
    lab.transfer(2, 2, &Prompt::new(2, 4 * 16), 0)?;
    lab.assert_over()
}
