//! Owns the shape of a fleet on one machine: how many workers of each role. Parsed once from `XpYd`. *Pure.*

use std::{fmt, str::FromStr};

/// More workers than this on one machine is a typing error.
pub const WORKERS_PER_ROLE_MAX: u16 = 64;

/// `XpYd`: X prefill and Y decode workers. Whether the numbers make sense together is for [`Fleet::new`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    pub prefill: u16,
    pub decode: u16,
}

/// A fleet that can answer requests: at least one pair, or at least one plain worker, never both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fleet {
    Split(Split),
    Plain { workers: u16 },
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TopologyError {
    #[error("`{0}` is not of the form XpYd: write for example 1p1d for one prefill and one decode worker")]
    Form(String),
    #[error("{0} workers of one role on one machine: at most {WORKERS_PER_ROLE_MAX}")]
    TooMany(String),
    #[error("{0} has prefill workers and no decode worker: nobody would answer; write for example {1}p1d")]
    NoDecode(Split, u16),
    #[error("{0} has decode workers and no prefill worker: nobody would compute the prompt; write for example 1p{1}d")]
    NoPrefill(Split, u16),
    #[error("0p0d starts no worker: add --plain N for N unsplit workers, or write for example 1p1d")]
    Empty,
    #[error("{0} together with --plain: the gateway serves either pairs or plain workers; write 0p0d --plain {1}")]
    Both(Split, u16),
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}p{}d", self.prefill, self.decode)
    }
}

impl FromStr for Split {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, TopologyError> {
        let form = || TopologyError::Form(text.to_owned());
        let lower = text.to_ascii_lowercase();
        let (prefill, rest) = lower.split_once('p').ok_or_else(form)?;
        let decode = rest.strip_suffix('d').ok_or_else(form)?;
        Ok(Split { prefill: count(prefill, form)?, decode: count(decode, form)? })
    }
}

fn count(digits: &str, form: impl Fn() -> TopologyError) -> Result<u16, TopologyError> {
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(form());
    }
    match digits.parse() {
        Ok(number) if number <= WORKERS_PER_ROLE_MAX => Ok(number),
        _ => Err(TopologyError::TooMany(digits.to_owned())),
    }
}

impl Fleet {
    pub fn new(split: Split, plain: u16) -> Result<Self, TopologyError> {
        if plain > WORKERS_PER_ROLE_MAX {
            return Err(TopologyError::TooMany(plain.to_string()));
        }
        match (split.prefill, split.decode, plain) {
            (0, 0, 0) => Err(TopologyError::Empty),
            (0, 0, workers) => Ok(Fleet::Plain { workers }),
            (_, 0, _) => Err(TopologyError::NoDecode(split, split.prefill)),
            (0, _, _) => Err(TopologyError::NoPrefill(split, split.decode)),
            (_, _, 0) => Ok(Fleet::Split(split)),
            (_, _, plain) => Err(TopologyError::Both(split, plain)),
        }
    }

    /// How many workers compute at the same moment, for sharing out cores. The two halves of a pair take turns on a
    /// request, so that under light load they rarely compute at once, and either may then use all cores.
    pub fn workers_at_once(self) -> u16 {
        match self {
            Fleet::Split(split) => split.prefill.max(split.decode),
            Fleet::Plain { workers } => workers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_usual_forms() {
        assert_eq!("1p1d".parse(), Ok(Split { prefill: 1, decode: 1 }));
        assert_eq!("2P13D".parse(), Ok(Split { prefill: 2, decode: 13 }));
        assert_eq!("0p0d".parse(), Ok(Split { prefill: 0, decode: 0 }));
    }

    #[test]
    fn refuses_other_forms_by_showing_one_that_works() {
        for text in ["", "1p", "1d1p", "p1d", "1p1dd", "+1p1d", "1p-1d", "1 p1d", "onepd", "1p1"] {
            let error = text.parse::<Split>().expect_err(text);
            assert_eq!(error, TopologyError::Form(text.to_owned()));
            assert!(error.to_string().contains("1p1d"), "{error}");
        }
        assert_eq!("65p1d".parse::<Split>(), Err(TopologyError::TooMany("65".into())));
        assert_eq!("1p99999999999d".parse::<Split>(), Err(TopologyError::TooMany("99999999999".into())));
    }

    #[test]
    fn a_fleet_has_pairs_or_plain_workers() {
        let split = |prefill, decode| Split { prefill, decode };
        assert_eq!(Fleet::new(split(2, 1), 0), Ok(Fleet::Split(split(2, 1))));
        assert_eq!(Fleet::new(split(0, 0), 3), Ok(Fleet::Plain { workers: 3 }));
        assert_eq!(Fleet::new(split(0, 0), 0), Err(TopologyError::Empty));
        assert_eq!(Fleet::new(split(1, 0), 0), Err(TopologyError::NoDecode(split(1, 0), 1)));
        assert_eq!(Fleet::new(split(0, 2), 0), Err(TopologyError::NoPrefill(split(0, 2), 2)));
        assert_eq!(Fleet::new(split(1, 1), 1), Err(TopologyError::Both(split(1, 1), 1)));
        assert_eq!(Fleet::new(split(0, 0), 65), Err(TopologyError::TooMany("65".into())));
    }
}
