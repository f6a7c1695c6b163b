//! One side of a split alone, its peer played by a script: faults of queues, idle engines and steps that hang.

use std::{
    sync::{Arc, atomic::Ordering, mpsc},
    time::{Duration, Instant},
};

use tandem_handoff::{
    ids::{Room, Time},
    layout::PoolShape,
    limits::Limits,
    ticket::Ticket,
    wire::{Cause, CauseKind, Side},
};

use super::common::{Bench, Shape, parts, request};
use crate::{
    bootstrap::stats::HandoffStats,
    config::Role,
    decode_role,
    engine::{EngineHandle, inbox::Mail, spawn, thread::RoleDriver},
    prefill_role,
    request::{SampleErrorKind, SampleEvent, SampleRequest},
};

const SHAPE: Shape = Shape { pages: 8, page_size: 4, chunk: 8, running: 4, context: 30, reserved_decode: 4 };
/// Nothing here takes longer, unless it hangs.
const LIMIT: Duration = Duration::from_secs(20);

fn pool() -> PoolShape {
    PoolShape { layers: 1, kv_heads: 1, head_dim: 1, page_size: 4, element_bytes: 4, tp: 1, pages: SHAPE.pages }
}

fn room(value: u64) -> Room {
    Room::new(value).unwrap()
}

fn with_room(value: u64) -> SampleRequest {
    let ticket = Ticket { host: "p".into(), port: 8998, room: room(value) };
    SampleRequest { ticket: Some(ticket), ..request(&[1, 2, 3], 4) }
}

fn failure(event: Option<SampleEvent>) -> SampleErrorKind {
    match event {
        Some(SampleEvent::Failed(error)) => error.kind,
        other => panic!("no failure but {other:?}"),
    }
}

#[test]
fn a_decode_worker_that_never_sends_its_pages_costs_a_deadline_and_one_failure() {
    let stats = Arc::new(HandoffStats::default());
    let (role, script) = prefill_role::scripted::counted(pool(), Limits::default(), stats.clone());
    let mut bench = Bench::new(SHAPE, Role::Prefill, RoleDriver::Prefill(Box::new(role)));
    let id = bench.submit(&with_room(1));
    bench.now = Time(299_000_000);
    bench.turn(Mail::default());
    assert!(bench.said[&id].is_empty());
    assert_eq!(bench.core.loads().bootstrap_queue, 1);
    bench.now = Time(301_000_000);
    bench.turn(Mail::default());
    assert_eq!(failure(bench.said[&id].last().cloned()), SampleErrorKind::Timeout);
    assert_eq!(bench.core.loads().bootstrap_queue, 0);
    assert_eq!(stats.bootstrap_failed.load(Ordering::Relaxed), 1);
    assert!(script.posted().is_empty());
    bench.assert_all_free();
}

#[test]
fn a_thousand_prompts_without_pages_do_not_delay_one_that_has_them() {
    let (role, script) = prefill_role::scripted::prefill_role(pool(), Limits::default());
    let mut bench = Bench::new(SHAPE, Role::Prefill, RoleDriver::Prefill(Box::new(role)));
    for value in 1..=1000 {
        bench.submit(&with_room(value));
    }
    let ready = bench.submit(&with_room(1001));
    assert!(bench.toy.state.lock().unwrap().steps.is_empty());
    script.reserve(room(1001), &[1, 2, 3], vec![0]);
    bench.turn(Mail::default());
    bench.turn(Mail::default());
    assert_eq!(bench.toy.state.lock().unwrap().steps.len(), 1, "it starts within two turns");
    assert!(matches!(bench.said[&ready].last(), Some(SampleEvent::Finished { .. })));
    assert_eq!(bench.core.loads().bootstrap_queue, 1000);
}

/// A decode engine on its thread, whose clock runs.
fn decode_engine(limits: Limits) -> (EngineHandle, decode_role::scripted::DecodeScript, Arc<dyn Fn() + Send + Sync>) {
    let (role, script) = decode_role::scripted::decode_role(pool(), limits);
    let (mut parts, _) = parts(SHAPE, Role::Decode, RoleDriver::Decode(Box::new(role)));
    let born = Instant::now();
    parts.clock = Arc::new(move || Time(born.elapsed().as_micros() as u64));
    let waker = parts.waker.clone().into_fn();
    (spawn(parts).unwrap(), script, waker)
}

#[test]
fn a_lone_request_in_an_idle_engine_ends_by_its_deadline_without_other_traffic() {
    let (engine, ..) = decode_engine(Limits { waiting_timeout_ms: 30, ..Limits::default() });
    let mut lone = engine.submit(with_room(1)).unwrap();
    let start = Instant::now();
    assert_eq!(failure(lone.blocking_recv()), SampleErrorKind::Timeout);
    assert!(start.elapsed() < LIMIT);
    engine.shutdown();
}

#[test]
fn a_lone_request_in_an_idle_engine_is_woken_by_its_failed_transfer() {
    let (engine, script, wake) = decode_engine(Limits::default());
    let mut lone = engine.submit(with_room(1)).unwrap();
    let start = Instant::now();
    while script.pages(room(1)).is_none() {
        assert!(start.elapsed() < LIMIT, "no pages were offered");
        // As a channel does that came up.
        wake();
        std::thread::yield_now();
    }
    script.fail(room(1), Cause::new(Side::Prefill, CauseKind::Lost, "a page could not be sent"));
    wake();
    assert_eq!(failure(lone.blocking_recv()), SampleErrorKind::Peer);
    engine.shutdown();
}

#[test]
fn an_engine_without_a_peer_is_well_and_one_whose_step_hangs_shows_it() {
    let (role, _script) = prefill_role::scripted::prefill_role(pool(), Limits::default());
    let (parts, _) = parts(SHAPE, Role::Prefill, RoleDriver::Prefill(Box::new(role)));
    let engine = spawn(parts).unwrap();
    assert!(engine.is_alive() && engine.last_step_age() < LIMIT);
    engine.shutdown();

    let (parts, toy) = super::common::parts(SHAPE, Role::Null, RoleDriver::Null);
    let (go_on, hang) = mpsc::sync_channel::<()>(0);
    *toy.on_step.lock().unwrap() = Some(Box::new(move || {
        let _ = hang.recv();
    }));
    let engine = spawn(parts).unwrap();
    let mut stream = engine.submit(request(&[1, 2], 1)).unwrap();
    let start = Instant::now();
    while engine.last_step_age() < Duration::from_millis(20) {
        assert!(start.elapsed() < LIMIT, "a step that hangs has an age");
        std::thread::yield_now();
    }
    drop(go_on);
    while !matches!(stream.blocking_recv(), Some(SampleEvent::Finished { .. })) {}
    while engine.last_step_age() > Duration::ZERO {
        assert!(start.elapsed() < LIMIT, "an idle engine has no step");
        std::thread::yield_now();
    }
    engine.shutdown();
}
