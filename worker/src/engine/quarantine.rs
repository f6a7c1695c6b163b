//! When a worker has so many pages in quarantine that it must end. *Pure.*
//!
//! A quarantined page belongs to an attempt that ended longer ago than the drain deadline, and that a peer may still touch.
//! Only proof of quiet frees it (H2, H5), and the fence is tried again and again. A few such pages cost a little of the
//! pool. Past a limit the worker gives up: it admits nothing more, lets what runs end, and exits. The end of the process
//! is the last fence, for it takes the pool and every transfer with it.

use std::fmt;

/// More pages are in quarantine than the limit allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Excess {
    pub pages: u32,
    pub max: u32,
    pub total: u32,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pages, max, total } = self;
        write!(
            f,
            "{pages} of {total} KV pages are quarantined, more than --quarantine-pages-max {max}: peers of ended transfers \
             may still touch them"
        )
    }
}

/// Watches the count. A worker that was over the limit once stays condemned, also when proof of quiet comes after all:
/// its gateway has been told, and its running requests are being ended.
#[derive(Debug)]
pub(super) struct Quarantine {
    max: u32,
    total: u32,
    excess: Option<Excess>,
}

impl Quarantine {
    pub fn new(max: u32, total: u32) -> Self {
        Self { max, total, excess: None }
    }

    /// Takes in the count after a turn. True once: when it is over the limit for the first time.
    pub fn see(&mut self, pages: u32) -> bool {
        let over = self.excess.is_none() && pages > self.max;
        if over {
            self.excess = Some(Excess { pages, max: self.max, total: self.total });
        }
        over
    }

    pub fn max(&self) -> u32 {
        self.max
    }

    pub fn excess(&self) -> Option<Excess> {
        self.excess
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_itself_is_allowed_and_one_more_condemns_for_good() {
        let mut quarantine = Quarantine::new(2, 8);
        assert!(!quarantine.see(0) && !quarantine.see(2));
        assert_eq!(quarantine.excess(), None);
        assert!(quarantine.see(3), "the first time it is news");
        assert!(!quarantine.see(8) && !quarantine.see(0), "and no news after");
        assert_eq!(quarantine.excess(), Some(Excess { pages: 3, max: 2, total: 8 }));
    }

    #[test]
    fn a_limit_of_none_tolerates_none_and_one_of_the_whole_pool_is_never_passed() {
        assert!(Quarantine::new(0, 8).see(1));
        assert!(!Quarantine::new(8, 8).see(8));
    }

    #[test]
    fn the_reason_names_the_numbers_and_the_setting() {
        let text = Excess { pages: 3, max: 2, total: 8 }.to_string();
        assert!(text.contains("3 of 8") && text.contains("--quarantine-pages-max 2"), "{text}");
    }
}
