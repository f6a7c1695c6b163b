//! `gateway_bench`: instant mock workers, and load on a gateway before them. `tests/bench/gateway/compare.py` runs it for
//! several gateways in turn; each command prints one line of JSON. A run that was not right prints why, as
//! `{"refused": …}`, and fails.

mod answer;
mod answers;
mod cancel;
mod client;
mod first_byte;
mod histogram;
mod intake;
mod ledger;
mod load;
mod memory;
mod mock;
mod plain;
mod process;
mod script;

use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_json::{Value, json};

use crate::process::Tree;
use crate::script::Script;

/// What went wrong, and with it the whole run.
#[derive(Debug)]
pub struct Failure(String);

impl Failure {
    pub fn new(what: impl Into<String>) -> Self {
        Failure(what.into())
    }

    pub fn io(what: &str) -> impl Fn(std::io::Error) -> Failure {
        move |error| Failure(format!("{what}: {error}"))
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Parser)]
#[command(about = "Instant mock workers, and load on a gateway before them")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Mock workers, as many of each side as said, on ports that are printed first.
    Mock { pairs: usize },
    /// Requests under load, in a closed loop or, with a rate, in an open one.
    Load {
        #[command(flatten)]
        target: Target,
        /// Connections, each with one request at a time.
        #[arg(long, default_value_t = 1)]
        connections: usize,
        /// Bytes of a body.
        #[arg(long, default_value_t = 1024)]
        body_bytes: usize,
        /// Streamed, 64 tokens; the workers write each event alone, or all that fit at once.
        #[arg(long, value_enum)]
        stream: Option<Writes>,
        /// Requests per second of an open loop.
        #[arg(long)]
        rate: Option<f64>,
        #[arg(long, default_value_t = 300)]
        warmup_ms: u64,
        #[arg(long, default_value_t = 1000)]
        measure_ms: u64,
    },
    /// From D's first byte to the client's, while P works.
    FirstByte {
        #[command(flatten)]
        target: Target,
        #[arg(long, default_value_t = 20)]
        requests: u64,
    },
    /// Memory with streams that rest, then with readers that do not read.
    Memory {
        #[command(flatten)]
        target: Target,
        #[arg(long, default_value_t = 2000)]
        idle: usize,
        #[arg(long, default_value_t = 200)]
        slow: usize,
    },
    /// From a client that leaves, or a leg that fails, to the end of the other legs.
    Cancel {
        #[command(flatten)]
        target: Target,
        #[arg(long, default_value_t = 10)]
        requests: u64,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Writes {
    Each,
    Burst,
}

/// How a gateway ties both legs of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Fleet {
    /// The same room in both bodies.
    Rooms,
    /// P first, its answer's parameters in D's body.
    Transfers,
    /// No gateway: D alone.
    Direct,
}

#[derive(Args)]
pub struct Target {
    /// Where the requests go.
    #[arg(long)]
    port: u16,
    /// Any port of the mock workers.
    #[arg(long)]
    mock: u16,
    #[arg(long, value_enum)]
    fleet: Fleet,
    /// Process id of the gateway.
    #[arg(long, value_parser = tree)]
    gateway: Option<Tree>,
    /// Process id of the mock workers.
    #[arg(long, value_parser = tree)]
    mocks: Option<Tree>,
}

fn tree(text: &str) -> Result<Tree, std::num::ParseIntError> {
    text.parse().map(Tree)
}

impl Target {
    /// Each of the requests has come to the workers once, and both legs belong together.
    fn legs_add_up(&self, requests: u64) -> Result<(), Failure> {
        let stats = plain::ask(self.mock, "/bench/stats")?;
        let (pairs, prefill) = match self.fleet {
            Fleet::Rooms => ("rooms", requests),
            Fleet::Transfers => ("transfers", requests),
            Fleet::Direct => ("plain", 0),
        };
        let good = stats["strange"] == 0
            && stats["wrong_pairs"] == 0
            && stats["half_pairs"] == 0
            && stats["cut"] == 0
            && stats["decode_legs"] == requests
            && stats["prefill_legs"] == prefill
            && stats[pairs] == requests;
        if good { Ok(()) } else { Err(Failure::new(format!("{requests} requests, but the workers saw {stats}"))) }
    }
}

fn run(command: Command) -> Result<Value, Failure> {
    match command {
        Command::Mock { pairs } => mock::serve(pairs).map(|()| json!({})),
        Command::Load { target, connections, body_bytes, stream, rate, warmup_ms, measure_ms } => {
            let script = Script { stream: stream.is_some(), each: stream == Some(Writes::Each), ..Script::default() };
            let plan = load::Plan {
                script,
                body_bytes,
                connections,
                rate,
                warmup: Duration::from_millis(warmup_ms),
                measure: Duration::from_millis(measure_ms),
            };
            load::run(&target, &plan)
        }
        Command::FirstByte { target, requests } => first_byte::run(&target, requests),
        Command::Memory { target, idle, slow } => memory::run(&target, idle, slow),
        Command::Cancel { target, requests } => cancel::run(&target, requests),
    }
}

fn main() -> std::process::ExitCode {
    match run(Cli::parse().command) {
        Ok(result) => {
            println!("{result}");
            std::process::ExitCode::SUCCESS
        }
        Err(Failure(why)) => {
            println!("{}", json!({"refused": why}));
            std::process::ExitCode::from(3)
        }
    }
}
