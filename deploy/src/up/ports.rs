//! Owns the choice of ports for one fleet. Promises that the ports of one call are distinct, were free a moment ago, and
//! lie outside the range from which the kernel takes the ports of outgoing connections, so that no connection of ours
//! can take one before the child listens. Another program may: then the child's last log line says so.
//! A fixed port, rather than one that the child reports, is what lets a worker come back where its peers look for it.

use std::{
    io,
    net::{SocketAddr, TcpListener, ToSocketAddrs},
    ops::RangeInclusive,
};

use rand::Rng as _;

/// Where the search begins at the lowest; below are the well-known services.
const LOWEST: u16 = 10_000;
const TRIES_MAX: usize = 2_000;
/// What Linux uses when nobody set it.
const DEFAULT_EPHEMERAL: RangeInclusive<u16> = 32_768..=60_999;

#[derive(Debug, thiserror::Error)]
pub enum PortError {
    #[error("cannot listen on {host}:{port}: {source}; stop the program that does, or choose another with {flag}")]
    Taken { flag: &'static str, host: String, port: u16, source: io::Error },
    #[error("found no free port on {host} in {TRIES_MAX} tries: is {host} an address of this machine?")]
    NoneFree { host: String },
}

/// Ports being chosen: each stays bound until [`Ports::release`], so that no two are the same.
pub struct Ports {
    held: Vec<TcpListener>,
    range: RangeInclusive<u16>,
}

impl Ports {
    pub fn new() -> Self {
        Self { held: Vec::new(), range: outside(ephemeral_range()) }
    }

    /// The port that the user asked for by `flag`, or a free one if it is 0.
    pub fn take(&mut self, flag: &'static str, host: &str, wanted: u16) -> Result<u16, PortError> {
        if wanted == 0 {
            return self.any(host);
        }
        match bind(host, wanted) {
            Ok(listener) => {
                self.held.push(listener);
                Ok(wanted)
            }
            Err(source) => Err(PortError::Taken { flag, host: host.to_owned(), port: wanted, source }),
        }
    }

    pub fn any(&mut self, host: &str) -> Result<u16, PortError> {
        let mut random = rand::rng();
        for _ in 0..TRIES_MAX {
            let port = random.random_range(self.range.clone());
            if let Ok(listener) = bind(host, port) {
                self.held.push(listener);
                return Ok(port);
            }
        }
        Err(PortError::NoneFree { host: host.to_owned() })
    }

    /// Frees the ports for the children that are about to listen on them.
    pub fn release(self) {}
}

fn bind(host: &str, port: u16) -> io::Result<TcpListener> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let addresses: Vec<SocketAddr> = (bare, port).to_socket_addrs()?.collect();
    TcpListener::bind(addresses.as_slice())
}

fn ephemeral_range() -> RangeInclusive<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut numbers = text.split_whitespace().map(str::parse::<u16>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(low)), Some(Ok(high))) if low < high => low..=high,
        _ => DEFAULT_EPHEMERAL,
    }
}

/// The larger side of `ephemeral`, or everything above [`LOWEST`] if neither side has a thousand ports.
fn outside(ephemeral: RangeInclusive<u16>) -> RangeInclusive<u16> {
    let below = ephemeral.start().saturating_sub(LOWEST);
    let above = u16::MAX - ephemeral.end();
    match below.max(above) {
        0..1_000 => LOWEST..=u16::MAX,
        _ if below >= above => LOWEST..=ephemeral.start() - 1,
        _ => ephemeral.end() + 1..=u16::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_ports_are_distinct_and_free_after_release() {
        let mut ports = Ports::new();
        let mut chosen: Vec<u16> = (0..32).map(|_| ports.any("127.0.0.1").expect("a free port")).collect();
        chosen.sort_unstable();
        chosen.dedup();
        assert_eq!(chosen.len(), 32);
        ports.release();
        bind("127.0.0.1", chosen[0]).expect("free again");
    }

    #[test]
    fn a_taken_port_is_refused_with_the_flag_that_changes_it() {
        let holder = TcpListener::bind("127.0.0.1:0").expect("bind");
        let port = holder.local_addr().expect("address").port();
        let error = Ports::new().take("--port", "127.0.0.1", port).expect_err("taken");
        assert!(error.to_string().contains("--port"), "{error}");
    }

    #[test]
    fn stays_out_of_the_range_of_outgoing_connections() {
        assert_eq!(outside(32_768..=60_999), 10_000..=32_767);
        assert_eq!(outside(11_000..=30_000), 30_001..=65_535);
        assert_eq!(outside(1_024..=65_535), 10_000..=65_535);
    }
}
