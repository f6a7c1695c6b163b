//! Addresses for the processes of one test: a loopback address of its own, ports from the system.
//!
//! Two tests never share an address, and outgoing connections leave from 127.0.0.1, so a port that a killed worker
//! left stays free until the worker is back on it. Within one test no port is given out twice.

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Mutex, PoisonError};

/// Ports that this process gave out.
static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// This process's address in 127/8. Process ids below 2^22 (the kernel's limit) map to distinct addresses.
pub fn host() -> Ipv4Addr {
    let id = std::process::id();
    Ipv4Addr::new(127, 64 + ((id >> 16) & 0x3f) as u8, ((id >> 8) & 0xff) as u8, (id & 0xff) as u8)
}

/// A port that was free on [`host`] a moment ago.
pub fn free_port() -> u16 {
    free_ports(1)[0]
}

/// `count` distinct ones, none of which was given out before: its process may not have bound it yet, or may be about to
/// come back.
pub fn free_ports(count: usize) -> Vec<u16> {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let given = given.get_or_insert_default();
    let (mut ports, mut held) = (Vec::new(), Vec::new());
    while ports.len() < count {
        let listener =
            TcpListener::bind(SocketAddr::from((host(), 0))).expect("the loopback interface has a free port");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        if given.insert(port) {
            ports.push(port);
        }
        // Held, so that the system does not offer it again.
        held.push(listener);
    }
    ports
}
