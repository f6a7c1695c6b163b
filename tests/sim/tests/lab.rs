//! The lab's text, word for word: it is documentation, and the protocol's order of steps.

use tandem_sim::lab;

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
    assert_eq!(text.matches("every promise was kept").count(), 5, "each story ends well");
}
