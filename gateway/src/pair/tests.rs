//! What holds for each policy, and what their tests share.

use clap::ValueEnum as _;
use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::*;
use crate::config::tests::config;

pub fn dice() -> StdRng {
    StdRng::seed_from_u64(0x7a6d)
}

/// Settings as a command line gives them.
pub fn pair_config(line: &str) -> PairConfig {
    config(&format!("--worker-urls http://w:1 {line}")).unwrap().pair
}

/// A request that says nothing of itself.
pub fn ask() -> Ask<'static> {
    Ask { text: None, prompt_bytes: 0, key: None, now: Instant::now() }
}

pub fn tokens(tokens: u64) -> Load {
    Load { tokens: Some(tokens), legs: 0 }
}

pub fn legs(legs: u32) -> Load {
    Load { tokens: None, legs }
}

pub fn workers(loads: impl IntoIterator<Item = Load>) -> Vec<Candidate> {
    let named = |(i, load)| Candidate { id: WorkerId::of(&format!("http://w{i}:1")), load };
    loads.into_iter().enumerate().map(named).collect()
}

pub fn idle(count: usize) -> Vec<Candidate> {
    workers(vec![Load::default(); count])
}

#[test]
fn settings_and_metrics_use_the_same_names() {
    for name in PolicyName::value_variants() {
        let flag = name.to_possible_value().expect("none is hidden");
        assert_eq!(flag.get_name(), name.build(&pair_config("")).name());
        assert_eq!(serde_json::to_value(name).unwrap(), flag.get_name());
    }
}

fn any_load() -> impl Strategy<Value = Load> {
    (proptest::option::of(0..10_000u64), 0..200u32).prop_map(|(tokens, legs)| Load { tokens, legs })
}

proptest! {
    #[test]
    fn the_choice_is_one_of_the_candidates(
        rounds in proptest::collection::vec((proptest::collection::vec(any_load(), 1..9), 0..4usize, 0..3usize), 1..30),
    ) {
        let texts = ["a".repeat(2000), format!("{}{}", "a".repeat(1000), "b".repeat(900)), String::new(), "c".into()];
        for name in PolicyName::value_variants() {
            let (policy, mut dice) = (name.build(&pair_config("")), dice());
            for (loads, text, key) in &rounds {
                let workers = workers(loads.iter().copied());
                let text = texts[*text].as_str();
                let ask = Ask { text: Some(text), prompt_bytes: text.len(), key: [None, Some("k"), Some("")][*key], ..ask() };
                prop_assert!(policy.choose(&ask, &workers, &mut dice) < workers.len());
            }
        }
    }
}
