//! Zero-downtime upgrade: a new process takes the listening sockets over from the one that serves. The old one goes on
//! accepting until the new one has its workers probed, then lets its connections end. Both sides of the conversation in
//! [`wire`] are here; when to open, close and leave is [`super::life`]'s.

mod path;
mod wire;

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdStream;
use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::error::StartError;
use crate::server::sockets::{Socket, Sockets};
pub use path::{Meeting, check_free};
use wire::{Channel, DESCRIPTORS_MAX, Message, PROTOCOL, SocketName};

/// How long one side waits for an answer that needs no work of the other.
const WORD_WAIT: Duration = Duration::from_secs(5);

/// The new process, as the old one knows it.
pub struct Successor {
    channel: Channel,
    pub pid: u32,
}

/// How a new process ended its probation.
pub enum Probation {
    /// It was told to stop, and does so itself.
    Leaves,
    Died,
}

/// Waits for a new process at `meeting` and gives it the sockets; returns one that is ready to serve. A new process that
/// fails costs nothing: `failed` hears why, and the wait goes on.
pub async fn next_successor(meeting: &Meeting, sockets: &Sockets, limit: Duration, failed: impl Fn(&str)) -> Successor {
    loop {
        let stream = match meeting.listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                failed(&format!("cannot accept at the upgrade socket: {error}"));
                // Out of descriptors, most likely: asked again at once it would say the same.
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        match give(Channel::new(stream), sockets, limit).await {
            Ok(successor) => return successor,
            Err(why) => failed(&why),
        }
    }
}

/// The conversation up to `Ready`.
async fn give(mut channel: Channel, sockets: &Sockets, limit: Duration) -> Result<Successor, String> {
    match prepare(&mut channel, sockets, limit).await {
        Ok(pid) => Ok(Successor { channel, pid }),
        Err(why) => {
            // It may be gone.
            let _ = channel.send(&Message::Refused { why: why.clone() }, &[]).await;
            Err(why)
        }
    }
}

async fn prepare(channel: &mut Channel, sockets: &Sockets, limit: Duration) -> Result<u32, String> {
    let peer = channel.peer_uid().map_err(|e| format!("the new process has no user: {e}"))?;
    let own = rustix::process::geteuid().as_raw();
    if peer != own {
        return Err(format!(
            "the new process runs as uid {peer}, this gateway as {own}: only the same user may take over"
        ));
    }
    let (pid, version) = match timeout(WORD_WAIT, channel.next()).await {
        Ok(Ok(Some(Message::Hello { protocol: PROTOCOL, pid, version }))) => (pid, version),
        Ok(Ok(Some(Message::Hello { protocol, version, .. }))) => {
            let ours = env!("CARGO_PKG_VERSION");
            return Err(format!(
                "version {version} hands over by protocol {protocol}, this gateway (version {ours}) by {PROTOCOL}: \
                 stop this one and start the other"
            ));
        }
        Ok(other) => return Err(format!("expected a greeting, got {other:?}")),
        Err(_) => return Err(format!("no greeting within {WORD_WAIT:?}")),
    };
    tracing::info!(pid, version, "upgrade: a new process asks for the sockets; this one goes on accepting");
    let (names, copies) = sockets.look(|all| {
        let names = all.iter().map(name_of).collect::<Vec<_>>();
        let copies = all.iter().map(Socket::copy).collect::<Result<Vec<_>, _>>();
        (names, copies)
    });
    let copies = copies.map_err(|e| format!("a listening socket cannot be copied: {e}"))?;
    let borrowed: Vec<_> = copies.iter().map(AsFd::as_fd).collect();
    let said =
        Message::Sockets { pid: std::process::id(), version: env!("CARGO_PKG_VERSION").to_owned(), sockets: names };
    channel.send(&said, &borrowed).await.map_err(|e| format!("the sockets could not be sent: {e}"))?;
    match timeout(limit, channel.next()).await {
        Ok(Ok(Some(Message::Ready))) => Ok(pid),
        Ok(Ok(Some(Message::Refused { why }))) => Err(format!("process {pid} gave up: {why}")),
        Ok(Ok(None)) => Err(format!("process {pid} died before it was ready")),
        Ok(other) => Err(format!("process {pid} was to say that it is ready, but: {other:?}")),
        Err(_) => Err(format!("process {pid} was not ready within {} s (--upgrade-timeout-secs)", limit.as_secs())),
    }
}

fn name_of(socket: &Socket) -> SocketName {
    SocketName { name: socket.name.to_owned(), asked: shown(&socket.asked), address: socket.address.to_string() }
}

fn shown((host, port): &(String, u16)) -> String {
    format!("{host}:{port}")
}

impl Successor {
    /// Tells it that this process has stopped accepting, and waits until it serves.
    pub async fn relieve(&mut self) -> Result<(), String> {
        let pid = self.pid;
        self.channel.send(&Message::Relieved, &[]).await.map_err(|e| format!("process {pid} cannot be told: {e}"))?;
        match timeout(WORD_WAIT, self.channel.next()).await {
            Ok(Ok(Some(Message::Serving))) => Ok(()),
            Ok(Ok(None)) => Err(format!("process {pid} died before it served")),
            Ok(other) => Err(format!("process {pid} was to serve, but: {other:?}")),
            Err(_) => Err(format!("process {pid} did not serve within {WORD_WAIT:?}")),
        }
    }

    /// This process serves on instead.
    pub async fn refuse(&mut self, why: &str) {
        let _ = self.channel.send(&Message::Refused { why: why.to_owned() }, &[]).await;
    }

    /// Returns when the new process leaves or dies. Cancel-safe.
    pub async fn ended(&mut self) -> Probation {
        loop {
            match self.channel.next().await {
                Ok(Some(Message::Leaving)) => return Probation::Leaves,
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return Probation::Died,
            }
        }
    }
}

/// The old process, as the new one knows it before its own runtime runs.
pub struct Predecessor {
    stream: StdStream,
    pub pid: u32,
}

/// What the old process says while the new one gets ready.
pub enum Word {
    Relieved,
    /// It serves on; the new one must not.
    Refused(String),
    Died,
}

/// The sockets of the process that serves, by the names and addresses that this one is to have. A listener that the old one
/// does not have is bound; one that only the old one has ends with it.
pub fn take(path: &Path, wanted: &[(&'static str, &(String, u16))]) -> Result<(Vec<Socket>, Predecessor), StartError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async {
        let mut channel = Channel::new(path::connect(path).await?);
        let (peer, own) = (channel.peer_uid().map_err(failed)?, rustix::process::geteuid().as_raw());
        if peer != own {
            return Err(StartError::Upgrade(format!(
                "the gateway at {} runs as uid {peer}, this process as {own}: only the same user may take over",
                path.display()
            )));
        }
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let hello = Message::Hello { protocol: PROTOCOL, pid: std::process::id(), version };
        channel.send(&hello, &[]).await.map_err(failed)?;
        let (pid, names) = match timeout(WORD_WAIT, channel.next()).await {
            Ok(Ok(Some(Message::Sockets { pid, sockets, version }))) => {
                tracing::info!(pid, version, "upgrade: the sockets of the process that serves are here");
                (pid, sockets)
            }
            Ok(Ok(Some(Message::Refused { why }))) => return Err(StartError::Upgrade(format!("refused: {why}"))),
            Err(_) => {
                let what =
                    format!("the running gateway did not answer within {WORD_WAIT:?}; another upgrade may be going on");
                return Err(StartError::Upgrade(what));
            }
            Ok(other) => return Err(StartError::Upgrade(format!("expected the sockets, got {other:?}"))),
        };
        if names.len() != channel.descriptors.len() || names.len() > DESCRIPTORS_MAX {
            let (named, came) = (names.len(), channel.descriptors.len());
            return Err(StartError::Upgrade(format!("{named} sockets were announced, {came} came")));
        }
        let came = names.into_iter().zip(std::mem::take(&mut channel.descriptors));
        let came = came.map(|(name, descriptor)| (name, TcpListener::from(descriptor))).collect();
        let sockets = match matched(wanted, came) {
            Ok(sockets) => sockets,
            Err(error) => {
                let _ = channel.send(&Message::Refused { why: error.to_string() }, &[]).await;
                return Err(error);
            }
        };
        Ok((sockets, Predecessor { stream: channel.into_std().map_err(failed)?, pid }))
    })
}

fn failed(error: std::io::Error) -> StartError {
    StartError::Upgrade(format!("the running gateway cannot be talked to: {error}"))
}

fn matched(
    wanted: &[(&'static str, &(String, u16))],
    mut came: Vec<(SocketName, TcpListener)>,
) -> Result<Vec<Socket>, StartError> {
    let mut sockets = Vec::new();
    for (name, asked) in wanted {
        let Some(at) = came.iter().position(|(there, _)| there.name == *name) else {
            tracing::info!(name, "upgrade: the old process has no such listener; it is opened here");
            sockets.push(Socket::bind(name, asked)?);
            continue;
        };
        let (there, listener) = came.swap_remove(at);
        if there.asked != shown(asked) && there.address != shown(asked) {
            return Err(StartError::Upgrade(format!(
                "the running gateway listens for {name} on {}, this one is to listen on {}: an upgrade does not change \
                 addresses; give the same ones, or stop and start",
                there.address,
                shown(asked)
            )));
        }
        sockets.push(Socket::of(name, asked, listener).map_err(failed)?);
    }
    for (there, _) in came {
        tracing::warn!(
            name = there.name,
            address = there.address,
            "upgrade: a listener that ends with the old process"
        );
    }
    Ok(sockets)
}

impl Predecessor {
    /// For the runtime that serves.
    pub fn awake(self) -> Result<OldProcess, StartError> {
        self.stream.set_nonblocking(true).map_err(failed)?;
        let stream = UnixStream::from_std(self.stream).map_err(failed)?;
        Ok(OldProcess { channel: Channel::new(stream), pid: self.pid })
    }
}

/// The old process, as the new one talks to it.
pub struct OldProcess {
    channel: Channel,
    pub pid: u32,
}

impl OldProcess {
    /// What it says next. Cancel-safe.
    pub async fn word(&mut self) -> Word {
        match self.channel.next().await {
            Ok(Some(Message::Relieved)) => Word::Relieved,
            Ok(Some(Message::Refused { why })) => Word::Refused(why),
            Ok(Some(other)) => Word::Refused(format!("it said {other:?}, which makes no sense now")),
            Ok(None) | Err(_) => Word::Died,
        }
    }

    /// Its death shows in the next [`OldProcess::word`].
    pub async fn tell_ready(&mut self) {
        let _ = self.channel.send(&Message::Ready, &[]).await;
    }

    pub async fn tell_serving(&mut self) {
        let _ = self.channel.send(&Message::Serving, &[]).await;
    }

    pub async fn tell_leaving(&mut self) {
        let _ = self.channel.send(&Message::Leaving, &[]).await;
    }

    pub async fn tell_refused(&mut self, why: &str) {
        let _ = self.channel.send(&Message::Refused { why: why.to_owned() }, &[]).await;
    }
}
