//! `tandem-sim`: many seeds, one seed again, or the lab.

use std::{
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use clap::Parser;
use tandem_sim::{
    coverage::Coverage,
    fabric::Kind,
    network::Manners,
    setup::Options,
    world::{self, Report},
};

/// Seeds from which on an empty pair of the coverage table fails the run.
const COVERAGE_SEEDS_MIN: u64 = 5000;
/// Failing seeds that are shown.
const SHOWN_MAX: usize = 5;

/// Runs a fleet under a virtual clock, seed by seed.
#[derive(Parser)]
struct Arguments {
    /// How many seeds.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Threads; each seed runs on one.
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, |cores| cores.get()))]
    threads: usize,
    /// faithful or hostile; both when absent.
    #[arg(long, value_parser = manners)]
    world: Option<Manners>,
    /// tcp, shm or rdma; all when absent.
    #[arg(long, value_parser = fabric)]
    fabric: Option<Kind>,
    /// Without faults: every request must be answered.
    #[arg(long)]
    calm: bool,
    /// Prints the transfer-fault lab: one transfer per reason to abort, step by step.
    #[arg(long)]
    lab: bool,
    /// Runs one seed and prints its trace.
    #[arg(long)]
    replay: Option<u64>,
}

fn manners(name: &str) -> Result<Manners, String> {
    Manners::named(name).ok_or("faithful or hostile".into())
}

fn fabric(name: &str) -> Result<Kind, String> {
    Kind::named(name).ok_or("tcp, shm or rdma".into())
}

#[derive(Default)]
struct Sum {
    coverage: Coverage,
    failing: Vec<(u64, String)>,
    answered: u64,
    failed: u64,
    aborted: u64,
    events: u64,
}

impl Sum {
    fn add(&mut self, report: &Report) {
        self.coverage.add(&report.coverage);
        self.answered += report.answered;
        self.failed += report.failed;
        self.aborted += report.aborted;
        self.events += report.events;
        if let Some(violation) = &report.violation {
            self.failing.push((report.seed, violation.to_string()));
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.lab {
        print!("{}", tandem_sim::lab::text());
        return ExitCode::SUCCESS;
    }
    let options =
        Options { manners: arguments.world, fabric: arguments.fabric, calm: arguments.calm, ..Options::default() };
    match arguments.replay {
        Some(seed) => replay(seed, options),
        None => many(&arguments, options),
    }
}

fn replay(seed: u64, options: Options) -> ExitCode {
    let report = world::run(seed, Options { trace: true, ..options });
    print!("{}", report.trace);
    match report.violation {
        None => {
            println!("seed {seed}: nothing is broken");
            ExitCode::SUCCESS
        }
        Some(violation) => {
            println!("seed {seed}: {violation}");
            ExitCode::FAILURE
        }
    }
}

fn many(arguments: &Arguments, options: Options) -> ExitCode {
    let began = Instant::now();
    let next = AtomicU64::new(arguments.from);
    let end = arguments.from + arguments.seeds;
    let sum = Mutex::new(Sum::default());
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let report = world::run(seed, options);
                    sum.lock().expect("no thread panics with the sum").add(&report);
                }
            });
        }
    });
    let mut sum = sum.into_inner().expect("no thread panics with the sum");
    sum.failing.sort();
    let seconds = began.elapsed().as_secs_f64();
    println!("{}", sum.coverage.table());
    println!(
        "{} seeds in {seconds:.1} s, {:.0} seeds/s on {} threads; {} answered, {} failed, {} aborted; {} events",
        arguments.seeds,
        arguments.seeds as f64 / seconds,
        arguments.threads,
        sum.answered,
        sum.failed,
        sum.aborted,
        sum.events
    );
    verdict(arguments, options, &sum)
}

fn verdict(arguments: &Arguments, options: Options, sum: &Sum) -> ExitCode {
    let mut good = sum.failing.is_empty();
    println!("{} violations", sum.failing.len());
    for (seed, what) in sum.failing.iter().take(SHOWN_MAX) {
        println!(
            "\nseed {seed}: {what}\n  replay: cargo run --release -p tandem-sim -- --replay {seed}{}",
            flags(options)
        );
    }
    if let Some((seed, _)) = sum.failing.first() {
        let report = world::run(*seed, Options { trace: true, ..options });
        println!("\ntrace of seed {seed}:\n{}", report.trace);
    }
    let every_kind = options.fabric.is_none() && options.manners.is_none() && !options.calm;
    if arguments.seeds >= COVERAGE_SEEDS_MIN && every_kind {
        for (spot, fault) in sum.coverage.gaps() {
            good = false;
            println!("not covered, and not impossible: {} when {}", fault.name(), spot.name());
        }
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The flags that a replay needs besides its seed.
fn flags(options: Options) -> String {
    let mut text = String::new();
    if let Some(manners) = options.manners {
        text.push_str(&format!(" --world {}", manners.name()));
    }
    if let Some(kind) = options.fabric {
        text.push_str(&format!(" --fabric {}", kind.name()));
    }
    if options.calm {
        text.push_str(" --calm");
    }
    text
}
