//! Every bug that the simulator found stays found: its seed runs clean.

use std::path::Path;

use tandem_sim::{seeds, setup::Options, world};

#[test]
fn the_seeds_of_found_bugs_run_clean() {
    let found =
        seeds::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds")).expect("the folder of seeds is readable");
    assert!(!found.is_empty());
    for found in found {
        let report = world::run(found.seed, Options { trace: true, ..found.options });
        if let Some(violation) = report.violation {
            panic!("{} is back:{}\n{violation}\n{}", found.name, found.story, report.trace);
        }
    }
}
