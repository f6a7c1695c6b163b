//! P's bootstrap port: `GET /health`, `GET /route`, and Upgrades to control channels and data streams.
//!
//! Bounded: connections that have not passed their handshake are capped and have a deadline, heads and frames have size
//! limits. Over the cap the oldest of them gives way to the newcomer, so that strangers who say nothing keep no decode
//! worker out. `GET /route` says no more than a stranger may know.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{
    Method, Request, Response, StatusCode,
    header::{CONNECTION, CONTENT_TYPE, UPGRADE},
};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tandem_fabric::{dispatch::SourceDispatch, memory::PoolMemory};
use tandem_handoff::{
    ids::{Channel, Incarnation, SessionId},
    ticket::Address,
    wire::{
        hello::{Identity, PROTOCOL},
        transfer::Backend,
    },
};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    time::{sleep, timeout},
};

use super::{
    ControlPlane, HandoffParts, HandoffStartError,
    channel::{Heartbeat, Opened},
    handshake::{self, Key},
    hub::{Hub, NetControl},
    lobby::{Lobby, Place},
    share::{self, SharePort},
    stats::HandoffStats,
};
use crate::{accept_log::AcceptLog, config::HandoffConfig, http::listen};

/// The path of both Upgrades.
pub(super) const HANDOFF_PATH: &str = "/handoff";
/// The Upgrade tokens of a control channel and of a data stream.
pub(super) const CONTROL_PROTOCOL: &str = "tandem-control";
pub(super) const DATA_PROTOCOL: &str = "tandem-data";

/// Connections that have not passed their handshake at most.
pub(super) const UNAUTHENTICATED_MAX: usize = 256;
/// From accepting a connection to the end of its handshake, and of each plain request.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// After an accept that failed, as with no file descriptors left.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

pub(super) struct Context {
    pub hub: Arc<Hub>,
    pub fabric: SourceDispatch,
    pub key: Key,
    pub memories: Vec<Arc<PoolMemory>>,
    pub stats: Arc<HandoffStats>,
    me: Incarnation,
    identity: Identity,
    heartbeat: Heartbeat,
    sessions: AtomicU64,
}

/// The port and the key, taken before the model is loaded: that they cannot be had is known in a moment. Nobody listens
/// yet, so that whoever comes too early is refused at once.
pub struct BootstrapPort {
    key: Key,
    socket: TcpSocket,
    address: SocketAddr,
}

impl BootstrapPort {
    /// # Errors
    /// When the port cannot be bound or the key file cannot be used.
    pub async fn take(config: &HandoffConfig) -> Result<Self, HandoffStartError> {
        let key = Key::load(config.key_file.as_deref())?;
        let (host, port) = (&config.bootstrap_host, config.bootstrap_port);
        let failed = |error| {
            let address = Address { host: host.clone(), port }.to_string();
            HandoffStartError::Bind { address, error }
        };
        let socket = listen::bind(host, port).await.map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        Ok(Self { key, socket, address })
    }
}

/// Serves the port until the returned control plane is dropped.
pub(crate) fn start(
    parts: &HandoffParts<'_>,
    port: BootstrapPort,
    fabric: SourceDispatch,
) -> Result<(Box<dyn ControlPlane>, SocketAddr), HandoffStartError> {
    let config = parts.config;
    let BootstrapPort { key, socket, address } = port;
    if !key.is_set() && !address.ip().is_loopback() {
        tracing::warn!(
            %address,
            "the bootstrap port is open to the network without a key: anyone who reaches it can ask for prompts' KV; \
             set --handoff-key-file on all workers"
        );
    }
    let (listener, share) = {
        let _runtime = parts.runtime.enter();
        let bind = |error| HandoffStartError::Bind { address: address.to_string(), error };
        (listen::listen(socket).map_err(bind)?, SharePort::open(config.transfer_backend, &parts.memories)?)
    };
    let transfer = share::transfer(config.transfer_backend, share.as_ref());
    let (control, hub) = NetControl::new(Arc::clone(&parts.waker));
    let context = Arc::new(Context {
        hub,
        fabric,
        key,
        memories: parts.memories.clone(),
        me: Incarnation(rand::random()),
        identity: Identity::new(parts.fingerprint, parts.shape, &parts.numerics, transfer),
        heartbeat: Heartbeat::new(config),
        sessions: AtomicU64::new(1),
        stats: Arc::clone(&parts.stats),
    });
    let driver = parts.runtime.spawn(async move {
        tokio::join!(accept(Arc::clone(&context), listener), share::accept(context, share));
    });
    Ok((Box::new(control.driven_by(driver)), address))
}

async fn accept(context: Arc<Context>, listener: TcpListener) {
    let lobby = Arc::new(Lobby::new(UNAUTHENTICATED_MAX));
    let mut log = AcceptLog::new("bootstrap");
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                log.failed(Instant::now(), &error);
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (place, displaced) = Lobby::enter(&lobby);
        if displaced {
            context.stats.handshake_refused();
        }
        tokio::spawn(serve(Arc::clone(&context), stream, peer, place));
    }
}

/// One connection serves one request.
async fn serve(context: Arc<Context>, stream: TcpStream, peer: SocketAddr, place: Place) {
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let place = Arc::new(place);
    let held = Arc::clone(&place);
    let service = service_fn(move |request| {
        let response = respond(&context, request, peer, &held);
        async move { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(16 * 1024)
        .timer(TokioTimer::new())
        .header_read_timeout(HANDSHAKE_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    // An error here is the client's: it left, or did not speak HTTP.
    tokio::select! {
        _ = timeout(HANDSHAKE_TIMEOUT, connection) => {}
        () = place.displaced() => {}
    }
}

fn respond(
    context: &Arc<Context>,
    mut request: Request<Incoming>,
    peer: SocketAddr,
    place: &Arc<Place>,
) -> Response<Full<Bytes>> {
    let known = ["/health", "/route", HANDOFF_PATH].contains(&request.uri().path());
    if known && request.method() != Method::GET {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET is served here");
    }
    match request.uri().path() {
        "/health" => plain(StatusCode::OK, "OK"),
        "/route" => route(),
        HANDOFF_PATH => {
            let wanted = request.headers().get(UPGRADE).and_then(|value| value.to_str().ok()).unwrap_or_default();
            let protocol = match wanted {
                CONTROL_PROTOCOL => CONTROL_PROTOCOL,
                DATA_PROTOCOL => DATA_PROTOCOL,
                _ => return plain(StatusCode::UPGRADE_REQUIRED, "this path is for decode workers"),
            };
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(upgraded(Arc::clone(context), upgrade, protocol, peer, Arc::clone(place)));
            let mut response = Response::new(Full::default());
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            response.headers_mut().insert(CONNECTION, http::HeaderValue::from_static("upgrade"));
            response.headers_mut().insert(UPGRADE, http::HeaderValue::from_static(protocol));
            response
        }
        _ => plain(StatusCode::NOT_FOUND, "this is a bootstrap port: GET /health or GET /route"),
    }
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("text/plain"));
    response
}

fn route() -> Response<Full<Bytes>> {
    let body = serde_json::json!({ "role": "prefill", "protocol": PROTOCOL, "ready": true });
    let mut response = Response::new(Full::from(body.to_string()));
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}

/// The connection has left HTTP. Its place is held until its handshake is over.
async fn upgraded(
    context: Arc<Context>,
    upgrade: hyper::upgrade::OnUpgrade,
    protocol: &'static str,
    peer: SocketAddr,
    place: Arc<Place>,
) {
    let Some(mut stream) = raw_stream(upgrade.await) else {
        return;
    };
    let outcome = if protocol == CONTROL_PROTOCOL {
        match in_time(&place, open_channel(&context, &mut stream)).await {
            Ok(opened) => {
                drop(place);
                context.stats.channel_opened();
                opened.run(Arc::clone(&context.hub), None, stream).await;
                return;
            }
            Err(why) => why,
        }
    } else {
        match in_time(&place, open_stream(&context, stream)).await {
            Ok(()) => return,
            Err(why) => why,
        }
    };
    context.stats.handshake_refused();
    tracing::warn!(%peer, protocol, why = outcome, "a decode worker was refused");
}

/// A handshake that neither its deadline nor a newcomer cuts short.
pub(super) async fn in_time<T>(place: &Place, handshake: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    tokio::select! {
        biased;
        outcome = timeout(HANDSHAKE_TIMEOUT, handshake) => {
            outcome.unwrap_or_else(|_| Err("the handshake took too long".to_owned()))
        }
        () = place.displaced() => Err("too many connections have not passed their handshake".to_owned()),
    }
}

/// The socket behind an upgraded connection. `None` when the peer sent bytes before the upgrade was answered.
pub(super) fn raw_stream(upgraded: Result<hyper::upgrade::Upgraded, hyper::Error>) -> Option<TcpStream> {
    let parts = upgraded.ok()?.downcast::<TokioIo<TcpStream>>().ok()?;
    parts.read_buf.is_empty().then(|| parts.io.into_inner())
}

async fn open_channel(context: &Context, stream: &mut TcpStream) -> Result<Opened, String> {
    let greeted = handshake::greet_decode(stream, &context.key, context.me, &context.identity).await;
    let (decode, identity, nonces) = greeted?;
    let session = SessionId(context.sessions.fetch_add(1, Ordering::Relaxed));
    let channel = Channel { prefill: context.me, decode, session };
    // Registered before D hears of it, so that its data streams find it.
    let opened = Opened::register(&context.hub, channel, context.me, identity.shape, context.heartbeat, nonces);
    if let Err(why) = handshake::welcome(stream, session, &context.identity).await {
        context.hub.lines().remove(&channel);
        return Err(why);
    }
    Ok(opened)
}

async fn open_stream(context: &Context, mut stream: TcpStream) -> Result<(), String> {
    let lookup = |channel: Channel, rank: u32| {
        let lines = context.hub.lines();
        lines.get(&channel).filter(|line| rank < line.peer_shape.tp).map(|line| line.nonces)
    };
    let (channel, rank) = handshake::accept_stream(&mut stream, &context.key, lookup).await?;
    if context.identity.transfer.backend == Backend::Shm {
        return Err("this prefill worker moves pages by shared memory alone".to_owned());
    }
    // Under the lock of the books: a stream is attached only to a channel that is open, and closing comes after.
    let lines = context.hub.lines();
    if lines.contains_key(&channel) {
        context.fabric.tcp.attach(channel, rank, stream);
        if rank == 0 {
            context.stats.carried_by(Backend::Tcp);
        }
    }
    drop(lines);
    Ok(())
}
