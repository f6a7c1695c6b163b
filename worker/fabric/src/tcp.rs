//! The TCP backend: pieces as frames on data streams, one stream per channel and decode rank.
//!
//! The streams come connected and authenticated from the worker's bootstrap driver; this module frames pieces on them.
//! A frame names its attempt and the index of its piece; the receiver derives the destination from its own books, so a
//! peer can write nowhere but into the pages of a live attempt.
//!
//! Safety argument:
//! - *D's pages are quiet* when the reader task holds no borrow of the attempt's pages. The reader takes a borrow for
//!   each non-blocking read into a page and gives it back right after; it takes none of a revoked attempt, and reads the
//!   rest of such a frame into scratch memory. One read call fills at most the rest of one piece, and behind it the next
//!   frame's header in the reader's own memory: no byte reaches a page before its own frame's attempt was looked up.
//!   Neither Drained nor closing the stream is needed, or would be enough.
//! - *P's source is quiet* when the kernel has copied the bytes (each write call is non-blocking and copies what it takes
//!   of all the frames that it is given), or the sender task gave the piece up or ended. After a stop, frames that have
//!   not begun are dropped, and the rest of a begun one is filled with zeros, so that a peer that reads slowly does not
//!   pin P's pages; D never publishes such an attempt, since its Done never comes: the source machine stops an attempt
//!   whose Done is out only when D has said that it ended.

mod batch;
pub mod frame;
mod sink;
mod source;

pub use sink::TcpSink;
pub use source::TcpSource;

#[cfg(test)]
mod tests;
