//! The model's tokenizer as the engine's detokenizer.

use tandem_model::{StreamDecoder, Tokenizer};

use super::{Detokenize, Detokenizers};

impl Detokenizers for Tokenizer {
    fn start(&self, skip_special_tokens: bool) -> Box<dyn Detokenize> {
        Box::new(Some(self.stream(skip_special_tokens)))
    }
}

/// `None` once it has finished.
impl Detokenize for Option<StreamDecoder> {
    fn push(&mut self, token: u32, text: &mut String) {
        if let Some(decoder) = self {
            text.push_str(decoder.push(token));
        }
    }

    fn finish(&mut self, text: &mut String) {
        if let Some(decoder) = self.take() {
            text.push_str(&decoder.finish());
        }
    }
}
