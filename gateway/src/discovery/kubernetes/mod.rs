//! Workers among the pods of Kubernetes: a list, a watch from its version on, and a list again whenever events may have been
//! lost. What pods mean is decided in `pod`, what events add up to in `state`, both pure; this file asks and waits.
//! Promises: the set converges to what the API holds, at the latest at the next periodic list; what the API cannot be
//! asked keeps what it said last.

mod pod;
pub mod selector;
mod state;

use std::time::Duration;

use futures_util::{StreamExt as _, pin_mut};
use kube::api::{ListParams, WatchParams};
use kube::core::{ObjectList, Request};
use tokio::time::{Instant, timeout, timeout_at};

use self::pod::Pod;
use self::state::{Pods, Step};
use super::Publisher;
use crate::config::{Kubernetes, WorkerSpec};
use crate::error::StartError;

/// Pods in one answer of a list, and in all of its answers.
const PAGE_PODS: u32 = 500;
const PODS_MAX: usize = 50_000;
/// A watch is asked to last so long; if it is silent for longer its connection is dead.
const WATCH: Duration = Duration::from_secs(60);
const LATE: Duration = Duration::from_secs(5);
/// One answer of a list, and the head of a watch, come within.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Pauses after failures double from the first to the last; a watch that lasted this long starts them anew.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(30);
const GOOD_WATCH: Duration = Duration::from_secs(10);

/// How to reach the API. Files are read, nothing is asked. Blocks; call it outside of an async runtime.
///
/// # Errors
/// Neither a URL, nor a kubeconfig, nor a service account.
pub fn access(settings: &Kubernetes) -> Result<kube::Config, StartError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| StartError::Config(format!("no runtime to read the kubeconfig: {e}")))?;
    runtime.block_on(reach(settings)).map_err(StartError::Config)
}

async fn reach(settings: &Kubernetes) -> Result<kube::Config, String> {
    let mut config = match &settings.api_url {
        Some(url) => kube::Config::new(url.parse().map_err(|e| format!("--service-discovery-api-url: {e}"))?),
        None => kube::Config::infer().await.map_err(|e| {
            format!(
                "--service-discovery: no way to reach Kubernetes' API: {e}; run in a pod with a service account, set \
                 KUBECONFIG, or give --service-discovery-api-url"
            )
        })?,
    };
    // Pauses between tries are ours.
    config.default_retry = false;
    config.connect_timeout = Some(ANSWER_TIMEOUT);
    Ok(config)
}

/// One list, for a self-check.
///
/// # Errors
/// Why the API could not be asked.
pub async fn look(settings: &Kubernetes) -> Result<Vec<WorkerSpec>, String> {
    let api = Api::new(settings, &reach(settings).await?)?;
    let (pods, version) = api.list().await?;
    let mut state = Pods::new(settings.rules.clone());
    state.relist(pods, version);
    Ok(state.workers())
}

/// Follows the pods for ever.
pub async fn watch(settings: &Kubernetes, access: &kube::Config, mut publisher: Publisher) {
    let mut pause = Pause(FIRST_PAUSE);
    let api = loop {
        match Api::new(settings, access) {
            Ok(api) => break api,
            Err(why) => publisher.failed(&why),
        }
        pause.wait().await;
    };
    let mut follower = Follower { api, pods: Pods::new(settings.rules.clone()), publisher };
    loop {
        let begun = Instant::now();
        let why = match follower.list().await {
            Ok(()) => follower.follow(begun + settings.relist).await,
            Err(why) => End::Failed(format!("{why}; the workers stay as they were")),
        };
        if begun.elapsed() >= GOOD_WATCH {
            pause = Pause(FIRST_PAUSE);
        }
        match why {
            End::Due => continue,
            End::Lost(why) => tracing::info!("kubernetes: {why}; listing all pods anew"),
            End::Failed(why) => follower.publisher.failed(&why),
        }
        pause.wait().await;
    }
}

/// Why a watch is over and a list due.
enum End {
    /// The periodic list.
    Due,
    /// Events may be lost, and nobody has to do anything about it.
    Lost(String),
    Failed(String),
}

struct Follower {
    api: Api,
    pods: Pods,
    publisher: Publisher,
}

impl Follower {
    async fn list(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        let (pods, version) = self.api.list().await?;
        self.pods.relist(pods, version);
        self.publish(begun.elapsed());
        Ok(())
    }

    fn publish(&mut self, took: Duration) {
        self.publisher.publish(self.pods.workers(), took, &self.pods.complaints().join("; "));
    }

    /// One watch after another, each from where the last one ended, until a list is due.
    async fn follow(&mut self, relist: Instant) -> End {
        loop {
            let begun = Instant::now();
            let lasts = WATCH.min(relist.saturating_duration_since(begun));
            if lasts < Duration::from_secs(1) {
                return End::Due;
            }
            if let Some(end) = self.one_watch(begun, lasts).await {
                return end;
            }
        }
    }

    /// `None` when the watch ended when it was to end, with no event lost.
    async fn one_watch(&mut self, begun: Instant, lasts: Duration) -> Option<End> {
        let events = match timeout(ANSWER_TIMEOUT, self.api.events(self.pods.version(), lasts)).await {
            Ok(Ok(events)) => events,
            Ok(Err(kube::Error::Api(status))) if status.code == 410 => {
                return Some(End::Lost("the API no longer has the events since the list (410 Gone)".into()));
            }
            Ok(Err(error)) => return Some(End::Failed(self.api.explain(&error))),
            Err(_) => {
                return Some(End::Failed(format!("a watch was not answered within {} s", ANSWER_TIMEOUT.as_secs())));
            }
        };
        pin_mut!(events);
        loop {
            let step = match timeout_at(begun + lasts + LATE, events.next()).await {
                Ok(Some(Ok(event))) => self.pods.apply(event),
                Ok(Some(Err(error))) => return Some(End::Lost(format!("the watch broke: {error}"))),
                Ok(None) if begun.elapsed() + LATE >= lasts => return None,
                Ok(None) => return Some(End::Lost("the watch was cut before its time".into())),
                Err(_) => return Some(End::Lost("the watch fell silent".into())),
            };
            match step {
                Step::Changed => self.publish(Duration::ZERO),
                Step::Same => {}
                Step::Relist(why) => return Some(End::Lost(why)),
            }
        }
    }
}

/// The two questions to the API.
struct Api {
    client: kube::Client,
    request: Request,
    /// Of the pods that may be workers.
    selector: String,
    namespace: Option<String>,
}

impl Api {
    fn new(settings: &Kubernetes, access: &kube::Config) -> Result<Self, String> {
        let client = kube::Client::try_from(access.clone());
        let client = client.map_err(|e| format!("no client for Kubernetes' API at {}: {e}", access.cluster_url))?;
        let request = Request::new(match &settings.namespace {
            Some(namespace) => format!("/api/v1/namespaces/{namespace}/pods"),
            None => "/api/v1/pods".to_owned(),
        });
        Ok(Api { client, request, selector: settings.rules.for_api(), namespace: settings.namespace.clone() })
    }

    /// All pods, page by page, and the version that they are of.
    async fn list(&self) -> Result<(Vec<Pod>, String), String> {
        let mut pods = Vec::new();
        let mut next = None;
        loop {
            let mut params = ListParams::default().labels(&self.selector).limit(PAGE_PODS);
            params.continue_token = next;
            let request = self.request.list(&params).map_err(|e| e.to_string())?;
            let page = timeout(ANSWER_TIMEOUT, self.client.request::<ObjectList<Pod>>(request)).await;
            let page = page.map_err(|_| format!("a list was not answered within {} s", ANSWER_TIMEOUT.as_secs()))?;
            let page = page.map_err(|error| self.explain(&error))?;
            pods.extend(page.items);
            if pods.len() > PODS_MAX {
                return Err(format!("the selectors leave more than {PODS_MAX} pods; narrow them"));
            }
            next = page.metadata.continue_.filter(|token| !token.is_empty());
            if next.is_none() {
                return Ok((pods, page.metadata.resource_version.unwrap_or_default()));
            }
        }
    }

    async fn events(
        &self,
        version: &str,
        lasts: Duration,
    ) -> kube::Result<impl futures_util::Stream<Item = kube::Result<kube::core::WatchEvent<Pod>>> + use<>> {
        let seconds = u32::try_from(lasts.as_secs()).unwrap_or(1);
        let params = WatchParams::default().labels(&self.selector).timeout(seconds);
        let request = self.request.watch(&params, version).map_err(kube::Error::BuildRequest)?;
        self.client.request_events::<Pod>(request).await
    }

    /// What to do about an error, where that is known.
    fn explain(&self, error: &kube::Error) -> String {
        let place = match &self.namespace {
            Some(namespace) => format!("in the namespace {namespace}"),
            None => "in all namespaces, or give --service-discovery-namespace".to_owned(),
        };
        match error {
            kube::Error::Api(status) if matches!(status.code, 401 | 403) => format!(
                "the API refuses with {}: {}; allow this account the verbs list and watch on pods {place}",
                status.code, status.message
            ),
            kube::Error::Api(status) => format!("the API answers {}: {}", status.code, status.message),
            other => {
                let mut text = other.to_string();
                let mut cause = std::error::Error::source(other);
                while let Some(deeper) = cause {
                    text = format!("{text}: {deeper}");
                    cause = deeper.source();
                }
                text
            }
        }
    }
}

/// The next pause between two tries.
struct Pause(Duration);

impl Pause {
    /// Between half and all of the pause, so that gateways that lost the API together do not come back together.
    async fn wait(&mut self) {
        tokio::time::sleep(self.0.mul_f64(rand::random_range(0.5..=1.0))).await;
        self.0 = (self.0 * 2).min(LAST_PAUSE);
    }
}
