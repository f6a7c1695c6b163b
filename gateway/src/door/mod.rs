//! The door: one HTTP request off a client's connection, checked, its body read within the limit, and handed to the route
//! it names. Afterwards the connection serves on or is closed.

mod access;
mod admission;
mod body;
pub mod clients;
mod connection;
pub mod handshakes;
mod head;
pub mod keys;
pub mod reply;
mod serve;
mod target;
pub mod tls;
mod wire;

use std::sync::{Arc, Mutex};
use std::time::Instant;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use http::HeaderMap;
use pingora::apps::ServerApp;
use pingora::protocols::Stream;
use pingora::server::ShutdownWatch;

use crate::config::Config;
use crate::door::access::AccessLog;
use crate::door::admission::Admission;
use crate::door::clients::Clients;
use crate::door::connection::{Connection, Purpose};
use crate::door::keys::{Bucket, Key, KeyPermit, Keyring, Right, limited};
use crate::door::target::Surface;
use crate::error::{Failure, StartError};
use crate::gateway::Gateway;
use crate::metrics::door::DoorMetrics;

/// What the door keeps between requests.
#[derive(Debug)]
pub struct Door {
    pub clients: Clients,
    pub admission: Arc<Admission>,
    keys: ArcSwap<Keyring>,
    rate: Mutex<Option<Bucket>>,
    access: Option<AccessLog>,
}

impl Door {
    pub fn new(config: &Config, metrics: &DoorMetrics) -> Result<Self, StartError> {
        let (keys, now) = (&config.security.keys, Instant::now());
        let access = config.listen.access_log.as_deref();
        let access = access.map(|path| AccessLog::open(path, metrics.access_lines_lost.clone())).transpose()?;
        Ok(Door {
            clients: Clients::default(),
            admission: Admission::new(&config.admission),
            keys: ArcSwap::from_pointee(Keyring::new(keys, &Keyring::default(), now)),
            rate: Mutex::new(config.admission.rate.map(|rate| Bucket::new(rate, now))),
            access,
        })
    }

    /// Takes over settings that were read again. What runs and waits goes on and counts on.
    pub fn configure(&self, config: &Config) {
        let now = Instant::now();
        self.keys.store(Arc::new(Keyring::new(&config.security.keys, &self.keys.load(), now)));
        self.admission.adopt(&config.admission);
        *self.rate.lock().expect("no panic under this lock") = config.admission.rate.map(|rate| Bucket::new(rate, now));
    }

    /// Who asks, if a key is asked for, and whether it may ask now.
    fn caller(&self, headers: &HeaderMap, right: Right) -> Result<Caller, Failure> {
        let key = self.keys.load().authorize(headers, right)?;
        let permit = match &key {
            Some(key) if right == Right::Data => Some(key.enter(Instant::now())?),
            _ => None,
        };
        Ok(Caller { key, _permit: permit })
    }

    /// A refusal of one more prompt that needs nothing of its body.
    fn refuses_prompts(&self) -> Result<(), Failure> {
        self.admission.refuses_now()?;
        match self.rate.lock().expect("no panic under this lock").as_mut().map(|rate| rate.take(Instant::now())) {
            Some(Err(wait)) => {
                let what = "the gateway's rate of requests is used up (--rate-limit-tokens-per-second)";
                Err(limited("rate_limited", what.into(), wait))
            }
            _ => Ok(()),
        }
    }
}

/// Who asks, counted under its key until this is dropped.
#[derive(Debug)]
struct Caller {
    key: Option<Arc<Key>>,
    _permit: Option<KeyPermit>,
}

/// The data listener's application.
pub struct DataApp(pub Arc<Gateway>);

/// The application of the operators' listener, where they have one.
pub struct AdminApp(pub Arc<Gateway>);

/// The metrics listener's application.
pub struct MetricsApp(pub Arc<Gateway>);

#[async_trait]
impl ServerApp for DataApp {
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let surface = if self.0.config().listen.admin.is_some() { Surface::Data } else { Surface::Whole };
        serve_client(&self.0, surface, stream, shutdown).await
    }
}

#[async_trait]
impl ServerApp for AdminApp {
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        serve_client(&self.0, Surface::Admin, stream, shutdown).await
    }
}

/// Serves a connection to its end, counted among all that are open.
async fn serve_client(
    gateway: &Arc<Gateway>,
    surface: Surface,
    stream: Stream,
    shutdown: &ShutdownWatch,
) -> Option<Stream> {
    let Some(entry) = gateway.door.clients.enter(gateway.config().listen.connections_max) else {
        gateway.metrics.door.connections_refused.inc();
        return None;
    };
    let (connection, wire) = Connection::new(gateway.clone(), Purpose::Requests(surface), entry.admitted, stream);
    connection.process_new(wire, shutdown).await
}

#[async_trait]
impl ServerApp for MetricsApp {
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let (connection, wire) = Connection::new(self.0.clone(), Purpose::Metrics, true, stream);
        connection.process_new(wire, shutdown).await
    }
}
