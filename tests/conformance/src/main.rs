//! `tandem-conformance BACKEND [CASE...]`: the suite without a test harness, for machines that have none. Prints a line
//! per case; fails when one does.

use std::{process::ExitCode, time::Instant};

use tandem_conformance::{Backend, CASES, run, shm::Shm, tcp::Tcp};

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let backend: Box<dyn Backend> = match args.next().as_deref() {
        Some("tcp") => Box::new(Tcp::relayed()),
        Some("shm") => Box::new(Shm::relayed()),
        other => {
            eprintln!("usage: tandem-conformance tcp|shm [CASE...], not {other:?}");
            return ExitCode::from(2);
        }
    };
    let mut names: Vec<String> = args.collect();
    if names.is_empty() {
        names = CASES.iter().map(|case| case.name.to_owned()).collect();
    }
    let mut failed = 0;
    for name in &names {
        let begun = Instant::now();
        let outcome = run(name, backend.as_ref());
        let seconds = begun.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => println!("ok     {seconds:6.2} s  {name}"),
            Err(failure) => {
                failed += 1;
                println!("FAILED {seconds:6.2} s  {name}: {failure}");
            }
        }
    }
    println!("{}: {} cases, {failed} failed", backend.name(), names.len());
    ExitCode::from(u8::from(failed > 0))
}
