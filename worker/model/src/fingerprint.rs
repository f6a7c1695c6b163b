//! The 128 bits by which two workers know that they hold the same model. *Pure.*
//!
//! They cover the configuration, RoPE, each weight's role, type, shape and a sample of its bytes, the tokenizer's
//! bytes and the chat template. A sample and not all bytes, since reading every weight of a large model at start would
//! cost minutes of disk: [`WINDOWS`] windows of [`WINDOW_BYTES`] spread evenly over each tensor, first and last bytes
//! included. Another quantisation changes every window, a fine-tune practically every tensor; the fingerprint guards
//! against two different models by mistake, not against a forger.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::{
    config::{ModelConfig, Rope, RopeScaling},
    tokenizer::Tokenizer,
    weights::{Linear, Tensor, Weights},
};

const WINDOWS: usize = 8;
const WINDOW_BYTES: usize = 256;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 16]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl Fingerprint {
    pub(crate) fn of(config: &ModelConfig, weights: &Weights, tokenizer: &Tokenizer) -> Self {
        let mut fields = Fields(Sha256::new_with_prefix("tandem model 1"));
        fields.config(config);
        fields.rope(&config.rope);
        fields.weights(weights);
        fields.tokenizer(tokenizer);
        let digest = fields.0.finalize();
        let mut bits = [0; 16];
        bits.copy_from_slice(&digest[..16]);
        Self(bits)
    }
}

/// Every field goes in with its length, so that no two lists of fields read the same.
struct Fields(Sha256);

impl Fields {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn size(&mut self, size: usize) {
        self.0.update((size as u64).to_le_bytes());
    }

    fn number(&mut self, number: f64) {
        self.0.update(number.to_bits().to_le_bytes());
    }

    fn config(&mut self, config: &ModelConfig) {
        let ModelConfig {
            architecture,
            layers,
            hidden,
            intermediate,
            heads,
            kv_heads,
            head_dim,
            vocab,
            rms_eps,
            rope: _,
            max_positions,
            tied_head,
        } = config;
        self.bytes(format!("{architecture:?}").as_bytes());
        for size in [layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, max_positions] {
            self.size(*size);
        }
        self.number(f64::from(*rms_eps));
        self.size(usize::from(*tied_head));
    }

    fn rope(&mut self, rope: &Rope) {
        self.number(rope.theta);
        match &rope.scaling {
            RopeScaling::Default => self.bytes(b"default"),
            RopeScaling::Linear { factor } => {
                self.bytes(b"linear");
                self.number(*factor);
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                self.bytes(b"llama3");
                for number in [factor, low_freq_factor, high_freq_factor, original_max_positions] {
                    self.number(*number);
                }
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, attention_factor, original_max_positions, truncate } => {
                self.bytes(b"yarn");
                for number in [factor, beta_fast, beta_slow, attention_factor, original_max_positions] {
                    self.number(*number);
                }
                self.size(usize::from(*truncate));
            }
            RopeScaling::Factors(factors) => {
                self.bytes(b"factors");
                factors.iter().for_each(|factor| self.number(f64::from(*factor)));
            }
        }
    }

    fn weights(&mut self, weights: &Weights) {
        self.tensor("embedding", &weights.embedding);
        self.tensor("final_norm", &weights.final_norm);
        self.tensor("head", &weights.head);
        for layer in &weights.layers {
            self.tensor("attention_norm", &layer.attention_norm);
            self.tensor("mlp_norm", &layer.mlp_norm);
            let linears = [
                ("q", &layer.q),
                ("k", &layer.k),
                ("v", &layer.v),
                ("o", &layer.o),
                ("gate", &layer.gate),
                ("up", &layer.up),
                ("down", &layer.down),
            ];
            for (role, Linear { weight, bias }) in linears {
                self.tensor(role, weight);
                bias.iter().for_each(|bias| self.tensor("bias", bias));
            }
            layer.q_norm.iter().for_each(|norm| self.tensor("q_norm", norm));
            layer.k_norm.iter().for_each(|norm| self.tensor("k_norm", norm));
        }
    }

    fn tensor(&mut self, role: &str, tensor: &Tensor) {
        self.bytes(role.as_bytes());
        self.bytes(format!("{:?}", tensor.dtype).as_bytes());
        self.size(tensor.rows);
        self.size(tensor.cols);
        let bytes = tensor.bytes();
        if bytes.len() <= WINDOWS * WINDOW_BYTES {
            return self.bytes(bytes);
        }
        let last = bytes.len() - WINDOW_BYTES;
        for window in 0..WINDOWS {
            let start = (last as u128 * window as u128 / (WINDOWS as u128 - 1)) as usize;
            self.bytes(&bytes[start..start + WINDOW_BYTES]);
        }
    }

    fn tokenizer(&mut self, tokenizer: &Tokenizer) {
        self.size(tokenizer.vocab_size());
        for id in 0..tokenizer.vocab_size() as u32 {
            self.bytes(tokenizer.token_bytes(id));
        }
        self.bytes(tokenizer.chat_template().unwrap_or_default().as_bytes());
    }
}
