//! `abort_drain [ABORTS]`: how long an attempt that is aborted in the middle of its transfer pins pages, on D and on P,
//! per backend. One line of JSON each.
//!
//! The decode worker's client leaves when the first pieces have landed. Both machines and both ends of the fabric are
//! the real ones; control frames pass in memory, so the network's round trip is not in P's numbers.

use std::time::{Duration, Instant};

use tandem_conformance::{
    Backend, Failure,
    lab::{Lab, limits, user},
    pattern::Prompt,
    shm::Shm,
    tcp::Tcp,
};
use tandem_handoff::{ids::RequestId, layout::PoolShape};

/// A prompt of 64 pages of 256 KiB: 16 MiB, some milliseconds of transfer.
const PAGES: usize = 64;
const SHAPE: PoolShape =
    PoolShape { layers: 8, kv_heads: 4, head_dim: 64, page_size: 16, element_bytes: 4, tp: 1, pages: PAGES as u32 };

fn main() -> Result<(), Failure> {
    let aborts = std::env::args().nth(1).map_or(1000, |text| text.parse().expect("a number of aborts"));
    measure(&Tcp::direct(), aborts)?;
    measure(&Shm::direct(), aborts)
}

fn measure(backend: &dyn Backend, aborts: u64) -> Result<(), Failure> {
    let mut lab = Lab::new(backend, SHAPE, SHAPE, limits())?;
    lab.blind();
    let (mut on_d, mut on_p, mut left) = (Vec::new(), Vec::new(), 0);
    for id in 1..=aborts {
        let request = RequestId(id);
        lab.open(id, id, &Prompt::new(id, PAGES * 16), 0)?;
        lab.compute(id, PAGES)?;
        let attempt = lab.d.last_attempt();
        lab.until("the first piece", |lab| lab.d.landed(attempt) > 0)?;
        left += PAGES - lab.d.landed(attempt);
        let begun = Instant::now();
        let (mut d, mut p) = (None, None);
        lab.cancel_d(id, user())?;
        lab.until("quiet", |lab| {
            let since = begun.elapsed();
            if lab.d.requests[&request].back.is_some() {
                d.get_or_insert(since);
            }
            if lab.p.requests[&request].quiet {
                p.get_or_insert(since);
            }
            d.is_some() && p.is_some()
        })?;
        on_d.extend(d);
        on_p.extend(p);
    }
    lab.assert_over()?;
    println!(
        "{{\"backend\":\"{}\",\"aborts\":{aborts},\"pieces_left_mean\":{:.1},{},{}}}",
        backend.name(),
        left as f64 / aborts as f64,
        percentiles("d", on_d),
        percentiles("p", on_p),
    );
    Ok(())
}

fn percentiles(side: &str, mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1e3;
    format!("\"{side}_p50_ms\":{:.3},\"{side}_p99_ms\":{:.3},\"{side}_max_ms\":{:.3}", at(0.5), at(0.99), at(1.0))
}
