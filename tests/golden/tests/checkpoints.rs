//! Six small checkpoints, one per feature of the decoder, in exact arithmetic against float32 `transformers`.

use safetensors::SafeTensors;
use serde::Deserialize;
use tandem_cpu::CpuMath;
use tandem_golden::{Case, Runner, check_forced, check_greedy, data, load, logprob, with_bf16_frequencies};

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

fn check(name: &str) {
    let directory = data(name);
    let model = load(directory.to_str().expect("a path in UTF-8"));
    let text = std::fs::read_to_string(directory.join("reference.json")).expect("the reference");
    let reference: Reference = serde_json::from_str(&text).expect("the reference's fields");
    let bytes = std::fs::read(directory.join("reference.safetensors")).expect("the reference's logits");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut runner = Runner::new(&with_bf16_frequencies(&model.config), &model, CpuMath::Exact);
    for (i, case) in reference.cases.iter().enumerate() {
        let want: Vec<f32> = tensors
            .tensor(&format!("logits.{i}"))
            .expect("logits of each case")
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        for chunks in [&[1024][..], &[16], &[5, 1, 64, 3]] {
            let rows = runner.forward(&case.prompt_ids, 0, chunks);
            check_logits(&format!("{name}, case {i}"), &rows, &want);
            check_logprobs(&rows, case);
        }
        let first = runner.forward(&case.prompt_ids, 0, &[100]).pop().expect("a prompt");
        check_greedy(&mut runner, case, &first, 1e-3);
        check_forced(&mut runner, case, &first, 1e-3);
    }
}

/// Logits of the last positions within 1e-3 of the reference's largest.
fn check_logits(what: &str, rows: &[Vec<f32>], want: &[f32]) {
    let vocab = rows[0].len();
    let last = &rows[rows.len() - want.len() / vocab..];
    let largest = want.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    let worst = last.iter().flatten().zip(want).fold(0.0f32, |a, (got, want)| a.max((got - want).abs()));
    assert!(worst <= 1e-3 * largest, "{what}: logits differ by {worst}, the largest is {largest}");
}

fn check_logprobs(rows: &[Vec<f32>], case: &Case) {
    for (i, want) in case.prompt_logprobs.iter().enumerate() {
        let got = logprob(&rows[i], case.prompt_ids[i + 1]);
        assert!((got - want).abs() <= 2e-3, "prompt logprob {i}: {got}, the reference says {want}");
    }
}

#[test]
fn grouped_query_attention() {
    check("llama-gqa");
}

#[test]
fn scaled_rope_and_tied_head() {
    check("llama3-rope-tied");
}

#[test]
fn biased_qkv() {
    check("qwen2-bias");
}

#[test]
fn biased_qkv_with_seven_queries_per_head() {
    check("qwen2-d64-g7");
}

#[test]
fn query_and_key_norms() {
    check("qwen3-qknorm");
}

#[test]
fn query_and_key_norms_with_wide_heads() {
    check("qwen3-d128-g4");
}
