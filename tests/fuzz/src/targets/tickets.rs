//! The bootstrap fields of a request: the gateway's splice of them into any body, and the worker's reading of them.

use bytes::Bytes;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use serde_json::{Map, Value};
use tandem_gateway::{
    request::{Endpoint, Scanned, scan},
    ticket,
};
use tandem_handoff::ids::Room;
use tandem_worker::http::{body, fields::BootstrapFields, params};

use crate::Target;

const OWNED: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];
/// What else a client may not say about a handoff; of ranks it may say to a plain worker.
const REFUSED: [&str; 4] = ["bootstrap_pair_key", "decode_tp_size", "disagg_prefill_dp_rank", "kv_transfer_params"];
const RANKS: [&str; 2] = ["routed_dp_rank", "data_parallel_rank"];
const PORT: u16 = 8998;

/// From the client's body, what was found in it, and our fields.
type Splice = fn(&[u8], &Scanned, &str) -> Bytes;

/// Tries this splice.
pub struct Tickets(pub Splice);

impl Tickets {
    pub fn real() -> Self {
        Self(|_, scanned, fields| scanned.splice(fields))
    }
}

impl Target for Tickets {
    fn name(&self) -> &'static str {
        "tickets"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let bodies = [
            r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"n":2}"#,
            r#"{"prompt":["a","b"],"n":2,"echo":false}"#,
            r#"{"text":"a","sampling_params":{"n":3},"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":2}"#,
            r#"{"bootstrap_host":["h","[::1]"],"bootstrap_port":[null,9],"bootstrap_room":[5,9223372036854775807]}"#,
            r#" { "bootstrap\u005froom" : 7 , "a" : { "bootstrap_room" : [ 1 , "}" ] } , "stream" : null } "#,
            r#"{"input_ids":[[1,2],[3]],"bootstrap_room":1}"#,
            "{}",
        ];
        bodies.iter().map(|body| body.as_bytes().to_vec()).collect()
    }

    fn words(&self) -> &'static [&'static str] {
        &[
            "\"bootstrap_room\":",
            "\"bootstrap_host\":\"h\"",
            "\"bootstrap_port\":9,",
            "\"bootstrap\\u005froom\":1,",
            "\"kv_transfer_params\":{}",
            "\"routed_dp_rank\":1,",
            "\"n\":4",
            "\"prompt\":[\"a\",\"b\"]",
            "\"text\":",
            "{",
            "}",
            "[",
            "]",
            ",",
            "\"",
            "\\",
            "\\u",
            "null",
            "9223372036854775808",
            "-1",
            "1e999",
            "\u{feff}",
        ]
    }

    /// The most rooms that one body can ask for, each with a host and a port of its own.
    fn memory_bytes_max(&self, input_bytes: usize) -> usize {
        (4 << 20) + 256 * input_bytes
    }

    fn run(&self, input: &[u8]) -> String {
        let own = read(input);
        let spliced = [Endpoint::Chat, Endpoint::Completions, Endpoint::Generate].map(|at| self.spliced(at, input));
        format!("{own};{}", spliced.join(";"))
    }
}

impl Tickets {
    /// What the gateway sends is the client's object with our fields in place of the client's own, and the worker reads
    /// out of it the tickets that went in.
    fn spliced(&self, endpoint: Endpoint, input: &[u8]) -> String {
        let scanned = match scan(endpoint, Bytes::copy_from_slice(input)) {
            Ok(scanned) => scanned,
            Err(failure) => return format!("{} {}", failure.status, failure.code),
        };
        let count = scanned.samples.count();
        let rooms = ticket::mint(scanned.samples, &mut ChaCha8Rng::seed_from_u64(1));
        let fields = ticket::fields("[::1]", Some(PORT), scanned.samples, &rooms);
        let out = (self.0)(input, &scanned, &fields);
        if let Some(mut expected) = object(input) {
            expected.retain(|name, _| !OWNED.contains(&name.as_str()) && !REFUSED.contains(&name.as_str()));
            assert_eq!(object(&scanned.plain()), Some(expected.clone()), "a plain worker's body");
            expected.retain(|name, _| !RANKS.contains(&name.as_str()));
            let mut rest = object(&out).expect("what was one JSON object stays one");
            let ours = OWNED.map(|name| rest.remove(name).is_some());
            assert!(ours == [true; 3] && rest == expected, "the splice changed the client's fields");
        }
        // A body that no worker could read anyway (a key of half a character) needs no tickets.
        if body::parse::<Anything>(input).is_ok() {
            let read = body::parse::<BootstrapFields>(&out).expect("each of our fields stands there once");
            let tickets = params::tickets(read, count, 0).expect("as many as samples").expect("they are there");
            let read: Vec<Room> = tickets.iter().map(|ticket| ticket.room).collect();
            assert!(read == rooms && tickets.iter().all(|ticket| ticket.host == "[::1]" && ticket.port == PORT));
        }
        format!("{count} samples, stream {}, prompt logprobs {:?}", scanned.stream, scanned.prompt_logprobs)
    }
}

/// The worker's own reading, with whatever fields a client that is no gateway sends.
fn read(input: &[u8]) -> String {
    let mut said = String::new();
    for samples in 1..3 {
        let outcome = body::parse::<BootstrapFields>(input).and_then(|fields| params::tickets(fields, samples, PORT));
        match outcome {
            Ok(None) => said += "no tickets ",
            Ok(Some(tickets)) => {
                assert_eq!(tickets.len(), samples);
                for ticket in &tickets {
                    let address = ticket.address();
                    assert!(!address.to_string().is_empty() && address.bare_host().len() <= 255);
                }
                said += "tickets ";
            }
            Err(error) => {
                assert!(error.status.is_client_error() && !error.message.is_empty());
                said += error.param.as_deref().unwrap_or("malformed ");
            }
        }
    }
    said
}

fn object(bytes: &[u8]) -> Option<Map<String, Value>> {
    serde_json::from_slice(bytes).ok()
}

#[derive(Deserialize)]
struct Anything {}
