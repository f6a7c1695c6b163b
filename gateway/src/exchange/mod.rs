//! Carrying one request through: what is sent to whom, and what to do about each thing that happens.

pub mod drive;
mod machine;
pub mod ticket;
