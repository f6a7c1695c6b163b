//! One test per kind of fault that split engines have had in the field, over both engines; its name says which.

use rand::{Rng, SeedableRng, rngs::StdRng};

use super::*;
use crate::{
    engine::toy::{EOS, VOCAB},
    request::LogprobRequest,
};

/// An hour: past every deadline.
const HOUR_US: u64 = 3_600_000_000;

fn endless(prompt: &[u32], max_tokens: u32) -> SampleRequest {
    let mut endless = request(prompt, max_tokens);
    endless.sampling.ignore_eos = true;
    endless
}

fn failure(events: &[SampleEvent]) -> Option<SampleErrorKind> {
    match events.last() {
        Some(SampleEvent::Failed(error)) => Some(error.kind),
        _ => None,
    }
}

impl Pair {
    fn turns(&mut self, count: usize) {
        for _ in 0..count {
            self.prefill.turn(Mail::default());
            self.decode.turn(Mail::default());
        }
    }

    /// Frames arrive, both ways; no page moves, and nothing is proven quiet.
    fn talk(&mut self, turns: usize) {
        for _ in 0..turns {
            while self.deliver(0, 0) || self.deliver(1, 0) {}
            self.turns(1);
        }
    }

    fn wait_hours(&mut self, hours: u64) {
        self.prefill.now = Time(self.prefill.now.0 + hours * HOUR_US);
        self.decode.now = Time(self.decode.now.0 + hours * HOUR_US);
    }

    /// A transfer of 20 tokens, of which one write is in the hands of the network and cannot be called back.
    fn with_a_write_under_way() -> (Self, SeqId, (Attempt, Piece)) {
        let mut pair = Self::new();
        let id = pair.submit(&endless(&[7; 20], 4), 1, false);
        pair.talk(3);
        let held = pair.wire.lock().unwrap().posts.pop().expect("a chunk was posted");
        (pair, id, held)
    }

    fn land(&mut self, (attempt, piece): (Attempt, Piece)) {
        let now = self.prefill.now;
        let mut wire = self.wire.lock().unwrap();
        wire.land(attempt, &piece);
        wire.source.settled(now, attempt, 1, Settlement::Sent);
        wire.pump(now);
    }
}

#[test]
fn pages_of_an_aborted_transfer_go_to_nobody_while_a_write_is_under_way() {
    let (mut pair, first, held) = Pair::with_a_write_under_way();
    pair.decode.abort("r1");
    let second = endless(&[9; 20], 4);
    let id = pair.submit(&second, 2, false);
    pair.talk(50);
    assert_eq!(failure(&pair.decode.said[&first]), Some(SampleErrorKind::Aborted));
    let shown = |pair: &Pair| pair.wire.lock().unwrap().sink.offered();
    assert_eq!(shown(&pair), 0, "H2: the second fits only into the pages of the first");
    pair.land(held);
    pair.talk(50);
    assert_eq!(shown(&pair), 0, "what P says of its writes is no proof that D's memory is quiet");
    assert!(pair.deliver(3, 0), "the fabric proves it");
    pair.talk(1);
    assert_eq!(shown(&pair), 1);
    pair.settle();
    assert_eq!(pair.decode.said[&id], alone(DECODE, &second));
    pair.assert_clean();
}

#[test]
fn every_timeout_passes_under_a_running_write_and_no_page_is_freed() {
    let (mut pair, id, held) = Pair::with_a_write_under_way();
    for _ in 0..5 {
        pair.wait_hours(1);
        pair.talk(3);
        assert_eq!(pair.decode.core.loads().free_pages, DECODE.pages - 5, "H2");
        assert!(pair.prefill.core.loads().free_pages < PREFILL.pages, "H5");
    }
    for said in [&pair.prefill.said[&id], &pair.decode.said[&id]] {
        assert_eq!((ends(said), failure(said)), (1, Some(SampleErrorKind::Timeout)));
    }
    pair.land(held);
    pair.assert_clean();
}

/// The course of one request, a step at a time.
fn course(pair: &mut Pair, step: usize) {
    match step % 4 {
        0 => pair.turns(1),
        kind => drop(pair.deliver(kind as u8 - 1, 0)),
    }
}

#[test]
fn an_abort_at_any_moment_is_one_end_and_never_a_short_answer() {
    let asked = endless(&[5, 4, 3, 2, 1, 6], 6);
    let whole = alone(DECODE, &asked);
    for steps in 0..60 {
        for at_prefill in [true, false] {
            let mut pair = Pair::new();
            let id = pair.submit(&asked, 1, false);
            (0..steps).for_each(|step| course(&mut pair, step));
            let aborted = if at_prefill { &mut pair.prefill } else { &mut pair.decode };
            let over = ends(&aborted.said[&id]) == 1;
            aborted.abort("r1");
            if !over {
                assert_eq!(failure(&aborted.said[&id]), Some(SampleErrorKind::Aborted), "after {steps} steps");
            }
            pair.assert_clean();
            for bench in [&pair.prefill, &pair.decode] {
                assert_eq!(ends(&bench.said[&id]), 1, "after {steps} steps");
            }
            let said = &pair.decode.said[&id];
            assert!(!finished(said) || *said == whole, "H7: a short answer after {steps} steps");
        }
    }
}

#[test]
fn an_abort_behind_a_finished_prefill_is_an_error_and_no_answer_of_one_token() {
    let mut pair = Pair::new();
    let id = pair.submit(&request(&[5, 4, 3, 2, 1], 6), 1, false);
    pair.talk(6);
    assert!(pair.prefill.said[&id].is_empty() && !pair.wire.lock().unwrap().posts.is_empty(), "pages are under way");
    pair.prefill.abort("r1");
    assert_eq!(failure(&pair.prefill.said[&id]), Some(SampleErrorKind::Aborted));
    assert_eq!(pair.prefill.said[&id].len(), 1, "no token was shown");
    pair.settle();
    assert_eq!(pair.decode.said[&id].len(), 1);
    assert_eq!(failure(&pair.decode.said[&id]), Some(SampleErrorKind::Aborted));
    pair.assert_clean();
}

#[test]
fn an_eos_as_first_token_ends_the_answer_unless_it_is_to_be_ignored() {
    let mut ends_at_once = request(&[5, 4, 3, 2, 1], 6);
    ends_at_once.sampling.logit_bias = vec![(EOS, 100.0)];
    let mut goes_on = ends_at_once.clone();
    goes_on.sampling.ignore_eos = true;
    for (asked, said) in [(ends_at_once, 1), (goes_on, 6)] {
        let mut pair = Pair::new();
        let id = pair.submit(&asked, 1, false);
        pair.settle();
        assert_eq!(pair.decode.said[&id], alone(DECODE, &asked));
        assert_eq!(tokens(&pair.decode.said[&id]).len(), said);
        let steps = pair.decode.toy.state.lock().unwrap().steps.len();
        assert_eq!(steps, said - 1, "the first token takes no step of D");
        pair.assert_clean();
    }
}

#[test]
fn the_first_tokens_logprobs_are_the_unsplit_ones_for_none_one_and_all_and_too_many_are_refused() {
    let most = tandem_handoff::wire::TOP_LOGPROBS_MAX as u32;
    for top in [0, 1, VOCAB as u32, most, most + 1] {
        let mut asked = request(&[5, 4, 3, 2, 1], 3);
        asked.logprobs = LogprobRequest { output: true, top, prompt_from: None };
        let mut pair = Pair::new();
        let id = pair.submit(&asked, 1, false);
        pair.settle();
        if top <= most {
            assert_eq!(pair.decode.said[&id], alone(DECODE, &asked), "top {top}");
        } else {
            for said in [&pair.prefill.said[&id], &pair.decode.said[&id]] {
                assert_eq!(failure(said), Some(SampleErrorKind::BadRequest));
            }
        }
        pair.assert_clean();
    }
}

#[test]
fn the_same_room_twice_is_a_bad_request_and_harms_the_first_in_nothing() {
    let mut pair = Pair::new();
    let asked = endless(&[5, 4, 3], 4);
    let first = pair.submit(&asked, 1, false);
    pair.talk(1);
    let second = pair.submit(&endless(&[6, 6], 4), 1, true);
    pair.settle();
    for said in [&pair.prefill.said[&second], &pair.decode.said[&second]] {
        assert_eq!((ends(said), failure(said)), (1, Some(SampleErrorKind::BadRequest)));
    }
    assert_eq!(pair.decode.said[&first], alone(DECODE, &asked));
    pair.assert_clean();
}

#[test]
fn four_samples_of_one_prompt_with_a_room_each_are_four_answers() {
    let mut pair = Pair::new();
    let sample = |index| {
        let mut sample = endless(&[5, 4, 3], 4);
        sample.sample_index = index;
        sample.sampling.temperature = 1.0;
        sample
    };
    let ids: Vec<SeqId> = (0..4).map(|index| pair.submit(&sample(index), u64::from(index), index % 2 == 0)).collect();
    pair.settle();
    for (index, id) in (0..).zip(ids) {
        assert_eq!(pair.decode.said[&id], alone(DECODE, &sample(index)), "sample {index}");
    }
    pair.assert_clean();
}

#[test]
fn answers_that_outgrow_the_pool_are_retracted_and_all_come_to_their_end() {
    // Room for the prompts and one page: each answer alone would fit.
    let decode = Shape { pages: 4, reserved_decode: 0, ..DECODE };
    let mut pair = Pair::between(PREFILL, decode);
    let asked: Vec<_> = (1..4).map(|token| endless(&[token; 4], 10)).collect();
    let ids: Vec<SeqId> = (0..).zip(&asked).map(|(room, asked)| pair.submit(asked, room, false)).collect();
    for _ in 0..400 {
        for kind in 0..4 {
            pair.deliver(kind, 0);
        }
        pair.turns(1);
    }
    for (id, asked) in ids.iter().zip(&asked) {
        assert!(finished(&pair.decode.said[id]), "no end within 400 turns");
        assert_eq!(pair.decode.said[id], alone(DECODE, asked));
    }
    assert!(pair.decode.core.loads().retracted_total > 0, "the pool was meant to be too small");
    pair.assert_clean();
}

#[test]
fn a_step_that_reads_its_pages_late_reads_its_own_whatever_lands_meanwhile() {
    let mut pair = Pair::new();
    for toy in [pair.prefill.toy.clone(), pair.decode.toy.clone()] {
        let wire = pair.wire.clone();
        *toy.on_step.lock().unwrap() = Some(Box::new(move || {
            // Everything that was under way arrives between the launch and the first read.
            while (0..4).any(|kind| wire.lock().unwrap().deliver(Time(0), kind, 0)) {}
        }));
    }
    let asked: Vec<_> = (1..7).map(|token| endless(&[token; 7], 8)).collect();
    let mut ids = Vec::new();
    for (room, asked) in (0..).zip(&asked) {
        ids.push(pair.submit(asked, room, room % 2 == 0));
        pair.turns(3);
        if room % 3 == 2 {
            pair.decode.abort(&format!("r{room}"));
            pair.prefill.abort(&format!("r{room}"));
        }
        pair.turns(2);
    }
    pair.settle();
    for (id, asked) in ids.iter().zip(&asked) {
        let said = &pair.decode.said[id];
        assert!(*said == alone(DECODE, asked) || failure(said) == Some(SampleErrorKind::Aborted), "{said:?}");
    }
    assert!(ids.iter().filter(|id| finished(&pair.decode.said[id])).count() >= 4);
    pair.assert_clean();
}

#[test]
fn ten_thousand_requests_of_which_many_are_aborted_leave_a_tiny_pool_whole() {
    let mut rng = StdRng::seed_from_u64(1);
    let kinds: Vec<_> = (1..17u32)
        .map(|kind| {
            let prompt: Vec<u32> = (0..1 + kind).map(|at| 1 + (kind * 7 + at * 3) % (VOCAB as u32 - 1)).collect();
            request(&prompt, 1 + kind % 7)
        })
        .collect();
    let answers: Vec<_> = kinds.iter().map(|kind| alone(DECODE, kind)).collect();
    let mut pair = Pair::new();
    let mut live: Vec<(SeqId, u64, usize)> = Vec::new();
    let (mut room, mut whole) = (0, 0);
    while room < 10_000 || !live.is_empty() {
        if room < 10_000 && live.len() < 6 {
            let kind = rng.random_range(0..kinds.len());
            live.push((pair.submit(&kinds[kind], room, rng.random()), room, kind));
            room += 1;
        }
        for _ in 0..4 {
            pair.deliver(rng.random_range(0..4), rng.random_range(0..9));
        }
        match rng.random_range(0..10) {
            0 if !live.is_empty() => {
                // As the gateway does it: both legs, but not at the same moment.
                let name = format!("r{}", live[rng.random_range(0..live.len())].1);
                pair.decode.abort(&name);
                pair.deliver(rng.random_range(0..4), 0);
                pair.prefill.abort(&name);
            }
            1..5 => drop(pair.prefill.turn(Mail::default())),
            _ => drop(pair.decode.turn(Mail::default())),
        }
        live.retain(|(id, _, kind)| {
            let over = [&pair.prefill, &pair.decode].map(|bench| ends(&bench.said[id]));
            if over != [1, 1] {
                assert!(over.iter().all(|ends| *ends <= 1), "H7");
                return true;
            }
            let said = pair.decode.said.remove(id).expect("it was heard");
            pair.prefill.said.remove(id);
            assert!(!finished(&said) || said == answers[*kind], "{said:?} instead of {:?}", answers[*kind]);
            whole += usize::from(finished(&said));
            false
        });
    }
    assert!((2_000..9_500).contains(&whole), "{whole} whole answers: the mix was meant to have both");
    pair.assert_clean();
}
