//! What may change of the settings while the gateway runs. *Pure.*

use crate::config::Config;

impl Config {
    /// `new` as far as a running gateway can take it: what is fixed at the start stays as it is here. Also the names of what
    /// differs and stays.
    pub fn changed_to(&self, mut new: Config) -> (Config, Vec<&'static str>) {
        let mut kept = Kept::default();
        kept.keep("--host, --port", &self.listen.data, &mut new.listen.data);
        kept.keep("--prometheus-host, --prometheus-port", &self.listen.metrics, &mut new.listen.metrics);
        kept.keep("--admin-host, --admin-port", &self.listen.admin, &mut new.listen.admin);
        kept.keep("--threads", &self.listen.threads, &mut new.listen.threads);
        kept.keep("--address-file", &self.listen.address_file, &mut new.listen.address_file);
        kept.keep("--access-log", &self.listen.access_log, &mut new.listen.access_log);
        // The new list was written for the new fleet: under the old kind of legs it would be served wrongly, and where it is
        // empty since workers are to be found, nobody would be left.
        if self.fleet.backend != new.fleet.backend || self.discovery != new.discovery {
            kept.keep("the workers that are named", &self.fleet.workers, &mut new.fleet.workers);
        }
        kept.keep("--pd-backend", &self.fleet.backend, &mut new.fleet.backend);
        let workers = std::mem::replace(&mut new.fleet.workers, self.fleet.workers.clone());
        kept.keep("how workers are asked for their health and their breakers", &self.fleet, &mut new.fleet);
        new.fleet.workers = workers;
        kept.keep("how workers are picked", &self.pair, &mut new.pair);
        kept.keep("how workers are found", &self.discovery, &mut new.discovery);
        kept.keep("--tls-cert-path and its like", &self.security.server, &mut new.security.server);
        kept.keep("TLS towards workers", &self.security.workers, &mut new.security.workers);
        kept.keep("--upgrade-sock and its like", &self.upgrade, &mut new.upgrade);
        (new, kept.0)
    }
}

#[derive(Default)]
struct Kept(Vec<&'static str>);

impl Kept {
    fn keep<T: PartialEq + Clone>(&mut self, name: &'static str, old: &T, new: &mut T) {
        if old != new {
            self.0.push(name);
            new.clone_from(old);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::tests::config;

    #[test]
    fn what_is_fixed_stays_and_is_named() {
        let old = config("--worker-urls http://a:1 --port 1 --policy random").unwrap();
        let new = config("--worker-urls http://b:1 --port 2 --policy round_robin --request-timeout-secs 7").unwrap();
        let (now, kept) = old.changed_to(new);
        assert_eq!(kept, ["--host, --port", "how workers are picked"]);
        assert_eq!((now.listen.data.1, now.pair.decode_policy), (1, old.pair.decode_policy));
        assert_eq!((now.deadlines.whole.as_secs(), now.fleet.workers[0].url.as_str()), (7, "http://b:1"));
        let (_, kept) = now.changed_to(now.clone());
        assert!(kept.is_empty(), "{kept:?}");
    }

    #[test]
    fn workers_of_another_kind_of_fleet_wait_for_the_start() {
        let kept_of = |old: &str, new: &str| {
            let old = config(old).unwrap();
            let (now, kept) = old.changed_to(config(new).unwrap());
            assert_eq!(now.fleet, old.fleet);
            kept
        };
        let kept = kept_of("--worker-urls http://a:1", "--service-discovery --selector app=x");
        assert_eq!(kept, ["the workers that are named", "how workers are found"]);
        let split = "--prefill http://a:1 --decode http://b:1 --pd-backend sglang";
        let kept = kept_of(split, "--prefill http://c:1 --decode http://d:1 --pd-backend vllm-nixl");
        assert_eq!(kept, ["the workers that are named", "--pd-backend"]);
        assert_eq!(kept_of(split, &split.replace("sglang", "plain")), ["--pd-backend"]);
    }
}
