//! Telling workers that a request they know by `rid` is not waited for any more, beside the closed connection, which
//! engines notice only now and then.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::error::Side;
use crate::exchange::afterwards;
use crate::fleet::Worker;
use crate::leg::http1::{Beside, request_head};
use crate::leg::{ConnectLimits, Connector, Leg};

/// How long telling a worker may take.
const ABORT_WAIT: Duration = Duration::from_secs(2);
/// On their way at one time; beyond it the closed connection has to tell.
const ABORTS_MAX: usize = 64;
/// SGLang's engines abort each request whose id *begins* with the one given: a shorter one might end other clients'
/// requests.
const RID_BYTES_MIN: usize = 16;

/// Aborts on their way.
pub struct Aborts(Arc<Semaphore>);

impl Default for Aborts {
    fn default() -> Self {
        Aborts(Arc::new(Semaphore::new(ABORTS_MAX)))
    }
}

impl Aborts {
    /// Tells in the background. Only ids that their client chose are known here: giving requests ids of ours would change
    /// what workers answer.
    pub fn send(&self, connector: &Connector, worker: &Arc<Worker>, rid: &str, limits: ConnectLimits) {
        if rid.len() < RID_BYTES_MIN {
            return;
        }
        let Ok(permit) = self.0.clone().try_acquire_owned() else { return };
        let body = Bytes::from(serde_json::json!({ "rid": rid }).to_string());
        let (connector, worker) = (connector.clone(), worker.clone());
        tokio::spawn(async move {
            let telling = async {
                let line = connector.open(&worker, false, &limits).await.ok()?;
                let beside =
                    Beside { api_key: worker.spec.api_key.as_ref().map(|key| key.reveal()), ..Beside::default() };
                let head = request_head("/abort_request", &worker.authority, &HeaderMap::new(), &beside, body.len());
                let mut leg = Leg::new(Side::Decode, worker.begin(0)?, line, head, body);
                afterwards::ends(&mut leg).await.then(|| leg.release())
            };
            let told = matches!(timeout(ABORT_WAIT, telling).await, Ok(Some(())));
            tracing::debug!(worker = worker.url(), told, "told a worker to abort");
            drop(permit);
        });
    }
}
