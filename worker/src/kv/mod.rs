//! The KV cache as the scheduler sees it: pages with one owner each, and the pool that owns what nobody else does (H1).
pub mod page;
pub mod pool;
pub mod sums;
