//! One target per reader of foreign bytes, and one for orders of calls. Each holds the function that it tries, so that a
//! test can put a faulty one in its place.

pub mod answers;
pub mod frames;
pub mod greetings;
pub mod handoff;
pub mod merges;
pub mod models;
pub mod settings;
pub mod streams;
pub mod tickets;

use crate::Target;

/// The targets over the real functions.
pub fn all() -> Vec<Box<dyn Target>> {
    vec![
        Box::new(frames::Frames::real()),
        Box::new(greetings::Greetings::real()),
        Box::new(tickets::Tickets::real()),
        Box::new(answers::Answers::real()),
        Box::new(merges::Merges::real()),
        Box::new(settings::Settings::real()),
        Box::new(streams::Streams::real()),
        Box::new(models::Models::gguf()),
        Box::new(models::Models::safetensors()),
        Box::new(handoff::Handoff::real()),
    ]
}
