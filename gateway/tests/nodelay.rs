//! Small writes must not wait for acknowledgements: TCP_NODELAY is on for the client's connection and for both legs. Alone
//! in its process, since it looks at all sockets of the process.

mod support;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use support::*;

/// Duplicates of this process's TCP sockets with both their ends.
fn sockets() -> Vec<(OwnedFd, SocketAddr, SocketAddr)> {
    let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    let duplicates = numbers.filter_map(|n: i32| pidfd_getfd(&this, n, PidfdGetfdFlags::empty()).ok());
    let ends = |fd: OwnedFd| {
        let local = rustix::net::getsockname(&fd).ok()?.try_into().ok()?;
        let peer = rustix::net::getpeername(&fd).ok()??.try_into().ok()?;
        Some((fd, local, peer))
    };
    duplicates.filter_map(ends).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn small_writes_leave_at_once_on_every_side() {
    let p = Worker::start("prefill", well).await;
    let (play, _told) = hang();
    let mut d = Worker::start("decode", play).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let (client, url) = (gateway.client.clone(), gateway.url("/v1/chat/completions"));
    let running = tokio::spawn(async move { client.post(url).body("{}").send().await });
    d.next().await;
    let (mut clients, mut legs) = (0, 0);
    for (fd, local, peer) in sockets() {
        let is_client = local == gateway.addresses.data;
        let is_leg = peer == d.address || peer == p.address;
        if is_client || is_leg {
            assert!(rustix::net::sockopt::tcp_nodelay(&fd).unwrap(), "{local} to {peer}");
            clients += usize::from(is_client);
            legs += usize::from(is_leg);
        }
    }
    assert!(clients >= 1 && legs >= 2, "{clients} clients, {legs} legs");
    running.abort();
}
