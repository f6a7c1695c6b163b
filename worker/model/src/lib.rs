//! Model files: configuration, weights, tokenizer, chat template.
pub mod config;
pub mod dequant;
pub mod error;
pub mod weights;
