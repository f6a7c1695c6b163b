//! Handing P's pools to decode workers of the same host, so that they copy pages out of them: an abstract Unix socket on
//! P with a random name, which D learns from the handshake, and a stream on it per channel, bound to it as data streams
//! are. A wrong key learns nothing; without a key only processes of the same user are served, since whoever maps the
//! pools can read every prompt's KV.

use std::{io, sync::Arc};

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
    net::{UnixListener, UnixStream},
    time::sleep,
};

use super::{
    HandoffStartError, dialler, handshake,
    handshake::Nonces,
    listener::{self, ACCEPT_PAUSE, UNAUTHENTICATED_MAX, in_time},
    lobby::{Lobby, Place},
};
use crate::host;

/// What names of these sockets begin with: D connects to no other.
const PREFIX: &str = "tandem-kv-";

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
        if memories.iter().any(|memory| memory.descriptor().is_none()) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the KV pools are private memory"));
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
fn abstract_path(name: &str) -> String {
    format!("\0{name}")
}

/// P's half: serves the socket, if there is one, for ever.
pub(super) async fn accept(context: Arc<listener::Context>, port: Option<SharePort>) {
    let Some(port) = port else {
        return std::future::pending().await;
    };
    let lobby = Arc::new(Lobby::new(UNAUTHENTICATED_MAX));
    loop {
        match port.listener.accept().await {
            Ok((stream, _)) => {
                let (place, _) = Lobby::enter(&lobby);
                tokio::spawn(serve(Arc::clone(&context), stream, place));
            }
            Err(error) => {
                tracing::warn!(%error, "the socket for shared memory could not accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(context: Arc<listener::Context>, stream: UnixStream, place: Place) {
    match in_time(&place, hand_over(&context, stream)).await {
        Ok(channel) => {
            context.stats.carried_by(Backend::Shm);
            tracing::info!(
                session = channel.session.0,
                backend = "shm",
                "a decode worker of this host maps the KV pools"
            );
        }
        Err(why) => {
            context.stats.handshake_refused();
            tracing::warn!(why, "a decode worker of this host gets no shared memory");
        }
    }
}

async fn hand_over(context: &listener::Context, mut stream: UnixStream) -> Result<Channel, String> {
    if !context.key.is_set() && !same_user(&stream) {
        return Err("it belongs to another user; set --handoff-key-file on both workers".to_owned());
    }
    let lookup = |channel: Channel| context.hub.lines().get(&channel).map(|line| line.nonces);
    let channel = handshake::asked_for_pools(&mut stream, &context.key, lookup).await?;
    send_pools(&stream, &context.memories).await.map_err(|error| error.to_string())?;
    let answer = handshake::was_mapped(&mut stream).await?;
    // Under the lock of the books: a stream is attached only to a channel that is open, and closing comes after.
    let lines = context.hub.lines();
    if !lines.contains_key(&channel) {
        return Err("its channel has ended".to_owned());
    }
    context.fabric.shm.attach_after(channel, stream, answer).map_err(|error| error.to_string())?;
    Ok(channel)
}

/// D's half: maps the pools of P that `socket` serves, and copies the channel's pieces out of them from then on.
pub(super) async fn map_pools(
    context: &dialler::Context,
    socket: &str,
    channel: Channel,
    nonces: &Nonces,
    shape: &PoolShape,
) -> Result<(), String> {
    if !socket.starts_with(PREFIX) {
        return Err(format!("the prefill worker names the socket {socket:?}, which is none of a worker"));
    }
    let mut stream = UnixStream::connect(abstract_path(socket)).await.map_err(|error| {
        format!("its socket for shared memory cannot be reached: {error} (do both run in one network namespace?)")
    })?;
    handshake::ask_for_pools(&mut stream, &context.key, channel, nonces).await?;
    let pools = receive_pools(&stream, shape).await.map_err(|error| error.to_string())?;
    handshake::mapped(&mut stream).await?;
    context.fabric.shm.attach(channel, stream, pools).map_err(|error| error.to_string())
}
