//! The harness of the end-to-end tests: real processes, real sockets, and the rules by which answers are compared.
//!
//! What a reader needs in order: `binary` finds the product, `process` owns one child, `fleet` composes workers and a
//! gateway, `client` talks to them, `sse` and `loads` read what they say, `wait` bounds every wait, `mock` is a worker
//! that misbehaves on demand. `corpus` generates requests and `compare` says whether two answers are the same (H9);
//! both are pure. For runs with faults, `proxy` stands between two halves of a split, `announce` reads which state a
//! handoff enters, `faults` strikes, and `oracle` knows what each answer must be.
//!
//! It promises that every wait has a limit, that every child is killed by its own id when its owner goes out of scope,
//! and that a failing test shows the end of each log.

pub mod announce;
pub mod binary;
pub mod checkpoint;
pub mod client;
pub mod compare;
pub mod corpus;
pub mod faults;
pub mod fleet;
pub mod loads;
pub mod mock;
pub mod net;
pub mod oracle;
pub mod process;
pub mod proxy;
pub mod sse;
pub mod wait;

pub use client::{Answer, Client, Outcome};
pub use fleet::{Fleet, FleetOptions, Role, Worker};
