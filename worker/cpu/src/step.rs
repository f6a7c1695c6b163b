//! What a step is made of before any arithmetic: checked slices, and buffers that live from step to step. *Pure.*

use tandem_handoff::layout::PoolShape;

use crate::{
    CpuError, LogitRows, Slice,
    simd::{attention::Plan, matmul::Activations},
};

/// Kept between steps, so that a steady stream of steps allocates nothing.
#[derive(Default)]
pub struct Buffers {
    /// `[rows, hidden]`: the residual stream.
    pub hidden: Vec<f32>,
    pub activations: Activations,
    /// `[rows][q heads | k heads | v heads]`
    pub qkv: Vec<f32>,
    /// `[rows, hidden]`: what a row-parallel product adds to the residual stream.
    pub update: Vec<f32>,
    /// `[rows][gate | up]`
    pub gate_up: Vec<f32>,
    /// `[rows, head_dim / 2]` each
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    pub rows: Vec<Row>,
    /// Rows that need logits.
    pub logit_rows: Vec<usize>,
    pub plan: Plan,
}

/// One row of a step.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub token: u32,
    pub position: usize,
    /// Page, and offset in tokens within it.
    pub place: (u32, u32),
}

impl Buffers {
    pub fn list_rows(&mut self, slices: &[Slice<'_>], page_size: usize) {
        self.rows.clear();
        self.logit_rows.clear();
        for slice in slices {
            let first = self.rows.len();
            for (i, &token) in slice.tokens.iter().enumerate() {
                let position = slice.start as usize + i;
                let place = (slice.pages[position / page_size], (position % page_size) as u32);
                self.rows.push(Row { token, position, place });
            }
            match slice.logits {
                LogitRows::None => {}
                LogitRows::Last => self.logit_rows.extend((first..self.rows.len()).last()),
                LogitRows::All => self.logit_rows.extend(first..self.rows.len()),
            }
        }
    }
}

/// Refuses what would read or write outside the pool or the vocabulary.
pub fn check(slices: &[Slice<'_>], vocab: usize, shape: &PoolShape) -> Result<(), CpuError> {
    for slice in slices {
        if let Some(&token) = slice.tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(CpuError::Token { token, vocab });
        }
        if shape.pages_for(slice.start as usize + slice.tokens.len()) > slice.pages.len() {
            let (tokens, pages) = (slice.tokens.len(), slice.pages.len());
            return Err(CpuError::Pages { tokens, start: slice.start, pages, page_size: shape.page_size });
        }
        if let Some(&page) = slice.pages.iter().find(|page| **page >= shape.pages) {
            return Err(CpuError::Page { page, pages: shape.pages });
        }
    }
    Ok(())
}
