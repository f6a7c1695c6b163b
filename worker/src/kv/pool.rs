//! The pool: it owns the free pages, knows who holds each other page, and counts the leases. *Pure.*
//!
//! H1: each page has one owner (the free list, a sequence, an attempt, or, after its sequence let go of it under a
//! lease, the pool as a pinned page), and the owners sum to the pool. H2: pages that were published come back only
//! against their `FenceProof`.

use tandem_handoff::fence::{FenceProof, Mismatch, PublishedPages};

use super::page::{Lease, Page, Pages};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Free,
    Sequence,
    /// Published: a peer writes here.
    Attempt,
    /// Let go by its sequence while someone reads it; free when the last lease ends.
    Pinned,
}

/// Pages per owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    pub free: usize,
    pub sequences: usize,
    pub attempts: usize,
    pub pinned: usize,
}

#[derive(Debug)]
pub struct Pool {
    free: Vec<u32>,
    owner: Vec<Owner>,
    leases: Vec<u32>,
    counts: Counts,
}

impl Pool {
    pub fn new(pages: u32) -> Self {
        let count = pages as usize;
        Self {
            free: (0..pages).rev().collect(),
            owner: vec![Owner::Free; count],
            leases: vec![0; count],
            counts: Counts { free: count, ..Counts::default() },
        }
    }

    pub fn total(&self) -> usize {
        self.owner.len()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// A free page, now the caller's.
    pub fn allocate(&mut self) -> Option<Page> {
        let page = self.free.pop()?;
        self.hand_over(page, Owner::Free, Owner::Sequence);
        Some(Page(page))
    }

    /// All of `count` pages, or none.
    pub fn allocate_many(&mut self, count: usize) -> Option<Pages> {
        if count > self.free() {
            return None;
        }
        let mut pages = Pages::new();
        for _ in 0..count {
            pages.push(self.allocate()?);
        }
        Some(pages)
    }

    /// Takes a sequence's pages back. Leased ones stay pinned until their last lease ends.
    pub fn release(&mut self, pages: Pages) {
        // In reverse, so that the next owner gets them in their old order.
        for page in pages.0.into_iter().rev() {
            if self.leases[page as usize] == 0 {
                self.hand_over(page, Owner::Sequence, Owner::Free);
                self.free.push(page);
            } else {
                self.hand_over(page, Owner::Sequence, Owner::Pinned);
            }
        }
    }

    /// A right to read `pages`, which their owner must not write while it lasts.
    pub fn lease(&mut self, pages: &[u32]) -> Lease {
        for &page in pages {
            assert!(self.owner[page as usize] != Owner::Free, "H1: page {page} is leased while free");
            self.leases[page as usize] += 1;
        }
        Lease(pages.to_vec())
    }

    /// Widens a lease by `pages`.
    pub fn extend(&mut self, lease: &mut Lease, pages: &[u32]) {
        lease.0.extend(self.lease(pages).0);
    }

    pub fn end_lease(&mut self, lease: Lease) {
        for page in lease.0 {
            let leases = &mut self.leases[page as usize];
            *leases = leases.checked_sub(1).expect("H1: a lease is returned once");
            if *leases == 0 && self.owner[page as usize] == Owner::Pinned {
                self.hand_over(page, Owner::Pinned, Owner::Free);
                self.free.push(page);
            }
        }
    }

    /// Whether the owner of `page` may write to it.
    pub fn may_write(&self, page: u32) -> bool {
        self.owner[page as usize] == Owner::Sequence && self.leases[page as usize] == 0
    }

    pub fn is_free(&self, page: u32) -> bool {
        self.owner[page as usize] == Owner::Free
    }

    /// Gives a sequence's pages to an attempt: from now on a peer may know their addresses.
    pub fn publish(&mut self, pages: Pages) -> PublishedPages {
        for &page in pages.indices() {
            assert!(self.may_write(page), "H1: page {page} is published under a foreign lease");
            self.hand_over(page, Owner::Sequence, Owner::Attempt);
        }
        PublishedPages::new(pages.0)
    }

    /// Takes published pages back, as pages of a sequence (H2).
    ///
    /// # Errors
    /// When the proof belongs to other pages; both stay pinned.
    pub fn redeem(&mut self, pages: PublishedPages, proof: FenceProof) -> Result<Pages, Mismatch> {
        let pages = pages.redeem(proof)?;
        for &page in &pages {
            self.hand_over(page, Owner::Attempt, Owner::Sequence);
        }
        Ok(Pages(pages))
    }

    fn hand_over(&mut self, page: u32, from: Owner, to: Owner) {
        let owner = &mut self.owner[page as usize];
        assert_eq!(*owner, from, "H1: page {page} has one owner");
        *owner = to;
        *self.counts.of(from) -= 1;
        *self.counts.of(to) += 1;
    }

    /// Asserts H1 in full: the ledger agrees with the free list, and `held`, the pages that sequences say they hold, are
    /// those that the ledger calls theirs.
    pub fn check<'a>(&self, held: impl Iterator<Item = &'a Pages>) {
        let Counts { free, sequences, attempts, pinned } = self.counts;
        assert_eq!(free + sequences + attempts + pinned, self.total(), "H1: owners sum to the pool");
        let mut seen = vec![false; self.total()];
        let mut claim = |page: u32, owner: Owner| {
            assert!(!std::mem::replace(&mut seen[page as usize], true), "H1: page {page} has two owners");
            assert_eq!(self.owner[page as usize], owner, "H1: page {page}");
        };
        self.free.iter().for_each(|&page| claim(page, Owner::Free));
        held.flat_map(Pages::indices).for_each(|&page| claim(page, Owner::Sequence));
        let claimed = seen.iter().filter(|&&seen| seen).count();
        assert_eq!(claimed, free + sequences, "H1: a page was dropped");
    }
}

impl Counts {
    fn of(&mut self, owner: Owner) -> &mut usize {
        match owner {
            Owner::Free => &mut self.free,
            Owner::Sequence => &mut self.sequences,
            Owner::Attempt => &mut self.attempts,
            Owner::Pinned => &mut self.pinned,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_leased_page_is_freed_by_its_last_lease() {
        let mut pool = Pool::new(2);
        let pages = pool.allocate_many(2).unwrap();
        let lease = pool.lease(&pages.indices()[..1]);
        let mut second = pool.lease(&pages.indices()[..1]);
        pool.extend(&mut second, &pages.indices()[1..]);
        assert!(!pool.may_write(pages.indices()[0]));
        pool.release(pages);
        assert_eq!(pool.counts(), Counts { pinned: 2, ..Counts::default() });
        pool.end_lease(second);
        assert_eq!(pool.free(), 1);
        pool.end_lease(lease);
        assert_eq!(pool.free(), 2);
        pool.check(std::iter::empty());
    }

    #[test]
    fn published_pages_that_nobody_took_stay_with_the_attempt() {
        let mut pool = Pool::new(3);
        let pages = pool.allocate_many(2).unwrap();
        let published = pool.publish(pages);
        assert_eq!(pool.counts(), Counts { free: 1, attempts: 2, ..Counts::default() });
        assert_eq!(published.len(), 2);
        assert!(pool.allocate_many(2).is_none());
    }

    #[test]
    #[should_panic(expected = "H1: a page was dropped")]
    fn a_dropped_page_is_found() {
        let mut pool = Pool::new(1);
        let _ = pool.allocate();
        pool.check(std::iter::empty());
    }

    #[derive(Clone, Debug)]
    enum Act {
        Allocate(usize),
        Release(usize),
        Lease(usize),
        EndLease(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            (0usize..5).prop_map(Act::Allocate),
            (0usize..8).prop_map(Act::Release),
            (0usize..8).prop_map(Act::Lease),
            (0usize..8).prop_map(Act::EndLease),
        ]
    }

    proptest! {
        #[test]
        fn owners_sum_to_the_pool_and_leased_pages_are_never_handed_out(acts in prop::collection::vec(act(), 0..80)) {
            let mut pool = Pool::new(9);
            let mut held: Vec<Pages> = vec![];
            let mut leases: Vec<Lease> = vec![];
            for act in acts {
                match act {
                    Act::Allocate(count) => {
                        let free = pool.free();
                        match pool.allocate_many(count) {
                            Some(pages) => {
                                for page in pages.indices() {
                                    prop_assert!(leases.iter().all(|lease| !lease.0.contains(page)));
                                }
                                held.push(pages);
                            }
                            None => prop_assert!(count > free),
                        }
                    }
                    Act::Release(at) if at < held.len() => pool.release(held.swap_remove(at)),
                    Act::Lease(at) if at < held.len() => leases.push(pool.lease(held[at].indices())),
                    Act::EndLease(at) if at < leases.len() => pool.end_lease(leases.swap_remove(at)),
                    _ => {}
                }
                pool.check(held.iter());
            }
            held.drain(..).for_each(|pages| pool.release(pages));
            leases.drain(..).for_each(|lease| pool.end_lease(lease));
            prop_assert_eq!(pool.free(), 9);
        }
    }
}
