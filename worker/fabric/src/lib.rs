//! Moving bytes between KV pools, and the memory they live in.
pub mod memory;
