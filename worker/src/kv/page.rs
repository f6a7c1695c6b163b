//! A page of the KV pool as a value: whoever holds it may use the page, and nobody else may. *Pure.*
//!
//! [`Page`] and [`Pages`] can be neither copied nor made outside the pool, so a page has one owner by construction (H1).
//! Dropping one without giving it back leaks the page; the pool's [`check`](super::pool::Pool::check) finds that.

/// One owned page.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a page that is dropped is lost to the pool"]
pub struct Page(pub(super) u32);

/// The owned pages of one sequence, in the order of its tokens: page `i` holds tokens `i * page_size ..`.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "pages that are dropped are lost to the pool"]
pub struct Pages(pub(super) Vec<u32>);

impl Pages {
    /// No pages.
    pub fn new() -> Self {
        Self(Vec::new())
    }

    pub fn push(&mut self, page: Page) {
        self.0.push(page.0);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The page numbers, for page tables; knowing a number gives no right to the page.
    pub fn indices(&self) -> &[u32] {
        &self.0
    }

    /// All pages, leaving none.
    pub fn take(&mut self) -> Pages {
        Pages(std::mem::take(&mut self.0))
    }
}

/// A counted right to read pages that someone else owns: while it lasts they are neither freed nor written (H1, H5).
#[derive(Debug)]
#[must_use = "a lease that is dropped pins its pages for ever; return it to the pool"]
pub struct Lease(pub(super) Vec<u32>);
