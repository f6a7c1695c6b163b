//! The engine: one thread that schedules, steps the backend, samples and judges the ends of answers. HTTP talks to it
//! through an [`EngineHandle`] and never waits for it; it never waits for a socket.
//!
//! ```text
//!  HTTP --submit--> Inbox --> Core: admit -> plan -> Backend::step -> sample -> output --events--> SampleStream --> HTTP
//!                             ^  facts                      | chunks, first tokens, reserved pages
//!                             +------ PrefillHandoff / DecodeHandoff <---+
//! ```
//!
//! [`core`] is the engine without its thread: whoever owns a [`core::Core`] gives it time and mail, as the thread of
//! [`spawn`] and the simulator of `tests/sim` do.
pub mod core;
mod handle;
mod inbox;
mod loads;
mod quarantine;
mod sample;
mod thread;
#[cfg(test)]
pub(crate) mod toy;

pub use handle::{EngineHandle, SampleStream};
pub use inbox::{Abort, EngineWaker, Mail, Submission};
pub use loads::Loads;
pub use quarantine::Excess;
pub use thread::{EngineParts, RoleDriver, spawn};
