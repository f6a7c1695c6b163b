//! Owns the log of a worker: one line per event on stderr, filtered by level. Set up once by `main`. Promises that a log
//! that nobody reads any more stops no request: the lines are lost, and nothing else.

use std::io::{IsTerminal as _, stderr};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

const DEFAULT_FILTER: &str = "info";

#[derive(Debug, thiserror::Error)]
#[error(
    "--log-level {filter}: {reason}; use error, warn, info, debug, trace, or a filter like tandem_worker=debug,info"
)]
pub struct FilterError {
    filter: String,
    reason: String,
}

/// From here on, events that pass `filter` are written to stderr; colours only on a terminal.
pub fn start(filter: Option<&str>) -> Result<(), FilterError> {
    let filter = parse(filter.unwrap_or(DEFAULT_FILTER))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        // Otherwise a line that cannot be written is told by `eprintln!`, which panics because it cannot be written.
        .log_internal_errors(false)
        .init();
    Ok(())
}

fn parse(filter: &str) -> Result<EnvFilter, FilterError> {
    let error = |reason: String| FilterError { filter: filter.to_owned(), reason };
    // A lone word is a level: as a target name it would silently switch everything off.
    let is_level = !filter.is_empty() && filter.parse::<LevelFilter>().is_ok();
    if !is_level && !filter.contains(['=', ',']) {
        return Err(error("no such level".to_owned()));
    }
    EnvFilter::try_new(filter).map_err(|reason| error(reason.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_filters_are_taken_and_typing_errors_are_not() {
        for good in ["info", "WARN", "off", "tandem_worker=debug,info"] {
            parse(good).expect(good);
        }
        for bad in ["inof", "", "tandem=loud"] {
            assert!(parse(bad).expect_err(bad).to_string().contains("--log-level"));
        }
    }
}
