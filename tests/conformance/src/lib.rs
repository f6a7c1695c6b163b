//! One suite that every transfer backend must pass.
//!
//! The suite drives the real machines of `tandem-handoff`, both in one process, over the real ends of a fabric, with real
//! pools. Pages that nobody owns hold canaries, pages that are given back are filled anew at once, and what a decode
//! worker commits is compared with an oracle that knows only the prompt ([`pattern`]). So a fabric that writes too late,
//! reads too late, or says that it is quiet too early, is seen by its effect, whatever it reports.
//!
//! A backend takes part by a fixture, a [`Backend`]: `tcp` and `shm` are two. [`CASES`] are plain functions with names, so that
//! the suite also runs where no test harness is: `tandem-conformance BACKEND` is that program. Each case can fail:
//! `tests/planted/` plants a fault into a good backend, and names the case that must find it.

use std::{
    fmt,
    sync::{PoisonError, RwLock},
};

pub mod backend;
mod cases;
pub mod lab;
pub mod pages;
pub mod pattern;
mod relay;
pub mod shm;
pub mod tcp;

pub use backend::Backend;
pub use cases::{CASES, Case};

/// What a case saw that must not be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure(String);

impl Failure {
    pub fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }

    /// With what the case was about to do.
    #[must_use]
    pub fn during(self, what: &str) -> Self {
        Self(format!("{what}: {}", self.0))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

/// Ends a case when a condition does not hold.
macro_rules! ensure {
    ($condition:expr, $($what:tt)+) => {
        if !$condition {
            return Err($crate::Failure::new(format!($($what)+)));
        }
    };
}
pub(crate) use ensure;

/// The case that measures the process's memory: cases that run at the same time in other threads would disturb it.
const ALONE: &str = "a_slow_peer_bounds_memory";
static RUNNING: RwLock<()> = RwLock::new(());

/// Runs the case of this name.
///
/// # Errors
/// What the case saw, or that there is no such case.
pub fn run(name: &str, backend: &dyn Backend) -> Result<(), Failure> {
    let case = CASES.iter().find(|case| case.name == name);
    let case = case.ok_or_else(|| Failure::new(format!("there is no case {name:?}")))?;
    if name == ALONE {
        let _alone = RUNNING.write().unwrap_or_else(PoisonError::into_inner);
        (case.run)(backend)
    } else {
        let _beside_others = RUNNING.read().unwrap_or_else(PoisonError::into_inner);
        (case.run)(backend)
    }
}

/// What a fixture says when the machine refuses it something.
fn no(what: &'static str) -> impl Fn(std::io::Error) -> Failure {
    move |error| Failure::new(format!("this machine lends no {what}: {error}"))
}
