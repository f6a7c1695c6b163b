//! The real roles with a checker between them and the engine: what they promise is watched as it passes. *Pure.*
//!
//! The checker also tells the ledger of modelled memory who holds which page as a destination (H2), and compares what is
//! published with the oracle at the moment of the commit (H4).

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tandem_handoff::{
    fence::PublishedPages,
    ids::{Incarnation, RequestId, Time},
    ticket::Ticket,
    wire::{Cause, FirstToken},
};
use tandem_worker::{
    decode_role::{DecodeFact, DecodeHandoff, DecodeQueues, DecodeRole},
    prefill_role::{PrefillFact, PrefillHandoff, PrefillQueues, PrefillRole},
    request::SeqId,
};

use crate::{
    fabric::{SharedWire, lock},
    model,
};

/// What the checker knows of one request at P.
struct PrefillBook {
    room: u64,
    ended: bool,
    /// Its room is in use by an older request that is not quiet.
    second: bool,
}

/// P's role, shared by the engine and the world, which looks at its states.
#[derive(Clone)]
pub struct WatchedPrefill(pub Arc<Mutex<PrefillWatch>>);

pub struct PrefillWatch {
    pub role: PrefillRole,
    wire: SharedWire,
    process: Incarnation,
    live: BTreeMap<u64, PrefillBook>,
}

impl WatchedPrefill {
    pub fn new(role: PrefillRole, wire: SharedWire, process: Incarnation) -> Self {
        Self(Arc::new(Mutex::new(PrefillWatch { role, wire, process, live: BTreeMap::new() })))
    }

    pub fn lock(&self) -> MutexGuard<'_, PrefillWatch> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PrefillWatch {
    /// Requests that the role has not let go of.
    pub fn live(&self) -> impl Iterator<Item = u64> + '_ {
        self.live.keys().copied()
    }

    fn violation(&self, rule: &'static str, what: String) {
        let mut wire = lock(&self.wire);
        let name = wire.ground.name(self.process).to_owned();
        wire.ground.violation(rule, format!("{name}: {what}"));
    }

    fn watch(&mut self, fact: &PrefillFact) {
        let broken = match fact {
            PrefillFact::Reserved { id, .. } => match self.live.get(&id.0) {
                Some(book) if book.second => Some(format!("{id:?} is accepted although its room is in use")),
                Some(book) if !book.ended => None,
                _ => Some(format!("{id:?} is reserved after its end")),
            },
            PrefillFact::Delivered { id } | PrefillFact::Failed { id, .. } => match self.live.get_mut(&id.0) {
                Some(book) if !book.ended => {
                    book.ended = true;
                    None
                }
                _ => Some(format!("{id:?} ends twice: {fact:?}")),
            },
            PrefillFact::Quiet { id } => match self.live.remove(&id.0) {
                Some(book) if book.ended => None,
                _ => Some(format!("{id:?} is quiet before its end, or twice")),
            },
        };
        if let Some(what) = broken {
            self.violation("H7", what);
        }
    }
}

impl PrefillHandoff for WatchedPrefill {
    fn request(&mut self, now: Time, id: SeqId, ticket: &Ticket, prompt: &[u32]) {
        let mut watch = self.lock();
        let room = ticket.room.get();
        // The machine's own word for what is quiet: the engine hears of it in its next poll.
        let in_use = |id: &u64| watch.role.machine().state(RequestId(*id)).is_some();
        let second = watch.live.iter().any(|(id, book)| book.room == room && in_use(id));
        watch.live.insert(id.0, PrefillBook { room, ended: false, second });
        watch.role.request(now, id, ticket, prompt);
    }

    fn chunk_written(&mut self, now: Time, id: SeqId, pages: &[u32], range: Range<usize>) {
        self.lock().role.chunk_written(now, id, pages, range);
    }

    fn finish(&mut self, now: Time, id: SeqId, pages: &[u32], range: Range<usize>, first: FirstToken) {
        self.lock().role.finish(now, id, pages, range, first);
    }

    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause) {
        self.lock().role.cancel(now, id, cause);
    }

    fn poll(&mut self, now: Time) -> Vec<PrefillFact> {
        let mut watch = self.lock();
        let facts = watch.role.poll(now);
        for fact in &facts {
            watch.watch(fact);
        }
        facts
    }

    fn next_deadline(&self) -> Time {
        self.lock().role.next_deadline()
    }

    fn queues(&self) -> PrefillQueues {
        self.lock().role.queues()
    }
}

/// What the checker knows of one request at D.
struct DecodeBook {
    prompt: Vec<u32>,
    pages: Vec<u32>,
    ended: bool,
    /// D took the attempt's Failed in an earlier turn (H4).
    failed: bool,
}

/// D's role, shared by the engine and the world, which looks at its states.
#[derive(Clone)]
pub struct WatchedDecode(pub Arc<Mutex<DecodeWatch>>);

pub struct DecodeWatch {
    pub role: DecodeRole,
    wire: SharedWire,
    process: Incarnation,
    live: BTreeMap<u64, DecodeBook>,
}

impl WatchedDecode {
    pub fn new(role: DecodeRole, wire: SharedWire, process: Incarnation) -> Self {
        Self(Arc::new(Mutex::new(DecodeWatch { role, wire, process, live: BTreeMap::new() })))
    }

    pub fn lock(&self) -> MutexGuard<'_, DecodeWatch> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DecodeWatch {
    /// Requests whose pages have not come back.
    pub fn live(&self) -> impl Iterator<Item = u64> + '_ {
        self.live.keys().copied()
    }

    fn violation(&self, rule: &'static str, what: String) {
        let mut wire = lock(&self.wire);
        let name = wire.ground.name(self.process).to_owned();
        wire.ground.violation(rule, format!("{name}: {what}"));
    }

    /// The pages go back to the pool: nobody may write there any more.
    fn let_go(&self, pages: &[u32]) {
        let mut wire = lock(&self.wire);
        let memory = wire.ground.memory(self.process);
        pages.iter().for_each(|&page| memory.let_go(page));
    }

    fn watch(&mut self, fact: &DecodeFact) {
        match fact {
            DecodeFact::Committed { id, pages, .. } => match self.live.remove(&id.0) {
                Some(book) if !book.ended => self.committed(*id, &book, pages.numbers()),
                _ => self.violation("H7", format!("{id:?} commits after its end")),
            },
            DecodeFact::Failed { id, error } => match self.live.get_mut(&id.0) {
                Some(book) if !book.ended => {
                    book.ended = true;
                    self.failed(*id, &error.message);
                }
                _ => self.violation("H7", format!("{id:?} fails after its end")),
            },
            DecodeFact::Quiet { pages, .. } => {
                let owner = self.live.iter().find(|(_, book)| book.pages == pages.numbers()).map(|(id, _)| *id);
                match owner.and_then(|id| self.live.remove(&id)) {
                    Some(book) if book.ended => self.let_go(&book.pages),
                    _ => self.violation("H7", format!("{pages:?} come back before their end, or twice")),
                }
            }
        }
    }

    /// H3: a failure that P reported was reported of this very attempt.
    fn failed(&self, id: SeqId, message: &str) {
        let mut wire = lock(&self.wire);
        wire.ground.says(self.process, format_args!("request {} failed: {message}", id.0));
        let (failed, _) = wire.ground.heard(self.process, id.0);
        if message.starts_with("prefill worker:") && !failed && !message.contains("without a reason") {
            wire.ground.violation("H3", format!("{id:?} fails by a frame of another attempt: {message}"));
        }
        if message.contains("arrived damaged") && !wire.ground.flipped {
            wire.ground.violation("H4", format!("{id:?} landed damaged though no byte changed on its way: {message}"));
        }
    }

    /// H4: what is published is what the oracle has for that prompt.
    fn committed(&self, id: SeqId, book: &DecodeBook, pages: &[u32]) {
        if pages != book.pages {
            self.violation("H1", format!("{id:?} commits pages {pages:?}, it offered {:?}", book.pages));
        }
        let differs = {
            let mut wire = lock(&self.wire);
            wire.ground.says(self.process, format_args!("commits request {}", id.0));
            wire.ground.memory(self.process).differs(&book.pages, &model::chains(&book.prompt), true)
        };
        if let Some(what) = differs {
            self.violation("H4", format!("{id:?} commits what is not the KV of its prompt: {what}"));
        }
        let (_, done) = lock(&self.wire).ground.heard(self.process, id.0);
        if book.failed {
            self.violation("H4", format!("{id:?} commits although its attempt had failed before"));
        } else if !done {
            self.violation("H3", format!("{id:?} commits without Done of its own attempt"));
        }
        self.let_go(&book.pages);
    }

    /// What D knew before this turn.
    fn remember(&mut self) {
        let wire = lock(&self.wire);
        for (&id, book) in &mut self.live {
            book.failed |= wire.ground.heard(self.process, id).0;
        }
    }
}

impl DecodeHandoff for WatchedDecode {
    fn reserve(&mut self, now: Time, arrived: Time, id: SeqId, ticket: &Ticket, prompt: &[u32], pages: PublishedPages) {
        let mut watch = self.lock();
        let book = DecodeBook { prompt: prompt.to_vec(), pages: pages.numbers().to_vec(), ended: false, failed: false };
        {
            let mut wire = lock(&watch.wire);
            let memory = wire.ground.memory(watch.process);
            let doubly: Vec<u32> = book.pages.iter().copied().filter(|&page| memory.holder(page).is_some()).collect();
            book.pages.iter().for_each(|&page| memory.hold(page, id.0));
            if !doubly.is_empty() {
                wire.ground.violation("H1", format!("{id:?} offers pages {doubly:?}, which another attempt holds"));
            }
        }
        watch.live.insert(id.0, book);
        watch.role.reserve(now, arrived, id, ticket, prompt, pages);
    }

    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause) {
        self.lock().role.cancel(now, id, cause);
    }

    fn poll(&mut self, now: Time) -> Vec<DecodeFact> {
        let mut watch = self.lock();
        watch.remember();
        let facts = watch.role.poll(now);
        for fact in &facts {
            watch.watch(fact);
        }
        facts
    }

    fn next_deadline(&self) -> Time {
        self.lock().role.next_deadline()
    }

    fn queues(&self) -> DecodeQueues {
        self.lock().role.queues()
    }
}
