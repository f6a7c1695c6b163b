//! A bounded run of the simulator for every change: both worlds, all fabrics.

use tandem_sim::{
    network::Manners,
    setup::Options,
    world::{self, Report},
};

const SEEDS: u64 = 2000;

fn run(options: Options) -> (u64, u64) {
    let reports: Vec<Report> = (0..SEEDS).map(|seed| world::run(seed, options)).collect();
    for report in &reports {
        if let Some(violation) = &report.violation {
            let (seed, flags) = (report.seed, options.flags());
            panic!("seed {seed}: {violation}; `cargo run --release -p tandem-sim -- --replay {seed}{flags}` shows it");
        }
    }
    let sum = |count: fn(&Report) -> u64| reports.iter().map(count).sum();
    (sum(|report| report.answered), sum(|report| report.failed + report.aborted))
}

#[test]
fn the_faithful_world_keeps_every_promise() {
    let (answered, ended) = run(Options { manners: Some(Manners::Faithful), ..Options::default() });
    assert!(answered > 10 * SEEDS / 2 && ended > SEEDS / 4, "{answered} answered, {ended} ended otherwise");
}

#[test]
fn the_hostile_world_keeps_every_promise() {
    let (answered, ended) = run(Options { manners: Some(Manners::Hostile), ..Options::default() });
    assert!(answered > 5 * SEEDS / 2 && ended > SEEDS, "{answered} answered, {ended} ended otherwise");
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
