//! A bounded run of the simulator for every change: both worlds, all fabrics, and every pair of state and fault.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use tandem_sim::{
    coverage::Coverage,
    network::Manners,
    setup::Options,
    world::{self, Report},
};

/// Seeds of each world. Fewer leave rare pairs of state and fault empty.
const SEEDS: u64 = 5000;

#[derive(Default)]
struct Sum {
    coverage: Coverage,
    answered: u64,
    ended: u64,
    broken: Option<String>,
}

impl Sum {
    fn add(&mut self, manners: Manners, report: &Report) {
        self.coverage.add(&report.coverage);
        self.answered += report.answered;
        self.ended += report.failed + report.aborted;
        if let Some(violation) = &report.violation {
            let flags = format!("--replay {} --world {}", report.seed, manners.name());
            self.broken = Some(format!("{violation}; `cargo run --release -p tandem-sim -- {flags}` shows it"));
        }
    }
}

fn run(manners: Manners) -> Sum {
    let options = Options { manners: Some(manners), ..Options::default() };
    let (next, sum) = (AtomicU64::new(0), Mutex::new(Sum::default()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |cores| cores.get()) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= SEEDS {
                        return;
                    }
                    let report = world::run(seed, options);
                    sum.lock().expect("no thread panics with the sum").add(manners, &report);
                }
            });
        }
    });
    let sum = sum.into_inner().expect("no thread panics with the sum");
    assert_eq!(sum.broken, None);
    sum
}

#[test]
fn both_worlds_keep_every_promise_and_every_fault_strikes_in_every_state() {
    let faithful = run(Manners::Faithful);
    let (answered, ended) = (faithful.answered, faithful.ended);
    assert!(answered > 5 * SEEDS && ended > SEEDS / 4, "faithful: {answered} answered, {ended} ended otherwise");
    let hostile = run(Manners::Hostile);
    let (answered, ended) = (hostile.answered, hostile.ended);
    assert!(answered > 5 * SEEDS / 2 && ended > SEEDS, "hostile: {answered} answered, {ended} ended otherwise");
    let mut coverage = faithful.coverage;
    coverage.add(&hostile.coverage);
    let gaps: Vec<String> =
        coverage.gaps().iter().map(|(place, fault)| format!("{} when {}", fault.name(), place.name())).collect();
    assert_eq!(gaps, Vec::<String>::new(), "never struck, and not impossible:\n{}", coverage.table());
    assert!(coverage.preemptions > SEEDS / 10, "{} preemptions", coverage.preemptions);
}

#[test]
fn without_faults_everyone_is_answered() {
    let options = Options { manners: Some(Manners::Faithful), calm: true, ..Options::default() };
    let failed: u64 = (0..300)
        .map(|seed| world::run(seed, options))
        .map(|report| {
            assert_eq!(report.violation, None, "seed {}", report.seed);
            report.failed
        })
        .sum();
    assert_eq!(failed, 0);
}
