//! Carrying one request through: what is sent to whom, and what to do about each thing that happens.

mod afterwards;
mod client;
pub mod drive;
mod limits;
mod machine;
mod open;
pub mod retry;
mod run;
pub mod ticket;
