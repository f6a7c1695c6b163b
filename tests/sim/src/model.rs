//! The toy model and the oracle: KV rows, logits and answers as functions of the token history alone. *Pure.*
//!
//! A row is 8 bytes per KV head, layer and K or V. The row of position `n` depends on all tokens up to `n`, so a row that
//! was written by another sequence, or that moved to another place, is never right by chance.

use std::sync::Arc;

use tandem_handoff::layout::PoolShape;
use tandem_worker::{
    request::SamplingParams,
    sampling::{self, SamplerState, Scratch},
};

pub const VOCAB: usize = 24;
pub const EOS: u32 = 0;
/// Bytes of one row: head_dim 2, 4 bytes per element.
pub const ROW_BYTES: usize = 8;
/// What a chain of tokens begins with.
pub const START: u64 = 0x7A6E_D3A1_5C4B_9E87;

fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The shape of the toy's pools.
pub fn shape(layers: u32, kv_heads: u32, page_size: u32, tp: u32, pages: u32) -> PoolShape {
    PoolShape { layers, kv_heads, head_dim: 2, page_size, element_bytes: 4, tp, pages }
}

/// The history that ends with `token`, after the history `chain`.
pub fn extend(chain: u64, token: u32) -> u64 {
    mix(chain ^ (u64::from(token) + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93))
}

/// The history at each position.
pub fn chains(tokens: &[u32]) -> Vec<u64> {
    let grow = |chain: &mut u64, &token: &u32| {
        *chain = extend(*chain, token);
        Some(*chain)
    };
    tokens.iter().scan(START, grow).collect()
}

fn place(head: u32, layer: u32) -> u64 {
    mix(u64::from(head) << 32 | u64::from(layer))
}

/// K of a position: the history can be read back out of it.
pub fn key(chain: u64, head: u32, layer: u32) -> u64 {
    chain ^ place(head, layer)
}

/// The history that a K row stands for.
pub fn chain_of_key(key: u64, head: u32, layer: u32) -> u64 {
    key ^ place(head, layer)
}

pub fn value(chain: u64, head: u32, layer: u32) -> u64 {
    mix(chain ^ place(head, layer).rotate_left(17))
}

/// Page `page` of a sequence in the pool of `rank`: `[local head][layer][K|V][token]`, zero behind the last token.
pub fn page_image(shape: &PoolShape, rank: u32, page: usize, chains: &[u64]) -> Vec<u8> {
    let mut image = vec![0; shape.page_bytes()];
    let page_size = shape.page_size as usize;
    let tokens = chains.iter().skip(page * page_size).take(page_size);
    for (slot, &chain) in tokens.enumerate() {
        for (local, head) in shape.heads_of_rank(rank).enumerate() {
            for layer in 0..shape.layers {
                for (kv, row) in [key(chain, head, layer), value(chain, head, layer)].into_iter().enumerate() {
                    let at = shape.plane_offset(0, local as u32, layer, kv as u32) + slot * ROW_BYTES;
                    image[at..at + ROW_BYTES].copy_from_slice(&row.to_le_bytes());
                }
            }
        }
    }
    image
}

/// Takes one more position of history into the state that logits are made of.
pub fn fold(state: u64, chain: u64) -> u64 {
    mix(state ^ chain)
}

/// The logits that follow a history, folded position by position.
pub fn logits(state: u64) -> impl Iterator<Item = f32> {
    (0..VOCAB as u64).map(move |token| (mix(state ^ token.wrapping_mul(0x9E37_79B9_7F4A_7C15)) % 64) as f32 / 8.0)
}

/// What a sample says alone: `room` output tokens at most.
pub fn answer(prompt: &[u32], params: &SamplingParams, room: usize) -> Vec<u32> {
    let eos: Arc<[u32]> = [EOS].into();
    let mut sampler = SamplerState::new(params, 0, prompt, &eos);
    let mut scratch = Scratch::default();
    let (mut chain, mut state) = (START, START);
    let mut take = |token: u32| {
        chain = extend(chain, token);
        state = fold(state, chain);
        state
    };
    let mut state = prompt.iter().fold(START, |_, &token| take(token));
    let mut said = Vec::new();
    while said.len() < room.min(params.max_tokens as usize) {
        let row: Vec<f32> = logits(state).collect();
        let token = sampling::sample(&row, &sampler, &mut scratch).expect("the toy's logits are numbers");
        sampler.apply(token);
        said.push(token);
        if (token == EOS && !params.ignore_eos) || params.stop_token_ids.contains(&token) {
            break;
        }
        state = take(token);
    }
    said
}

/// Sampling without any rule but length and end of sequence.
pub fn sampling(max_tokens: u32, temperature: f32, seed: u64) -> SamplingParams {
    SamplingParams {
        max_tokens,
        min_tokens: 0,
        temperature,
        top_p: 1.0,
        top_k: None,
        min_p: 0.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        repetition_penalty: 1.0,
        logit_bias: vec![],
        seed,
        stop: vec![],
        stop_token_ids: vec![],
        ignore_eos: false,
        include_stop: false,
        skip_special_tokens: true,
    }
}
