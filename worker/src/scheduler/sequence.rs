//! One sequence as the scheduler sees it: tokens, pages, and how far they are computed. *Pure.*

use tandem_handoff::{ids::Time, ticket::Ticket};

use crate::{kv::page::Pages, request::SeqId};

#[derive(Debug)]
pub struct Sequence {
    pub id: SeqId,
    pub arrived: Time,
    /// Prompt and output.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Prompt and output tokens at most.
    pub tokens_max: usize,
    pub pages: Pages,
    /// Leading tokens whose KV lies in `pages`.
    pub computed: usize,
    /// The next prompt position whose logprob is wanted; positions are counted in the prompt, and 0 needs no row.
    pub prompt_rows_from: Option<usize>,
    /// Where the pair meets; absent in role null.
    pub ticket: Option<Ticket>,
    /// P: D's Reserve came.
    pub reserved: bool,
    /// P: leading pages that were handed to the transfer.
    pub pushed: usize,
}

impl Sequence {
    pub fn new(id: SeqId, arrived: Time, prompt: &[u32], tokens_max: usize, prompt_rows_from: Option<usize>) -> Self {
        Self {
            id,
            arrived,
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            tokens_max,
            pages: Pages::new(),
            computed: 0,
            prompt_rows_from,
            ticket: None,
            reserved: false,
            pushed: 0,
        }
    }

    /// Tokens that have no KV yet.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether only the last output token is missing, the common step of a decode.
    pub fn decodes(&self) -> bool {
        self.tokens.len() > self.prompt_len && self.pending() == 1
    }

    /// Whether the rows of tokens `start .. end` predict a prompt token whose logprob is wanted.
    pub fn wants_prompt_rows(&self, start: usize, end: usize) -> bool {
        self.prompt_rows_from.is_some_and(|from| from.max(start + 1) <= end.min(self.prompt_len - 1))
    }
}
