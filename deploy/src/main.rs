//! The one binary, `tandem`: the words of the command line, and nothing else. Each subcommand is a library call.

mod descriptors;
mod doctor;
mod leash;
mod logging;
mod up;

use std::{
    error::Error,
    io::{Write as _, stderr},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use tandem_gateway::GatewayArgs;
use tandem_worker::WorkerArgs;

/// Serve large language models with prefill and decode on separate workers.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Up(Box<up::UpArgs>),
    /// Stand in front of workers: pair a prefill with a decode worker for each request, or pick a plain one.
    ///
    /// Every setting can also come from the environment (TANDEM_GATEWAY_PORT=...) or from a file (--config).
    Gateway(Box<GatewayArgs>),
    /// Serve a model: unsplit, or as the prefill or the decode half of a split.
    ///
    /// Every setting can also come from the environment (TANDEM_WORKER_PORT=...) or from a file (--config).
    Worker(Box<WorkerArgs>),
    Doctor(Box<doctor::DoctorArgs>),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    leash::hold();
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            // In one write, so that a signal, which `up` may send just now, cannot tear it; and nobody has to read it.
            let _ = stderr().write_all(format!("tandem: {error}\n").as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        Command::Up(args) => up::run(*args)?,
        Command::Gateway(args) => {
            if let Some(shortage) = descriptors::gateway_shortage(descriptors::raise()) {
                // The gateway sets its log up by itself, later.
                let _ = stderr().write_all(format!("tandem: {shortage}\n").as_bytes());
            }
            tandem_gateway::run(*args)?;
        }
        Command::Doctor(args) => return doctor::run(*args),
        Command::Worker(args) => {
            let args = args.merged()?;
            logging::start(args.log_level.as_deref())?;
            if let Some(shortage) = descriptors::worker_shortage(descriptors::raise(), args.connections_max()) {
                tracing::warn!("{shortage}");
            }
            return Ok(tandem_worker::run(args)?.exit_status().into());
        }
    }
    Ok(ExitCode::SUCCESS)
}
