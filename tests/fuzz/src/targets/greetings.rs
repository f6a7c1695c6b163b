//! The handshake's frames, which strangers send: as for control frames, and whatever identity is accepted can be compared
//! and mapped without a panic.

use tandem_handoff::{
    ids::{Incarnation, SessionId},
    layout::{Mapping, PoolShape},
    wire::{
        Cause, CauseKind, Side, WireError,
        hello::{Greeting, Identity, PROTOCOL},
        transfer::Transfer,
    },
};

use super::frames::attempt;
use crate::Target;

type Decode = fn(&[u8]) -> Result<Greeting, WireError>;

pub struct Greetings(pub Decode);

impl Greetings {
    pub fn real() -> Self {
        Self(Greeting::decode)
    }
}

fn own() -> Identity {
    let shape = PoolShape { layers: 2, kv_heads: 4, head_dim: 8, page_size: 16, element_bytes: 2, tp: 2, pages: 64 };
    Identity::new([7; 16], shape, "cpu exact avx2", Transfer::default())
}

impl Target for Greetings {
    fn name(&self) -> &'static str {
        "greetings"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let greetings = [
            Greeting::Challenge { protocol: PROTOCOL, nonce: [1; 32], keyed: true, decode: Incarnation(2) },
            Greeting::Answer { nonce: [2; 32], keyed: false, prefill: Incarnation(1), mac: [3; 32] },
            Greeting::Hello { mac: [4; 32], identity: own() },
            Greeting::Welcome { session: SessionId(3), identity: own() },
            Greeting::Refused(Cause::new(Side::Prefill, CauseKind::Unfit, "another model")),
            Greeting::Bind { channel: attempt(1).channel(), rank: 1, mac: [5; 32] },
            Greeting::Bound,
        ];
        greetings.iter().map(Greeting::encode).collect()
    }

    fn memory_bytes_max(&self, input_bytes: usize) -> usize {
        (256 << 10) + 16 * input_bytes
    }

    fn run(&self, input: &[u8]) -> String {
        match (self.0)(input) {
            Ok(greeting) => {
                assert!(greeting.encode() == input, "{greeting:?} has another encoding than the bytes it came from");
                match greeting {
                    Greeting::Hello { identity, .. } | Greeting::Welcome { identity, .. } => met(&identity),
                    other => format!("{other:?}").split([' ', '(', '{']).next().unwrap_or_default().to_owned(),
                }
            }
            Err(error) => error.to_string(),
        }
    }
}

/// What a worker does with a peer's identity: names the differences, and where there are none maps its pages.
fn met(peer: &Identity) -> String {
    let differences = own().differences(peer);
    if differences.is_empty() {
        let mapping = Mapping::new(&own().shape, &peer.shape);
        assert!(!mapping.routes().is_empty(), "a mapping moves something");
    }
    let names = differences.iter().filter_map(|difference| difference.split(" (").next());
    format!("identity;{}", names.collect::<Vec<_>>().join(";"))
}
