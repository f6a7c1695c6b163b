//! Evidence that nobody writes to a page any more, and the pages that only this evidence sets free (H2). *Pure.*
//!
//! [`PublishedPages`] are pages whose address a peer has seen, or may have. They are move-only, and become plain page
//! numbers again only by spending the [`FenceProof`] of the same publication. A proof is made by the sink machine alone,
//! from facts that the fabric reports; nothing makes one because time passed.

use std::fmt;

/// Names one publication of one list of pages; grows within a decode incarnation and is never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Publication(pub(crate) u64);

/// What a proof rests on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Basis {
    /// The pages were never shown to a peer.
    NeverShown,
    /// Every piece of the set landed, and a landed piece is not written again.
    Landed,
    /// The fabric reported that no write of the attempt is in progress or can begin.
    Quiet,
}

/// No write of one attempt is in progress or can begin. Made by the sink machine only; spent by
/// [`PublishedPages::redeem`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a proof that is dropped leaves its pages pinned for ever"]
pub struct FenceProof {
    publication: Publication,
    basis: Basis,
}

impl FenceProof {
    pub(crate) fn new(publication: Publication, basis: Basis) -> Self {
        Self { publication, basis }
    }

    pub fn basis(&self) -> Basis {
        self.basis
    }
}

/// Pages of D's pool that are, or are about to be, the destination of a peer's writes.
///
/// The pool makes this value out of its own move-only pages. Dropping it leaks the pages, which is safe; it never frees
/// them.
#[derive(PartialEq, Eq)]
#[must_use = "published pages that are dropped never return to the pool"]
pub struct PublishedPages {
    pages: Vec<u32>,
    publication: Option<Publication>,
}

impl PublishedPages {
    /// The pages of one prompt in token order.
    pub fn new(pages: Vec<u32>) -> Self {
        Self { pages, publication: None }
    }

    pub fn numbers(&self) -> &[u32] {
        &self.pages
    }

    pub fn len(&self) -> usize {
        self.pages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The page numbers, for the price of the proof of this very publication.
    ///
    /// # Errors
    /// Gives both back when the proof belongs to another publication; the pages stay pinned.
    pub fn redeem(self, proof: FenceProof) -> Result<Vec<u32>, Mismatch> {
        if self.publication == Some(proof.publication) { Ok(self.pages) } else { Err(Mismatch { pages: self, proof }) }
    }

    /// The page numbers of a list that no handoff ever took: nothing can have been shown to a peer.
    ///
    /// # Errors
    /// Gives the list back when a handoff took it.
    pub fn withdraw(self) -> Result<Vec<u32>, Self> {
        if self.publication.is_none() { Ok(self.pages) } else { Err(self) }
    }

    /// Binds the list to a publication; a list is bound once in its life.
    pub(crate) fn bind(&mut self, publication: Publication) {
        assert!(self.publication.is_none(), "H1: a list of pages serves one attempt");
        self.publication = Some(publication);
    }
}

impl fmt::Debug for PublishedPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages of {:?}", self.pages.len(), self.publication)
    }
}

/// A proof met the pages of another publication: a fault of the caller.
#[derive(Debug, thiserror::Error)]
#[error("{proof:?} does not free {pages:?}: the pages stay pinned; this is a fault of the worker, please report it")]
pub struct Mismatch {
    pub pages: PublishedPages,
    pub proof: FenceProof,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_proof_of_the_same_publication_frees() {
        let mut pages = PublishedPages::new(vec![3, 1]);
        pages.bind(Publication(7));
        let foreign = FenceProof::new(Publication(8), Basis::Quiet);
        let Mismatch { pages, .. } = pages.redeem(foreign).unwrap_err();
        let own = FenceProof::new(Publication(7), Basis::Quiet);
        assert_eq!(pages.redeem(own).unwrap(), [3, 1]);
    }

    #[test]
    fn an_untouched_list_is_withdrawn_and_a_bound_one_is_not() {
        assert_eq!(PublishedPages::new(vec![5]).withdraw().unwrap(), [5]);
        let mut pages = PublishedPages::new(vec![5]);
        pages.bind(Publication(1));
        assert!(pages.withdraw().is_err());
    }
}
