//! The handshake of control channels and data streams over a connected stream. The order of messages is drawn in
//! `tandem_handoff::wire::hello`; this file moves them, and takes the MACs.

use std::{
    io::{self, ErrorKind},
    path::Path,
};

use hmac::{Hmac, Mac as _};
use sha2::Sha256;
use tandem_handoff::{
    ids::{Channel, Incarnation, SessionId},
    layout::PoolShape,
    wire::{
        Cause, CauseKind, Side,
        hello::{Greeting, Identity, Mac, Nonce, PROTOCOL, signed},
        transfer::Path as TransferPath,
    },
};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    HandoffStartError,
    channel::{framed, read_framed, write_framed},
};

const GREETING_BYTES_MAX: usize = 8 * 1024;
const KEY_BYTES_MIN: usize = 16;
const KEY_BYTES_MAX: u64 = 64 * 1024;

/// The key that both workers share, or none. Without a key the MACs are taken under an empty one: they then bind data
/// streams to their channel and authenticate nobody.
#[derive(Clone)]
pub struct Key(Option<Vec<u8>>);

impl Key {
    /// Reads the file, where there is one.
    ///
    /// # Errors
    /// When it cannot be read, or is too short for a secret or too long for a key.
    pub fn load(path: Option<&Path>) -> Result<Self, HandoffStartError> {
        let Some(path) = path else {
            return Ok(Self(None));
        };
        let fail = |reason: String| HandoffStartError::Key { path: path.display().to_string(), reason };
        let length = std::fs::metadata(path).map_err(|error| fail(error.to_string()))?.len();
        if length > KEY_BYTES_MAX {
            return Err(fail(format!("has {length} bytes, {KEY_BYTES_MAX} are the limit")));
        }
        let bytes = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
        let key = bytes.trim_ascii().to_vec();
        if key.len() < KEY_BYTES_MIN {
            return Err(fail(format!("has {} bytes, at least {KEY_BYTES_MIN} random ones are needed", key.len())));
        }
        Ok(Self(Some(key)))
    }

    pub fn is_set(&self) -> bool {
        self.0.is_some()
    }

    pub fn sign(&self, bytes: &[u8]) -> Mac {
        self.hmac(bytes).finalize().into_bytes().into()
    }

    /// In constant time.
    pub fn verify(&self, bytes: &[u8], mac: &Mac) -> bool {
        self.hmac(bytes).verify_slice(mac).is_ok()
    }

    fn hmac(&self, bytes: &[u8]) -> Hmac<Sha256> {
        let key = self.0.as_deref().unwrap_or_default();
        let mut hmac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
        hmac.update(bytes);
        hmac
    }
}

/// One random number of each side: every channel has new ones.
#[derive(Clone, Copy)]
pub(super) struct Nonces {
    pub decode: Nonce,
    pub prefill: Nonce,
}

/// Why there is no channel, and whether it is worth trying again soon.
#[derive(Debug)]
pub(super) struct Refusal {
    pub cause: Cause,
    pub retry: bool,
}

impl Refusal {
    /// The peer may be starting, or the path to it may come back.
    pub fn unreachable(side: Side, message: impl Into<String>) -> Self {
        Self { cause: Cause::new(side, CauseKind::Lost, message), retry: true }
    }

    /// The peers do not fit each other: trying again changes nothing.
    pub fn unfit(side: Side, message: impl Into<String>) -> Self {
        Self { cause: Cause::new(side, CauseKind::Unfit, message), retry: false }
    }
}

const HUNG_UP: &str = "the peer hung up in the handshake";

/// A connected stream, TCP or Unix.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Stream for S {}

async fn send(stream: &mut impl Stream, greeting: &Greeting) -> Result<(), String> {
    write_framed(stream, &greeting.encode()).await.map_err(broken)
}

fn broken(error: io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => HUNG_UP.to_owned(),
        _ => error.to_string(),
    }
}

async fn receive(stream: &mut impl Stream) -> Result<Greeting, String> {
    let bytes = read_framed(stream, GREETING_BYTES_MAX).await.map_err(broken)?;
    Greeting::decode(&bytes).map_err(|error| error.to_string())
}

/// What D learnt from the first messages.
pub(super) enum Met {
    /// There is a channel to this very process already, under another address.
    Known(Channel, PoolShape),
    New {
        channel: Channel,
        shape: PoolShape,
        nonces: Nonces,
        path: TransferPath,
    },
}

/// D's half. `known` says whether a channel to a prefill process is open.
pub(super) async fn greet_prefill(
    stream: &mut impl Stream,
    key: &Key,
    me: Incarnation,
    identity: &Identity,
    known: impl Fn(Incarnation) -> Option<(Channel, PoolShape)>,
) -> Result<Met, Refusal> {
    let lost = |error: String| Refusal::unreachable(Side::Decode, format!("the handshake broke off: {error}"));
    let unexpected = || Refusal::unfit(Side::Decode, "the peer does not speak the handoff protocol");
    let nonce_d: Nonce = rand::random();
    let challenge = Greeting::Challenge { protocol: PROTOCOL, nonce: nonce_d, keyed: key.is_set(), decode: me };
    send(stream, &challenge).await.map_err(lost)?;
    let (nonce_p, keyed, prefill, mac) = match receive(stream).await.map_err(lost)? {
        Greeting::Answer { nonce, keyed, prefill, mac } => (nonce, keyed, prefill, mac),
        Greeting::Refused(cause) => return Err(Refusal { cause, retry: false }),
        _ => return Err(unexpected()),
    };
    if let Some((channel, shape)) = known(prefill) {
        return Ok(Met::Known(channel, shape));
    }
    if keyed != key.is_set() || !key.verify(&signed::answer(&nonce_d, &nonce_p, prefill), &mac) {
        let message =
            "the prefill worker does not know this worker's handoff key; start both with the same --handoff-key-file";
        return Err(Refusal::unfit(Side::Decode, message));
    }
    let mac = key.sign(&signed::hello(&nonce_d, &nonce_p, me));
    send(stream, &Greeting::Hello { mac, identity: identity.clone() }).await.map_err(lost)?;
    match receive(stream).await.map_err(lost)? {
        Greeting::Welcome { session, identity: theirs } => {
            let differences = theirs.differences(identity);
            if !differences.is_empty() {
                return Err(Refusal::unfit(Side::Decode, differ(&differences)));
            }
            let path = TransferPath::between(&theirs.transfer, &identity.transfer);
            let path = path.map_err(|why| Refusal::unfit(Side::Decode, unfit(&why)))?;
            let channel = Channel { prefill, decode: me, session };
            let nonces = Nonces { decode: nonce_d, prefill: nonce_p };
            Ok(Met::New { channel, shape: theirs.shape, nonces, path })
        }
        Greeting::Refused(cause) => Err(Refusal { cause, retry: false }),
        _ => Err(unexpected()),
    }
}

/// P's half up to the point where D is known and fits; [`welcome`] follows once the channel is registered. A refusal has
/// been sent when this returns one.
pub(super) async fn greet_decode(
    stream: &mut impl Stream,
    key: &Key,
    me: Incarnation,
    identity: &Identity,
) -> Result<(Incarnation, Identity, Nonces), String> {
    let Greeting::Challenge { protocol, nonce: nonce_d, keyed, decode } = receive(stream).await? else {
        return Err("the peer does not speak the handoff protocol".to_owned());
    };
    if protocol != PROTOCOL {
        let message =
            format!("they differ in protocol (prefill {PROTOCOL}, decode {protocol}); run the same version on both");
        return refuse(stream, message).await;
    }
    if keyed != key.is_set() {
        let with = if keyed { "decode" } else { "prefill" };
        let message = format!("only the {with} worker has a handoff key; start both with the same --handoff-key-file");
        return refuse(stream, message).await;
    }
    let nonce_p: Nonce = rand::random();
    let mac = key.sign(&signed::answer(&nonce_d, &nonce_p, me));
    send(stream, &Greeting::Answer { nonce: nonce_p, keyed: key.is_set(), prefill: me, mac }).await?;
    let hello = receive(stream).await.map_err(|error| match error.as_str() {
        // D leaves at this point when it cannot verify the answer.
        HUNG_UP if key.is_set() => format!("{HUNG_UP}: the handoff keys differ, most likely; its log has the reason"),
        _ => error,
    });
    let Greeting::Hello { mac, identity: theirs } = hello? else {
        return Err("the peer does not speak the handoff protocol".to_owned());
    };
    if !key.verify(&signed::hello(&nonce_d, &nonce_p, decode), &mac) {
        let message = "the handoff keys differ; start both workers with the same --handoff-key-file";
        return refuse(stream, message.to_owned()).await;
    }
    let differences = identity.differences(&theirs);
    if !differences.is_empty() {
        return refuse(stream, differ(&differences)).await;
    }
    if let Err(why) = TransferPath::between(&identity.transfer, &theirs.transfer) {
        return refuse(stream, unfit(&why)).await;
    }
    if theirs.numerics != identity.numerics {
        tracing::warn!(
            prefill = identity.numerics,
            decode = theirs.numerics,
            "the workers compute differently: split and unsplit answers may differ in the last bits"
        );
    }
    Ok((decode, theirs, Nonces { decode: nonce_d, prefill: nonce_p }))
}

pub(super) async fn welcome(stream: &mut impl Stream, session: SessionId, identity: &Identity) -> Result<(), String> {
    send(stream, &Greeting::Welcome { session, identity: identity.clone() }).await
}

/// Tells the peer why; the error is the same.
pub(super) async fn refuse<T>(stream: &mut impl Stream, message: String) -> Result<T, String> {
    let cause = Cause::new(Side::Prefill, CauseKind::Unfit, message.clone());
    send(stream, &Greeting::Refused(cause)).await?;
    Err(message)
}

fn differ(differences: &[String]) -> String {
    unfit(&format!("they differ in {}", differences.join(", ")))
}

fn unfit(why: &str) -> String {
    format!("the prefill and the decode worker do not fit: {why}")
}

/// D's half of binding a data stream for `rank` to its channel.
pub(super) async fn bind_stream(
    stream: &mut impl Stream,
    key: &Key,
    channel: Channel,
    rank: u32,
    nonces: &Nonces,
) -> Result<(), String> {
    let mac = key.sign(&signed::bind(&nonces.decode, &nonces.prefill, &channel, rank));
    send(stream, &Greeting::Bind { channel, rank, mac }).await?;
    bound(stream).await
}

async fn bound(stream: &mut impl Stream) -> Result<(), String> {
    match receive(stream).await? {
        Greeting::Bound => Ok(()),
        Greeting::Refused(cause) => Err(cause.message().to_owned()),
        _ => Err("the peer does not speak the handoff protocol".to_owned()),
    }
}

/// P's half: which channel and rank the stream is for. `nonces` looks the channel up among the open ones.
pub(super) async fn accept_stream(
    stream: &mut impl Stream,
    key: &Key,
    nonces: impl Fn(Channel, u32) -> Option<Nonces>,
) -> Result<(Channel, u32), String> {
    let Greeting::Bind { channel, rank, mac } = receive(stream).await? else {
        return Err("the peer does not speak the handoff protocol".to_owned());
    };
    let bound = nonces(channel, rank)
        .is_some_and(|nonces| key.verify(&signed::bind(&nonces.decode, &nonces.prefill, &channel, rank), &mac));
    if !bound {
        return refuse(stream, "the data stream belongs to no open channel".to_owned()).await;
    }
    send(stream, &Greeting::Bound).await?;
    Ok((channel, rank))
}

/// D's half of asking for P's pools on P's Unix socket, which it knows as `socket`. They come next, and then [`mapped`]
/// follows.
pub(super) async fn ask_for_pools(
    stream: &mut impl Stream,
    key: &Key,
    socket: &str,
    channel: Channel,
    nonces: &Nonces,
) -> Result<(), String> {
    let mac = key.sign(&signed::share(&nonces.decode, &nonces.prefill, &channel, socket));
    send(stream, &Greeting::Share { channel, mac }).await?;
    bound(stream).await
}

/// D has mapped the pools; when this returns, P posts the channel's pieces on the stream.
pub(super) async fn mapped(stream: &mut impl Stream) -> Result<(), String> {
    send(stream, &Greeting::Mapped).await?;
    bound(stream).await
}

/// P's half: for which channel the stream asks for pools on `socket`. `nonces` looks the channel up among the open ones, or
/// says why this peer gets none. The peer's greeting is read before it is refused: it would not read the reason otherwise.
pub(super) async fn asked_for_pools(
    stream: &mut impl Stream,
    key: &Key,
    socket: &str,
    nonces: impl Fn(Channel) -> Result<Nonces, &'static str>,
) -> Result<Channel, String> {
    let Greeting::Share { channel, mac } = receive(stream).await? else {
        return Err("the peer does not speak the handoff protocol".to_owned());
    };
    let nonces = match nonces(channel) {
        Ok(nonces) => nonces,
        Err(why) => return refuse(stream, why.to_owned()).await,
    };
    if !key.verify(&signed::share(&nonces.decode, &nonces.prefill, &channel, socket), &mac) {
        let why = "the stream does not prove that its channel is its own, or came by another name of this socket";
        return refuse(stream, why.to_owned()).await;
    }
    send(stream, &Greeting::Bound).await?;
    Ok(channel)
}

/// P waits for D's [`mapped`]. Returns the answer, which the caller sends once the channel's pieces go by the stream.
pub(super) async fn was_mapped(stream: &mut impl Stream) -> Result<Vec<u8>, String> {
    match receive(stream).await? {
        Greeting::Mapped => Ok(framed(&Greeting::Bound.encode())),
        _ => Err("the peer does not speak the handoff protocol".to_owned()),
    }
}
