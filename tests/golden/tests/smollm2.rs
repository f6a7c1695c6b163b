//! SmolLM2-135M-Instruct (Q4_1) against the same file dequantised to float32. Fetches the model by name.

use tandem_cpu::CpuMath;
use tandem_golden::{Case, Runner, check_forced, check_greedy, data, load};

/// Half of the smallest margin that the quickstart's question meets (0.08 at its first token).
const FAST_MARGIN_MIN: f32 = 0.04;

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(data("smollm2").join("greedy.json")).expect("the reference");
    serde_json::from_str(&text).expect("the reference's fields")
}

#[test]
fn exact_arithmetic_follows_the_reference_closely() {
    let model = load("smollm2");
    let mut runner = Runner::new(&model.config, &model, CpuMath::Exact);
    for (i, case) in cases().iter().enumerate() {
        let first = runner.forward(&case.prompt_ids, 0, &[16, 3, 40]).pop().expect("a prompt");
        for (token, want) in &case.last_logits_top10 {
            let got = first[*token as usize];
            assert!((got - want).abs() <= 0.02, "case {i}, token {token}: {got}, the reference says {want}");
        }
        check_greedy(&mut runner, case, &first, 0.02);
        check_forced(&mut runner, case, &first, 0.02);
    }
}

#[test]
fn fast_arithmetic_chooses_alike_where_the_choice_is_clear() {
    let model = load("smollm2");
    let mut runner = Runner::new(&model.config, &model, CpuMath::Fast);
    let mut held = 0;
    for (i, case) in cases().iter().enumerate() {
        let first = runner.forward(&case.prompt_ids, 0, &[16, 3, 40]).pop().expect("a prompt");
        for (token, want) in &case.last_logits_top10 {
            let got = first[*token as usize];
            assert!((got - want).abs() <= 0.05, "case {i}, token {token}: {got}, the reference says {want}");
        }
        check_greedy(&mut runner, case, &first, FAST_MARGIN_MIN);
        held += check_forced(&mut runner, case, &first, FAST_MARGIN_MIN);
    }
    assert!(held > 150, "only {held} choices of the reference have a clear margin");
}
