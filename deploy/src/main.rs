//! The one binary, `tandem`: the words of the command line, and nothing else. Each subcommand is a library call.

mod leash;
mod logging;
mod up;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Serve large language models with prefill and decode on separate workers.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Up(up::UpArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    leash::hold();
    let ended = match cli.command {
        Command::Up(args) => up::run(args).map_err(|error| error.to_string()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("tandem: {message}");
            ExitCode::FAILURE
        }
    }
}
