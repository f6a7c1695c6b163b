//! The engine ids of vLLM's Mooncake connector, by which a decode worker finds the pages of a prefill worker's rank. The
//! bootstrap server of each prefill worker is asked once, and again after a failure there, since a new process has new
//! ids.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::backend;
use crate::error::StartError;
use crate::fleet::{Picked, Worker};
use crate::pair::WorkerId;

/// What was learnt is asked again after this time, so that a worker that came back unseen is found.
const AGE_MAX: Duration = Duration::from_secs(30);
const WORKERS_MAX: usize = 4096;
const ANSWER_BYTES_MAX: usize = 1 << 20;

type Ids = Arc<BTreeMap<u32, String>>;

/// What is known of each prefill worker.
pub struct Engines {
    client: reqwest::Client,
    known: Mutex<HashMap<WorkerId, (Ids, Instant)>>,
}

impl Engines {
    pub fn new() -> Result<Self, StartError> {
        let client = reqwest::Client::builder().no_proxy().build()?;
        Ok(Engines { client, known: Mutex::default() })
    }

    /// The engine id of the picked worker's rank; `None` where its bootstrap server cannot be asked.
    pub async fn of(&self, picked: &Picked, limit: Duration) -> Option<String> {
        let worker = &picked.worker;
        let ids = match self.fresh(worker.id()) {
            Some(ids) => ids,
            None => tokio::time::timeout(limit, self.ask(worker)).await.ok()??,
        };
        ids.get(&picked.rank.map_or(0, |rank| rank.index.into())).cloned()
    }

    fn fresh(&self, worker: WorkerId) -> Option<Ids> {
        let known = self.known.lock().expect("no panic under this lock");
        known.get(&worker).filter(|(_, since)| since.elapsed() < AGE_MAX).map(|(ids, _)| ids.clone())
    }

    async fn ask(&self, worker: &Worker) -> Option<Ids> {
        let url = format!("http://{}:{}/query", worker.spec.host, worker.bootstrap_port()?);
        let mut answer = self.client.get(&url).send().await.ok()?;
        let mut body = Vec::new();
        while let Some(piece) = answer.chunk().await.ok()? {
            if body.len() + piece.len() > ANSWER_BYTES_MAX {
                return None;
            }
            body.extend_from_slice(&piece);
        }
        let ids = Arc::new(backend::engine_ids(&body));
        if ids.is_empty() {
            tracing::warn!(url, "a Mooncake bootstrap server told no engine ids");
            return None;
        }
        let mut known = self.known.lock().expect("no panic under this lock");
        if known.len() >= WORKERS_MAX {
            known.clear();
        }
        known.insert(worker.id(), (ids.clone(), Instant::now()));
        Some(ids)
    }

    /// A leg failed: the worker may be another process by now.
    pub fn forget(&self, worker: WorkerId) {
        self.known.lock().expect("no panic under this lock").remove(&worker);
    }
}
