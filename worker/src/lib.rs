//! The worker: HTTP, scheduler, KV pool, roles.
pub mod config;
pub mod decode_role;
pub mod prefill_role;
pub mod request;
