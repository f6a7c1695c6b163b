//! What the legs of a fleet look like, as data: which leg goes first, what each body says, and what of the prefill leg's
//! answer belongs into the client's. One exchange machine serves them all. *Pure.*

mod vllm;

use std::fmt::Write;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use tandem_handoff::ids::Room;

use crate::error::{Failure, Side};
use crate::exchange::ticket;
use crate::fleet::Rank;
use crate::request::{Endpoint, Field, Scanned};
use crate::stream::{Merge, PrefillAnswer, PromptLogprobs};

pub use vllm::engine_ids;

/// Whose workers are behind the gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum Backend {
    /// Tandem's own: both legs at once, the room in the body.
    #[default]
    Tandem,
    /// SGLang: both legs at once, the room in the body.
    Sglang,
    /// vLLM with its NIXL connector: prefill first, its answer tells decode where the pages are.
    VllmNixl,
    /// vLLM with its Mooncake connector: both legs at once, joined by a transfer id.
    VllmMooncake,
    /// No handoff between workers: one leg for each request.
    Plain,
}

/// When which leg is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Both at once.
    Parallel,
    /// D's body is made of P's answer.
    PrefillFirst,
    /// One leg; D, or a plain worker, does both phases.
    DecodeOnly,
}

/// The picked pair, as far as bodies tell of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pairing<'a> {
    /// P's host, an IPv6 address in brackets, and its bootstrap port where known.
    pub bootstrap_host: &'a str,
    pub bootstrap_port: Option<u16>,
    pub prefill_rank: Option<Rank>,
    pub decode_rank: Option<Rank>,
    /// Mooncake's engine of P's rank, see [`engine_ids`].
    pub engine_id: Option<&'a str>,
    /// One for each sample, new ones for each attempt.
    pub rooms: &'a [Room],
}

/// What is sent; a body that is not there yet, or for a leg that is not sent, is `None`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bodies {
    pub prefill: Option<Bytes>,
    pub decode: Option<Bytes>,
}

impl Backend {
    pub fn name(self) -> &'static str {
        match self {
            Backend::Tandem => "tandem",
            Backend::Sglang => "sglang",
            Backend::VllmNixl => "vllm-nixl",
            Backend::VllmMooncake => "vllm-mooncake",
            Backend::Plain => "plain",
        }
    }

    /// Refuses what a pair of this kind cannot serve, with words for the client.
    pub fn check(self, scanned: &Scanned) -> Result<(), Failure> {
        if self == Backend::Plain {
            return Ok(());
        }
        if !scanned.endpoint.generates() {
            let path = scanned.endpoint.path();
            let what = format!(
                "{path} is served by plain workers only, and this model has prefill and decode workers alone; \
                 add a plain worker for it"
            );
            return Err(Failure::client(501, "unsupported_with_pd", what));
        }
        match scanned.prompt_logprobs {
            Some(field @ "prompt_logprobs") if matches!(self, Backend::Tandem | Backend::Sglang) => {
                let what = "asks for vLLM's prompt logprobs, which these workers do not compute; \
                            use `echo` with `logprobs`, or `/generate` with `logprob_start_len`";
                return Err(unsupported(field, what));
            }
            _ => {}
        }
        if self == Backend::Sglang && scanned.n > 1 {
            let what = "asks for several samples of one prompt, which SGLang's prefill and decode workers mix up; \
                        send the request several times with one sample each";
            return Err(unsupported("n", what));
        }
        Ok(())
    }

    pub fn order(self, scanned: &Scanned) -> Order {
        match self {
            Backend::Tandem | Backend::Sglang => Order::Parallel,
            Backend::Plain => Order::DecodeOnly,
            // The pages of a prompt are handed over once, so that several samples or prompts have nothing to share.
            _ if scanned.samples.count() > 1 => Order::DecodeOnly,
            Backend::VllmNixl => Order::PrefillFirst,
            Backend::VllmMooncake => Order::Parallel,
        }
    }

    /// Its workers take `POST /abort_request` with the request's `rid`.
    pub fn aborts_by_rid(self) -> bool {
        matches!(self, Backend::Tandem | Backend::Sglang)
    }

    /// Bodies name the engine of P's rank, see [`engine_ids`].
    pub fn needs_engine_id(self) -> bool {
        self == Backend::VllmMooncake
    }

    /// The bodies of an attempt. Fails where something is missing that the pair needs to find each other.
    pub fn bodies(self, scanned: &Scanned, pair: &Pairing) -> Result<Bodies, Failure> {
        match (self, self.order(scanned)) {
            (Backend::Tandem | Backend::Sglang, _) => Ok(bootstrap_bodies(scanned, pair)),
            (_, Order::DecodeOnly) => Ok(Bodies { prefill: None, decode: Some(decode_only(self, scanned, pair)) }),
            (Backend::VllmMooncake, _) => vllm::mooncake(scanned, pair),
            (_, _) => Ok(Bodies { prefill: Some(vllm::prefill(scanned, vllm::NIXL_PREFILL)), decode: None }),
        }
    }

    /// D's body where it is made of P's answer. Without P's word D computes the prompt itself.
    pub fn decode_after(self, scanned: &Scanned, prefill: &PrefillAnswer) -> Bytes {
        vllm::decode(scanned, prefill.kv_transfer_params.as_deref())
    }

    /// A header that a leg of this side has beside those of the client.
    pub fn header(self, side: Side, pair: &Pairing) -> Option<(HeaderName, HeaderValue)> {
        let rank = match side {
            Side::Prefill => pair.prefill_rank,
            Side::Decode => pair.decode_rank,
        };
        match self {
            Backend::VllmNixl | Backend::VllmMooncake => {
                Some((HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(rank?.index)))
            }
            Backend::Tandem | Backend::Sglang | Backend::Plain => None,
        }
    }

    /// What of P's answer belongs into D's.
    pub fn merge(self, scanned: &Scanned) -> Merge {
        if self.order(scanned) == Order::DecodeOnly {
            return Merge::default();
        }
        let is_vllm = matches!(self, Backend::VllmNixl | Backend::VllmMooncake);
        let style = if is_vllm { PromptLogprobs::Replaced } else { PromptLogprobs::InFront };
        Merge { prompt_logprobs: scanned.prompt_logprobs.map(|_| style), usage: is_vllm }
    }
}

fn unsupported(field: &'static str, what: &str) -> Failure {
    Failure::client(400, "unsupported_with_pd", format!("`{field}` {what}")).at(field)
}

/// The same bytes for both legs, unless ranks were chosen. SGLang's D finds the rank of its P by the room, too, so that
/// rooms and ranks must agree, see [`ticket::mint`].
fn bootstrap_bodies(scanned: &Scanned, pair: &Pairing) -> Bodies {
    let mut fields = ticket::fields(pair.bootstrap_host, pair.bootstrap_port, scanned.samples, pair.rooms);
    if pair.prefill_rank.is_none() && pair.decode_rank.is_none() {
        let body = scanned.splice(&fields);
        return Bodies { prefill: Some(body.clone()), decode: Some(body) };
    }
    let ours = fields.len();
    if let Some(rank) = pair.prefill_rank {
        let _ = write!(fields, r#","routed_dp_rank":{}"#, rank.index);
    }
    let prefill = scanned.splice(&fields);
    fields.truncate(ours);
    if let Some(rank) = pair.prefill_rank {
        let _ = write!(fields, r#","disagg_prefill_dp_rank":{}"#, rank.index);
    }
    if let Some(rank) = pair.decode_rank {
        let _ = write!(fields, r#","routed_dp_rank":{}"#, rank.index);
    }
    Bodies { prefill: Some(prefill), decode: Some(scanned.splice(&fields)) }
}

/// vLLM takes a rank as a header, all others in the body.
fn decode_only(backend: Backend, scanned: &Scanned, pair: &Pairing) -> Bytes {
    match pair.decode_rank {
        Some(rank) if backend == Backend::Plain => scanned.splice(&format!(r#""routed_dp_rank":{}"#, rank.index)),
        _ => scanned.plain(),
    }
}

/// The field that bounds the tokens of an answer, by API.
fn limit_of(endpoint: Endpoint) -> Field {
    match endpoint {
        Endpoint::Responses => Field::MaxOutputTokens,
        _ => Field::MaxTokens,
    }
}

#[cfg(test)]
mod tests;
