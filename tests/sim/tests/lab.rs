//! The lab's text, word for word: it is documentation, and the protocol's order of steps.

use tandem_sim::lab;

/// Columns of a terminal in which it is to be readable.
const COLUMNS: usize = 100;

#[test]
fn the_lab_tells_the_same_stories_every_time() {
    let text = lab::text();
    let known = include_str!("lab.txt");
    if text != known {
        let place = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lab.txt");
        let line = text.lines().zip(known.lines()).position(|(new, old)| new != old).unwrap_or(0);
        panic!(
            "line {} differs: {:?}; if the change is right: cargo run --release -p tandem-sim -- --lab > {place}",
            line + 1,
            text.lines().nth(line)
        );
    }
}

#[test]
fn every_story_ends_well_and_says_what_proved_quiet() {
    let text = lab::text();
    assert_eq!(text.matches("\nend: every page is free again, every promise was kept\n").count(), 5);
    assert_eq!(text.matches("\nproof: ").count(), 5);
}

#[test]
fn the_lab_is_readable() {
    let text = lab::text();
    for line in text.lines() {
        assert!(line.chars().count() <= COLUMNS, "{line:?} is wider than {COLUMNS} columns");
        assert!(!line.contains(['{', '}', '[', ']', '"']), "{line:?} is written for a program");
    }
    let steps: Vec<&str> = text.split("\nstep ").skip(1).collect();
    for step in steps {
        let what = step.lines().nth(1).expect("a step has lines");
        assert!(what.contains(" ms  ") || what.starts_with("  => "), "step {step} does not say what happened");
    }
}
