//! The fleet at one moment: its workers and, per model, the pools that requests are served from. A pool may be split into
//! prefill and decode workers, have plain workers, or both. *Pure* but for what the workers' own atomics say.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use smallvec::SmallVec;

use crate::config::Role;
use crate::error::{Failure, Side};
use crate::fleet::health::Standing;
use crate::fleet::worker::{Picked, Worker};
use crate::pair::{Ask, Candidate, Policy, WorkerId};

/// Candidates that need no memory of their own during a pick.
const CANDIDATES_INLINE: usize = 16;
/// Names of models that an error lists.
const MODELS_SHOWN_MAX: usize = 20;

/// The workers and pools of one moment. Requests hold the one they began with.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// All that a source names, and those that drain, in the order in which they came.
    pub workers: Vec<Arc<Worker>>,
    pools: Vec<Arc<Pool>>,
    by_model: BTreeMap<String, usize>,
    /// Takes the models that nobody names: the fleet serves one.
    default: Option<usize>,
}

impl Snapshot {
    /// Groups `workers`; those without a source drain and are in no pool. `sides` gives what outlives a snapshot.
    pub fn new(workers: Vec<Arc<Worker>>, mut sides: impl FnMut(&str, Role) -> SideState) -> Self {
        let serving: Vec<Arc<Worker>> = workers.iter().filter(|w| !w.sources.is_empty()).cloned().collect();
        let mut names: Vec<&str> = Vec::new();
        for name in serving.iter().flat_map(|w| w.models()) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        let named = |w: &&Arc<Worker>| !w.models().is_empty();
        let has = |w: &Arc<Worker>, name: &str| w.models().iter().any(|model| model == name);
        let common = names.iter().copied().find(|name| serving.iter().filter(named).all(|w| has(w, name)));
        let mut groups: Vec<(&str, Vec<Arc<Worker>>)> = Vec::new();
        let mut by_model = BTreeMap::new();
        for name in &names {
            // Who has not told its model yet belongs to the only one there is.
            let belongs = |w: &&Arc<Worker>| has(w, name) || (common == Some(*name) && w.models().is_empty());
            let members: Vec<_> = serving.iter().filter(belongs).cloned().collect();
            let same = |(_, known): &(&str, Vec<Arc<Worker>>)| {
                known.len() == members.len() && known.iter().zip(&members).all(|(a, b)| Arc::ptr_eq(a, b))
            };
            let at = groups.iter().position(same).unwrap_or_else(|| {
                groups.push((name, members));
                groups.len() - 1
            });
            by_model.insert((*name).to_owned(), at);
        }
        if groups.is_empty() {
            groups.push(("", serving.clone()));
        }
        let default = match common {
            Some(name) => Some(by_model[name]),
            None => names.is_empty().then_some(0),
        };
        let pools = groups.into_iter().map(|(name, members)| Arc::new(Pool::new(name, members, &mut sides))).collect();
        Snapshot { workers, pools, by_model, default }
    }

    pub fn pools(&self) -> &[Arc<Pool>] {
        &self.pools
    }

    /// The names of all models.
    pub fn models(&self) -> impl Iterator<Item = (&str, &Arc<Pool>)> {
        self.by_model.iter().map(|(name, at)| (name.as_str(), &self.pools[*at]))
    }

    /// Who serves a request for this model. A fleet of one model serves any name, as its workers do.
    pub fn pool(&self, model: Option<&str>) -> Result<&Arc<Pool>, Failure> {
        let adapters_base = |name: &str| self.by_model.get(name.split_once(':')?.0);
        let found = model.and_then(|name| self.by_model.get(name).or_else(|| adapters_base(name)).copied());
        match (found.or(self.default), model) {
            (Some(at), _) => Ok(&self.pools[at]),
            (None, Some(name)) => {
                let shown: String = name.chars().take(200).collect();
                let what = format!("the model {shown:?} does not exist; there are {}", self.models_in_words());
                Err(Failure::client(404, "model_not_found", what).at("model"))
            }
            (None, None) => {
                let what = format!("name a model, since several are served here: {}", self.models_in_words());
                Err(Failure::client(400, "model_required", what).at("model"))
            }
        }
    }

    fn models_in_words(&self) -> String {
        let shown: Vec<_> = self.by_model.keys().take(MODELS_SHOWN_MAX).map(String::as_str).collect();
        let more = self.by_model.len().saturating_sub(MODELS_SHOWN_MAX);
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        shown.join(", ") + &rest
    }

    /// The worker with this id, draining or not.
    pub fn worker(&self, uuid: &str) -> Option<&Arc<Worker>> {
        self.workers.iter().find(|w| w.uuid() == uuid)
    }

    /// Some model can be served.
    pub fn is_ready(&self) -> bool {
        self.pools.iter().any(|pool| pool.is_ready())
    }
}

/// What a side of a pool keeps when its workers change.
#[derive(Clone, Debug)]
pub struct SideState {
    pub policy: Arc<dyn Policy>,
    pub picks: Arc<AtomicU64>,
}

impl SideState {
    pub fn new(policy: Arc<dyn Policy>) -> Self {
        SideState { policy, picks: Arc::default() }
    }
}

/// The workers of one model.
#[derive(Debug)]
pub struct Pool {
    /// The first of its names; empty while no worker told one.
    pub name: String,
    prefill: Members,
    decode: Members,
    plain: Members,
}

/// The workers of one role in a pool.
#[derive(Debug)]
struct Members {
    workers: Vec<Arc<Worker>>,
    /// Who may be picked: each rank of each worker, as its place in `workers`, its rank and its id.
    seats: Vec<(usize, usize, WorkerId)>,
    state: SideState,
}

impl Members {
    fn new(workers: Vec<Arc<Worker>>, state: SideState) -> Self {
        let ranks = |(at, worker): (usize, &Arc<Worker>)| {
            let worker = worker.clone();
            (0..worker.slots.len()).map(move |rank| (at, rank, seat_id(&worker, rank)))
        };
        let seats = workers.iter().enumerate().flat_map(ranks).collect();
        Members { workers, seats, state }
    }

    fn has(&self, standing: Standing) -> bool {
        self.workers.iter().any(|w| w.live.standing() == standing && w.live.admits())
    }
}

/// What policies call a worker, or one of its ranks.
pub fn seat_id(worker: &Worker, rank: usize) -> WorkerId {
    match worker.slots.len() {
        1 => worker.id(),
        _ => WorkerId::of(&format!("{}@{rank}", worker.url())),
    }
}

/// Nobody may serve a side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoWorker {
    pub role: Role,
    /// Why, in words that a client may read.
    pub why: String,
    /// Why, worker by worker, for the log.
    pub detail: String,
    /// When a breaker lets the next leg through.
    pub retry_after: Option<Duration>,
}

impl From<NoWorker> for Failure {
    fn from(none: NoWorker) -> Failure {
        let mut failure = Failure::no_worker(none.role.name(), &none.why).with_detail(none.detail);
        if let Some(wait) = none.retry_after {
            failure.retry_after_secs = Some(wait.as_secs_f64().ceil().clamp(1.0, 3600.0) as u32);
        }
        failure
    }
}

impl Pool {
    fn new(name: &str, workers: Vec<Arc<Worker>>, sides: &mut impl FnMut(&str, Role) -> SideState) -> Self {
        let mut of = |role: Role| {
            let members = workers.iter().filter(|w| w.spec.role == role).cloned().collect();
            Members::new(members, sides(name, role))
        };
        let (prefill, decode, plain) = (of(Role::Prefill), of(Role::Decode), of(Role::Plain));
        Pool { name: name.to_owned(), prefill, decode, plain }
    }

    fn members(&self, role: Role) -> &Members {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
            Role::Plain => &self.plain,
        }
    }

    pub fn workers(&self, role: Role) -> &[Arc<Worker>] {
        &self.members(role).workers
    }

    pub fn policy(&self, role: Role) -> &Arc<dyn Policy> {
        &self.members(role).state.policy
    }

    /// Legs for which a worker of this role was picked.
    pub fn picks(&self, role: Role) -> u64 {
        self.members(role).state.picks.load(Relaxed)
    }

    /// A request is served by a prefill and a decode worker now. A pool with both kinds goes split as long as each side has
    /// somebody, and else to its plain workers, if one of them may serve.
    pub fn is_split(&self) -> bool {
        let paired = !self.prefill.workers.is_empty() || !self.decode.workers.is_empty();
        if !paired || self.plain.workers.is_empty() {
            return paired;
        }
        let whole = |standing| self.prefill.has(standing) && self.decode.has(standing);
        whole(Standing::Healthy) || !self.plain.has(Standing::Healthy)
    }

    /// Somebody healthy on each side, or a healthy plain worker.
    pub fn is_ready(&self) -> bool {
        let healthy = |members: &Members| members.workers.iter().any(|w| w.is_healthy());
        (healthy(&self.prefill) && healthy(&self.decode)) || healthy(&self.plain)
    }

    /// A worker of this role: a healthy one by the policy, else one that may be back; never one whose breaker is open.
    pub fn pick(&self, role: Role, ask: &Ask, excluded: &[WorkerId]) -> Result<Picked, NoWorker> {
        let members = self.members(role);
        for standing in [Standing::Healthy, Standing::MaybeBack] {
            let mut seats: SmallVec<[(usize, usize); CANDIDATES_INLINE]> = SmallVec::new();
            let mut candidates: SmallVec<[Candidate; CANDIDATES_INLINE]> = SmallVec::new();
            for (at, rank, id) in &members.seats {
                let worker = &members.workers[*at];
                let live = &worker.live;
                if live.standing() == standing && live.admits() && !excluded.contains(&live.id) {
                    seats.push((*at, *rank));
                    candidates.push(Candidate { id: *id, load: worker.slots[*rank].load() });
                }
            }
            while !candidates.is_empty() {
                let chosen = members.state.policy.choose(ask, &candidates, &mut rand::rng());
                let (at, rank) = seats[chosen];
                if let Some(picked) = members.workers[at].begin(rank) {
                    members.state.picks.fetch_add(1, Relaxed);
                    return Ok(picked);
                }
                // Another request is its trial by now.
                seats.remove(chosen);
                candidates.remove(chosen);
            }
        }
        Err(self.nobody(role))
    }

    /// Why nobody of this role may serve.
    pub fn nobody(&self, role: Role) -> NoWorker {
        let workers = self.workers(role);
        let reasons: BTreeSet<_> = workers.iter().map(|w| w.live.reason()).collect();
        let why = match reasons.is_empty() {
            true => "there is none".to_owned(),
            false => reasons.into_iter().collect::<Vec<_>>().join("; "),
        };
        let all: Vec<_> = workers.iter().map(|w| format!("{}: {}", w.url(), w.live.reason())).collect();
        let waits = workers.iter().map(|w| w.live.opens_in()).filter(|wait| !wait.is_zero());
        NoWorker { role, why, detail: all.join("; "), retry_after: waits.min() }
    }
}

/// Has policies forget the workers, or ranks, that they had before and have not any more.
pub fn forget_gone(before: &Snapshot, after: &Snapshot) {
    let members = |snapshot: &Snapshot| -> Vec<(Arc<Pool>, Role)> {
        snapshot.pools.iter().flat_map(|pool| Role::ALL.map(|role| (pool.clone(), role))).collect()
    };
    let now = members(after);
    for (pool, role) in members(before) {
        let old = pool.members(role);
        let stays = |id: WorkerId| {
            now.iter().any(|(pool, role)| {
                let new = pool.members(*role);
                Arc::ptr_eq(&new.state.policy, &old.state.policy) && new.seats.iter().any(|seat| seat.2 == id)
            })
        };
        for (_, _, id) in old.seats.iter().filter(|(_, _, id)| !stays(*id)) {
            old.state.policy.forget(*id);
        }
    }
}

/// The role that takes this side's leg.
pub fn role_of(side: Side, split: bool) -> Role {
    match (side, split) {
        (Side::Prefill, _) => Role::Prefill,
        (Side::Decode, true) => Role::Decode,
        (Side::Decode, false) => Role::Plain,
    }
}
