//! A backend for tests: its KV is the tokens themselves, and its logits are a function of the history that it reads back
//! out of the pages it is given. A wrong, stale or overwritten page shows as a wrong answer.

use std::sync::{Arc, Mutex};

use tandem_fabric::memory::PoolMemory;

use crate::{
    backend::{Backend, BackendError, LogitRows, Slice},
    output::{Detokenize, Detokenizers},
};

pub(crate) const VOCAB: usize = 24;
pub(crate) const EOS: u32 = 0;

/// What a test sees of a toy backend, and may break.
#[derive(Debug, Default)]
pub(crate) struct ToyState {
    /// `[page][token]`: the token at that place plus one; 0 where nothing was written.
    pub kv: Vec<u32>,
    /// Slices of each step as (start, tokens).
    pub steps: Vec<Vec<(u32, usize)>>,
    /// The next step fails with this message.
    pub fail_next: Option<String>,
    /// The next step panics.
    pub panic_next: bool,
    /// The next rows are not numbers.
    pub nan_next: bool,
}

/// Runs when a step was launched and has not yet read a page.
type OnStep = Box<dyn FnMut() + Send>;

#[derive(Clone)]
pub(crate) struct Toy {
    pub state: Arc<Mutex<ToyState>>,
    pub on_step: Arc<Mutex<Option<OnStep>>>,
    page_size: usize,
}

impl Toy {
    pub fn new(pages: usize, page_size: usize) -> Self {
        let state = ToyState { kv: vec![0; pages * page_size], ..ToyState::default() };
        Self { state: Arc::new(Mutex::new(state)), on_step: Arc::default(), page_size }
    }

    /// The KV of `page`.
    pub fn page(&self, page: u32) -> Vec<u32> {
        let start = page as usize * self.page_size;
        self.state.lock().unwrap().kv[start..start + self.page_size].to_vec()
    }

    /// What a transfer does to D's page.
    pub fn write_page(&self, page: u32, kv: &[u32]) {
        let start = page as usize * self.page_size;
        self.state.lock().unwrap().kv[start..start + self.page_size].copy_from_slice(kv);
    }
}

/// The row that follows `history`, as hash of it.
fn row(history: impl Iterator<Item = u32>) -> impl Iterator<Item = f32> {
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    for word in history {
        assert!(word > 0, "a step reads KV that was never written");
        hash = (hash ^ u64::from(word)).wrapping_mul(0x100_0000_01B3);
    }
    (0..VOCAB as u64).map(move |token| {
        let mut mixed = (hash ^ token.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        mixed ^= mixed >> 32;
        (mixed % 64) as f32 / 8.0
    })
}

impl Backend for Toy {
    fn step(&mut self, slices: &[Slice<'_>], logits: &mut Vec<f32>) -> Result<(), BackendError> {
        if let Some(on_step) = &mut *self.on_step.lock().unwrap() {
            on_step();
        }
        let mut state = self.state.lock().unwrap();
        state.steps.push(slices.iter().map(|slice| (slice.start, slice.tokens.len())).collect());
        if let Some(message) = state.fail_next.take() {
            return Err(BackendError(message));
        }
        if std::mem::take(&mut state.panic_next) {
            drop(state);
            panic!("the toy was asked to panic");
        }
        let nan = std::mem::take(&mut state.nan_next);
        let place =
            |pages: &[u32], at: usize| pages[at / self.page_size] as usize * self.page_size + at % self.page_size;
        for slice in slices {
            for (offset, &token) in slice.tokens.iter().enumerate() {
                let at = place(slice.pages, slice.start as usize + offset);
                state.kv[at] = token + 1;
            }
        }
        for slice in slices {
            let end = slice.start as usize + slice.tokens.len();
            let rows = match slice.logits {
                LogitRows::None => end..end,
                LogitRows::Last => end - 1..end,
                LogitRows::All => slice.start as usize..end,
            };
            for last in rows {
                logits.extend(row((0..=last).map(|at| state.kv[place(slice.pages, at)])));
            }
        }
        if nan {
            logits.fill(f32::NAN);
        }
        Ok(())
    }

    fn zero_tail(&mut self, page: u32, from_token: u32) {
        let start = page as usize * self.page_size;
        let mut state = self.state.lock().unwrap();
        state.kv[start + from_token as usize..start + self.page_size].fill(0);
    }

    fn vocab(&self) -> usize {
        VOCAB
    }

    fn memory(&self) -> &[Arc<PoolMemory>] {
        &[]
    }

    fn numerics_id(&self) -> String {
        "toy".into()
    }
}

/// Token `n` is the `n`th letter; the end of sequence has no text.
pub(crate) struct Letters;

impl Detokenizers for Letters {
    fn start(&self, _skip_special_tokens: bool) -> Box<dyn Detokenize> {
        Box::new(Letters)
    }
}

impl Detokenize for Letters {
    fn push(&mut self, token: u32, text: &mut String) {
        if token != EOS {
            text.push((b'a' + token as u8) as char);
        }
    }

    fn finish(&mut self, _text: &mut String) {}
}
