//! The worker: HTTP, scheduler, KV pool, roles.
mod accept_log;
mod announce;
pub mod backend;
pub mod bootstrap;
pub mod config;
pub mod decode_role;
pub mod engine;
pub mod error;
mod host;
pub mod http;
pub mod kv;
#[cfg(test)]
mod log_lines;
pub mod metrics;
pub mod output;
pub mod prefill_role;
mod quarantine_log;
pub mod request;
mod run;
pub mod sampling;
pub mod scheduler;

pub use config::WorkerArgs;
pub use error::StartError;
pub use run::{Ended, run};
