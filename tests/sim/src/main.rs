//! `tandem-sim`: many seeds, one seed again, or the lab.

use std::{
    fmt::Display,
    io::{self, Write},
    process::ExitCode,
    str::FromStr,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use clap::{CommandFactory, Parser, error::ErrorKind};
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
    #[arg(long, default_value_t = 1000, value_parser = at_least_one::<u64>)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Threads; each seed runs on one.
    #[arg(
        long,
        default_value_t = std::thread::available_parallelism().map_or(1, |cores| cores.get()),
        value_parser = at_least_one::<usize>
    )]
    threads: usize,
    /// faithful or hostile; both when absent.
    #[arg(long, value_parser = manners)]
    world: Option<Manners>,
    /// tcp, shm or rdma; all when absent.
    #[arg(long, value_parser = fabric)]
    fabric: Option<Kind>,
    /// Without faults, in the faithful world: every request must be answered.
    #[arg(long)]
    calm: bool,
    /// Prints the transfer-fault lab: one transfer per reason to abort, step by step. Takes no other flag.
    #[arg(long, exclusive = true)]
    lab: bool,
    /// Runs one seed and prints its trace.
    #[arg(long, conflicts_with_all = ["seeds", "from", "threads"])]
    replay: Option<u64>,
}

fn at_least_one<T: FromStr<Err: Display> + From<u8> + PartialOrd>(number: &str) -> Result<T, String> {
    let number: T = number.parse().map_err(|error: T::Err| error.to_string())?;
    if number < T::from(1) { Err("must be at least 1".into()) } else { Ok(number) }
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
        return show(&tandem_sim::lab::text(), true);
    }
    let manners = match arguments.world {
        Some(Manners::Hostile) if arguments.calm => {
            refuse("--calm cannot be used with --world hostile, which loses frames: leave one of them out")
        }
        _ if arguments.calm => Some(Manners::Faithful),
        world => world,
    };
    let options = Options { manners, fabric: arguments.fabric, calm: arguments.calm, ..Options::default() };
    match arguments.replay {
        Some(seed) => replay(seed, options),
        None => many(&arguments, options),
    }
}

/// Ends the program with a message about its flags, as a flag of an unknown name does.
fn refuse(why: &str) -> ! {
    Arguments::command().error(ErrorKind::ArgumentConflict, why).exit()
}

/// Prints all of it. A reader that leaves early (`| head`) has seen what it wanted.
fn show(text: &str, good: bool) -> ExitCode {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("the output cannot be written: {error}");
            ExitCode::FAILURE
        }
        _ if good => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn replay(seed: u64, options: Options) -> ExitCode {
    let Report { trace, violation, .. } = world::run(seed, Options { trace: true, ..options });
    let what = violation.as_ref().map_or("nothing is broken".to_owned(), ToString::to_string);
    show(&format!("{trace}seed {seed}: {what}\n"), violation.is_none())
}

fn many(arguments: &Arguments, options: Options) -> ExitCode {
    let Some(end) = arguments.from.checked_add(arguments.seeds) else {
        refuse(&format!(
            "--from {} leaves no room for --seeds {}: the last seed may be {} at most",
            arguments.from,
            arguments.seeds,
            u64::MAX - 1
        ))
    };
    let began = Instant::now();
    let next = AtomicU64::new(arguments.from);
    let sum = Mutex::new(Sum::default());
    let take = || next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |seed| (seed < end).then_some(seed + 1));
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads {
            scope.spawn(|| {
                while let Ok(seed) = take() {
                    let report = world::run(seed, options);
                    sum.lock().expect("no thread panics with the sum").add(&report);
                }
            });
        }
    });
    let mut sum = sum.into_inner().expect("no thread panics with the sum");
    sum.failing.sort();
    let seconds = began.elapsed().as_secs_f64();
    let mut text = format!(
        "{}\n{} seeds in {seconds:.1} s, {:.0} seeds/s on {} threads; {} answered, {} failed, {} aborted; {} events\n",
        sum.coverage.table(),
        arguments.seeds,
        arguments.seeds as f64 / seconds,
        arguments.threads,
        sum.answered,
        sum.failed,
        sum.aborted,
        sum.events
    );
    let covered = coverage(arguments, options, &sum, &mut text);
    violations(options, &sum, &mut text);
    show(&text, covered && sum.failing.is_empty())
}

/// Whether the coverage table has no gap, where enough ran for it to be judged.
fn coverage(arguments: &Arguments, options: Options, sum: &Sum, text: &mut String) -> bool {
    if arguments.seeds < COVERAGE_SEEDS_MIN {
        text.push_str(&format!("coverage not judged below {COVERAGE_SEEDS_MIN} seeds\n"));
        return true;
    }
    if !options.flags().is_empty() {
        text.push_str(&format!("coverage not judged: the run was narrowed by{}\n", options.flags()));
        return true;
    }
    let gaps = sum.coverage.gaps();
    for (spot, fault) in &gaps {
        text.push_str(&format!("not covered, and not impossible: {} when {}\n", fault.name(), spot.name()));
    }
    gaps.is_empty()
}

fn violations(options: Options, sum: &Sum, text: &mut String) {
    let flags = options.flags();
    text.push_str(&format!("{} violations\n", sum.failing.len()));
    for (seed, what) in sum.failing.iter().take(SHOWN_MAX) {
        text.push_str(&format!(
            "\nseed {seed}: {what}\n  replay: cargo run --release -p tandem-sim -- --replay {seed}{flags}\n"
        ));
    }
    if let Some((seed, _)) = sum.failing.first() {
        let report = world::run(*seed, Options { trace: true, ..options });
        text.push_str(&format!("\ntrace of seed {seed}:\n{}\n", report.trace));
    }
}
