//! Listening and stopping. Pingora is the server; its own rules for the beginning and the end are not used: `sockets` binds
//! the listeners and opens and closes them, `life` decides when, `stop` says who may ask for it, `upgrade` is the talk with
//! the process before or after this one.
//!
//! | signal | what happens |
//! |---|---|
//! | SIGTERM, SIGINT, SIGQUIT | listeners close, running exchanges may end within `--shutdown-grace-period-secs`; what still runs is broken off and its client told |
//! | SIGHUP | settings are read again, see `reload` |
//! | SIGTERM, SIGINT or SIGQUIT a second time | running exchanges are broken off at once; their clients are told |
//!
//! Pingora's graceful stop would sleep a fixed time and then drop what still runs; its upgrade would stop the old process
//! even if nobody took the sockets.

mod life;
mod reload;
mod sockets;
mod stop;
mod upgrade;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use pingora::server::configuration::ServerConf;
use pingora::server::{RunArgs, Server};
use pingora::services::background::background_service;

use crate::config::Config;
use crate::discovery::Discovery;
use crate::door::tls::Certificates;
use crate::door::{AdminApp, DataApp, MetricsApp};
use crate::error::StartError;
use crate::fleet::probe::ProbeService;
use crate::gateway::Gateway;
use life::{Life, Start};
use reload::Reload;
pub use reload::Settings;
use sockets::{Acceptor, Socket, Sockets, endpoint};
pub use stop::{How, Stop};
use upgrade::Predecessor;

const DATA: &str = "data";
const METRICS: &str = "metrics";
const ADMIN: &str = "admin";

/// Where the gateway listens.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    pub data: SocketAddr,
    pub metrics: SocketAddr,
    /// Where operators have a listener of their own.
    pub admin: Option<SocketAddr>,
    /// The data and admin listeners speak TLS.
    pub tls: bool,
}

/// Serves until told to stop, or until another process has taken over. `listening` is called once, before the first
/// connection is accepted.
pub fn serve(
    settings: impl Into<Settings>,
    stop: Stop,
    listening: impl FnOnce(Addresses) + Send + 'static,
) -> Result<(), StartError> {
    let Settings { config, again } = settings.into();
    let certificates = config.security.server.clone().map(Certificates::load).transpose()?;
    let (sockets, predecessor) = listen(&config)?;
    let address = |name| sockets.iter().find(|s| s.name == name).map(|s| s.address);
    let bound = |name| address(name).expect("each listener of the settings is there");
    let (admin, tls) = (address(ADMIN), certificates.is_some());
    let addresses = Addresses { data: bound(DATA), metrics: bound(METRICS), admin, tls };
    let (threads, upgrade_sock) = (config.listen.threads, config.upgrade.sock.clone());
    let address_file = config.listen.address_file.clone();
    let announce = Box::new(move |addresses| {
        if let Some(path) = &address_file {
            write_addresses(path, addresses)?;
        }
        listening(addresses);
        Ok(())
    });
    let gateway = Arc::new(Gateway::new(config)?);
    let sockets = Arc::new(Sockets::new(sockets));
    let discovery = Discovery::new(&gateway)?;

    let conf = ServerConf {
        threads: 1,
        grace_period_seconds: Some(0),
        graceful_shutdown_timeout_seconds: Some(0),
        ..Default::default()
    };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    let tls = || endpoint(certificates.clone());
    server.add_service(Acceptor::new(DATA, DataApp(gateway.clone()), tls()?, threads, &sockets, &gateway));
    if admin.is_some() {
        server.add_service(Acceptor::new(ADMIN, AdminApp(gateway.clone()), tls()?, 1, &sockets, &gateway));
    }
    server.add_service(Acceptor::new(METRICS, MetricsApp(gateway.clone()), endpoint(None)?, 1, &sockets, &gateway));
    server.add_service(background_service("probe", ProbeService(gateway.prober.clone())));
    server.add_service(background_service("discovery", discovery));
    if let Some(again) = again {
        server.add_service(background_service("reload", Reload { gateway: gateway.clone(), again }));
    }
    let failure = Arc::new(Mutex::new(None));
    let start = Mutex::new(Some(Start { predecessor, announce }));
    let life = Life { gateway, sockets, addresses, stop, upgrade_sock, start, failure: failure.clone() };
    server.run(RunArgs { shutdown_signal: Box::new(life) });
    let failure = failure.lock().expect("no panic under this lock").take();
    failure.map_or(Ok(()), Err)
}

/// The sockets that the settings ask for: bound, or those of the process that serves.
fn listen(config: &Config) -> Result<(Vec<Socket>, Option<Predecessor>), StartError> {
    let mut wanted = vec![(DATA, &config.listen.data), (METRICS, &config.listen.metrics)];
    wanted.extend(config.listen.admin.as_ref().map(|address| (ADMIN, address)));
    if let Some(path) = &config.upgrade.take_over_at {
        return upgrade::take(path, &wanted).map(|(sockets, old)| (sockets, Some(old)));
    }
    if let Some(path) = &config.upgrade.sock {
        upgrade::check_free(path)?;
    }
    let bound = wanted.into_iter().map(|(name, asked)| Socket::bind(name, asked));
    Ok((bound.collect::<Result<_, _>>()?, None))
}

/// Written beside and renamed, so that a reader never sees half of it.
fn write_addresses(path: &Path, addresses: Addresses) -> Result<(), StartError> {
    let failed = |source| StartError::AddressFile { path: path.display().to_string(), source };
    let Addresses { data, metrics, admin, .. } = addresses;
    let text = serde_json::json!({"data": data.to_string(), "metrics": metrics.to_string(), "admin": admin.map(|a| a.to_string())});
    let beside = path.with_extension("tmp");
    std::fs::write(&beside, format!("{text}\n")).map_err(failed)?;
    std::fs::rename(&beside, path).map_err(failed)
}
