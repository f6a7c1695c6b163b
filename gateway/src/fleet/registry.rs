//! Who belongs to the fleet: what each source names now, what an operator changed or removed, and the workers that follow
//! from it. A worker is known by its URL; it lives as long as a source names it, and drains when none does. *Pure* but for
//! the workers' own atomics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::config::{FleetConfig, PairConfig, Role, Secret, WorkerSpec};
use crate::fleet::learn::Facts;
use crate::fleet::live::Live;
use crate::fleet::load::Slot;
use crate::fleet::pool::{SideState, Snapshot};
use crate::fleet::worker::Worker;
use crate::pair::WorkerId;

/// Who names workers. Where two name the same one, the first of this order describes it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Source {
    /// `POST /workers`.
    Rest,
    Flags,
    File,
    Kubernetes,
    Dns,
}

impl Source {
    pub fn name(self) -> &'static str {
        match self {
            Source::Rest => "rest",
            Source::Flags => "flags",
            Source::File => "file",
            Source::Kubernetes => "kubernetes",
            Source::Dns => "dns",
        }
    }
}

/// What an operator changes about a worker (`PUT /workers/{id}`); nothing where nothing is given.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Change {
    pub role: Option<Role>,
    pub bootstrap_port: Option<u16>,
    pub model: Option<String>,
    pub api_key: Option<Secret>,
    pub labels: Option<BTreeMap<String, String>>,
}

impl Change {
    /// This change, and a later one on top of it.
    fn and(self, later: Change) -> Change {
        Change {
            role: later.role.or(self.role),
            bootstrap_port: later.bootstrap_port.or(self.bootstrap_port),
            model: later.model.or(self.model),
            api_key: later.api_key.or(self.api_key),
            labels: later.labels.or(self.labels),
        }
    }

    /// A worker as it is described, changed.
    pub fn of(&self, spec: &WorkerSpec) -> WorkerSpec {
        WorkerSpec {
            role: self.role.unwrap_or(spec.role),
            bootstrap_port: self.bootstrap_port.or(spec.bootstrap_port),
            model: self.model.clone().or_else(|| spec.model.clone()),
            api_key: self.api_key.clone().or_else(|| spec.api_key.clone()),
            labels: self.labels.clone().unwrap_or_else(|| spec.labels.clone()),
            ..spec.clone()
        }
    }
}

/// The book that snapshots are written from.
#[derive(Debug, Default)]
pub struct Registry {
    named: BTreeMap<Source, Vec<WorkerSpec>>,
    /// URLs that an operator removed while a source names them; they stay out until none does, or until they are added
    /// again.
    removed: BTreeSet<String>,
    changes: BTreeMap<String, Change>,
    members: Vec<Member>,
    sides: BTreeMap<(String, Role), SideState>,
}

#[derive(Debug)]
struct Member {
    /// As its sources describe it.
    spec: WorkerSpec,
    facts: Facts,
    sources: Vec<Source>,
    live: Arc<Live>,
    /// What the last snapshot has of it.
    value: Option<Arc<Worker>>,
}

impl Registry {
    /// All that one source names now.
    pub fn name(&mut self, source: Source, specs: Vec<WorkerSpec>) {
        self.named.insert(source, specs);
    }

    /// An operator adds a worker. It is in again, whoever else names it.
    pub fn add(&mut self, spec: WorkerSpec) {
        self.removed.remove(&spec.url);
        self.changes.remove(&spec.url);
        let ours = self.named.entry(Source::Rest).or_default();
        ours.retain(|known| known.url != spec.url);
        ours.push(spec);
    }

    /// An operator removes a worker, whoever names it.
    pub fn remove(&mut self, url: &str) {
        if let Some(ours) = self.named.get_mut(&Source::Rest) {
            ours.retain(|known| known.url != url);
        }
        self.removed.insert(url.to_owned());
    }

    pub fn change(&mut self, url: &str, later: Change) {
        if let Some(member) = self.members.iter_mut().find(|m| m.spec.url == url)
            && later.role.is_some()
        {
            // The operator's word comes after the worker's own.
            member.facts.role = None;
            member.live.meet_again();
        }
        let change = self.changes.remove(url).unwrap_or_default().and(later);
        self.changes.insert(url.to_owned(), change);
    }

    /// Takes what a worker says of itself; true if it is news.
    pub fn learn(&mut self, id: WorkerId, facts: Facts) -> bool {
        let Some(member) = self.members.iter_mut().find(|m| m.live.id == id) else { return false };
        let news = member.facts != facts;
        member.facts = facts;
        news
    }

    /// Brings the members up to date and writes the snapshot that follows from them.
    pub fn snapshot(&mut self, config: &FleetConfig, pair: &PairConfig, before: &Snapshot) -> Snapshot {
        self.muster(config);
        let values = self.members.iter_mut().map(|member| member.value(config)).collect();
        self.keep_first_pool(before);
        let sides = &mut self.sides;
        let snapshot = Snapshot::new(values, |name, role| {
            let policy = if role == Role::Prefill { pair.prefill_policy } else { pair.decode_policy };
            sides.entry((name.to_owned(), role)).or_insert_with(|| SideState::new(policy.build(pair))).clone()
        });
        sides.retain(|(name, _), _| snapshot.pools().iter().any(|pool| pool.name == *name));
        snapshot
    }

    /// Members are those that some source names; others drain, and are forgotten once they have no leg.
    fn muster(&mut self, config: &FleetConfig) {
        let named: BTreeSet<&str> = self.named.values().flatten().map(|spec| spec.url.as_str()).collect();
        self.removed.retain(|url| named.contains(url.as_str()));
        self.changes.retain(|url, _| named.contains(url.as_str()) && !self.removed.contains(url));
        for member in &mut self.members {
            member.sources.clear();
        }
        for (source, specs) in &self.named {
            for spec in specs.iter().filter(|spec| !self.removed.contains(&spec.url)) {
                match self.members.iter_mut().find(|m| m.spec.url == spec.url) {
                    Some(member) if member.sources.contains(source) => {}
                    Some(member) => {
                        if member.sources.is_empty() {
                            let changed = self.changes.get(&spec.url).map(|change| change.of(spec));
                            member.describe(changed.unwrap_or_else(|| spec.clone()));
                        }
                        member.sources.push(*source);
                    }
                    None => self.members.push(Member::new(spec.clone(), *source, config)),
                }
            }
        }
        for member in &self.members {
            member.live.drain(member.sources.is_empty());
        }
        self.members.retain(|member| !member.sources.is_empty() || member.live.legs() > 0);
    }

    /// The fleet's only pool keeps its policies when its workers tell their model.
    fn keep_first_pool(&mut self, before: &Snapshot) {
        let mut names = self.members.iter().flat_map(|member| match &member.spec.model {
            Some(model) => std::slice::from_ref(model),
            None => &member.facts.models,
        });
        if let ([only], Some(name)) = (before.pools(), names.next())
            && only.name.is_empty()
        {
            let name = name.clone();
            let sides = std::mem::take(&mut self.sides);
            self.sides = sides.into_iter().map(|((_, role), state)| ((name.clone(), role), state)).collect();
        }
    }
}

impl Member {
    fn new(spec: WorkerSpec, source: Source, config: &FleetConfig) -> Self {
        let live = Arc::new(Live::new(&spec.url, config.thresholds, config.breaker));
        Member { spec, facts: Facts::default(), sources: vec![source], live, value: None }
    }

    /// Takes a new description. What it was met as before is no longer what it must be met as where its role is another one.
    fn describe(&mut self, spec: WorkerSpec) {
        if spec.role != self.spec.role {
            self.facts.role = None;
            self.live.meet_again();
        }
        self.spec = spec;
    }

    /// Its value for a snapshot: the last one where nothing about it is new.
    fn value(&mut self, config: &FleetConfig) -> Arc<Worker> {
        let role = self.facts.role.unwrap_or(self.spec.role);
        let ranks = match config.dp_aware {
            true => self.spec.dp_size.or(self.facts.dp_size).unwrap_or(1).max(1),
            false => 1,
        };
        let spec = WorkerSpec { role, ..self.spec.clone() };
        let slots = match &self.value {
            Some(last) if last.slots.len() == usize::from(ranks) => {
                if last.spec == spec && last.facts == self.facts && last.sources == self.sources {
                    return last.clone();
                }
                last.slots.clone()
            }
            _ => (0..ranks).map(|_| Slot::new()).collect(),
        };
        let value = Worker::new(spec, self.facts.clone(), self.sources.clone(), slots, self.live.clone());
        self.value.insert(Arc::new(value)).clone()
    }
}
