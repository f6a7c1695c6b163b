//! Carrying one request through: what is sent to whom, and what to do about each thing that happens.

pub mod aborts;
mod afterwards;
pub mod client;
pub mod drive;
pub mod engines;
mod limits;
mod machine;
mod open;
pub mod retry;
mod run;
pub mod ticket;
