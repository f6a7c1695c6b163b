//! Both sides of the KV handoff protocol. *Pure*: no I/O, no clock, no threads, no unsafe.
pub mod ids;
pub mod layout;
pub mod ticket;
