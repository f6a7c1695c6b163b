//! Any mix of requests in a tiny pool says what each would have said alone.

use proptest::prelude::*;

use super::common::{Bench, Shape, alone, request, tokens};
use crate::{
    engine::{inbox::Mail, toy::VOCAB},
    request::{FinishReason, LogprobRequest, SampleErrorKind, SampleEvent, SampleRequest, SamplingParams},
};

const SMALL: Shape = Shape { pages: 6, page_size: 4, chunk: 4, running: 8, context: 100, reserved_decode: 4 };

#[test]
fn preemption_changes_no_answer() {
    let mut bench = Bench::null(SMALL);
    let mut one = request(&[1, 2, 3, 4, 5], 16);
    one.sampling.ignore_eos = true;
    let two = SampleRequest { prompt: [9, 8, 7].into(), ..one.clone() };
    let ids = [bench.submit(&one), bench.submit(&two)];
    bench.until_idle();
    assert!(bench.core.loads().retracted_total > 0, "the pool was meant to be too small");
    for (id, request) in ids.iter().zip([&one, &two]) {
        assert_eq!(bench.said[id], alone(SMALL, request));
        assert_eq!(tokens(&bench.said[id]).len(), 16);
    }
    bench.assert_all_free();
}

#[test]
fn the_newest_is_preempted_and_returns_before_newer_ones() {
    let mut bench = Bench::null(SMALL);
    let mut long = request(&[1; 8], 14);
    long.sampling.ignore_eos = true;
    let old = bench.submit(&long);
    let newer = bench.submit(&SampleRequest { prompt: [2; 8].into(), ..long.clone() });
    let newest = bench.submit(&SampleRequest { prompt: [3; 8].into(), ..long.clone() });
    let mut order = vec![];
    for _ in 0..200 {
        bench.turn(Mail::default());
        for id in [old, newer, newest] {
            let ended = matches!(bench.said[&id].last(), Some(SampleEvent::Finished { .. }));
            if ended && !order.contains(&id) {
                order.push(id);
            }
        }
    }
    assert_eq!(order, [old, newer, newest]);
}

#[test]
fn aborting_a_retracted_request_leaks_nothing_and_helps_the_others() {
    let mut bench = Bench::null(SMALL);
    let mut long = request(&[1, 2, 3, 4, 5], 16);
    long.sampling.ignore_eos = true;
    let named = |rid: &str| SampleRequest { rid: rid.into(), ..long.clone() };
    let ids = [bench.submit(&named("a")), bench.submit(&named("b"))];
    while bench.core.loads().retracted == 0 {
        bench.turn(Mail::default());
    }
    bench.abort("b");
    let loads = bench.core.loads();
    assert_eq!((loads.retracted, loads.waiting, loads.aborted_total), (0, 0, 1));
    bench.until_idle();
    assert_eq!(bench.said[&ids[0]], alone(SMALL, &long));
    assert!(
        matches!(bench.said[&ids[1]].last(), Some(SampleEvent::Failed(error)) if error.kind == SampleErrorKind::Aborted)
    );
    bench.assert_all_free();
}

#[test]
fn an_answer_ends_where_the_context_or_the_pool_does() {
    let mut bench = Bench::null(SMALL);
    let mut endless = request(&[5; 20], 1000);
    endless.sampling.ignore_eos = true;
    let id = bench.submit(&endless);
    bench.until_idle();
    assert_eq!(tokens(&bench.said[&id]).len(), 4);
    assert!(matches!(bench.said[&id].last(), Some(SampleEvent::Finished { reason: FinishReason::Length, .. })));
}

#[test]
fn no_tokens_means_the_prompt_alone() {
    let mut bench = Bench::null(SMALL);
    let mut echo = request(&[3, 1, 2], 0);
    echo.logprobs.prompt_from = Some(0);
    let id = bench.submit(&echo);
    bench.until_idle();
    let [SampleEvent::Prompt(list), SampleEvent::Finished { reason: FinishReason::Length, .. }] = &bench.said[&id][..]
    else {
        panic!("{:?}", bench.said[&id]);
    };
    assert_eq!(
        list.iter().map(|(token, logprob)| (*token, logprob.is_some())).collect::<Vec<_>>(),
        [(3, false), (1, true), (2, true)]
    );
}

#[test]
fn decoding_goes_on_beside_a_long_prompt() {
    let shape = Shape { pages: 64, context: 200, ..SMALL };
    let mut bench = Bench::null(shape);
    let mut talk = request(&[1, 2], 60);
    talk.sampling.ignore_eos = true;
    let talker = bench.submit(&talk);
    bench.submit(&request(&[4; 40], 2));
    for _ in 0..8 {
        let before = tokens(&bench.said[&talker]).len();
        bench.turn(Mail::default());
        assert_eq!(tokens(&bench.said[&talker]).len(), before + 1, "each step decodes one token");
    }
    let steps = bench.toy.state.lock().unwrap().steps.clone();
    assert!(steps.iter().all(|step| step.iter().filter(|(_, len)| *len > 1).map(|(_, len)| len).sum::<usize>() <= 4));
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let numbers = (0u32..24, 0u32..4, prop_oneof![Just(0f32), 0.3f32..1.5], 0.5f32..1.2, prop::option::of(1u32..9));
    let penalties = (prop_oneof![Just(0f32), -1f32..1.0], prop_oneof![Just(1f32), 0.8f32..1.3]);
    let stops = (prop::collection::vec("[a-x]{1,2}", 0..3), prop::collection::vec(1u32..VOCAB as u32, 0..2));
    let flags = (any::<u64>(), any::<bool>(), any::<bool>());
    (numbers, penalties, stops, flags).prop_map(|(numbers, penalties, stops, flags)| SamplingParams {
        max_tokens: numbers.0,
        min_tokens: numbers.1,
        temperature: numbers.2,
        top_p: numbers.3.min(1.0),
        top_k: numbers.4,
        min_p: 0.0,
        frequency_penalty: penalties.0,
        presence_penalty: penalties.0 / 2.0,
        repetition_penalty: penalties.1,
        logit_bias: vec![],
        seed: flags.0,
        stop: stops.0,
        stop_token_ids: stops.1,
        ignore_eos: flags.1,
        include_stop: flags.2,
        skip_special_tokens: true,
    })
}

pub fn any_request() -> impl Strategy<Value = SampleRequest> {
    let logprobs = (any::<bool>(), 0u32..4, prop::option::of(0u32..20));
    let prompt = prop::collection::vec(1u32..VOCAB as u32, 1..16);
    (prompt, sampling(), logprobs, 0u32..3).prop_map(|(prompt, sampling, logprobs, sample_index)| SampleRequest {
        rid: String::new(),
        sample_index,
        prompt: prompt.into(),
        sampling,
        logprobs: LogprobRequest { output: logprobs.0, top: logprobs.1, prompt_from: logprobs.2 },
        ticket: None,
    })
}

fn any_shape() -> impl Strategy<Value = Shape> {
    (4u32..12, prop_oneof![Just(1u32), Just(3), Just(4)], 1u32..20, 1u32..6).prop_map(
        |(pages, size, chunk, running)| Shape {
            pages: pages * 4 / size,
            page_size: size,
            chunk,
            running,
            context: 60,
            reserved_decode: 4,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn equals_each_request_alone(
        shape in any_shape(),
        requests in prop::collection::vec((any_request(), 0usize..6, prop::option::weighted(0.2, 0usize..30)), 1..8),
    ) {
        let mut bench = Bench::null(shape);
        let mut ids = vec![];
        let mut aborts = vec![];
        let mut turn = 0usize;
        for (index, (request, pause, abort)) in requests.iter().enumerate() {
            for _ in 0..*pause {
                bench.turn(Mail::default());
                turn += 1;
            }
            let rid = format!("r{index}");
            ids.push(bench.submit(&SampleRequest { rid: rid.clone(), ..request.clone() }));
            aborts.extend(abort.map(|after| (turn + after, rid)));
        }
        aborts.sort();
        for (at, rid) in aborts {
            while turn < at {
                bench.turn(Mail::default());
                turn += 1;
            }
            bench.abort(&rid);
        }
        bench.until_idle();
        bench.assert_all_free();
        for (id, (request, ..)) in ids.iter().zip(&requests) {
            let said = &bench.said[id];
            let expected = alone(shape, request);
            match said.last() {
                Some(SampleEvent::Failed(error)) if error.kind == SampleErrorKind::Aborted => {
                    prop_assert_eq!(&said[..said.len() - 1], &expected[..said.len() - 1]);
                }
                Some(SampleEvent::Failed(error)) if error.kind == SampleErrorKind::BadRequest => {
                    prop_assert!(request.prompt.len() >= bench.core.scheduler.tokens_max(), "{error}");
                    prop_assert_eq!(said.len(), 1);
                }
                _ => prop_assert_eq!(said, &expected),
            }
        }
    }
}
