//! The gateway: one entry point in front of prefill and decode workers, or of plain ones. Pingora is its server; what to do
//! is decided in pure modules, done in thin drivers beside them. A request passes the rooms in this order:
//!
//! | room | what it does | kind |
//! |---|---|---|
//! | `door` | takes a request off a client's connection: head, key, admission, body; has the gateway's own words | I/O |
//! | `request`, `json` | finds what must be known of the body, splices the gateway's fields into it | pure |
//! | `fleet`, `pair` | the workers and how they do; picks one per side | state, pure |
//! | `backend` | what the legs of a fleet look like | pure |
//! | `exchange` | carries the request through: one exchange, one outcome | I/O around a pure machine |
//! | `leg` | one connection that carries one request and its answer | I/O |
//! | `stream` | judges the answer while it passes | pure |
//! | `error` | what can go wrong, as values | pure |
//!
//! Beside the path: `discovery` finds workers, `admin` answers operators, `metrics` counts, `server` listens, stops, hands its
//! sockets on and reads settings again, `config` holds the settings, `logging` the log.

mod admin;
pub mod backend;
mod config;
mod discovery;
mod door;
mod error;
mod exchange;
mod fleet;
mod gateway;
mod json;
mod leg;
mod logging;
mod metrics;
mod pair;
pub mod request;
mod server;
pub mod stream;
mod versions;

use std::io::Write as _;

pub use backend::Backend;
pub use config::{Config, GatewayArgs, Role, Secret, WorkerSpec};
pub use discovery::known_workers;
pub use error::{Failure, Side, StartError};
pub use exchange::ticket;
pub use leg::http1;
pub use logging::log_filter;
pub use pair::PolicyName;
pub use server::{Addresses, How, Settings, Stop, serve};

/// Runs a gateway until SIGTERM, SIGINT or SIGQUIT; running exchanges may end, unless a second signal comes. Blocks; call it from a thread
/// without an async runtime, since pingora brings its own.
pub fn run(args: GatewayArgs) -> Result<(), StartError> {
    serve(Settings::read(args)?, Stop::Signals, |addresses| {
        let Addresses { data, metrics, tls, .. } = &addresses;
        let scheme = if *tls { "https" } else { "http" };
        // Nobody has to read it: serving goes on.
        let _ = writeln!(
            std::io::stdout(),
            "tandem gateway listens on {scheme}://{data}, metrics on http://{metrics}/metrics"
        );
    })
}

/// A client that trusts and shows what legs to workers do. Reads the files that the settings name.
pub fn worker_client(config: &Config) -> Result<reqwest::ClientBuilder, StartError> {
    Ok(leg::tls::PeerTls::load(&config.security.workers)?.client(reqwest::Client::builder()))
}
