//! D's end of the control channels: dials the prefill workers that tickets name, one channel per pair.
//!
//! A dial is tried again with backoff for a short while, since a worker that restarts is soon back; then the requests
//! that wait for it fail with the reason. Peers that do not fit are not tried again.

use std::{
    collections::HashSet,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{
    Request, StatusCode,
    header::{CONNECTION, HOST, UPGRADE},
};
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tandem_fabric::dispatch::SinkDispatch;
use tandem_handoff::{
    ids::{Channel, Incarnation},
    layout::PoolShape,
    ticket::Address,
    wire::{
        Side,
        hello::Identity,
        transfer::{Backend, Path},
    },
};
use tokio::{
    net::{TcpStream, lookup_host},
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    ControlEvent, ControlPlane, HandoffParts,
    channel::{Heartbeat, Opened},
    handshake::{self, Key, Met, Nonces, Refusal},
    hub::{Hub, NetControl},
    listener::{CONTROL_PROTOCOL, DATA_PROTOCOL, HANDOFF_PATH, raw_stream},
    share::{self, Unshared},
    stats::HandoffStats,
};

/// How long a worker that cannot be reached is tried.
const DIAL_WINDOW: Duration = Duration::from_secs(3);
/// One try: name, connection, handshake, data streams.
const TRY_TIMEOUT: Duration = Duration::from_secs(5);
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

pub(super) struct Context {
    pub fabric: SinkDispatch,
    pub key: Key,
    hub: Arc<Hub>,
    me: Incarnation,
    identity: Identity,
    heartbeat: Heartbeat,
    ranks: u32,
    /// Addresses that are being dialled: a second request for one waits for the same answer.
    dialling: Mutex<HashSet<Address>>,
    stats: Arc<HandoffStats>,
}

/// Dials until the returned control plane is dropped.
pub(crate) fn start(parts: &HandoffParts<'_>, key: Key, fabric: SinkDispatch) -> Box<dyn ControlPlane> {
    let (mut control, hub) = NetControl::new(Arc::clone(&parts.waker));
    let context = Arc::new(Context {
        hub,
        fabric,
        key,
        me: Incarnation(rand::random()),
        identity: Identity::new(
            parts.fingerprint,
            parts.shape,
            &parts.numerics,
            share::transfer(parts.config.transfer_backend, None),
        ),
        heartbeat: Heartbeat::new(parts.config),
        ranks: parts.shape.tp,
        dialling: Mutex::default(),
        stats: Arc::clone(&parts.stats),
    });
    let driver = parts.runtime.spawn(dial_all(context, control.dials()));
    Box::new(control.driven_by(driver))
}

async fn dial_all(context: Arc<Context>, mut dials: mpsc::Receiver<Address>) {
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            address = dials.recv() => {
                let Some(address) = address else { return };
                if context.dialling().insert(address.clone()) {
                    running.spawn(dial(Arc::clone(&context), address));
                }
            }
            Some(_) = running.join_next() => {}
        }
    }
}

impl Context {
    fn dialling(&self) -> std::sync::MutexGuard<'_, HashSet<Address>> {
        self.dialling.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dials one address to its answer.
async fn dial(context: Arc<Context>, address: Address) {
    let give_up = Instant::now() + DIAL_WINDOW;
    let mut backoff = BACKOFF_FIRST;
    let outcome = loop {
        let tried = timeout(TRY_TIMEOUT, try_dial(&context, &address)).await.unwrap_or_else(|_| {
            let message = format!("{address} did not answer within {} ms", TRY_TIMEOUT.as_millis());
            Err(Refusal::unreachable(Side::Decode, message))
        });
        match tried {
            Err(refusal) if refusal.retry && Instant::now() + backoff < give_up => {
                sleep(backoff).await;
                backoff = (backoff * 2).min(BACKOFF_MAX);
            }
            outcome => break outcome,
        }
    };
    // Removed before the answer is given: a request that comes after the answer starts a dial of its own.
    context.dialling().remove(&address);
    let hub = Arc::clone(&context.hub);
    match outcome {
        Ok(Dialled::Known(channel, shape)) => {
            let _ = hub.report(ControlEvent::Up { channel, address: Some(address), shape }).await;
        }
        Ok(Dialled::New(opened, stream)) => {
            context.stats.channel_opened();
            tokio::spawn(opened.run(hub, Some(address), stream));
        }
        Err(refusal) => {
            context.stats.handshake_refused();
            tracing::warn!(%address, why = refusal.cause.message(), "no channel to the prefill worker");
            let _ = hub.report(ControlEvent::DialFailed { address, cause: refusal.cause }).await;
        }
    }
}

enum Dialled {
    Known(Channel, PoolShape),
    New(Opened, TcpStream),
}

async fn try_dial(context: &Context, address: &Address) -> Result<Dialled, Refusal> {
    let lost = |why: String| {
        Refusal::unreachable(Side::Decode, format!("the prefill worker {address} cannot be reached: {why}"))
    };
    let (mut stream, at) = connect(address).await.map_err(lost)?;
    stream = upgrade(stream, address, CONTROL_PROTOCOL).await.map_err(lost)?;
    let known = |prefill| context.hub.channel_to(prefill);
    let met = handshake::greet_prefill(&mut stream, &context.key, context.me, &context.identity, known).await?;
    let (channel, shape, nonces, path) = match met {
        Met::Known(channel, shape) => return Ok(Dialled::Known(channel, shape)),
        Met::New { channel, shape, nonces, path } => (channel, shape, nonces, path),
    };
    let (backend, why_not_shm) = carrier(context, address, channel, &shape, &nonces, &path).await?;
    if backend == Backend::Tcp {
        for rank in 0..context.ranks {
            let data = open_stream(context, address, at, channel, rank, &nonces).await.map_err(lost)?;
            context.fabric.tcp.attach(channel, rank, data);
        }
    }
    context.stats.carried_by(backend);
    let session = channel.session.0;
    let backend = backend.name();
    tracing::info!(prefill = %address, session, backend, why_not_shm, "a channel to a prefill worker is open");
    let opened = Opened::register(&context.hub, channel, context.me, shape, context.heartbeat, nonces);
    Ok(Dialled::New(opened, stream))
}

/// What carries the channel's pages now, and why not shared memory, where this worker's settings leave the choice.
async fn carrier(
    context: &Context,
    address: &Address,
    channel: Channel,
    shape: &PoolShape,
    nonces: &Nonces,
    path: &Path,
) -> Result<(Backend, Option<String>), Refusal> {
    let (socket, required) = match path {
        Path::Tcp { why } => return Ok((Backend::Tcp, why.map(str::to_owned))),
        Path::Shm { socket, required } => (socket, *required),
    };
    match share::map_pools(context, (socket, required), channel, nonces, shape).await {
        Ok(()) => Ok((Backend::Shm, None)),
        Err(Unshared::Agreed(why)) if !required => Ok((Backend::Tcp, Some(why))),
        Err(Unshared::Agreed(why)) => {
            let message = format!(
                "no shared memory with the prefill worker {address}, which --disaggregation-transfer-backend shm \
                 demands: {why}"
            );
            Err(Refusal::unfit(Side::Decode, message))
        }
        Err(Unshared::Unclear(why)) => {
            let message = format!("the prefill worker {address} ended the handshake for shared memory: {why}");
            Err(Refusal::unreachable(Side::Decode, message))
        }
    }
}

/// The first of the host's addresses that accepts.
async fn connect(address: &Address) -> Result<(TcpStream, SocketAddr), String> {
    let found = lookup_host((address.bare_host(), address.port)).await.map_err(|error| error.to_string())?;
    let mut last = "the name has no address".to_owned();
    for at in found {
        match connect_to(at).await {
            Ok(stream) => return Ok((stream, at)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn connect_to(at: SocketAddr) -> Result<TcpStream, String> {
    let stream = TcpStream::connect(at).await.map_err(|error| error.to_string())?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    Ok(stream)
}

async fn open_stream(
    context: &Context,
    address: &Address,
    at: SocketAddr,
    channel: Channel,
    rank: u32,
    nonces: &Nonces,
) -> Result<TcpStream, String> {
    let stream = connect_to(at).await?;
    let mut stream = upgrade(stream, address, DATA_PROTOCOL).await?;
    handshake::bind_stream(&mut stream, &context.key, channel, rank, nonces).await?;
    Ok(stream)
}

/// Leaves HTTP on a fresh connection.
async fn upgrade(stream: TcpStream, address: &Address, protocol: &'static str) -> Result<TcpStream, String> {
    let text = |error: hyper::Error| error.to_string();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
    let connection = tokio::spawn(connection.with_upgrades());
    let request = Request::get(HANDOFF_PATH)
        .header(HOST, address.to_string())
        .header(CONNECTION, "upgrade")
        .header(UPGRADE, protocol)
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let response = sender.send_request(request).await.map_err(text)?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        connection.abort();
        return Err(format!("it answered {} to the handoff's upgrade", response.status()));
    }
    raw_stream(hyper::upgrade::on(response).await).ok_or_else(|| "it does not speak the handoff protocol".to_owned())
}
