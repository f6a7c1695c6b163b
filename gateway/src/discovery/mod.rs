//! Where workers come from while the gateway runs: a watched file, DNS, Kubernetes. Each source looks by itself and
//! publishes its whole list; the fleet adds the lists up. Promises: a source that fails keeps what it said last.

mod dns;
mod entries;
mod file;
mod kubernetes;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use pingora::server::ShutdownWatch;
use pingora::services::background::BackgroundService;

pub use kubernetes::selector;

use crate::config::{Config, DiscoveryConfig, WorkerSpec};
use crate::error::StartError;
use crate::fleet::{Fleet, Source};
use crate::gateway::Gateway;
use crate::metrics::DiscoveryMetrics;

/// Takes the whole list of one source.
pub trait Membership: Send + Sync {
    fn update(&self, source: Source, specs: Vec<WorkerSpec>);
}

impl Membership for Fleet {
    fn update(&self, source: Source, specs: Vec<WorkerSpec>) {
        Fleet::update(self, source, specs);
    }
}

/// A worker at an address, by plain HTTP.
fn url_of(ip: IpAddr, port: u16) -> String {
    format!("http://{}", SocketAddr::new(ip, port))
}

/// One source's way to the fleet, the log and the metrics.
pub struct Publisher {
    source: Source,
    fleet: Arc<dyn Membership>,
    metrics: Arc<DiscoveryMetrics>,
    published: Option<Vec<WorkerSpec>>,
    /// What was complained about last, which is not said again.
    complaint: String,
}

impl Publisher {
    pub fn new(source: Source, fleet: Arc<dyn Membership>, metrics: Arc<DiscoveryMetrics>) -> Self {
        Publisher { source, fleet, metrics, published: None, complaint: String::new() }
    }

    /// The source's whole list, which took so long to get, and what is wrong with what it says, if anything is.
    pub fn publish(&mut self, specs: Vec<WorkerSpec>, took: Duration, complaint: &str) {
        self.metrics.synced(self.source.name(), took);
        self.update(specs);
        self.complain(complaint);
    }

    /// A list that stands in for one that could not be had whole.
    pub fn update(&mut self, specs: Vec<WorkerSpec>) {
        let source = self.source.name();
        self.metrics.discovered(source, specs.len());
        if self.published.as_ref() == Some(&specs) {
            return;
        }
        let by_url = |specs: &[WorkerSpec]| specs.iter().map(|s| (s.url.clone(), s.role)).collect::<BTreeMap<_, _>>();
        let (before, now) = (by_url(self.published.as_deref().unwrap_or_default()), by_url(&specs));
        for (url, role) in now.iter().filter(|(url, role)| before.get(*url) != Some(*role)) {
            self.metrics.joined(source);
            tracing::info!("{source}: {url} is a {} worker", role.worker_type());
        }
        for url in before.keys().filter(|url| !now.contains_key(*url)) {
            self.metrics.left(source);
            tracing::info!("{source}: {url} is no worker any more");
        }
        if now.is_empty() {
            tracing::warn!("{source} names no worker");
        }
        self.fleet.update(self.source, specs.clone());
        self.published = Some(specs);
    }

    /// A look that failed. The workers stay; the same words are logged once.
    pub fn failed(&mut self, why: &str) {
        self.metrics.failed(self.source.name());
        self.complain(why);
    }

    fn complain(&mut self, why: &str) {
        if self.complaint == why {
            return;
        }
        why.clone_into(&mut self.complaint);
        if !why.is_empty() {
            tracing::warn!("{}: {why}", self.source.name());
        }
    }
}

/// All sources, as one service of the server.
pub struct Discovery {
    config: DiscoveryConfig,
    kubernetes: Option<kube::Config>,
    fleet: Arc<dyn Membership>,
    metrics: Arc<DiscoveryMetrics>,
}

impl Discovery {
    /// Reads what can be read at once: the file's workers are in the fleet when this returns.
    ///
    /// # Errors
    /// A file that is missing or broken, and no way to find Kubernetes' API.
    pub fn new(gateway: &Gateway) -> Result<Self, StartError> {
        let config = gateway.config().discovery.clone();
        let (fleet, metrics) = (gateway.fleet.clone(), gateway.metrics.discovery.clone());
        if let Some(file) = &config.file {
            let specs = file::read(&file.path).map_err(StartError::Config)?;
            fleet.update(Source::File, specs);
        }
        let kubernetes = config.kubernetes.as_ref().map(kubernetes::access).transpose()?;
        Ok(Discovery { config, kubernetes, fleet, metrics })
    }

    fn publisher(&self, source: Source) -> Publisher {
        Publisher::new(source, self.fleet.clone(), self.metrics.clone())
    }

    async fn run(&self) {
        let file = async {
            if let Some(file) = &self.config.file {
                file::watch(file, self.publisher(Source::File)).await;
            }
        };
        let dns = async {
            if let Some(dns) = &self.config.dns {
                dns::watch(dns, dns::system(), self.publisher(Source::Dns)).await;
            }
        };
        let kubernetes = async {
            if let (Some(settings), Some(access)) = (&self.config.kubernetes, &self.kubernetes) {
                kubernetes::watch(settings, access, self.publisher(Source::Kubernetes)).await;
            }
        };
        let all: [std::pin::Pin<Box<dyn Future<Output = ()> + Send + '_>>; 3] =
            [Box::pin(file), Box::pin(dns), Box::pin(kubernetes)];
        join_all(all).await;
    }
}

#[async_trait]
impl BackgroundService for Discovery {
    async fn start(&self, mut shutdown: ShutdownWatch) {
        tokio::select! {
            () = self.run() => {}
            _ = shutdown.wait_for(|down| *down) => {}
        }
    }
}

/// All workers that these settings name now: by flags, and by one look at each source.
///
/// # Errors
/// What source could not be asked, and why.
pub async fn known_workers(config: &Config) -> Result<Vec<WorkerSpec>, String> {
    let mut known = config.fleet.workers.clone();
    if let Some(file) = &config.discovery.file {
        known.extend(file::read(&file.path)?);
    }
    if let Some(dns) = &config.discovery.dns {
        known.extend(dns::look(dns, &dns::system()).await?);
    }
    if let Some(settings) = &config.discovery.kubernetes {
        known.extend(kubernetes::look(settings).await?);
    }
    let mut urls = BTreeSet::new();
    known.retain(|worker| urls.insert(worker.url.clone()));
    Ok(known)
}

#[cfg(test)]
pub mod tests {
    use std::sync::Mutex;
    use std::time::Instant;

    use super::*;
    use crate::metrics::Metrics;

    /// Stands where the fleet would, and waits for sights.
    #[derive(Clone)]
    pub struct Recorder {
        lists: Arc<Lists>,
        metrics: Arc<DiscoveryMetrics>,
    }

    #[derive(Default)]
    struct Lists(Mutex<Vec<Vec<WorkerSpec>>>);

    impl Membership for Lists {
        fn update(&self, _: Source, specs: Vec<WorkerSpec>) {
            self.0.lock().unwrap().push(specs);
        }
    }

    impl Default for Recorder {
        fn default() -> Self {
            let metrics = Metrics::new().unwrap().discovery;
            Recorder { lists: Arc::default(), metrics }
        }
    }

    impl Recorder {
        pub fn publisher(&self) -> Publisher {
            Publisher::new(Source::File, self.lists.clone(), self.metrics.clone())
        }

        pub fn urls(&self) -> Vec<String> {
            let lists = self.lists.0.lock().unwrap();
            lists.last().into_iter().flatten().map(|spec| spec.url.clone()).collect()
        }

        pub fn updates(&self) -> usize {
            self.lists.0.lock().unwrap().len()
        }

        pub fn in_sync(&self) -> bool {
            self.metrics.counts("file").1
        }

        async fn see(&self, what: &str, seen: impl Fn() -> bool) {
            let begun = Instant::now();
            while !seen() {
                assert!(begun.elapsed() < Duration::from_secs(20), "{what}; last: {:?}", self.urls());
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }

        pub async fn until(&self, urls: &[&str]) {
            self.see(&format!("never saw {urls:?}"), || self.updates() > 0 && self.urls() == urls).await;
        }

        pub async fn until_failures(&self, count: u64) {
            self.see("too few failures", || self.metrics.counts("file").0 >= count).await;
        }
    }

    #[test]
    fn only_a_changed_list_reaches_the_fleet() {
        let recorder = Recorder::default();
        let mut publisher = recorder.publisher();
        let specs = entries::parse("- url: http://a:1", entries::Format::Yaml).unwrap();
        publisher.publish(specs.clone(), Duration::ZERO, "");
        publisher.publish(specs, Duration::ZERO, "");
        publisher.failed("a look failed");
        assert_eq!((recorder.updates(), recorder.urls()), (1, vec!["http://a:1".to_owned()]));
        publisher.publish(Vec::new(), Duration::ZERO, "");
        assert_eq!((recorder.updates(), recorder.urls().len()), (2, 0));
    }
}
