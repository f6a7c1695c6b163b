//! Names of things on the wire: rooms, incarnations, sessions, attempts. *Pure.*
//!
//! A room is a routing label that the gateway mints; it is never an identity. The identity of a transfer is the
//! [`Attempt`], which every frame, queue entry and completion carries (H3).

use std::fmt;

/// A bootstrap room: 63 bits, chosen by the gateway, the same on both legs of one sample.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Room(u64);

impl Room {
    /// The largest room, so that a room is a positive number in every client's signed integers.
    pub const MAX: u64 = i64::MAX as u64;

    /// `None` when the value does not fit into 63 bits.
    pub fn new(value: u64) -> Option<Self> {
        (value <= Self::MAX).then_some(Self(value))
    }

    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "room {}", self.0)
    }
}

/// One start of one worker process: random, so that a restarted peer on the same address is a new one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// One control channel between a decode and a prefill worker, numbered by the prefill worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SessionId(pub u64);

/// One transfer of one prompt's pages from one P to one D.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Attempt {
    pub prefill: Incarnation,
    pub decode: Incarnation,
    pub session: SessionId,
    /// Grows within a decode incarnation and is never reused.
    pub number: u64,
}

impl Attempt {
    /// The control channel that the attempt lives and dies with.
    pub fn channel(&self) -> Channel {
        Channel { prefill: self.prefill, decode: self.decode, session: self.session }
    }
}

/// One control channel between two exact processes. A session number alone repeats over prefill workers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Channel {
    pub prefill: Incarnation,
    pub decode: Incarnation,
    pub session: SessionId,
}

impl Channel {
    pub fn attempt(&self, number: u64) -> Attempt {
        Attempt { prefill: self.prefill, decode: self.decode, session: self.session, number }
    }
}

/// Names one request of the engine that uses a machine; the engine never reuses one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RequestId(pub u64);

/// Monotonic time in microseconds since the start of the process (H6). The drivers read clocks, this crate does not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    pub const NEVER: Time = Time(u64::MAX);

    pub fn after_ms(self, ms: u64) -> Time {
        Time(self.0.saturating_add(ms.saturating_mul(1000)))
    }

    /// Microseconds from `earlier` to `self`; zero when `earlier` is later.
    pub fn micros_since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
