//! Which worker gets a leg: the policies, one file each, and the table of their names. A policy is asked with what it may
//! look at of a request and with the workers that may serve it; what it remembers is its own and bounded. Each side of each
//! pool has a policy object of its own. Adding a policy is a file and a line in the table below. *Pure*: loads, the time and
//! the dice come in.

mod branches;
mod bucket;
mod cache_aware;
mod consistent_hashing;
mod least_load;
mod load;
mod manual;
mod power_of_two;
mod prefixes;
mod random;
mod recent;
mod round_robin;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

use http::HeaderMap;
use rand::RngCore;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::config::PairConfig;
use branches::Branches;
use load::Least;
pub use load::{Balance, Load};
pub use manual::AssignmentMode;

/// Names of a session, sglang_router's first.
const SESSION_HEADERS: [&str; 2] = ["x-smg-routing-key", "x-session-id"];

/// The table: a policy's name on the command line and in files, and how it is made.
macro_rules! policies {
    ($($(#[doc = $help:literal])+ $name:ident => $make:path,)+) => {
        /// A policy by name, as settings give it.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, clap::ValueEnum)]
        #[serde(rename_all = "snake_case")]
        #[value(rename_all = "snake_case")]
        pub enum PolicyName {
            $($(#[doc = $help])+ $name,)+
        }

        impl PolicyName {
            /// A new policy object, for one side of one pool.
            pub fn build(self, config: &PairConfig) -> Arc<dyn Policy> {
                match self {
                    $(PolicyName::$name => Arc::new($make(config)),)+
                }
            }
        }
    };
}

policies! {
    /// Any of them.
    Random => random::Random::new,
    /// One after the other.
    RoundRobin => round_robin::RoundRobin::new,
    /// Two at random, the less loaded of them.
    PowerOfTwo => power_of_two::PowerOfTwo::new,
    /// The least loaded.
    LeastLoad => least_load::LeastLoad::new,
    /// The one that holds the longest beginning of the conversation, unless it is much busier than others.
    CacheAware => cache_aware::CacheAware::new,
    /// By the length of the prompt (prefill only).
    Bucket => bucket::Bucket::new,
    /// By a hash of the session or user, within a bound of load.
    ConsistentHashing => consistent_hashing::ConsistentHashing::new,
    /// Where the session or user was first.
    Manual => manual::Manual::new,
}

/// Who a worker is, for policies: derived from its name, so that it is the same in each gateway and after each restart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct WorkerId(u64);

impl WorkerId {
    /// `name`: the worker's URL, with `@rank` behind it where the ranks of one worker are candidates of their own.
    pub fn of(name: &str) -> Self {
        WorkerId(xxh3_64(name.as_bytes()))
    }

    /// A hash of its name.
    fn hash(self) -> u64 {
        self.0
    }
}

/// A worker that may get the leg.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub id: WorkerId,
    pub load: Load,
}

/// What a client's headers say about which requests belong together, before the body's `user` does.
pub fn session_of(headers: &HeaderMap) -> Option<&str> {
    SESSION_HEADERS.iter().find_map(|name| headers.get(*name)?.to_str().ok().filter(|session| !session.is_empty()))
}

/// What a policy may look at of a request.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The conversation as one text; only made where [`Policy::reads_text`].
    pub text: Option<&'a str>,
    /// The length of the prompt, or of the body where nobody measured the prompt.
    pub prompt_bytes: usize,
    /// What says that requests belong together; only where [`Policy::reads_key`].
    pub key: Option<&'a str>,
    pub now: Instant,
}

/// A way to choose. Requests of all threads share the object.
pub trait Policy: Send + Sync + Debug {
    /// As settings and metrics call it.
    fn name(&self) -> &'static str;

    /// It wants [`Ask::text`], which costs a pass over the body.
    fn reads_text(&self) -> bool {
        false
    }

    /// It wants [`Ask::key`].
    fn reads_key(&self) -> bool {
        false
    }

    /// The index of the chosen one. There is at least one candidate, and they come in the order of the pool.
    fn choose(&self, ask: &Ask, candidates: &[Candidate], dice: &mut dyn RngCore) -> usize;

    /// The worker is gone: nothing of it is remembered.
    fn forget(&self, _worker: WorkerId) {}

    /// How often which branch was taken, by a name that metrics use.
    fn branches(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// What it remembers, where it does: keys or blocks.
    fn entries(&self) -> Option<usize> {
        None
    }
}

/// A number below `count`, each as likely.
fn below(count: usize, dice: &mut dyn RngCore) -> usize {
    ((u128::from(dice.next_u64()) * count as u128) >> 64) as usize
}

#[cfg(test)]
mod tests;
