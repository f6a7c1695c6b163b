//! What the gateway writes into a request for both legs: where the prefill worker's bootstrap port is, and the room.
//! *Pure.*

use crate::ids::Room;

/// SGLang's three fields `bootstrap_host`, `bootstrap_port`, `bootstrap_room`, for one sample.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Ticket {
    /// A host name, an IPv4 address, or an IPv6 address in brackets.
    pub host: String,
    pub port: u16,
    pub room: Room,
}
