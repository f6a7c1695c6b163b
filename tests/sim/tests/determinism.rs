//! One seed gives the same bytes every time.

use tandem_sim::{
    setup::Options,
    world::{self, Report},
};

fn traced(seed: u64) -> Report {
    world::run(seed, Options { trace: true, ..Options::default() })
}

#[test]
fn one_seed_twice_gives_identical_bytes() {
    for seed in 0..40 {
        let (first, second) = (traced(seed), traced(seed));
        assert!(first.trace.len() > 1000, "seed {seed} has a trace");
        assert_eq!(first.trace, second.trace, "seed {seed}");
        assert_eq!((first.events, first.virtual_us), (second.events, second.virtual_us), "seed {seed}");
    }
}

#[test]
fn a_trace_changes_nothing_and_other_threads_change_nothing() {
    let alone: Vec<(u64, u64)> = (0..20).map(traced).map(|report| (report.events, report.virtual_us)).collect();
    let together: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let run = |seed| move || world::run(seed, Options::default());
        let threads: Vec<_> = (0..20).map(|seed| scope.spawn(run(seed))).collect();
        let report = |thread: std::thread::ScopedJoinHandle<'_, Report>| thread.join().expect("a world reports");
        threads.into_iter().map(report).map(|report| (report.events, report.virtual_us)).collect()
    });
    assert_eq!(alone, together);
}
