//! The worker: HTTP, scheduler, KV pool, roles.
pub mod backend;
pub mod config;
pub mod decode_role;
pub mod engine;
pub mod kv;
pub mod output;
pub mod prefill_role;
pub mod request;
pub mod sampling;
pub mod scheduler;
