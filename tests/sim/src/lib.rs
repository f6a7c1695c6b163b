//! A deterministic simulator of whole fleets: many prefill and decode workers, a gateway's part, seeded workloads and
//! faults under one virtual clock. One seed is one thread and gives the same bytes every time.
//!
//! Real: the handoff's machines, the roles, the engine's core with its scheduler and page pool. Modelled: the clock, the
//! control channels ([`network`]), three fabrics ([`fabric`]), memory ([`memory`]), the device ([`backend`]), the gateway
//! ([`gateway`]). A late write really overwrites what is there; checkers watch H1 to H10, that everything ends in bounded
//! virtual time, that nothing is left, and that answers and published rows are those of an oracle which knows the token
//! history only ([`model`]).

pub mod agenda;
pub mod backend;
pub mod coverage;
pub mod fabric;
pub mod faults;
pub mod gateway;
pub mod ground;
pub mod lab;
pub mod memory;
pub mod model;
pub mod network;
pub mod node;
pub mod rng;
pub mod roles;
pub mod seeds;
pub mod setup;
pub mod trace;
pub mod wire;
pub mod world;
