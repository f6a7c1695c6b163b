//! The engine against an oracle: each request alone in a pool that is large enough for it.
mod common;
mod faults;
mod mixed;
mod pair;
mod quarantine;
mod roles;
