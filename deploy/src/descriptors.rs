//! Owns how many file descriptors the process may have open. A soft limit of 1024 is most shells' default and far below
//! what a worker or a gateway under load needs; without a descriptor it cannot even answer whether it is well, and is
//! taken for lost. Promises to raise the soft limit as far as the process may by itself, and to say when that is too
//! little.

use rustix::process::{Resource, getrlimit, setrlimit};

/// What a worker needs beside its HTTP connections: the handoff's channels and streams, its connections that have not
/// proven themselves, the model, the log.
const WORKER_RESERVE: u64 = 1024;
/// A request at the gateway takes one descriptor for its client and one for each half.
const PER_GATEWAY_REQUEST: u64 = 3;
/// Requests at once that a gateway should be able to have.
const GATEWAY_REQUESTS: u64 = 1024;

/// Raises the soft limit to the hard one. Returns what holds from now on; where there is no limit, the largest number.
pub fn raise() -> u64 {
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    limit.current = limit.maximum;
    let now = if setrlimit(Resource::Nofile, limit).is_ok() { limit.maximum } else { before };
    now.unwrap_or(u64::MAX)
}

/// Why `limit` is too low for a worker that takes this many connections.
pub fn worker_shortage(limit: u64, connections_max: usize) -> Option<String> {
    (limit < (connections_max as u64).saturating_add(WORKER_RESERVE)).then(|| {
        format!(
            "this process may open {limit} files, less than --max-connections {connections_max} and a reserve of \
             {WORKER_RESERVE}: under load it may answer no health check and be taken for lost; raise the hard limit \
             (ulimit -Hn, LimitNOFILE=) or lower --max-connections"
        )
    })
}

/// Why `limit` is too low for a gateway.
pub fn gateway_shortage(limit: u64) -> Option<String> {
    (limit < GATEWAY_REQUESTS * PER_GATEWAY_REQUEST).then(|| {
        format!(
            "this process may open {limit} files, and a request takes {PER_GATEWAY_REQUEST}: with more than {} requests at \
             once it refuses connections; raise the hard limit (ulimit -Hn, LimitNOFILE=)",
            limit / PER_GATEWAY_REQUEST
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let mut limit = getrlimit(Resource::Nofile);
        let hard = limit.maximum.unwrap_or(1 << 20);
        limit.current = Some(hard - 1);
        setrlimit(Resource::Nofile, limit).expect("a lower soft limit is always allowed");
        assert!(raise() >= hard);
        assert_eq!(getrlimit(Resource::Nofile).current, limit.maximum);
    }

    #[test]
    fn a_shortage_names_both_numbers() {
        let text = worker_shortage(4096, 8192).expect("too few");
        assert!(text.contains("may open 4096") && text.contains("--max-connections 8192"), "{text}");
        assert_eq!(worker_shortage(8192 + WORKER_RESERVE, 8192), None);
        assert_eq!(worker_shortage(u64::MAX, usize::MAX), None);
        assert!(gateway_shortage(300).expect("too few").contains("more than 100 requests"));
        assert_eq!(gateway_shortage(20_000), None);
    }
}
