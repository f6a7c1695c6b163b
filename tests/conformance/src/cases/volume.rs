//! Much: many small pieces, many bytes, and a peer too slow for them.

use std::{fs, time::Duration};

use tandem_handoff::{ids::RequestId, layout::PoolShape};

use super::{MIB, large};
use crate::{
    Backend, Failure,
    backend::Flow,
    ensure,
    lab::{Lab, limits},
    pattern::Prompt,
};

pub fn ten_thousand_small_writes(backend: &dyn Backend) -> Result<(), Failure> {
    const WRITES: usize = 10_000;
    let shape =
        PoolShape { layers: 1, kv_heads: 1, head_dim: 4, page_size: 2, element_bytes: 4, tp: 1, pages: WRITES as u32 };
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.open(1, 1, &Prompt::new(1, WRITES * 2), 0)?;
    for end in (100..=WRITES).step_by(100) {
        lab.compute(1, end)?;
    }
    lab.finish(1)?;
    lab.committed(1)?;
    ensure!(lab.d.landed_pieces() == WRITES, "{} of {WRITES} pieces landed", lab.d.landed_pieces());
    lab.assert_over()
}

pub fn one_large_transfer(backend: &dyn Backend) -> Result<(), Failure> {
    // Both pools, and as much again for the machine's other users.
    let (wanted, available) = (1024, available_mib());
    let pages = wanted.min(available / 4);
    if pages < wanted {
        println!(
            "one_large_transfer moves {pages} MiB instead of {wanted}: only {available} MiB of memory are available"
        );
    }
    ensure!(pages > 0, "{available} MiB of memory are available");
    let shape = large(pages as u32);
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.open(1, 1, &Prompt::new(1, pages * 16), 0)?;
    for end in (64..pages).step_by(64) {
        lab.compute(1, end)?;
    }
    lab.finish(1)?;
    lab.committed(1)?;
    lab.assert_over()
}

/// What the peer does not take waits in P's pages, not in buffers.
pub fn a_slow_peer_bounds_memory(backend: &dyn Backend) -> Result<(), Failure> {
    const PAGES: usize = 256;
    let shape = large(PAGES as u32);
    let mut lab = Lab::new(backend, shape, shape, limits())?;
    lab.link.flow(Flow::Held);
    lab.open(1, 1, &Prompt::new(1, PAGES * 16), 0)?;
    let before = resident_bytes()?;
    lab.finish(1)?;
    let most = lab.proofs.in_flight_bytes_max as u64;
    for _ in 0..10 {
        lab.link.flow(Flow::Bytes(2 * MIB));
        lab.pass(Duration::from_millis(30))?;
        let grown = resident_bytes()?.saturating_sub(before);
        ensure!(grown <= most, "memory grew by {grown} bytes while the peer was slow, {most} are the bound");
    }
    let (settled, landed) = (lab.p.settled(), lab.d.landed_pieces() as u64);
    let waiting = (settled - landed.min(settled)) * MIB;
    ensure!(waiting <= most, "H5: {waiting} bytes settled at P are not at D, the way holds {most}");
    ensure!(!lab.p.requests[&RequestId(1)].delivered, "P delivered what the peer has not taken");
    lab.link.flow(Flow::Open);
    lab.committed(1)?;
    lab.assert_over()
}

fn available_mib() -> usize {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: Option<usize> = line.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok());
    kib.unwrap_or(4 << 20) / 1024
}

/// Private memory: pools that are shared count with each of their mappings, and are bounded by themselves.
fn resident_bytes() -> Result<u64, Failure> {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib: Option<u64> = line.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| Failure::new("/proc/self/status says nothing of RssAnon"))
}
