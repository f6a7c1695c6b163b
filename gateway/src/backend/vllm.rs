//! The bodies of vLLM's two connectors. P computes the prompt and one token, whole, and keeps the pages for D. *Pure.*

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::backend::{Bodies, Pairing, limit_of};
use crate::error::Failure;
use crate::request::{Endpoint, Field, Scanned};

/// Where P's pages are to be found is not known yet.
pub const NIXL_PREFILL: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// P's body: one token, no stream, nothing that speaks against one token.
pub fn prefill(scanned: &Scanned, kv_transfer_params: &str) -> Bytes {
    let limit = match limit_of(scanned.endpoint) {
        Field::MaxOutputTokens => "max_output_tokens",
        _ => "max_tokens",
    };
    // A chat's newer name counts more than the older one where both are there.
    let newer = scanned.endpoint == Endpoint::Chat && scanned.raw(Field::MaxCompletionTokens).is_some();
    let newer = if newer { r#","max_completion_tokens":1"# } else { "" };
    let fields = format!(r#""kv_transfer_params":{kv_transfer_params},"stream":false,"{limit}":1{newer}"#);
    scanned.rewritten(|field| dropped(field) || bounds(field), &fields)
}

/// D's body: the client's, and where the pages are.
pub fn decode(scanned: &Scanned, kv_transfer_params: Option<&[u8]>) -> Bytes {
    let fields =
        kv_transfer_params.map(|params| format!(r#""kv_transfer_params":{}"#, String::from_utf8_lossy(params)));
    scanned.rewritten(dropped, fields.as_deref().unwrap_or(""))
}

fn dropped(field: Field) -> bool {
    field.is_handoff() || field.is_rank()
}

fn bounds(field: Field) -> bool {
    matches!(
        field,
        Field::Stream
            | Field::StreamOptions
            | Field::MaxTokens
            | Field::MaxCompletionTokens
            | Field::MaxOutputTokens
            | Field::MinTokens
    )
}

/// Both bodies name one transfer; D's also says at which engine.
pub fn mooncake(scanned: &Scanned, pair: &Pairing) -> Result<Bodies, Failure> {
    let (Some(port), Some(engine_id)) = (pair.bootstrap_port, pair.engine_id) else {
        let why = "its Mooncake bootstrap server did not tell its engine id yet; give its port behind --prefill URL";
        return Err(Failure::no_worker("prefill", why));
    };
    let transfer_id: String = pair.rooms.iter().take(1).map(|room| format!("xfer-{:016x}", room.get())).collect();
    let to_prefill = json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer_id});
    let to_decode = json!({
        "do_remote_decode": false,
        "do_remote_prefill": true,
        "remote_bootstrap_addr": format!("http://{}:{port}", pair.bootstrap_host),
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    });
    Ok(Bodies {
        prefill: Some(prefill(scanned, &to_prefill.to_string())),
        decode: Some(decode(scanned, Some(to_decode.to_string().as_bytes()))),
    })
}

/// Engine ids by data-parallel rank, from the answer of `GET {bootstrap}/query`: ranks with their entries, or engine ids
/// with theirs.
pub fn engine_ids(answer: &[u8]) -> BTreeMap<u32, String> {
    #[derive(Deserialize)]
    struct Entry {
        engine_id: String,
    }
    let Ok(entries) = serde_json::from_slice::<BTreeMap<String, Value>>(answer) else { return BTreeMap::new() };
    let mut ids = BTreeMap::new();
    for (key, value) in entries {
        match (key.parse::<u32>(), Entry::deserialize(&value)) {
            (Ok(rank), Ok(entry)) => drop(ids.insert(rank, entry.engine_id)),
            _ => {
                let ranks = value.as_object().into_iter().flat_map(|ranks| ranks.keys());
                let ranks: Vec<u32> = ranks.filter_map(|rank| rank.parse().ok()).collect();
                let id = |rank| if ranks.len() > 1 { format!("{key}_dp{rank}") } else { key.clone() };
                ids.extend(ranks.iter().map(|rank| (*rank, id(*rank))));
            }
        }
    }
    ids
}
