//! The third and fourth criteria: allocations that fail midway, and a producer that is cancelled while it is preempted.

use tandem_handoff::{
    cause::{CauseKind, Side},
    fence::{Basis, PublishedPages},
    ids::RequestId,
};

use super::{MIB, large};
use crate::{
    Backend, Failure,
    backend::Flow,
    ensure,
    lab::{Lab, cause, limits, user},
    pattern::Prompt,
};

/// A prompt list whose first sample is moving when the second finds D's pool too small.
pub fn an_allocation_that_fails_midway_is_rolled_back(backend: &dyn Backend) -> Result<(), Failure> {
    let (p, d) = (large(16), large(6));
    let mut lab = Lab::new(backend, p, d, limits())?;
    let (first, second) = (Prompt::new(1, 4 * 16), Prompt::new(2, 4 * 16));
    lab.link.flow(Flow::Bytes(MIB + MIB / 2));
    lab.open(1, 1, &first, 0)?;
    lab.request(2, 2, &second)?;
    for id in [1, 2] {
        lab.p.requests.get_mut(&RequestId(id)).expect("it was made").keeps_pages = true;
    }
    lab.compute(1, 3)?;
    // Page after page, until there is none: what was taken goes back untouched, and both samples end.
    let mut taken = Vec::new();
    while let Some(page) = lab.d.pages.take(1)? {
        taken.extend(page);
    }
    ensure!(taken.len() == 2, "the case wants an allocation that fails in its middle");
    let back = PublishedPages::new(taken).withdraw().map_err(|pages| Failure::new(format!("{pages:?} are bound")))?;
    lab.d.pages.give_back(back);
    let full = cause(Side::Decode, CauseKind::Unavailable, "no pages");
    lab.cancel_d(1, full.clone())?;
    lab.cancel_p(1, full.clone())?;
    lab.cancel_p(2, full)?;
    lab.link.flow(Flow::Open);
    lab.until("quiet", |lab| lab.p.requests.values().all(|request| request.quiet))?;
    lab.until("D's pages", |lab| lab.d.pages.is_full())?;
    // The source pins are gone, and the producer's own KV is still there to be read.
    let differs = lab.p.source_differs(RequestId(1));
    ensure!(differs.is_none(), "the producer's KV changed: {differs:?}");
    too_few_pages(&mut lab)?;
    lab.transfer(4, 4, &first, 0)?;
    lab.assert_over()
}

/// An engine that offers what it got, though it is too little, gets it back: nobody has seen it.
fn too_few_pages(lab: &mut Lab) -> Result<(), Failure> {
    let (id, prompt) = (RequestId(3), Prompt::new(3, 4 * 16));
    let pages = lab.d.pages.take(3)?.ok_or_else(|| Failure::new("D's pool is not empty"))?;
    let now = lab.now();
    lab.d.offer(now, id, 3, &prompt, Vec::new(), pages)?;
    lab.turn()?;
    let request = &lab.d.requests[&id];
    ensure!(request.failed.is_some(), "an offer of too few pages was accepted");
    ensure!(request.back == Some(Basis::NeverShown), "the pages came back by {:?}", request.back);
    Ok(())
}

/// P's pool holds one prompt: its replay can only use the very pages that the cancelled attempt still pins.
pub fn a_cancel_while_preempted_pins_until_drained(backend: &dyn Backend) -> Result<(), Failure> {
    let (p, d) = (large(4), large(8));
    let mut lab = Lab::new(backend, p, d, limits())?;
    let prompt = Prompt::new(1, 4 * 16);
    lab.link.flow(Flow::Held);
    lab.open(1, 1, &prompt, 0)?;
    lab.p.deaf = true;
    lab.compute(1, 3)?;
    // The scheduler wants the pages while the client leaves: the attempt is cancelled, and the pages stay.
    lab.cancel_p(1, user())?;
    ensure!(lab.p.stopped.len() == 1, "the fabric was not told to stop");
    let replay = lab.request(2, 2, &prompt);
    ensure!(replay.is_err(), "the replay got pages that the old attempt still pins");
    lab.skip_ms(10 * limits().drain_timeout_ms);
    lab.turn()?;
    ensure!(lab.p.pages.free() == 0, "H5: pages were freed because time passed");
    lab.p.deaf = false;
    lab.link.flow(Flow::Open);
    lab.until("P's quiet", |lab| lab.p.requests[&RequestId(1)].quiet)?;
    lab.until("D's quiet", |lab| lab.d.requests[&RequestId(1)].back.is_some())?;
    if lab.channel.is_none() {
        lab.connect()?;
    }
    lab.transfer(2, 2, &prompt, 0)?;
    lab.assert_over()
}
