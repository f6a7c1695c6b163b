//! Names whose addresses are workers, looked up again and again. The system's resolver is asked (`getaddrinfo`), so that the
//! gateway sees what every other program on the machine sees: hosts file, search domains, local caches. It tells no TTL;
//! a short interval serves as well, since the cache beside it keeps to the TTL. Promises: an answer is the whole truth
//! about its name; without an answer the last one stands until the grace is over.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::time::Instant;

use super::{Publisher, url_of};
use crate::config::{Dns, DnsName, WorkerSpec};

/// Addresses of one name at most.
const ADDRESSES_MAX: usize = 4096;

/// Asks for the addresses of a name.
pub type Lookup = Arc<dyn Fn(String) -> BoxFuture<'static, Result<Vec<IpAddr>, String>> + Send + Sync>;

/// The system's resolver. It bounds its own time, by its `options timeout attempts`.
pub fn system() -> Lookup {
    Arc::new(|name| {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name, 0)).await.map_err(|e| e.to_string())?;
            Ok(found.map(|address| address.ip()).collect())
        })
    })
}

/// What is known of one name.
struct Known {
    addresses: BTreeSet<IpAddr>,
    /// The first of the look-ups that failed since the last answer.
    failing_since: Option<Instant>,
}

impl Known {
    /// Takes what a look-up brought.
    ///
    /// # Errors
    /// Why there was no answer, and what is done about it.
    fn take(&mut self, answer: Result<Vec<IpAddr>, String>, now: Instant, grace: Duration) -> Result<(), String> {
        match answer {
            Ok(found) if !found.is_empty() => {
                self.addresses = one_family(found);
                self.failing_since = None;
                Ok(())
            }
            other => {
                let why = other.err().unwrap_or_else(|| "it has no address".into());
                let since = *self.failing_since.get_or_insert(now);
                if now.duration_since(since) < grace {
                    return Err(format!("{why}; its last addresses stay for {} s", grace.as_secs()));
                }
                self.addresses.clear();
                Err(format!("{why}, for {} s: its workers are dropped", grace.as_secs()))
            }
        }
    }
}

/// A machine with both kinds of addresses is one worker, not two: IPv4 where there is one.
fn one_family(found: Vec<IpAddr>) -> BTreeSet<IpAddr> {
    let has_v4 = found.iter().any(IpAddr::is_ipv4);
    found.into_iter().filter(|ip| ip.is_ipv4() == has_v4).take(ADDRESSES_MAX).collect()
}

struct Shared {
    known: Vec<Known>,
    publisher: Publisher,
}

/// Follows all names for ever, each at its own pace.
pub async fn watch(dns: &Dns, lookup: Lookup, publisher: Publisher) {
    let known = dns.names.iter().map(|_| Known { addresses: BTreeSet::new(), failing_since: None }).collect();
    let shared = Mutex::new(Shared { known, publisher });
    let follow = async |index: usize, name: &DnsName| {
        loop {
            let begun = Instant::now();
            let answer = lookup(name.name.clone()).await;
            note(dns, index, answer, begun.elapsed(), &shared);
            tokio::time::sleep(dns.interval).await;
        }
    };
    join_all(dns.names.iter().enumerate().map(|(index, name)| follow(index, name))).await;
}

fn note(dns: &Dns, index: usize, answer: Result<Vec<IpAddr>, String>, took: Duration, shared: &Mutex<Shared>) {
    let mut shared = shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Shared { known, publisher } = &mut *shared;
    let taken = known[index].take(answer, Instant::now(), dns.grace);
    let specs = dns.names.iter().zip(known.iter()).flat_map(|(name, known)| specs(name, &known.addresses)).collect();
    if known.iter().all(|name| name.failing_since.is_none()) {
        return publisher.publish(specs, took, "");
    }
    publisher.update(specs);
    if let Err(why) = taken {
        publisher.failed(&format!("{}: {why}", dns.names[index].name));
    }
}

fn specs<'a>(name: &DnsName, addresses: impl IntoIterator<Item = &'a IpAddr>) -> Vec<WorkerSpec> {
    let spec = |ip: &IpAddr| {
        let mut spec = WorkerSpec::new(&url_of(*ip, name.port), name.role).ok()?;
        spec.bootstrap_port = name.bootstrap_port;
        Some(spec)
    };
    addresses.into_iter().filter_map(spec).collect()
}

/// One look at all names.
///
/// # Errors
/// The first name without an answer.
pub async fn look(dns: &Dns, lookup: &Lookup) -> Result<Vec<WorkerSpec>, String> {
    let mut found = Vec::new();
    for name in &dns.names {
        let addresses = lookup(name.name.clone()).await.map_err(|why| format!("{}: {why}", name.name))?;
        found.extend(specs(name, &one_family(addresses)));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::tests::Recorder;
    use super::*;
    use crate::config::Role;

    const GRACE: Duration = Duration::from_secs(60);

    fn ips(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    fn known() -> Known {
        Known { addresses: BTreeSet::new(), failing_since: None }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_the_whole_truth_and_none_is_bridged_for_a_while() {
        let mut known = known();
        let shown = |known: &Known| known.addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
        known.take(Ok(ips(&["10.0.0.2", "10.0.0.1"])), Instant::now(), GRACE).unwrap();
        assert_eq!(shown(&known), ["10.0.0.1", "10.0.0.2"]);
        known.take(Ok(ips(&["10.0.0.2"])), Instant::now(), GRACE).unwrap();
        assert_eq!(shown(&known), ["10.0.0.2"]);
        for answer in [Err("timed out".to_owned()), Ok(Vec::new())] {
            known.take(answer, Instant::now(), GRACE).unwrap_err();
            tokio::time::advance(GRACE / 3).await;
        }
        assert_eq!(shown(&known), ["10.0.0.2"]);
        // An answer starts the grace anew.
        known.take(Ok(ips(&["10.0.0.3"])), Instant::now(), GRACE).unwrap();
        known.take(Err("timed out".into()), Instant::now(), GRACE).unwrap_err();
        tokio::time::advance(GRACE).await;
        let why = known.take(Err("timed out".into()), Instant::now(), GRACE).unwrap_err();
        assert!(why.contains("dropped") && shown(&known).is_empty(), "{why}");
    }

    #[test]
    fn a_machine_with_both_kinds_of_addresses_is_one_worker() {
        assert_eq!(one_family(ips(&["fd00::1", "10.0.0.1"])), BTreeSet::from_iter(ips(&["10.0.0.1"])));
        let name = DnsName { name: "p".into(), port: 1, role: Role::Prefill, bootstrap_port: Some(2) };
        let specs = specs(&name, &one_family(ips(&["fd00::1"])));
        assert_eq!((&*specs[0].url, specs[0].bootstrap_port), ("http://[fd00::1]:1", Some(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn names_fail_alone() {
        let answers = Arc::new(Mutex::new(vec![("a", Ok(ips(&["10.0.0.1"]))), ("b", Ok(ips(&["10.0.0.2"])))]));
        let script = answers.clone();
        let lookup: Lookup = Arc::new(move |name| {
            let found = script.lock().unwrap().iter().find(|(known, _)| *known == name).unwrap().1.clone();
            Box::pin(async { found })
        });
        let names = [("a", Role::Prefill), ("b", Role::Decode)].map(|(name, role)| DnsName {
            name: name.into(),
            port: 9,
            role,
            bootstrap_port: None,
        });
        let dns = Dns { names: names.into(), interval: Duration::from_secs(5), grace: GRACE };
        let recorder = Recorder::default();
        let publisher = recorder.publisher();
        let task = tokio::spawn(async move { watch(&dns, lookup, publisher).await });
        recorder.until(&["http://10.0.0.1:9", "http://10.0.0.2:9"]).await;
        *answers.lock().unwrap() = vec![("a", Err("no such name".into())), ("b", Ok(ips(&["10.0.0.3"])))];
        recorder.until(&["http://10.0.0.1:9", "http://10.0.0.3:9"]).await;
        tokio::time::sleep(2 * GRACE).await;
        recorder.until(&["http://10.0.0.3:9"]).await;
        task.abort();
    }
}
