//! Planted faults: the simulator must find each within a bounded number of seeds, and nothing in the same seeds without.
//!
//! Prints the table: which fault, how many seeds it took, and which checker found it.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use tandem_handoff::sabotage::{Fault, Planted};
use tandem_sim::{fabric::Kind, ground::Violation, setup::Options, world};

const SEEDS_MAX: u64 = 2000;

/// The first seed that shows the fault.
fn hunt(fault: Fault) -> Option<(u64, Violation)> {
    // What only TCP does (it fills up a stopped frame) is hunted over TCP.
    let fabric = (fault == Fault::StopsAfterDone).then_some(Kind::Tcp);
    let options = Options { planted: Planted::fault(fault), fabric, ..Options::default() };
    (0..SEEDS_MAX).find_map(|seed| Some((seed, world::run(seed, options).violation?)))
}

#[test]
fn every_planted_fault_is_found_and_nothing_is_found_without() {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(BTreeMap::new());
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&fault) = Fault::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = hunt(fault);
                    found.lock().expect("no hunter panics").insert(fault, outcome);
                }
            });
        }
    });
    let found = found.into_inner().expect("no hunter panics");
    let mut seeds_used = 0;
    let mut missed = Vec::new();
    println!("{:<26} {:>6}  found by", "planted fault", "seeds");
    for (fault, outcome) in &found {
        match outcome {
            Some((seed, violation)) => {
                seeds_used = seeds_used.max(seed + 1);
                println!("{:<26} {:>6}  {}: {:.110}", format!("{fault:?}"), seed + 1, violation.rule, violation.what);
            }
            None => {
                missed.push(fault);
                println!("{:<26} {:>6}  NOT FOUND", format!("{fault:?}"), SEEDS_MAX);
            }
        }
    }
    assert_eq!(missed, Vec::<&Fault>::new(), "not found within {SEEDS_MAX} seeds");
    for seed in 0..seeds_used {
        let report = world::run(seed, Options::default());
        assert_eq!(report.violation, None, "seed {seed} without a planted fault");
    }
    println!("the same {seeds_used} seeds without a planted fault: nothing");
}
