//! What the gateway writes into a request for both legs: where the prefill worker's bootstrap port is, and the room.
//! *Pure.*

use std::fmt;

use crate::ids::Room;

/// SGLang's three fields `bootstrap_host`, `bootstrap_port`, `bootstrap_room`, for one sample.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Ticket {
    /// A host name, an IPv4 address, or an IPv6 address in brackets.
    pub host: String,
    pub port: u16,
    pub room: Room,
}

impl Ticket {
    pub fn address(&self) -> Address {
        Address { host: self.host.clone(), port: self.port }
    }
}

/// Where a prefill worker's bootstrap port listens, as the ticket spells it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Address {
    pub host: String,
    pub port: u16,
}

impl Address {
    /// The host for a resolver: an IPv6 address loses its brackets.
    pub fn bare_host(&self) -> &str {
        self.host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&self.host)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') && !self.host.starts_with('[') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_ipv4_or_ipv6_with_and_without_brackets() {
        for (host, bare, shown) in [
            ("p0.cluster", "p0.cluster", "p0.cluster:8998"),
            ("10.0.0.7", "10.0.0.7", "10.0.0.7:8998"),
            ("[::1]", "::1", "[::1]:8998"),
            ("::1", "::1", "[::1]:8998"),
        ] {
            let address = Address { host: host.into(), port: 8998 };
            assert_eq!(address.bare_host(), bare);
            assert_eq!(address.to_string(), shown);
        }
    }
}
