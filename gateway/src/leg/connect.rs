//! Making connections to workers, or taking idle ones.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pingora::ErrorType;
use pingora::connectors::TransportConnector;
use pingora::protocols::Stream;
use pingora::upstreams::peer::HttpPeer;

use crate::config::{Deadlines, ip_of};
use crate::fleet::Worker;
use crate::leg::tls::PeerTls;

/// A connection ready for a request.
pub struct Line {
    pub(super) stream: Stream,
    pub(super) reused: bool,
    /// How long it may idle afterwards, unless the worker wants less.
    pub(super) idle_max: Duration,
}

/// Why there is no connection, in words that a client may read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unreachable {
    pub why: String,
    /// The deadline for connecting passed; otherwise the worker or its network said no.
    pub timed_out: bool,
}

impl Unreachable {
    fn said(why: &str) -> Self {
        Unreachable { why: why.to_owned(), timed_out: false }
    }
}

/// Makes connections. A clone makes them by the same means.
#[derive(Clone)]
pub struct Connector(Arc<Means>);

struct Means {
    transport: TransportConnector,
    tls: PeerTls,
}

impl Connector {
    pub fn new(tls: PeerTls) -> Self {
        Connector(Arc::new(Means { transport: TransportConnector::new(None), tls }))
    }

    /// A connection to `worker`: an idle one, or a new one if there is none or `fresh` is asked for.
    pub async fn open(&self, worker: &Worker, fresh: bool, limits: &ConnectLimits) -> Result<Line, Unreachable> {
        if !fresh && let Some(stream) = worker.live().idle.checkout() {
            return Ok(Line { stream, reused: true, idle_max: limits.idle });
        }
        // On the heap, since few requests need it and its state is large.
        let connecting = Box::pin(self.connect(worker, limits.connect));
        let stream = match tokio::time::timeout(limits.connect, connecting).await {
            Ok(connected) => connected,
            Err(_) => {
                let why = format!("no connection within {} ms", limits.connect.as_millis());
                Err(Unreachable { why, timed_out: true })
            }
        };
        match stream {
            Ok(stream) => {
                worker.live().note_connected();
                Ok(Line { stream, reused: false, idle_max: limits.idle })
            }
            Err(unreachable) => {
                worker.live().note_unreachable(&unreachable.why);
                Err(unreachable)
            }
        }
    }

    /// Tries each address of the worker in turn.
    async fn connect(&self, worker: &Worker, limit: Duration) -> Result<Stream, Unreachable> {
        let (host, port) = (worker.spec.host.as_str(), worker.spec.port);
        let addresses: Vec<SocketAddr> = match ip_of(host) {
            Some(ip) => vec![SocketAddr::new(ip, port)],
            None => match tokio::net::lookup_host((host, port)).await {
                Ok(found) => found.collect(),
                Err(error) => {
                    tracing::debug!(worker = worker.url(), %error, "cannot resolve");
                    return Err(Unreachable::said("its name cannot be resolved"));
                }
            },
        };
        let mut last = Unreachable::said("its name has no address");
        for address in addresses {
            let mut peer = HttpPeer::new(address, worker.spec.tls, host.to_owned());
            peer.options.total_connection_timeout = Some(limit);
            self.0.tls.apply(&mut peer);
            match self.0.transport.new_stream(&peer).await {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    tracing::debug!(worker = worker.url(), %address, %error, "cannot connect");
                    last = in_words(&error.etype);
                }
            }
        }
        Err(last)
    }
}

/// How long connecting may take, and how long the connection may idle afterwards.
#[derive(Clone, Copy, Debug)]
pub struct ConnectLimits {
    pub connect: Duration,
    pub idle: Duration,
}

impl ConnectLimits {
    pub fn of(deadlines: &Deadlines) -> Self {
        ConnectLimits { connect: deadlines.connect, idle: deadlines.pool_idle }
    }
}

/// Why no connection was made, without addresses.
fn in_words(error: &ErrorType) -> Unreachable {
    let why = match error {
        ErrorType::ConnectRefused => "nobody listens there",
        ErrorType::ConnectTimedout => "it accepted no connection in time",
        ErrorType::ConnectNoRoute => "there is no route to it",
        ErrorType::TLSHandshakeFailure | ErrorType::TLSHandshakeTimedout => "the TLS handshake failed",
        ErrorType::InvalidCert => "its certificate is not trusted",
        _ => "no connection to it could be made",
    };
    let timed_out = matches!(error, ErrorType::ConnectTimedout | ErrorType::TLSHandshakeTimedout);
    Unreachable { why: why.to_owned(), timed_out }
}
