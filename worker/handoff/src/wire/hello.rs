//! The handshake of a control channel, and the binding of a data stream to it. *Pure*: the MACs are computed by the
//! driver, this file says over which bytes.
//!
//! ```text
//!  D                                              P
//!  | Challenge { nonce_d, keyed, incarnation_d }   |
//!  |---------------------------------------------->|
//!  |  Answer { nonce_p, incarnation_p, mac_p }     |   P proves that it knows the key
//!  |<----------------------------------------------|
//!  | Hello { mac_d, identity_d }                   |   D proves it, and only now says what it runs
//!  |---------------------------------------------->|
//!  |  Welcome { session, identity_p } | Refused    |
//!  |<----------------------------------------------|
//! ```

use super::{
    codec::{Reader, WireError, Writer},
    transfer::{self, Transfer},
};
use crate::{
    cause::Cause,
    ids::{Channel, Incarnation, SessionId},
    layout::PoolShape,
};

/// Version of everything on the wire; both sides must be equal.
pub const PROTOCOL: u32 = 2;
/// Bytes of a numerics id at most.
pub const NUMERICS_BYTES_MAX: usize = 256;
/// The names of the element order that the layout module describes.
pub const ORDER: &str = "page-head-layer-kv-token-dim";

pub type Nonce = [u8; 32];
pub type Mac = [u8; 32];

/// What a worker runs: compared field by field before the first Reserve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    pub protocol: u32,
    /// Over config, weights, RoPE and template.
    pub fingerprint: [u8; 16],
    pub shape: PoolShape,
    pub order: String,
    /// Build, math mode, ISA path. A difference is a warning.
    pub numerics: String,
    /// What may move the pages. Not compared here: [`transfer::Path::between`] makes a choice of it.
    pub transfer: Transfer,
}

impl Identity {
    pub fn new(fingerprint: [u8; 16], shape: PoolShape, numerics: &str, transfer: Transfer) -> Self {
        let mut numerics = numerics.to_owned();
        while numerics.len() > NUMERICS_BYTES_MAX {
            numerics.pop();
        }
        Self { protocol: PROTOCOL, fingerprint, shape, order: ORDER.to_owned(), numerics, transfer }
    }

    /// What must be equal and is not, one phrase each: empty when the two can hand pages over. `self` is P.
    pub fn differences(&self, decode: &Identity) -> Vec<String> {
        let (p, d) = (&self.shape, &decode.shape);
        let mut out = Vec::new();
        let mut compare = |name: &str, prefill: String, decode: String| {
            if prefill != decode {
                out.push(format!("{name} (prefill {prefill}, decode {decode})"));
            }
        };
        compare("protocol", self.protocol.to_string(), decode.protocol.to_string());
        compare("model fingerprint", hex(&self.fingerprint), hex(&decode.fingerprint));
        compare("page size", p.page_size.to_string(), d.page_size.to_string());
        compare("layers", p.layers.to_string(), d.layers.to_string());
        compare("KV heads", p.kv_heads.to_string(), d.kv_heads.to_string());
        compare("head_dim", p.head_dim.to_string(), d.head_dim.to_string());
        compare("order", self.order.clone(), decode.order.clone());
        if p.element_bytes != d.element_bytes {
            let (p, d) = (p.element_bytes, d.element_bytes);
            out.push(format!("KV bytes per element (prefill {p}, decode {d}; set by --cpu-math)"));
        }
        out
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The frames before a session exists, and those that bind a data stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Greeting {
    Challenge {
        protocol: u32,
        nonce: Nonce,
        keyed: bool,
        decode: Incarnation,
    },
    Answer {
        nonce: Nonce,
        keyed: bool,
        prefill: Incarnation,
        mac: Mac,
    },
    Hello {
        mac: Mac,
        identity: Identity,
    },
    Welcome {
        session: SessionId,
        identity: Identity,
    },
    Refused(Cause),
    /// First frame of a data stream: it carries the pieces for one decode rank.
    Bind {
        channel: Channel,
        rank: u32,
        mac: Mac,
    },
    Bound,
    /// First frame on P's Unix socket: the channel's pieces are to move by shared memory. P answers Bound and hands its
    /// pools over.
    Share {
        channel: Channel,
        mac: Mac,
    },
    /// D has mapped P's pools. P answers Bound: from then on the stream is the backend's.
    Mapped,
}

impl Greeting {
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::new());
        match self {
            Greeting::Challenge { protocol, nonce, keyed, decode } => {
                w.u8(1).u32(*protocol).bytes(nonce).u8((*keyed).into()).u64(decode.0);
            }
            Greeting::Answer { nonce, keyed, prefill, mac } => {
                w.u8(2).bytes(nonce).u8((*keyed).into()).u64(prefill.0).bytes(mac);
            }
            Greeting::Hello { mac, identity } => {
                w.u8(3).bytes(mac);
                write_identity(&mut w, identity);
            }
            Greeting::Welcome { session, identity } => {
                w.u8(4).u64(session.0);
                write_identity(&mut w, identity);
            }
            Greeting::Refused(cause) => {
                w.u8(5).cause(cause);
            }
            Greeting::Bind { channel, rank, mac } => {
                w.u8(6).channel(channel).u32(*rank).bytes(mac);
            }
            Greeting::Bound => {
                w.u8(7);
            }
            Greeting::Share { channel, mac } => {
                w.u8(8).channel(channel).bytes(mac);
            }
            Greeting::Mapped => {
                w.u8(9);
            }
        }
        w.0
    }

    /// # Errors
    /// Says what is wrong with the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader(bytes);
        let greeting = match r.u8("greeting")? {
            1 => Greeting::Challenge {
                protocol: r.u32("protocol")?,
                nonce: r.array("nonce")?,
                keyed: r.flag("keyed")?,
                decode: Incarnation(r.u64("incarnation")?),
            },
            2 => Greeting::Answer {
                nonce: r.array("nonce")?,
                keyed: r.flag("keyed")?,
                prefill: Incarnation(r.u64("incarnation")?),
                mac: r.array("mac")?,
            },
            3 => Greeting::Hello { mac: r.array("mac")?, identity: read_identity(&mut r)? },
            4 => Greeting::Welcome { session: SessionId(r.u64("session")?), identity: read_identity(&mut r)? },
            5 => Greeting::Refused(r.cause()?),
            6 => Greeting::Bind { channel: r.channel()?, rank: r.u32("rank")?, mac: r.array("mac")? },
            7 => Greeting::Bound,
            8 => Greeting::Share { channel: r.channel()?, mac: r.array("mac")? },
            9 => Greeting::Mapped,
            other => return Err(WireError::Unknown { field: "greeting", value: other.into() }),
        };
        r.end()?;
        Ok(greeting)
    }
}

fn write_identity(w: &mut Writer, identity: &Identity) {
    let shape = &identity.shape;
    w.u32(identity.protocol).bytes(&identity.fingerprint);
    w.u32(shape.layers).u32(shape.kv_heads).u32(shape.head_dim).u32(shape.page_size);
    w.u32(shape.element_bytes).u32(shape.tp).u32(shape.pages);
    w.text(&identity.order, NUMERICS_BYTES_MAX).text(&identity.numerics, NUMERICS_BYTES_MAX);
    transfer::write(w, &identity.transfer);
}

fn read_identity(r: &mut Reader<'_>) -> Result<Identity, WireError> {
    let protocol = r.u32("protocol")?;
    let fingerprint = r.array("fingerprint")?;
    let mut size = |field: &'static str, max: u32| match r.u32(field)? {
        value if (1..=max).contains(&value) => Ok(value),
        value => Err(WireError::Unknown { field, value: value.into() }),
    };
    let shape = PoolShape {
        layers: size("layers", 4096)?,
        kv_heads: size("KV heads", 1024)?,
        head_dim: size("head_dim", 4096)?,
        page_size: size("page size", 4096)?,
        element_bytes: size("KV bytes per element", 8)?,
        tp: size("tp", 256)?,
        pages: size("pages", u32::MAX)?,
    };
    let order = r.text(NUMERICS_BYTES_MAX, "order")?;
    let numerics = r.text(NUMERICS_BYTES_MAX, "numerics")?;
    Ok(Identity { protocol, fingerprint, shape, order, numerics, transfer: transfer::read(r)? })
}

/// What each MAC is taken over. The first byte keeps one use's MAC from serving as another's.
pub mod signed {
    use super::{Channel, Incarnation, Nonce, Writer};

    fn over(use_: u8, nonce_d: &Nonce, nonce_p: &Nonce) -> Writer {
        let mut w = Writer(Vec::new());
        w.u8(use_).bytes(b"tandem handoff").bytes(nonce_d).bytes(nonce_p);
        w
    }

    pub fn answer(nonce_d: &Nonce, nonce_p: &Nonce, prefill: Incarnation) -> Vec<u8> {
        let mut w = over(1, nonce_d, nonce_p);
        w.u64(prefill.0);
        w.0
    }

    pub fn hello(nonce_d: &Nonce, nonce_p: &Nonce, decode: Incarnation) -> Vec<u8> {
        let mut w = over(2, nonce_d, nonce_p);
        w.u64(decode.0);
        w.0
    }

    pub fn bind(nonce_d: &Nonce, nonce_p: &Nonce, channel: &Channel, rank: u32) -> Vec<u8> {
        let mut w = over(3, nonce_d, nonce_p);
        w.channel(channel).u32(rank);
        w.0
    }

    /// `socket` is the name of P's socket as D has it: P hands nothing over to whom another name was told.
    pub fn share(nonce_d: &Nonce, nonce_p: &Nonce, channel: &Channel, socket: &str) -> Vec<u8> {
        let mut w = over(4, nonce_d, nonce_p);
        w.channel(channel).bytes(socket.as_bytes());
        w.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        let shape =
            PoolShape { layers: 2, kv_heads: 4, head_dim: 8, page_size: 16, element_bytes: 2, tp: 1, pages: 10 };
        Identity::new([7; 16], shape, "avx2", Transfer::default())
    }

    #[test]
    fn equal_workers_differ_in_nothing_and_tp_pages_numerics_may_differ() {
        let mut other = identity();
        other.shape.tp = 2;
        other.shape.pages = 99;
        other.numerics = "avx512".into();
        assert!(identity().differences(&other).is_empty());
    }

    #[test]
    fn each_field_that_differs_is_named_with_both_values() {
        let mut other = identity();
        other.fingerprint = [8; 16];
        other.shape.page_size = 32;
        other.shape.head_dim = 4;
        other.shape.element_bytes = 4;
        let named = identity().differences(&other).join("; ");
        for part in [
            "model fingerprint",
            "page size (prefill 16, decode 32)",
            "head_dim (prefill 8, decode 4)",
            "KV bytes per element (prefill 2, decode 4; set by --cpu-math)",
        ] {
            assert!(named.contains(part), "{named}");
        }
        assert!(!named.contains("layers"));
    }
}
