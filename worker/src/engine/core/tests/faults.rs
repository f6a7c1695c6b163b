//! Steps that fail, rows that are not numbers, requests that cannot be served, a thread that panics.

use super::common::{Bench, Shape, parts, request, tokens};
use crate::{
    config::Role,
    engine::{inbox::Mail, spawn, thread::RoleDriver},
    request::{SampleErrorKind, SampleEvent, SampleRequest},
};

const SHAPE: Shape = Shape { pages: 8, page_size: 4, chunk: 8, running: 4, context: 30, reserved_decode: 4 };

fn failure(events: &[SampleEvent]) -> (SampleErrorKind, String) {
    match events.last() {
        Some(SampleEvent::Failed(error)) => (error.kind, error.message.clone()),
        other => panic!("no failure but {other:?}"),
    }
}

#[test]
fn a_failed_step_ends_its_samples_and_nothing_else() {
    let mut bench = Bench::null(SHAPE);
    let doomed = bench.submit(&request(&[1, 2, 3], 9));
    bench.toy.state.lock().unwrap().fail_next = Some("out of luck".into());
    bench.turn(Mail::default());
    let (kind, message) = failure(&bench.said[&doomed]);
    assert_eq!(kind, SampleErrorKind::Internal);
    assert!(message.contains("out of luck"), "{message}");
    bench.assert_all_free();
    let next = bench.submit(&request(&[1, 2, 3], 9));
    bench.until_idle();
    assert!(matches!(bench.said[&next].last(), Some(SampleEvent::Finished { .. })));
}

#[test]
fn logits_that_are_not_numbers_fail_by_name() {
    let mut bench = Bench::null(SHAPE);
    bench.toy.state.lock().unwrap().nan_next = true;
    let id = bench.submit(&request(&[1], 9));
    let (kind, message) = failure(&bench.said[&id]);
    assert_eq!(kind, SampleErrorKind::Internal);
    assert!(message.contains("not numbers"), "{message}");
    bench.assert_all_free();
}

#[test]
fn banning_every_token_is_the_requests_fault() {
    let mut bench = Bench::null(SHAPE);
    let mut all_banned = request(&[1], 9);
    all_banned.sampling.min_tokens = 5;
    all_banned.sampling.stop_token_ids = (0..bench.core.backend.vocab() as u32).collect();
    let id = bench.submit(&all_banned);
    let (kind, message) = failure(&bench.said[&id]);
    assert_eq!(kind, SampleErrorKind::BadRequest);
    assert!(message.contains("min_tokens"), "{message}");
    bench.assert_all_free();
}

#[test]
fn what_can_never_be_served_is_refused_with_both_numbers() {
    let mut bench = Bench::null(SHAPE);
    let long = bench.submit(&request(&[1; 30], 1));
    let (kind, message) = failure(&bench.said[&long]);
    assert_eq!(kind, SampleErrorKind::BadRequest);
    assert!(message.contains("30 tokens") && message.contains("context length is 30"), "{message}");

    let mut bench = Bench::null(Shape { context: 99, ..SHAPE });
    let long = bench.submit(&request(&[1; 40], 1));
    let (_, message) = failure(&bench.said[&long]);
    assert!(message.contains("40 tokens") && message.contains("holds 32"), "{message}");
    for prompt in [&[][..], &[1, 99]] {
        let id = bench.submit(&request(prompt, 1));
        assert_eq!(failure(&bench.said[&id]).0, SampleErrorKind::BadRequest);
    }
    assert!(bench.toy.state.lock().unwrap().steps.is_empty());
}

#[test]
fn the_thread_serves_aborts_and_shuts_down() {
    let (parts, _) = parts(Shape { context: 20_000, pages: 5_000, ..SHAPE }, Role::Null, RoleDriver::Null);
    let engine = spawn(parts).unwrap();
    let mut good = engine.submit(request(&[1, 2], 5)).unwrap();
    let mut events = vec![];
    while let Some(event) = good.blocking_recv() {
        events.push(event);
    }
    assert!(matches!(events.last(), Some(SampleEvent::Finished { .. })));
    assert!(!tokens(&events).is_empty());

    let mut endless = request(&[1], 19_000);
    endless.sampling.ignore_eos = true;
    let mut named = engine.submit(SampleRequest { rid: "x".into(), ..endless.clone() }).unwrap();
    let left = engine.submit(endless.clone()).unwrap();
    drop(left);
    engine.abort("x").unwrap();
    let last = std::iter::from_fn(|| named.blocking_recv()).last();
    assert_eq!(failure(&[last.unwrap()]).0, SampleErrorKind::Aborted);

    let mut cut = engine.submit(endless).unwrap();
    engine.shutdown();
    let last = std::iter::from_fn(|| cut.blocking_recv()).last();
    assert_eq!(failure(&[last.unwrap()]).0, SampleErrorKind::Unavailable);
    assert!(engine.submit(request(&[1], 1)).is_err());
}

#[test]
fn a_panic_of_the_thread_fails_every_stream_and_shows() {
    let (parts, toy) = parts(SHAPE, Role::Null, RoleDriver::Null);
    toy.state.lock().unwrap().panic_next = true;
    let engine = spawn(parts).unwrap();
    let mut doomed = engine.submit(request(&[1, 2], 5)).unwrap();
    assert_eq!(failure(&[doomed.blocking_recv().unwrap()]).0, SampleErrorKind::Internal);
    assert!(doomed.blocking_recv().is_none());
    assert!(!engine.is_alive());
    assert_eq!(engine.submit(request(&[1], 1)).unwrap_err().kind, SampleErrorKind::Internal);
}

#[test]
fn a_full_queue_takes_all_or_none() {
    let (mut parts, _) = parts(SHAPE, Role::Null, RoleDriver::Null);
    parts.config.queue_requests_max = 3;
    let engine = spawn(parts).unwrap();
    let error = engine.submit_all(vec![request(&[1], 1); 4]).unwrap_err();
    assert_eq!(error.kind, SampleErrorKind::Unavailable);
    assert_eq!(engine.submit_all(vec![request(&[1], 1); 3]).unwrap().len(), 3);
}
