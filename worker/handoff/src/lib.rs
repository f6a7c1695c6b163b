//! Both sides of the KV handoff protocol. *Pure*: no I/O, no clock, no threads, no randomness, no unsafe; the crate's
//! `clippy.toml` and `tests/purity.rs` see to that.
//!
//! A prefill worker P computes a prompt's KV pages and pushes them into pages that a decode worker D has offered.
//! [`source`] is P's machine, [`sink`] is D's. Both take calls of their engine, frames of the peer, facts of the fabric
//! and the time, and give back effects. Drivers do what the effects say and know nothing else.
//!
//! ```text
//!  P, per request (source)                          D, per request (sink)
//!
//!        request                                           reserve: pages for what D does not hold
//!           |                                                 |
//!           v        deadline, cancel                         v       dial failed, deadline, cancel
//!      +---------+ ----------------> Failed, Quiet       +----------+ ----------> Failed, Quiet (never shown)
//!      | Waiting |  (tombstone for the late Reserve)     | Dialling |
//!      +---------+  D's early Abort, a misfit: the same, +----------+
//!           |       and no tombstone                          |
//!           | Reserve (before or after the request;           | channel up: Expect, then Reserve
//!           | prompts, held prefix and pages agree)           v
//!           v  -> Reserved                               +---------+ every piece of the set landed, and Done
//!      +---------+   deadline, cancel, Abort,            | Offered | ------------+
//!      |  Open   | --- channel lost, post failed --+     +---------+             v checksums asked for: Verify
//!      +---------+                                 |          |           +-----------+
//!       | ^  | chunk_written: Post                 |          |           | Verifying | they agree, or none were asked
//!       | +--+                                     |          |           +-----------+ for -> Release, Committed
//!       v finish: Post, Done                       |          | Failed,         |                  (proof: landed)
//!      +---------+                                 |          | deadline,       | as Offered, or they differ
//!      | Pushed  | ------------- as above ------+  |          | cancel,         |
//!      +---------+                              |  |          | channel lost    |
//!           | all posts settled                 v  v          v                 v  -> Failed; Abort unless P knows; Revoke
//!           v                               +----------+ +---------------------------+
//!       Delivered, Quiet                    | Draining | |         Draining          | fabric reports quiet
//!                                           +----------+ +---------------------------+ -> Settled to P, Quiet
//!        Stop unless Done is out;             | ^   |      | ^ drain deadline: Quarantined,            (proof: quiet)
//!        Settled of D goes to the fabric      | |   |      +-+ channel closed, revoked again;
//!        drain deadline: Quarantined,         +-+   |          never freed by time
//!        channel closed; never freed by time        v
//!                       all posts settled -> Quiet, and Drained to D unless poisoned or the channel is gone
//!
//!  P, per room: free -> Request | Held Reserve | Tombstone -> free. Each second live use is refused by name, and a
//!  tombstone is consumed by the first request or Reserve that meets it. A room is free again when its attempt is quiet.
//! ```
//!
//! A poisoned attempt (a write of unknown outcome) is remembered as long as its channel lives: D's Abort may cross its end,
//! and gets no Drained either. D ends an offered attempt also when P's Done does not fit it, or Drained comes without Failed.
//!
//! Every table is bounded: requests and attempts by the engine, which owns their pages; Reserves without request,
//! tombstones, channels and the names of prefill workers by [`limits::Limits`].
//!
//! The invariants, which code and tests name:
//!
//! - **H1** Each page has one owner (free list, prefix cache, one sequence, one attempt as destination, quarantine), and
//!   owners sum to the pool. Readers take counted leases; a leased page is neither freed, evicted nor written; writing
//!   needs ownership and no foreign lease. D's held prefix is leased from Reserve to commit or end.
//! - **H2** A page whose address a peer has seen returns to the free list only by spending a [`fence::FenceProof`] of
//!   that attempt.
//! - **H3** Frames, completions and immediates of another attempt, session or incarnation change nothing.
//! - **H4** Decode reads nothing before each piece of the set landed, Done came, the pages are visible to its device, and
//!   their checksums, where they are asked for, agree. A failure recorded before D's commit wins.
//! - **H5** Source pages stay unchanged and unfreed until each write that names them has settled; where D copies, that is
//!   when D says Settled or its process is gone.
//! - **H6** Each non-terminal state has a deadline, and every deadline leads towards an end. Monotonic time only.
//! - **H7** Each attempt ends once: delivered, refused or aborted; the client gets exactly one outcome, never an empty
//!   success.
//! - **H8** A retry is a new attempt and a new room.
//! - **H9** For greedy and for seeded sampling, split and unsplit answers are the same.
//! - **H10** A page leaves a sequence only after the last launched step or copy that names it has completed, and is not
//!   shown to a peer before.

#![forbid(unsafe_code)]

pub mod cause;
pub mod checksum;
pub mod deadline;
pub mod fence;
pub mod ids;
pub mod layout;
pub mod limits;
pub mod sabotage;
pub mod sink;
pub mod source;
pub mod state;
pub mod ticket;
pub mod wire;

#[cfg(test)]
mod pair;
