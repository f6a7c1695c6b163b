//! Waiting for a fact, always with a limit. A test is right by what it observes; the pauses here only spare the CPU.

use std::future::Future;
use std::time::{Duration, Instant};

/// Between two looks at a fact.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Looks until `look` gives a value, or panics after `limit` with `what` and the last reason.
pub async fn until<T, F>(what: &str, limit: Duration, mut look: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    let start = Instant::now();
    loop {
        match look().await {
            Ok(value) => return value,
            Err(reason) if start.elapsed() > limit => panic!("waited {limit:?} for {what}: {reason}"),
            Err(_) => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

/// Runs `work` to its end, or panics after `limit`.
pub async fn within<T>(what: &str, limit: Duration, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(limit, work).await {
        Ok(value) => value,
        Err(_) => panic!("{what} took longer than {limit:?}"),
    }
}
