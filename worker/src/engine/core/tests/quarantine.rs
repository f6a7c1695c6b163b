//! A quarantine over its limit, in both roles over scripted fabrics that report no quiet: nothing more is admitted, what
//! waits for pages is sent elsewhere, what holds pages goes on, and no page is freed without its proof.

use tandem_handoff::{
    ids::Room,
    layout::PoolShape,
    limits::Limits,
    ticket::Ticket,
    wire::{Cause, CauseKind, FirstToken, Side},
};

use super::common::{Bench, Shape, request};
use crate::{
    config::Role,
    decode_role::scripted::decode_role,
    engine::{Excess, inbox::Mail, thread::RoleDriver},
    prefill_role::scripted::prefill_role,
    request::{SampleErrorKind, SampleEvent, SampleRequest, SeqId},
};

/// A quarter of the pool, two pages, is the limit.
const SHAPE: Shape = Shape { pages: 8, page_size: 4, chunk: 8, running: 4, context: 30, reserved_decode: 0 };
const POOL: PoolShape =
    PoolShape { layers: 1, kv_heads: 1, head_dim: 1, page_size: 4, element_bytes: 4, tp: 1, pages: 8 };
const EXCESS: Excess = Excess { pages: 3, max: 2, total: 8 };
/// A turn of the bench takes a millisecond.
const DRAIN_TURNS: u64 = 5;

fn limits() -> Limits {
    Limits { drain_timeout_ms: DRAIN_TURNS, ..Limits::default() }
}

fn room(number: u64) -> Room {
    Room::new(number).expect("in range")
}

fn asked(number: u64, prompt: &[u32], max_tokens: u32) -> SampleRequest {
    let ticket = Ticket { host: "p".into(), port: 1, room: room(number) };
    let mut request = SampleRequest { ticket: Some(ticket), ..request(prompt, max_tokens) };
    request.sampling.ignore_eos = true;
    request
}

fn lost() -> Cause {
    Cause::new(Side::Prefill, CauseKind::Lost, "cut by the test")
}

fn unavailable(bench: &Bench, id: SeqId) -> bool {
    let told = |event: &SampleEvent| {
        matches!(event, SampleEvent::Failed(error)
            if error.kind == SampleErrorKind::Unavailable && error.message.contains("quarantine"))
    };
    bench.said[&id].last().is_some_and(told)
}

fn turns(bench: &mut Bench, count: u64) {
    for _ in 0..count {
        bench.turn(Mail::default());
    }
}

#[test]
fn a_decode_worker_over_the_limit_only_finishes_what_it_has_begun() {
    let (role, script) = decode_role(POOL, limits());
    let mut bench = Bench::new(SHAPE, Role::Decode, RoleDriver::Decode(Box::new(role)));
    let running = bench.submit(&asked(1, &[1, 2, 3], 12));
    bench.turn(Mail::default());
    bench.toy.write_page(script.pages(room(1)).expect("offered")[0], &[2, 3, 4, 0]);
    script.deliver(room(1), FirstToken { token: 7, logprob: None, cached_tokens: 0 });
    let doomed = bench.submit(&asked(2, &[1; 9], 4));
    bench.turn(Mail::default());
    script.hold_quiet(true);
    script.fail(room(2), lost());
    bench.turn(Mail::default());
    assert!(matches!(bench.said[&doomed].last(), Some(SampleEvent::Failed(_))));
    let waiting = bench.submit(&asked(3, &[1; 24], 4));
    let loads = bench.core.loads();
    assert_eq!((loads.draining_pages, loads.quarantined_pages, loads.excess), (3, 0, None));
    assert!(bench.said[&waiting].is_empty(), "it waits for pages");

    turns(&mut bench, DRAIN_TURNS);
    assert_eq!(bench.core.loads().excess, Some(EXCESS));
    assert!(unavailable(&bench, waiting));
    let late = bench.submit(&asked(4, &[1], 1));
    assert!(unavailable(&bench, late));
    turns(&mut bench, 12);
    assert!(matches!(bench.said[&running].last(), Some(SampleEvent::Finished { .. })), "what ran goes on to its end");
    let loads = bench.core.loads();
    assert_eq!((loads.free_pages, loads.quarantined_pages), (5, 3), "time frees nothing (H2)");

    script.hold_quiet(false);
    bench.turn(Mail::default());
    bench.assert_all_free();
    assert_eq!(bench.core.loads().excess, Some(EXCESS), "a condemned worker stays condemned");
}

#[test]
fn a_prefill_worker_over_the_limit_only_finishes_what_it_has_begun() {
    let (role, script) = prefill_role(POOL, limits());
    let mut bench = Bench::new(SHAPE, Role::Prefill, RoleDriver::Prefill(Box::new(role)));
    let doomed = bench.submit(&asked(1, &[1; 9], 4));
    let attempt = script.reserve(room(1), &[1; 9], vec![0, 1, 2]);
    script.hold_writes(true);
    turns(&mut bench, 3);
    script.abort(attempt, room(1), lost());
    bench.turn(Mail::default());
    assert!(matches!(bench.said[&doomed].last(), Some(SampleEvent::Failed(_))));
    let waiting = bench.submit(&asked(2, &[1; 4], 4));
    let loads = bench.core.loads();
    assert_eq!((loads.draining_pages, loads.quarantined_pages, loads.excess), (3, 0, None));

    turns(&mut bench, DRAIN_TURNS);
    let loads = bench.core.loads();
    assert_eq!((loads.free_pages, loads.quarantined_pages, loads.excess), (5, 3, Some(EXCESS)), "H5");
    assert!(unavailable(&bench, waiting));
    let late = bench.submit(&asked(3, &[1], 1));
    assert!(unavailable(&bench, late));

    script.hold_writes(false);
    bench.turn(Mail::default());
    bench.assert_all_free();
    assert_eq!(bench.core.loads().excess, Some(EXCESS), "a condemned worker stays condemned");
}
