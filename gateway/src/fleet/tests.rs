//! Stories of the registry and its pools, without workers or a clock.

use std::sync::Mutex;

use rand::RngCore;

use super::*;
use crate::config::tests::config;
use crate::pair::{Ask, Candidate, Policy};
use pool::SideState;

fn fleet(line: &str) -> Fleet {
    Fleet::new(&config(line).unwrap())
}

fn pair() -> Fleet {
    fleet("--prefill http://p:1 --prefill http://q:1 --decode http://d:1 --policy round_robin")
}

fn spec(url: &str, role: Role) -> WorkerSpec {
    WorkerSpec::new(url, role).unwrap()
}

fn ask() -> Ask<'static> {
    Ask { text: None, prompt_bytes: 0, key: None, now: std::time::Instant::now() }
}

fn pick(fleet: &Fleet, role: Role, excluded: &[WorkerId]) -> Result<Picked, NoWorker> {
    fleet.snapshot().pool(None).unwrap().pick(role, &ask(), excluded)
}

fn urls(fleet: &Fleet) -> Vec<String> {
    fleet.snapshot().workers.iter().map(|w| w.url().to_owned()).collect()
}

fn worker(fleet: &Fleet, url: &str) -> Arc<Worker> {
    fleet.snapshot().workers.iter().find(|w| w.url() == url).unwrap().clone()
}

#[test]
fn healthy_first_then_those_that_may_be_back() {
    let fleet = pair();
    assert!(!fleet.snapshot().is_ready());
    assert_eq!(
        pick(&fleet, Role::Decode, &[]).unwrap().worker.url(),
        "http://d:1",
        "not reached yet, but perhaps there"
    );
    let (p, q, d) = (worker(&fleet, "http://p:1"), worker(&fleet, "http://q:1"), worker(&fleet, "http://d:1"));
    q.live.note_answered();
    for _ in 0..4 {
        assert_eq!(pick(&fleet, Role::Prefill, &[]).unwrap().worker.id(), q.id());
    }
    assert_eq!(pick(&fleet, Role::Prefill, &[q.id()]).unwrap().worker.id(), p.id());
    d.live.note_declined(Health::NotReady("starting".into()));
    let nobody = pick(&fleet, Role::Decode, &[]).unwrap_err();
    assert!(nobody.why == "starting" && nobody.detail.contains("http://d:1"), "{nobody:?}");
    d.live.note_answered();
    assert!(fleet.snapshot().is_ready());
}

#[test]
fn a_pick_counts_as_load_until_it_is_dropped() {
    let fleet = pair();
    let picked = pick(&fleet, Role::Decode, &[]).unwrap();
    picked.worker.report_load(&[(0, 100)]);
    picked.sent(40);
    let worker = picked.worker.clone();
    assert_eq!((worker.load().tokens, worker.load().legs), (Some(110), 1));
    drop(picked);
    assert_eq!((worker.load().tokens, worker.load().legs), (Some(110), 0));
}

#[test]
fn silence_cuts_the_legs_that_run_and_those_that_begin() {
    use futures_util::FutureExt;
    let fleet = pair();
    let d = worker(&fleet, "http://d:1");
    d.live.note_answered();
    for _ in 0..3 {
        assert!(d.until_cut(crate::error::Side::Decode).now_or_never().is_none());
        d.live.note_missed("no answer");
        d.live.note_connected();
    }
    let failure = d.until_cut(crate::error::Side::Decode).now_or_never().expect("cut at once");
    assert_eq!(failure.code, "decode_silent");
    d.live.note_answered();
    assert!(d.until_cut(crate::error::Side::Decode).now_or_never().is_none());
}

#[test]
fn a_worker_lives_as_long_as_a_source_names_it() {
    let fleet = pair();
    fleet.update(Source::File, vec![spec("http://d:1", Role::Decode), spec("http://e:1", Role::Decode)]);
    fleet.update(Source::Flags, vec![spec("http://p:1", Role::Prefill)]);
    assert_eq!(urls(&fleet), ["http://p:1", "http://d:1", "http://e:1"], "the file still names d");
    let running = worker(&fleet, "http://e:1").begin(0).unwrap();
    fleet.update(Source::File, vec![]);
    assert_eq!(urls(&fleet), ["http://p:1", "http://e:1"], "e drains");
    assert!(running.worker.begin(0).is_none(), "a snapshot that knew it begins nothing there");
    assert_eq!(pick(&fleet, Role::Decode, &[]).unwrap_err().why, "there is none");
    drop(running);
    fleet.sweep();
    assert_eq!(urls(&fleet), ["http://p:1"]);
}

#[test]
fn one_that_is_named_again_while_it_drains_goes_on() {
    let fleet = pair();
    let running = worker(&fleet, "http://d:1").begin(0).unwrap();
    fleet.remove("http://d:1");
    assert!(running.worker.is_draining());
    fleet.add(spec("http://d:1", Role::Decode));
    assert!(!running.worker.is_draining() && pick(&fleet, Role::Decode, &[]).is_ok());
    assert_eq!(worker(&fleet, "http://d:1").legs(), 1, "the same worker");
}

#[test]
fn what_an_operator_removed_stays_out_until_nobody_names_it() {
    let fleet = pair();
    let flags = || vec![spec("http://p:1", Role::Prefill), spec("http://d:1", Role::Decode)];
    fleet.remove("http://d:1");
    fleet.update(Source::Flags, flags());
    assert_eq!(urls(&fleet), ["http://p:1"]);
    fleet.update(Source::Flags, flags()[..1].to_vec());
    fleet.update(Source::Flags, flags());
    assert_eq!(urls(&fleet), ["http://p:1", "http://d:1"]);
}

#[test]
fn a_change_outlives_updates_and_ends_with_the_worker() {
    let fleet = pair();
    fleet.change("http://q:1", Change { role: Some(Role::Decode), ..Change::default() });
    fleet.change("http://q:1", Change { model: Some("m".into()), ..Change::default() });
    fleet.update(Source::File, vec![]);
    let q = worker(&fleet, "http://q:1");
    assert_eq!((q.spec.role, q.spec.model.as_deref()), (Role::Decode, Some("m")));
    let held = fleet.snapshot();
    fleet.update(Source::Flags, vec![]);
    fleet.update(Source::Flags, vec![spec("http://q:1", Role::Prefill)]);
    assert_eq!(worker(&fleet, "http://q:1").spec.role, Role::Prefill);
    assert!(held.workers.iter().any(|w| w.spec.role == Role::Decode), "a snapshot does not change");
}

#[test]
fn ranks_are_candidates_of_their_own() {
    let fleet = fleet("--worker-urls http://w:1 --dp-aware --policy round_robin");
    let w = worker(&fleet, "http://w:1");
    fleet.learn(w.id(), Facts { dp_size: Some(3), ..Facts::default() });
    let picked: Vec<_> = (0..6).map(|_| pick(&fleet, Role::Plain, &[]).unwrap()).collect();
    let ranks: Vec<_> = picked.iter().map(|p| p.rank.unwrap()).collect();
    assert!(ranks.iter().all(|rank| rank.size == 3));
    for index in 0..3 {
        assert_eq!(ranks.iter().filter(|rank| rank.index == index).count(), 2);
    }
    let w = worker(&fleet, "http://w:1");
    w.report_load(&[(0, 5), (2, 7)]);
    assert_eq!(w.slots[2].load().tokens, Some(7));
    assert_eq!(w.slots[1].load().tokens, None, "a rank that reports nothing is not taken for idle");
    assert_eq!((w.load().tokens, w.load().legs), (None, 6));
}

#[test]
fn adapters_of_some_workers_have_pools_within_the_one_model() {
    let fleet = fleet("--worker-urls http://v:1 http://w:1 http://x:1");
    let names = |names: &[&str]| Facts { models: names.iter().map(|n| (*n).into()).collect(), ..Facts::default() };
    fleet.learn(worker(&fleet, "http://v:1").id(), names(&["m", "lora"]));
    fleet.learn(worker(&fleet, "http://w:1").id(), names(&["m"]));
    let snapshot = fleet.snapshot();
    let size = |model| snapshot.pool(model).unwrap().workers(Role::Plain).len();
    assert_eq!((size(Some("m")), size(Some("lora")), size(Some("other")), size(None)), (3, 1, 3, 3));
    fleet.learn(worker(&fleet, "http://x:1").id(), names(&["n"]));
    let snapshot = fleet.snapshot();
    assert_eq!(snapshot.pool(Some("other")).unwrap_err().code, "model_not_found");
    assert_eq!(snapshot.pool(Some("n")).unwrap().workers(Role::Plain).len(), 1);
}

/// Takes the first, and remembers whom it was told to forget.
#[derive(Debug, Default)]
struct Noting(Mutex<Vec<WorkerId>>);

impl Policy for Noting {
    fn name(&self) -> &'static str {
        "noting"
    }

    fn choose(&self, _: &Ask, _: &[Candidate], _: &mut dyn RngCore) -> usize {
        0
    }

    fn forget(&self, worker: WorkerId) {
        self.0.lock().unwrap().push(worker);
    }
}

#[test]
fn policies_forget_who_is_gone_and_nobody_else() {
    let fleet = fleet("--worker-urls http://v:1 http://w:1");
    let all = fleet.snapshot().workers.clone();
    let policy = Arc::new(Noting::default());
    let of = |workers: &[Arc<Worker>]| Snapshot::new(workers.to_vec(), |_, _| SideState::new(policy.clone()));
    pool::forget_gone(&of(&all), &of(&all));
    assert!(policy.0.lock().unwrap().is_empty());
    pool::forget_gone(&of(&all), &of(&all[1..]));
    assert_eq!(*policy.0.lock().unwrap(), [all[0].id()]);
}

#[test]
fn the_first_pool_keeps_its_policies_when_its_model_is_learnt() {
    let fleet = pair();
    let before = fleet.snapshot().pool(None).unwrap().policy(Role::Decode).clone();
    fleet.learn(worker(&fleet, "http://d:1").id(), Facts { models: vec!["m".into()], ..Facts::default() });
    let snapshot = fleet.snapshot();
    let pool = snapshot.pool(Some("m")).unwrap();
    assert!(pool.name == "m" && Arc::ptr_eq(pool.policy(Role::Decode), &before));
}

#[test]
fn an_open_breaker_is_tried_by_one_leg_and_a_word_of_it_closes() {
    let fleet = fleet("--worker-urls http://w:1 --cb-failure-threshold 2 --cb-timeout-duration-secs 0.001");
    let w = worker(&fleet, "http://w:1");
    for _ in 0..2 {
        pick(&fleet, Role::Plain, &[]).unwrap().report(Outcome::Failed);
    }
    assert_eq!(w.live.breaker_state(), State::Open);
    let opened = std::time::Instant::now();
    let trial = loop {
        match pick(&fleet, Role::Plain, &[]) {
            Ok(trial) => break trial,
            Err(nobody) => assert!(nobody.why.contains("circuit breaker is open"), "{nobody:?}"),
        }
        assert!(opened.elapsed() < Duration::from_secs(5));
    };
    assert!(pick(&fleet, Role::Plain, &[]).unwrap_err().why.contains("half open"), "one trial at a time");
    drop(trial);
    let next = pick(&fleet, Role::Plain, &[]).expect("the first trial ended without a word");
    next.report(Outcome::Good);
    assert_eq!(w.live.breaker_state(), State::Closed);
    assert!(pick(&fleet, Role::Plain, &[]).is_ok());
    assert_eq!(w.live.outcomes(Outcome::Failed), 2);
}
