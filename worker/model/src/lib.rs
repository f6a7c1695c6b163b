//! Model files: configuration, weights, tokenizer, chat template.
pub mod config;
pub mod weights;
