//! The shared-memory backend for two workers of one host: D maps P's pools read-only and copies out of them.
//!
//! P's pools are memory files ([`PoolMemory::shared`](crate::memory::PoolMemory::shared)). D gets their descriptors over
//! a Unix socket, one stream per channel, which the worker's bootstrap driver has authenticated. On it P then posts
//! ranges, and D answers each post once its own copier has moved the range, or passed it over:
//!
//! ```text
//!   P                                             D
//!   | [descriptors of the pools]                  |   checks seals, kind and size, maps for reading
//!   |-------------------------------------------->|
//!   | Post { attempt, piece, rank, offset, bytes }|   looks the attempt up, takes a borrow, copies a block, gives
//!   |-------------------------------------------->|   it back, and so on
//!   |   Answer { attempt, piece, outcome }        |
//!   |<--------------------------------------------|
//! ```
//!
//! Safety argument:
//! - *P cannot write into D at all.* D's pools are private memory of D; a post names a range of P's pool, whose bounds D
//!   checks, and a piece, whose destination D derives from its own books. What a broken P can spoil are the bytes of its
//!   own attempts.
//! - *D's pages are quiet* when D's copier holds no borrow of the attempt. It takes one for each block of at most 256 KiB,
//!   right before the copy, and gets none once the attempt is revoked. So D fences alone, in the time of one block at
//!   most, even when P is stopped or dead; and a D that was stopped in mid-copy and goes on finishes that block into a
//!   page that is still the attempt's, since no proof of quiet exists before the borrow is back (H2).
//! - *P's source is quiet* (H5) when D's copier reads it no more. D alone can say so, since P cannot take D's mapping
//!   away: D answered the post; or D sent Settled for the attempt, which it does after its own proof of quiet; or D's end
//!   of the socket is closed; or D's process is gone. Until then the pages stay pinned, and P's machine quarantines them.
//!   What was not announced to D yet is P's own again at once.
//!   - The closed socket proves it because D's copier owns the socket, and ends its reading and its mapping before it
//!     closes it. It never shuts down its sending half. A process that dies, however, first stops all its threads and
//!     drops its memory, and only then closes its descriptors (`do_exit` in Linux: `exit_mm` precedes `exit_files`, per
//!     thread, and the last thread's closes them), so that the end of the stream is no earlier than the end of the copy.
//!   - The process is that which connected (`SO_PEERCRED`), watched by a pidfd, which becomes readable when its last
//!     thread has exited. Were the number in use again by then, the other process's end would be told later, and still be
//!     true of D. It is needed where another process has inherited D's end of the socket.
//! - *No `SIGBUS` in D.* Reading a mapped file faults where the file has no such page: behind its end, or where a page
//!   cannot be made. The size is fixed for ever by the seals `SHRINK` and `GROW`, which nobody can take away, and D
//!   compares it with the shape of the handshake before it maps. Only shared memory without huge pages (tmpfs) is taken:
//!   a reserve of huge pages can be empty. Holes read as zeros. What remains are faults of the machine, such as a bad
//!   memory cell, which any memory has.
//! - *D reads, and nobody but P writes.* `FUTURE_WRITE` leaves P's own mapping the only writable one for ever; D's is
//!   made for reading and cannot be changed. D copies by raw pointers and makes no reference to P's memory: should P
//!   break its promise and write to it meanwhile, the copy holds a mixture of bytes, of an attempt that P has spoilt
//!   itself.

mod copier;
mod ledger;
mod messages;
mod pools;
mod sink;
mod source;

pub use pools::{PeerPools, ShmError, receive_pools, same_user, send_pools};
pub use sink::ShmSink;
pub use source::ShmSource;

#[cfg(test)]
mod tests;
