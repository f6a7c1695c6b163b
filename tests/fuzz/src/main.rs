//! A long run of one target: `tandem-fuzz handoff 600`, or one input again: `tandem-fuzz handoff --replay FILE`.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use tandem_fuzz::{
    drive::{Until, checked, fuzz},
    targets,
};

#[derive(Parser)]
#[command(about = "Fuzzes one target for a while; a finding is saved and its path printed")]
struct Args {
    /// One of: frames, greetings, tickets, answers, merges, settings, streams, gguf, safetensors, handoff
    target: String,
    /// How long
    #[arg(default_value_t = 60)]
    seconds: u64,
    /// Another seed, other mutants; by default a random one, which is printed
    #[arg(long)]
    seed: Option<u64>,
    /// Runs this one input, with all that it prints
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let targets = targets::all();
    let Some(target) = targets.iter().find(|target| target.name() == args.target) else {
        let names: Vec<&str> = targets.iter().map(|target| target.name()).collect();
        eprintln!("there is no target {:?}; there are {}", args.target, names.join(", "));
        return ExitCode::FAILURE;
    };
    if let Some(path) = args.replay {
        return replay(&**target, &path);
    }
    let seed = args.seed.unwrap_or_else(rand::random);
    println!("{} with --seed {seed} for {} s", target.name(), args.seconds);
    match fuzz(&**target, seed, Until::Time(Duration::from_secs(args.seconds))) {
        Ok(report) => {
            println!("{} inputs came to {} different things, no finding", report.inputs, report.ends);
            ExitCode::SUCCESS
        }
        Err(finding) => {
            println!("{}", finding.what);
            match finding.save(&**target) {
                Ok(path) => println!("input: {0}\nreplay: just fuzz {1} --replay {0}", path.display(), target.name()),
                Err(error) => println!("the input cannot be saved ({error}): {:?}", finding.input),
            }
            ExitCode::FAILURE
        }
    }
}

fn replay(target: &dyn tandem_fuzz::Target, path: &std::path::Path) -> ExitCode {
    let input = match std::fs::read(path) {
        Ok(input) => input,
        Err(error) => {
            eprintln!("{}: {error}", path.display());
            return ExitCode::FAILURE;
        }
    };
    match checked(target, &input) {
        Ok(_) => {
            println!("it keeps its promises: {}", target.run(&input));
            ExitCode::SUCCESS
        }
        Err(what) => {
            println!("{what}");
            ExitCode::FAILURE
        }
    }
}
