//! The worker: HTTP, scheduler, KV pool, roles.
pub mod config;
pub mod request;
