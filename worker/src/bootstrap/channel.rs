//! One control channel after Hello: frames both ways, heartbeats, and its end.

use std::{io, sync::Arc, time::Duration};

use tandem_handoff::{
    ids::{Channel, Incarnation},
    layout::PoolShape,
    ticket::Address,
    wire::{FRAME_BYTES_MAX, Frame},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, oneshot},
    time::{MissedTickBehavior, interval, timeout},
};

use super::{
    ControlEvent,
    handshake::Nonces,
    hub::{FRAMES_MAX, Hub, Line},
};
use crate::config::HandoffConfig;

const CLOSED_HERE: &str = "this worker closed it";

/// How often a channel pings, and how long its peer may be silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heartbeat {
    interval: Duration,
    silence: Duration,
}

impl Heartbeat {
    pub fn new(config: &HandoffConfig) -> Self {
        let interval = config.heartbeat_interval_ms.max(1);
        // One more interval than failures: the peer's pings are not in step with our count.
        let silence = interval.saturating_mul(u64::from(config.heartbeat_max_failure.max(1)) + 1);
        Self { interval: Duration::from_millis(interval), silence: Duration::from_millis(silence) }
    }
}

/// A frame's bytes behind their length: `[u32 length][bytes]`.
pub(super) fn framed(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 + bytes.len());
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
    out
}

/// The bytes of the next frame; a length over `bytes_max` is an error before anything is allocated.
pub(super) async fn read_framed<R: AsyncRead + Unpin>(stream: &mut R, bytes_max: usize) -> io::Result<Vec<u8>> {
    let length = stream.read_u32_le().await? as usize;
    if length > bytes_max {
        let message = format!("a frame of {length} bytes is over the limit of {bytes_max}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

pub(super) async fn write_framed<W: AsyncWrite + Unpin>(stream: &mut W, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&framed(bytes)).await
}

/// A channel that passed Hello, ready to run.
pub(super) struct Opened {
    channel: Channel,
    me: Incarnation,
    peer: Incarnation,
    shape: PoolShape,
    heartbeat: Heartbeat,
    frames: mpsc::Receiver<Frame>,
    close: oneshot::Receiver<String>,
}

impl Opened {
    /// Enters the channel into the hub's books, where data streams and the role find it.
    pub fn register(
        hub: &Hub,
        channel: Channel,
        me: Incarnation,
        shape: PoolShape,
        heartbeat: Heartbeat,
        nonces: Nonces,
    ) -> Self {
        let (sender, frames) = mpsc::channel(FRAMES_MAX);
        let (closer, close) = oneshot::channel();
        let line = Line { frames: sender, close: closer, nonces, peer_shape: shape };
        hub.lines().insert(channel, line);
        let peer = if me == channel.prefill { channel.decode } else { channel.prefill };
        Self { channel, me, peer, shape, heartbeat, frames, close }
    }

    /// Runs the channel to its end. The role hears of it first by `Up` and last by `Down`.
    pub async fn run(self, hub: Arc<Hub>, address: Option<Address>, stream: TcpStream) {
        let Self { channel, me, peer, shape, heartbeat, mut frames, close } = self;
        if hub.report(ControlEvent::Up { channel, address: address.clone(), shape }).await.is_err() {
            return;
        }
        let dialled = address.map_or_else(String::new, |address| address.to_string());
        let socket = stream.peer_addr().map_or_else(|_| "unknown".to_owned(), |socket| socket.to_string());
        let (mut reader, mut writer) = stream.into_split();
        let why = tokio::select! {
            biased;
            reason = close => match reason {
                Ok(reason) => format!("this worker closed it: {reason}"),
                Err(_) => CLOSED_HERE.to_owned(),
            },
            why = read_loop(&hub, channel, me, peer, heartbeat, &mut reader) => why,
            why = write_loop(me, peer, heartbeat, &mut frames, &mut writer) => why,
        };
        let session = channel.session.0;
        if me == channel.prefill {
            tracing::info!(decode = socket, %peer, session, why, "the control channel to a decode worker ended");
        } else {
            tracing::info!(prefill = dialled, socket, %peer, session, why, "the control channel to a prefill worker ended");
        }
        hub.lines().remove(&channel);
        let _ = hub.report(ControlEvent::Down { channel, why }).await;
    }
}

async fn read_loop(
    hub: &Hub,
    channel: Channel,
    me: Incarnation,
    peer: Incarnation,
    heartbeat: Heartbeat,
    reader: &mut OwnedReadHalf,
) -> String {
    loop {
        let bytes = match timeout(heartbeat.silence, read_framed(reader, FRAME_BYTES_MAX)).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return "the peer closed it or died".to_owned();
            }
            Ok(Err(error)) => return error.to_string(),
            Err(_) => return format!("the peer was silent for {} ms", heartbeat.silence.as_millis()),
        };
        match Frame::decode(&bytes) {
            Ok(Frame::Ping { from, to }) if from == peer && to == me => {}
            Ok(Frame::Ping { .. }) => return "the peer is another process than the one that said Hello".to_owned(),
            Ok(frame) => {
                if hub.report(ControlEvent::Frame { channel, frame }).await.is_err() {
                    return "this worker is shutting down".to_owned();
                }
            }
            Err(error) => return format!("the peer sent a bad frame: {error}"),
        }
    }
}

async fn write_loop(
    me: Incarnation,
    peer: Incarnation,
    heartbeat: Heartbeat,
    frames: &mut mpsc::Receiver<Frame>,
    writer: &mut OwnedWriteHalf,
) -> String {
    let mut pings = interval(heartbeat.interval);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let frame = tokio::select! {
            biased;
            frame = frames.recv() => match frame {
                Some(frame) => frame,
                None => return CLOSED_HERE.to_owned(),
            },
            _ = pings.tick() => Frame::Ping { from: me, to: peer },
        };
        match timeout(heartbeat.silence, write_framed(writer, &frame.encode())).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error.to_string(),
            Err(_) => return format!("the peer read nothing for {} ms", heartbeat.silence.as_millis()),
        }
    }
}
