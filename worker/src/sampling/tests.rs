//! The sampler against its rules, and against a naive sampler on random rows.
use proptest::prelude::*;

use super::*;
use crate::request::SamplingParams;

fn params() -> SamplingParams {
    SamplingParams { seed: 1, ..SamplingParams::greedy(16) }
}

fn state(params: SamplingParams, prompt: &[u32]) -> SamplerState {
    SamplerState::new(&params, 0, prompt, &[0])
}

fn draw(row: &[f32], state: &SamplerState) -> u32 {
    sample(row, state, &mut Scratch::default()).unwrap()
}

#[test]
fn greedy_takes_the_lowest_of_equal_ids() {
    assert_eq!(draw(&[0.0, 5.0, 5.0], &state(params(), &[])), 1);
}

#[test]
fn min_tokens_bans_eos_and_stop_tokens_until_reached() {
    let mut state = state(SamplingParams { min_tokens: 1, stop_token_ids: vec![1], ..params() }, &[]);
    let row = [9.0, 8.0, 1.0];
    assert_eq!(draw(&row, &state), 2);
    state.apply(2);
    assert_eq!(draw(&row, &state), 0);
}

#[test]
fn penalties_count_each_output_token_once_and_repetition_sees_the_prompt() {
    let row = [1.0, 4.0, 3.9];
    let mut frequency = state(SamplingParams { frequency_penalty: 0.06, ..params() }, &[1, 1, 1]);
    assert_eq!(draw(&row, &frequency), 1, "the prompt does not count for frequency");
    frequency.apply(1);
    assert_eq!(draw(&row, &frequency), 1);
    frequency.apply(1);
    assert_eq!(draw(&row, &frequency), 2);
    let repetition = state(SamplingParams { repetition_penalty: 1.5, ..params() }, &[1]);
    assert_eq!(draw(&row, &repetition), 2);
    let biased = state(SamplingParams { logit_bias: vec![(0, 50.0), (99, 1.0)], ..params() }, &[]);
    assert_eq!(draw(&row, &biased), 0);
}

#[test]
fn numbers_that_are_none_are_refused_by_name() {
    let state = state(params(), &[]);
    let scratch = &mut Scratch::default();
    assert_eq!(sample(&[0.0, f32::NAN], &state, scratch), Err(SamplingFault::NotANumber(0)));
    assert_eq!(sample(&[0.0, f32::INFINITY], &state, scratch), Err(SamplingFault::NotANumber(0)));
    assert_eq!(sample(&[f32::NEG_INFINITY; 2], &state, scratch), Err(SamplingFault::NothingLeft(0)));
}

#[test]
fn a_request_that_bans_every_token_is_told_apart_from_a_model_that_gives_none() {
    let banning = SamplingParams { min_tokens: 1, stop_token_ids: vec![0, 1], ..params() };
    for temperature in [0.0, 1.0] {
        let state = state(SamplingParams { temperature, ..banning.clone() }, &[]);
        let sampled = |row: &[f32]| sample(row, &state, &mut Scratch::default());
        assert_eq!(sampled(&[1.0, 2.0]), Err(SamplingFault::AllBanned(0)));
        assert_eq!(sampled(&[f32::NEG_INFINITY; 2]), Err(SamplingFault::NothingLeft(0)));
    }
}

#[test]
fn frequencies_of_draws_follow_the_distribution() {
    let mut sampler = state(SamplingParams { temperature: 1.0, ..params() }, &[]);
    let row = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let mut counts = [0f64; 3];
    for _ in 0..20_000 {
        let token = draw(&row, &sampler);
        counts[token as usize] += 1.0 / 20_000.0;
        sampler.apply(token);
    }
    for (count, expected) in counts.iter().zip([0.5, 0.3, 0.2]) {
        assert!((count - expected).abs() < 0.015, "{counts:?}");
    }
}

#[test]
fn tiny_temperatures_are_greedy() {
    let cold = state(SamplingParams { temperature: 1e-30, top_p: 0.9, ..params() }, &[]);
    assert_eq!(draw(&[1.0, 1.0001, 0.0], &cold), 1);
}

/// The same rules, written with full sorts.
fn naive(row: &[f32], p: &SamplingParams, position: u32) -> u32 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| if logit == max { 1.0 } else { ((logit - max) * (1.0 / p.temperature)).exp() };
    let mut all: Vec<(f32, u32)> = row.iter().enumerate().map(|(id, &logit)| (weight(logit), id as u32)).collect();
    let total: f64 = all.iter().map(|&(weight, _)| f64::from(weight)).sum();
    all.retain(|&(weight, _)| weight > 0.0 && weight >= p.min_p);
    if p.top_k.is_some() || p.top_p < 1.0 {
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        all.truncate(p.top_k.map_or(usize::MAX, |k| k as usize));
        let mut mass = 0.0;
        let mut full = false;
        all.retain(|&(weight, _)| {
            let keep = !full;
            mass += f64::from(weight);
            full |= mass >= f64::from(p.top_p) * total;
            keep
        });
    }
    draw_from(&all, random::unit(p.seed, 0, position))
}

proptest! {
    #[test]
    fn equals_a_naive_sampler(
        seed: u64,
        row in prop::collection::vec(-9i32..9, 1..700),
        temperature in 0.1f32..3.0,
        top_p in 0.05f32..1.2,
        top_k in prop::option::of(1u32..600),
        min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
    ) {
        let row: Vec<f32> = row.into_iter().map(|logit| logit as f32 * 0.5).collect();
        let params = SamplingParams { temperature, top_p: top_p.min(1.0), top_k, min_p, seed, ..params() };
        let mut sampler = state(params.clone(), &[]);
        for position in 0..4 {
            let token = draw(&row, &sampler);
            prop_assert_eq!(token, naive(&row, &params, position));
            sampler.apply(token);
        }
    }
}
