//! Asking workers how they do, one task per worker that lives and dies with it: health, what the worker says of itself
//! whenever it came up and now and then, and its load. Findings go into the fleet.
//!
//! | question | path | where that does not exist |
//! |---|---|---|
//! | health | `--health-check-endpoint` | |
//! | role, bootstrap port, ranks | `/server_info` | `/get_server_info`, `/model_info`, `/get_model_info` |
//! | model | `/v1/models` | the names in the answer before |
//! | load | `/v1/loads` | `/get_load` |
//!
//! A health question stays open while further ones are asked, so that a worker that answers late has answered. By default one
//! that answers nothing counts as silent 12 s later at most: 2 s to the next look, 1 s for a load, and 9 s.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use futures_util::stream::{FuturesUnordered, StreamExt};
use http::{Method, StatusCode};
use pingora::server::ShutdownWatch;
use pingora::services::background::BackgroundService;
use serde_json::Value;
use tokio::task::{AbortHandle, JoinSet};

use crate::config::{Config, Role, Secret};
use crate::error::StartError;
use crate::fleet::{Fleet, Health, Live, Pool, Worker, learn, load};
use crate::leg::tls::PeerTls;

/// A question of an operator that is passed on.
pub const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// A look at a worker that a request waits for; a load, since it must not hold up the next look.
const QUICK_TIMEOUT: Duration = Duration::from_secs(1);
/// Workers that are not healthy, or did not answer last time, are asked this many times as often.
const HASTE: u32 = 8;
/// A healthy worker says what it is again at each of so many looks.
const LOOKS_PER_INTRODUCTION: u32 = 8;

/// Asks the workers of one fleet.
pub struct Prober {
    fleet: Arc<Fleet>,
    client: reqwest::Client,
    /// For workers that have no key of their own.
    api_key: ArcSwap<Option<Secret>>,
    /// Looks that requests wait for come one after another.
    looking: tokio::sync::Mutex<()>,
}

/// What came of a question.
enum Said {
    This(Value),
    /// It has none of the paths, or no JSON there.
    Nothing,
    NoAnswer,
}

impl Prober {
    pub fn new(fleet: Arc<Fleet>, config: &Config, tls: &PeerTls) -> Result<Self, StartError> {
        let client = tls
            .client(reqwest::Client::builder())
            .timeout(ASK_TIMEOUT)
            .connect_timeout(config.deadlines.connect)
            .pool_max_idle_per_host(0)
            .no_proxy()
            .build()?;
        Ok(Prober {
            fleet,
            client,
            api_key: ArcSwap::from_pointee(config.security.api_key.clone()),
            looking: Default::default(),
        })
    }

    /// Takes over settings that were read again.
    pub fn configure(&self, config: &Config) {
        self.api_key.store(Arc::new(config.security.api_key.clone()));
    }

    /// Asks a side's workers that are not healthy, now, since a request finds nobody there. Bounded by a second. A silent
    /// worker would take that second for nothing, and the look at it that is always under way sees its first answer.
    pub async fn look_again(&self, pool: &Pool, role: Role) {
        let looked = async {
            let _turn = self.looking.lock().await;
            let hopeful = |w: &&Arc<Worker>| !matches!(w.health(), Health::Healthy | Health::Silent(_));
            if pool.workers(role).iter().all(|w| !w.is_healthy()) {
                let checks = pool.workers(role).iter().filter(hopeful).map(|worker| self.check(&worker.live, true));
                futures_util::future::join_all(checks).await;
            }
        };
        let _ = tokio::time::timeout(QUICK_TIMEOUT, looked).await;
    }

    /// Looks after one worker until it has drained.
    async fn tend(&self, live: &Arc<Live>) {
        tokio::select! {
            () = self.watch(live) => {}
            () = drained(live, self.fleet.drain) => {
                tracing::info!(worker = live.url, "worker has drained and is gone");
                self.fleet.sweep();
            }
        }
    }

    async fn watch(&self, live: &Arc<Live>) {
        let interval = self.fleet.config.check_interval;
        for look in 0u32.. {
            self.check(live, look.is_multiple_of(LOOKS_PER_INTRODUCTION)).await;
            let pause = if live.answers() { interval } else { interval / HASTE };
            tokio::time::sleep(pause).await;
        }
    }

    /// One look at one worker.
    async fn check(&self, live: &Arc<Live>, introduce: bool) {
        let Some(worker) = self.fleet.worker(live) else { return };
        let well = self.fleet.config.checks_disabled || self.is_well(&worker).await;
        self.fleet.count_check(worker.spec.role, well);
        if !well {
            return;
        }
        if (introduce || !live.introduced.load(Relaxed))
            && let Err(why) = self.introduce(&worker).await
        {
            return live.note_declined(Health::WrongRole(why));
        }
        live.note_answered();
        // What was learnt may have made another value of it.
        let Some(worker) = self.fleet.worker(live) else { return };
        worker.report_load(&self.loads(&worker, QUICK_TIMEOUT).await);
    }

    /// Asks for health and notes all but a good answer.
    async fn is_well(&self, worker: &Worker) -> bool {
        let (live, config) = (&worker.live, &self.fleet.config);
        let whole = config.check_timeout * config.thresholds.failures;
        let ask = || self.ask(Method::GET, worker, &config.check_endpoint).timeout(whole).send();
        let mut asked = FuturesUnordered::from_iter([ask()]);
        let mut ticks = tokio::time::interval(config.check_timeout);
        ticks.tick().await;
        for _ in 0..config.thresholds.failures {
            let answered = loop {
                tokio::select! {
                    Some(answered) = asked.next() => match answered {
                        // The clock of the misses counts it.
                        Err(error) if error.is_timeout() => {}
                        answered => break Some(answered),
                    },
                    _ = ticks.tick() => break None,
                }
            };
            match answered {
                Some(Ok(answer)) if answer.status().is_success() => return true,
                Some(Ok(answer)) => {
                    let why = format!("GET {} answered {}", config.check_endpoint, answer.status().as_u16());
                    live.note_declined(Health::NotReady(why));
                    return false;
                }
                Some(Err(error)) if error.is_connect() => {
                    live.note_unreachable("nobody listens there");
                    return false;
                }
                Some(Err(error)) => {
                    live.note_missed(&format!("GET {} failed: {}", config.check_endpoint, error.without_url()));
                    return false;
                }
                None => {
                    let millis = config.check_timeout.as_millis();
                    live.note_missed(&format!("GET {} was not answered within {millis} ms", config.check_endpoint));
                    asked.push(ask());
                }
            }
        }
        false
    }

    /// Has a worker say what it is; `Err` says why it cannot serve where it is configured.
    async fn introduce(&self, worker: &Worker) -> Result<(), String> {
        let (live, limit) = (&worker.live, self.fleet.config.check_timeout);
        let paths = ["/server_info", "/get_server_info", "/model_info", "/get_model_info"];
        let (info, models) =
            tokio::join!(self.question(worker, &paths, limit), self.question(worker, &["/v1/models"], limit));
        let complete = !matches!((&info, &models), (Said::NoAnswer, _) | (_, Said::NoAnswer));
        let value = |said| if let Said::This(value) = said { value } else { Value::Null };
        let (info, models) = (value(info), value(models));
        let mut facts = learn::facts(&info, &models, &worker.facts);
        if let Some(found) = learn::role(&info) {
            if found == worker.spec.role {
                live.agreed.store(true, Relaxed);
            } else if live.agreed.load(Relaxed) {
                let (from, to) = (worker.spec.role.worker_type(), found.worker_type());
                tracing::info!(worker = live.url, from, to, "worker changed its role");
                facts.role = Some(found);
            } else {
                return Err(learn::wrong_role(&worker.spec, found));
            }
        }
        let no_port = worker.spec.bootstrap_port.or(facts.bootstrap_port).is_none();
        if no_port && worker.spec.role == Role::Prefill && !live.introduced.load(Relaxed) {
            tracing::warn!(worker = live.url, "its bootstrap port is not known: give it behind --prefill URL");
        }
        self.fleet.learn(live.id, facts);
        live.introduced.store(complete, Relaxed);
        Ok(())
    }

    /// A request to one worker, with the key where one is set.
    pub fn ask(&self, method: Method, worker: &Worker, path: &str) -> reqwest::RequestBuilder {
        let request = self.client.request(method, format!("{}{path}", worker.url()));
        match worker.spec.api_key.as_ref().or(self.api_key.load().as_ref().as_ref()).map(Secret::reveal) {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Tokens that the worker holds now, as it says itself.
    pub async fn tokens(&self, worker: &Worker, limit: Duration) -> Option<u64> {
        load::total(&self.loads(worker, limit).await)
    }

    async fn loads(&self, worker: &Worker, limit: Duration) -> Vec<(usize, u64)> {
        match self.question(worker, &["/v1/loads", "/get_load"], limit).await {
            Said::This(value) => load::reported(&value),
            Said::Nothing | Said::NoAnswer => vec![],
        }
    }

    /// The first of the paths that answers with JSON, each within `limit`.
    async fn question(&self, worker: &Worker, paths: &[&str], limit: Duration) -> Said {
        for path in paths {
            let answer = match self.ask(Method::GET, worker, path).timeout(limit).send().await {
                Ok(answer) => answer,
                Err(_) => return Said::NoAnswer,
            };
            match answer.status() {
                status if status.is_success() => return answer.json().await.map_or(Said::Nothing, Said::This),
                StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {}
                _ => return Said::NoAnswer,
            }
        }
        Said::Nothing
    }
}

/// Returns once the worker is to be removed and its last leg ended, at the latest by being cut.
async fn drained(live: &Live, limit: Duration) {
    loop {
        live.until_draining(true).await;
        let last_words = async {
            if tokio::time::timeout(limit, live.until_idle()).await.is_err() {
                tracing::warn!(
                    worker = live.url,
                    legs = live.legs(),
                    "legs still ran {} s after the removal",
                    limit.as_secs()
                );
                live.cut_removed();
                live.until_idle().await;
            }
        };
        tokio::select! {
            () = last_words => return,
            // It was named again.
            () = live.until_draining(false) => {}
        }
    }
}

/// The prober as a service of the server.
pub struct ProbeService(pub Arc<Prober>);

#[async_trait]
impl BackgroundService for ProbeService {
    async fn start(&self, mut shutdown: ShutdownWatch) {
        let fleet = &self.0.fleet;
        let mut changed = fleet.changed.subscribe();
        let mut running = JoinSet::new();
        let mut tended: Vec<(Arc<Live>, AbortHandle)> = Vec::new();
        loop {
            let snapshot = fleet.snapshot();
            let of = |worker: &Worker, live: &Arc<Live>| Arc::ptr_eq(&worker.live, live);
            tended.retain(|(live, task)| {
                let stays = !task.is_finished() && snapshot.workers.iter().any(|w| of(w, live));
                if !stays {
                    task.abort();
                }
                stays
            });
            for worker in &snapshot.workers {
                if !tended.iter().any(|(live, _)| of(worker, live)) {
                    let (prober, live) = (self.0.clone(), worker.live.clone());
                    let task = running.spawn(async move { prober.tend(&live).await });
                    tended.push((worker.live.clone(), task));
                }
            }
            tokio::select! {
                _ = changed.changed() => {}
                Some(_) = running.join_next() => {}
                _ = shutdown.wait_for(|down| *down) => return,
            }
        }
    }
}
