//! Handing P's pools to decode workers of the same host, so that they copy pages out of them: an abstract Unix socket on
//! P with a random name, which D learns from the handshake, and a stream on it per channel, bound to it as data streams
//! are. A wrong key learns nothing; without a key only processes of the same user are served, since whoever maps the
//! pools can read every prompt's KV.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tandem_fabric::{
    memory::PoolMemory,
    shm::{receive_pools, same_user, send_pools},
};
use tandem_handoff::{
    ids::Channel,
    layout::PoolShape,
    wire::transfer::{Backend, Transfer},
};
use tokio::{
    net::{UnixListener, UnixStream, unix::UCred},
    time::{sleep, timeout},
};

use super::{
    HandoffStartError, dialler, handshake,
    handshake::Nonces,
    listener::{self, ACCEPT_PAUSE, UNAUTHENTICATED_MAX, in_time},
    lobby::{Lobby, Place},
    rate::RateGate,
};
use crate::{accept_log::AcceptLog, host};

/// What names of these sockets begin with: D connects to no other.
pub(super) const PREFIX: &str = "tandem-kv-";
/// Places in the handshake for processes that will be refused for their user, so that they hear why: few, and none of those
/// that others need.
const FOREIGNERS_MAX: usize = 16;
/// Any process of the host can be refused here as often as it likes: so rarely is it told.
const REFUSALS_TOLD_EVERY: Duration = Duration::from_secs(10);
/// D's limit for the handshake where TCP can take its place: the rest of a dial's time is TCP's.
const LIMIT_WITH_FALLBACK: Duration = Duration::from_secs(2);
/// And where nothing can: below the limit of the dial, so that the error names the step.
const LIMIT_ALONE: Duration = Duration::from_secs(4);
/// Between two tries at a socket whose queue is full.
const BUSY_PAUSE_FIRST: Duration = Duration::from_millis(2);
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(50);

pub(super) const OTHER_USER: &str =
    "the two workers run as different users; set --handoff-key-file on both, and they share memory all the same";
const NO_CHANNEL: &str = "the stream belongs to no open channel";
const CHANNEL_ENDED: &str = "the channel of the stream has ended";

/// P's socket.
pub(super) struct SharePort {
    listener: UnixListener,
    name: String,
}

impl SharePort {
    /// `None` where the settings or the pools do not allow it. Must be called within the runtime.
    ///
    /// # Errors
    /// When the settings demand shared memory and it cannot be had.
    pub fn open(backend: Backend, memories: &[Arc<PoolMemory>]) -> Result<Option<Self>, HandoffStartError> {
        if backend == Backend::Tcp {
            return Ok(None);
        }
        match Self::bind(memories) {
            Ok(port) => Ok(Some(port)),
            Err(error) if backend == Backend::Shm => Err(HandoffStartError::Shm { reason: error.to_string() }),
            Err(error) => {
                tracing::warn!(%error, "no shared memory for decode workers of this host: their pages go by tcp");
                Ok(None)
            }
        }
    }

    fn bind(memories: &[Arc<PoolMemory>]) -> io::Result<Self> {
        if let Some(private) = memories.iter().find(|memory| memory.descriptor().is_none()) {
            let why = private.why_private().map_or_else(String::new, |why| format!(": {why}"));
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("the KV pools are private memory{why}")));
        }
        let name = format!("{PREFIX}{:032x}", rand::random::<u128>());
        let listener = UnixListener::bind(abstract_path(&name))?;
        Ok(Self { listener, name })
    }
}

/// What a worker says of itself in the handshake.
pub(super) fn transfer(backend: Backend, port: Option<&SharePort>) -> Transfer {
    let socket = port.map_or_else(String::new, |port| port.name.clone());
    Transfer { backend, host: host::boot_id(), socket }
}

/// A name without a file, as the runtime takes it.
pub(super) fn abstract_path(name: &str) -> String {
    format!("\0{name}")
}

/// What connections to the socket need.
struct Door {
    context: Arc<listener::Context>,
    name: String,
    refusals: Mutex<RateGate>,
}

/// P's half: serves the socket, if there is one, for ever.
pub(super) async fn accept(context: Arc<listener::Context>, port: Option<SharePort>) {
    let Some(SharePort { listener, name }) = port else {
        return std::future::pending().await;
    };
    let lobby = Arc::new(Lobby::new(UNAUTHENTICATED_MAX));
    let foreigners = Arc::new(Lobby::new(FOREIGNERS_MAX));
    let door = Arc::new(Door { context, name, refusals: Mutex::new(RateGate::new(REFUSALS_TOLD_EVERY)) });
    let mut log = AcceptLog::new("shared memory");
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let welcome = door.context.key.is_set() || same_user(&stream);
                let (place, _) = Lobby::enter(if welcome { &lobby } else { &foreigners });
                tokio::spawn(serve(Arc::clone(&door), stream, place, welcome));
            }
            Err(error) => {
                log.failed(Instant::now(), &error);
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(door: Arc<Door>, stream: UnixStream, place: Place, welcome: bool) {
    let peer = stream.peer_cred().ok();
    match in_time(&place, hand_over(&door, stream, welcome)).await {
        Ok(channel) => {
            door.context.stats.carried_by(Backend::Shm);
            tracing::info!(
                session = channel.session.0,
                decode = %channel.decode,
                pid = peer.and_then(|peer| peer.pid()),
                backend = "shm",
                "a decode worker of this host maps the KV pools"
            );
        }
        Err(why) => {
            door.context.stats.handshake_refused();
            let told = door.refusals.lock().unwrap_or_else(PoisonError::into_inner).pass(Instant::now());
            if let Some(untold) = told {
                let (pid, uid) = (peer.as_ref().and_then(UCred::pid), peer.as_ref().map(UCred::uid));
                tracing::warn!(why, pid, uid, untold, "a process of this host was refused shared memory");
            }
        }
    }
}

async fn hand_over(door: &Door, mut stream: UnixStream, welcome: bool) -> Result<Channel, String> {
    let context = &door.context;
    let lookup = |channel: Channel| {
        if !welcome {
            return Err(OTHER_USER);
        }
        context.hub.lines().get(&channel).map(|line| line.nonces).ok_or(NO_CHANNEL)
    };
    let channel = handshake::asked_for_pools(&mut stream, &context.key, &door.name, lookup).await?;
    send_pools(&stream, &context.memories).await.map_err(|error| error.to_string())?;
    let answer = handshake::was_mapped(&mut stream).await?;
    {
        // Under the lock of the books: a stream is attached only to a channel that is open, and closing comes after.
        let lines = context.hub.lines();
        if lines.contains_key(&channel) {
            context.fabric.shm.attach_after(channel, stream, answer).map_err(|error| error.to_string())?;
            return Ok(channel);
        }
    }
    handshake::refuse(&mut stream, CHANNEL_ENDED.to_owned()).await
}

/// Why D has not mapped P's pools.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unshared {
    /// Both know it: the channel's pages can go by TCP.
    Agreed(String),
    /// P may post the channel's pieces here already, for all that D knows: the channel is of no use.
    Unclear(String),
}

/// D's half: maps the pools of P that `socket` serves, and copies the channel's pieces out of them from then on. Has a
/// limit of its own, which leaves time for TCP unless shared memory is `required`.
pub(super) async fn map_pools(
    context: &dialler::Context,
    (socket, required): (&str, bool),
    channel: Channel,
    nonces: &Nonces,
    shape: &PoolShape,
) -> Result<(), Unshared> {
    let limit = if required { LIMIT_ALONE } else { LIMIT_WITH_FALLBACK };
    let mut step = "is busy: others connect to it all the time";
    let asked = timeout(limit, async {
        let mut stream = connect(socket).await?;
        step = "does not answer";
        handshake::ask_for_pools(&mut stream, &context.key, socket, channel, nonces).await?;
        let pools = receive_pools(&stream, shape).await.map_err(|error| error.to_string())?;
        Ok((stream, pools))
    });
    let asked = asked.await;
    let asked = asked.unwrap_or_else(|_| {
        Err(format!("its socket for shared memory {step}; given up after {} ms", limit.as_millis()))
    });
    let (mut stream, pools) = asked.map_err(Unshared::Agreed)?;
    handshake::mapped(&mut stream).await.map_err(Unshared::Unclear)?;
    context.fabric.shm.attach(channel, stream, pools).map_err(|error| Unshared::Unclear(error.to_string()))
}

/// Waits while the socket's queue is full, for as long as the caller does.
pub(super) async fn connect(socket: &str) -> Result<UnixStream, String> {
    if !socket.starts_with(PREFIX) {
        return Err(format!("the prefill worker names the socket {socket:?}, which is none of a worker"));
    }
    let mut pause = BUSY_PAUSE_FIRST;
    loop {
        match UnixStream::connect(abstract_path(socket)).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                sleep(pause).await;
                pause = (pause * 2).min(BUSY_PAUSE_MAX);
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return Err("its socket for shared memory is not here: the two workers run in different network \
                            namespaces, or the prefill worker has ended"
                    .to_owned());
            }
            outcome => {
                return outcome.map_err(|error| format!("its socket for shared memory cannot be reached: {error}"));
            }
        }
    }
}
