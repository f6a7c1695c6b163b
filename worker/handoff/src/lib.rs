//! Both sides of the KV handoff protocol. *Pure*: no I/O, no clock, no threads, no unsafe.
pub mod cause;
pub mod fence;
pub mod ids;
pub mod layout;
pub mod ticket;
pub mod wire;
