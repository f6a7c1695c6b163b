//! A prefill and a decode engine in one process, joined by the real machines of the handoff and a wire whose every
//! delivery the test decides. Pages move when a piece is delivered, out of whatever P's page holds then: a source page
//! freed too early (H5), or a destination reused too early (H2), shows as a wrong answer.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex},
};

use proptest::prelude::*;
use tandem_handoff::{
    checksum::head_checksum,
    ids::{Attempt, Channel, Incarnation, RequestId, Room, SessionId, Time},
    layout::{Mapping, PoolShape},
    limits::Limits,
    sink::{Sink, SinkEffect, SinkFact},
    source::{Piece, Settlement, Source, SourceEffect, SourceFact},
    ticket::Ticket,
    wire::{Cause, Frame},
};

use super::{
    common::{Bench, Shape, alone, request, tokens},
    mixed::any_request,
};
use crate::{
    bootstrap::sample_error,
    config::Role,
    decode_role::{DecodeFact, DecodeHandoff, DecodeQueues},
    engine::{core::Turn, inbox::Mail, thread::RoleDriver, toy::Toy},
    kv::sums::{Checksums, PageSums},
    prefill_role::{PrefillFact, PrefillHandoff, PrefillQueues},
    request::{FinishReason, SampleErrorKind, SampleEvent, SampleRequest, SeqId},
};

mod faults;

const PREFILL: Shape = Shape { pages: 9, page_size: 4, chunk: 4, running: 3, context: 24, reserved_decode: 0 };
const DECODE: Shape = Shape { pages: 8, page_size: 4, chunk: 4, running: 4, context: 24, reserved_decode: 4 };
const CHANNEL: Channel = Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(1) };

fn pool_shape(pages: u32) -> PoolShape {
    PoolShape { layers: 1, kv_heads: 1, head_dim: 1, page_size: 4, element_bytes: 4, tp: 1, pages }
}

/// The two machines, and everything between them that is not delivered yet.
struct Wire {
    source: Source,
    sink: Sink,
    to_sink: VecDeque<Frame>,
    to_source: VecDeque<Frame>,
    posts: Vec<(Attempt, Piece)>,
    /// What D's fabric accepts.
    expected: BTreeMap<Attempt, (Vec<u32>, Mapping)>,
    revoked: Vec<Attempt>,
    source_facts: Vec<PrefillFact>,
    sink_facts: Vec<DecodeFact>,
    pools: Option<(Toy, Toy)>,
    /// The next page changes on its way.
    damage_next: bool,
    /// Pages of P's pool and of D's.
    pages: (u32, u32),
}

struct ToySums(Toy);

impl PageSums for ToySums {
    fn sum(&self, _rank: u32, page: u32, _slot: u32) -> u32 {
        head_checksum(&self.0.page(page).into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
    }
}

fn sums(toy: &Toy, pages: u32) -> Checksums {
    Checksums::over(pool_shape(pages), Box::new(ToySums(toy.clone())))
}

impl Wire {
    fn act(&mut self, now: Time, call: impl FnOnce(&mut Self)) {
        call(self);
        self.pump(now);
    }

    /// What the prefill role computes where D asks for it.
    fn source_sums(&self, id: SeqId, pages: &[u32]) -> Vec<u32> {
        let (prefill, _) = self.pools.as_ref().unwrap();
        if self.source.wants_checksums(RequestId(id.0)) { sums(prefill, self.pages.0).of(pages) } else { vec![] }
    }

    fn pump(&mut self, now: Time) {
        loop {
            let from_source = self.source.effects();
            let from_sink = self.sink.effects();
            if from_source.is_empty() && from_sink.is_empty() {
                return;
            }
            from_source.into_iter().for_each(|effect| self.do_source(now, effect));
            from_sink.into_iter().for_each(|effect| self.do_sink(now, effect));
        }
    }

    fn do_source(&mut self, now: Time, effect: SourceEffect) {
        match effect {
            SourceEffect::Send { frame, .. } => self.to_sink.push_back(frame),
            SourceEffect::Post { attempt, pieces } => self.posts.extend(pieces.into_iter().map(|p| (attempt, p))),
            SourceEffect::Stop { attempt } => {
                let before = self.posts.len();
                self.posts.retain(|(other, _)| *other != attempt);
                let dropped = (before - self.posts.len()) as u64;
                if dropped > 0 {
                    self.source.settled(now, attempt, dropped, Settlement::Dropped);
                }
            }
            SourceEffect::PeerSettled { .. } => {}
            SourceEffect::CloseChannel { why, .. } => self.lose(now, &why),
            SourceEffect::Fact(SourceFact::Reserved { request, held_tokens, .. }) => {
                self.source_facts.push(PrefillFact::Reserved { id: SeqId(request.0), held_tokens });
            }
            SourceEffect::Fact(SourceFact::Delivered { request, .. }) => {
                self.source_facts.push(PrefillFact::Delivered { id: SeqId(request.0) });
            }
            SourceEffect::Fact(SourceFact::Failed { request, cause }) => {
                self.source_facts.push(PrefillFact::Failed { id: SeqId(request.0), error: sample_error(&cause) });
            }
            SourceEffect::Fact(SourceFact::Quiet { request }) => {
                self.source_facts.push(PrefillFact::Quiet { id: SeqId(request.0) });
            }
        }
    }

    fn do_sink(&mut self, now: Time, effect: SinkEffect) {
        match effect {
            SinkEffect::Dial { address } => {
                self.source.channel_up(now, CHANNEL, pool_shape(self.pages.1));
                self.sink.channel_up(now, address, CHANNEL, pool_shape(self.pages.0));
            }
            SinkEffect::Send { frame, .. } => self.to_source.push_back(frame),
            SinkEffect::Expect { attempt, pages, mapping } => {
                self.expected.insert(attempt, (pages, mapping));
            }
            SinkEffect::Revoke { attempt } => self.revoked.push(attempt),
            SinkEffect::PeerDrained { .. } => {}
            SinkEffect::Verify { attempt, pages, held, checksums } => {
                let (_, decode) = self.pools.as_ref().unwrap();
                let outcome = sums(decode, self.pages.1).compare(&pages, held, &checksums);
                self.sink.verified(now, attempt, outcome);
            }
            SinkEffect::Release { attempt } => {
                self.expected.remove(&attempt);
            }
            SinkEffect::CloseChannel { why, .. } => self.lose(now, &why),
            SinkEffect::Fact(SinkFact::Committed { request, pages, proof, first }) => {
                self.sink_facts.push(DecodeFact::Committed { id: SeqId(request.0), pages, proof, first });
            }
            SinkEffect::Fact(SinkFact::Failed { request, cause }) => {
                self.sink_facts.push(DecodeFact::Failed { id: SeqId(request.0), error: sample_error(&cause) });
            }
            SinkEffect::Fact(SinkFact::Quiet { pages, proof }) => {
                self.sink_facts.push(DecodeFact::Quiet { pages, proof });
            }
        }
    }

    fn lose(&mut self, now: Time, why: &str) {
        self.to_sink.clear();
        self.to_source.clear();
        self.source.channel_down(now, CHANNEL, why);
        self.sink.channel_down(now, CHANNEL, why);
    }

    /// Delivers one of the things under way, if there is one of that kind.
    fn deliver(&mut self, now: Time, kind: u8, pick: usize) -> bool {
        let delivered = match kind % 4 {
            0 => self.to_sink.pop_front().map(|frame| self.sink.frame(now, CHANNEL, frame)).is_some(),
            1 => self.to_source.pop_front().map(|frame| self.source.frame(now, CHANNEL, frame)).is_some(),
            2 if !self.posts.is_empty() => {
                let (attempt, piece) = self.posts.remove(pick % self.posts.len());
                self.land(attempt, &piece);
                self.source.settled(now, attempt, 1, Settlement::Sent);
                true
            }
            3 if !self.revoked.is_empty() => {
                let attempt = self.revoked.swap_remove(pick % self.revoked.len());
                self.expected.remove(&attempt);
                self.sink.quiet(attempt);
                true
            }
            _ => false,
        };
        self.pump(now);
        delivered
    }

    /// A write that is not yet proven quiet lands, even of an attempt that has ended.
    fn land(&mut self, attempt: Attempt, piece: &Piece) {
        let Some((pages, mapping)) = self.expected.get(&attempt) else { return };
        let (prefill, decode) = self.pools.as_ref().unwrap();
        let from = piece.source_offset / pool_shape(self.pages.0).page_bytes();
        let to = pages[mapping.split(piece.index as usize).0];
        let mut kv = prefill.page(from as u32);
        if std::mem::take(&mut self.damage_next) {
            kv[1] ^= 1;
        }
        decode.write_page(to, &kv);
        self.sink.landed(attempt, &[piece.index]);
    }
}

struct SourcePort(Arc<Mutex<Wire>>);
struct SinkPort(Arc<Mutex<Wire>>);

impl PrefillHandoff for SourcePort {
    fn request(&mut self, now: Time, id: SeqId, ticket: &Ticket, prompt: &[u32]) {
        self.0.lock().unwrap().act(now, |wire| wire.source.request(now, RequestId(id.0), ticket.room, prompt));
    }

    fn chunk_written(&mut self, now: Time, id: SeqId, pages: &[u32], range: std::ops::Range<usize>) {
        self.0.lock().unwrap().act(now, |wire| {
            let sums = wire.source_sums(id, &pages[range.clone()]);
            wire.source.chunk_written(now, RequestId(id.0), pages, range, &sums);
        });
    }

    fn finish(
        &mut self,
        now: Time,
        id: SeqId,
        pages: &[u32],
        range: std::ops::Range<usize>,
        first: tandem_handoff::wire::FirstToken,
    ) {
        self.0.lock().unwrap().act(now, |wire| {
            let sums = wire.source_sums(id, &pages[range.clone()]);
            wire.source.finish(now, RequestId(id.0), pages, range, &sums, first);
        });
    }

    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause) {
        self.0.lock().unwrap().act(now, |wire| wire.source.cancel(now, RequestId(id.0), cause));
    }

    fn poll(&mut self, now: Time) -> Vec<PrefillFact> {
        let mut wire = self.0.lock().unwrap();
        wire.source.tick(now);
        wire.pump(now);
        std::mem::take(&mut wire.source_facts)
    }

    fn next_deadline(&self) -> Time {
        self.0.lock().unwrap().source.next_deadline()
    }

    fn queues(&self) -> PrefillQueues {
        PrefillQueues::default()
    }
}

impl DecodeHandoff for SinkPort {
    fn reserve(
        &mut self,
        now: Time,
        _arrived: Time,
        id: SeqId,
        ticket: &Ticket,
        prompt: &[u32],
        pages: tandem_handoff::fence::PublishedPages,
    ) {
        self.0.lock().unwrap().act(now, |wire| wire.sink.reserve(now, RequestId(id.0), ticket, prompt, 0, pages));
    }

    fn cancel(&mut self, now: Time, id: SeqId, cause: Cause) {
        self.0.lock().unwrap().act(now, |wire| wire.sink.cancel(now, RequestId(id.0), cause));
    }

    fn poll(&mut self, now: Time) -> Vec<DecodeFact> {
        let mut wire = self.0.lock().unwrap();
        wire.sink.tick(now);
        wire.pump(now);
        std::mem::take(&mut wire.sink_facts)
    }

    fn next_deadline(&self) -> Time {
        self.0.lock().unwrap().sink.next_deadline()
    }

    fn queues(&self) -> DecodeQueues {
        DecodeQueues::default()
    }
}

struct Pair {
    prefill: Bench,
    decode: Bench,
    wire: Arc<Mutex<Wire>>,
}

impl Pair {
    fn new() -> Self {
        Self::between(PREFILL, DECODE)
    }

    fn between(p: Shape, d: Shape) -> Self {
        let wire = Arc::new(Mutex::new(Wire {
            source: Source::new(pool_shape(p.pages), Limits::default()),
            sink: Sink::new(pool_shape(d.pages), Limits::default()),
            to_sink: VecDeque::new(),
            to_source: VecDeque::new(),
            posts: vec![],
            expected: BTreeMap::new(),
            revoked: vec![],
            source_facts: vec![],
            sink_facts: vec![],
            pools: None,
            damage_next: false,
            pages: (p.pages, d.pages),
        }));
        wire.lock().unwrap().sink.ask_checksums();
        let source = RoleDriver::Prefill(Box::new(SourcePort(wire.clone())));
        let prefill = Bench::new(p, Role::Prefill, source);
        let decode = Bench::new(d, Role::Decode, RoleDriver::Decode(Box::new(SinkPort(wire.clone()))));
        wire.lock().unwrap().pools = Some((prefill.toy.clone(), decode.toy.clone()));
        Self { prefill, decode, wire }
    }

    /// The same sample on both sides, in either order; both give it the same id here.
    fn submit(&mut self, request: &SampleRequest, room: u64, decode_first: bool) -> SeqId {
        let ticket = Ticket { host: "prefill".into(), port: 8998, room: Room::new(room).unwrap() };
        let request = SampleRequest { rid: format!("r{room}"), ticket: Some(ticket), ..request.clone() };
        if decode_first {
            self.decode.submit(&request);
            self.prefill.submit(&request)
        } else {
            self.prefill.submit(&request);
            self.decode.submit(&request)
        }
    }

    fn deliver(&mut self, kind: u8, pick: usize) -> bool {
        let now = self.prefill.now.max(self.decode.now);
        self.wire.lock().unwrap().deliver(now, kind, pick)
    }

    /// Everything under way arrives, and both engines come to rest.
    fn settle(&mut self) {
        for _ in 0..50_000 {
            let mut moved = (0..4).any(|kind| self.deliver(kind, 0));
            for bench in [&mut self.prefill, &mut self.decode] {
                moved |= bench.turn(Mail::default()) == Turn::Worked;
            }
            let wire = self.wire.lock().unwrap();
            moved |= !wire.source_facts.is_empty() || !wire.sink_facts.is_empty();
            moved |= !wire.to_sink.is_empty() || !wire.to_source.is_empty();
            moved |= !wire.posts.is_empty() || !wire.revoked.is_empty();
            if !moved {
                return;
            }
        }
        panic!("the pair does not come to rest");
    }

    /// Both pools are full again, after every deadline where one must pass.
    fn assert_clean(&mut self) {
        self.settle();
        let late = Time(3_600_000_000);
        self.prefill.now = late;
        self.decode.now = late;
        self.settle();
        self.prefill.assert_all_free();
        self.decode.assert_all_free();
        let wire = self.wire.lock().unwrap();
        assert!(wire.sink.is_idle() && wire.expected.is_empty() && wire.posts.is_empty());
    }
}

fn finished(events: &[SampleEvent]) -> bool {
    matches!(events.last(), Some(SampleEvent::Finished { .. }))
}

fn ends(events: &[SampleEvent]) -> usize {
    events.iter().filter(|e| matches!(e, SampleEvent::Finished { .. } | SampleEvent::Failed(_))).count()
}

/// D computes no prompt, so its leg has no prompt logprobs.
fn without_prompt(request: &SampleRequest) -> SampleRequest {
    let mut request = request.clone();
    request.logprobs.prompt_from = None;
    request
}

#[test]
fn a_split_answer_is_the_unsplit_one_and_prefill_shows_its_first_token() {
    let mut pair = Pair::new();
    let mut asked = request(&[5, 4, 3, 2, 1, 6, 7, 8, 9], 10);
    asked.logprobs = crate::request::LogprobRequest { output: true, top: 2, prompt_from: Some(0) };
    let id = pair.submit(&asked, 77, true);
    pair.settle();
    assert_eq!(pair.decode.said[&id], alone(DECODE, &without_prompt(&asked)));
    let whole = alone(DECODE, &asked);
    let said = &pair.prefill.said[&id];
    assert_eq!(said[..2], whole[..2], "prompt logprobs and token 0");
    assert!(matches!(said[2], SampleEvent::Finished { reason: FinishReason::Length, .. }));
    assert!(pair.decode.toy.state.lock().unwrap().steps.iter().all(|step| step.iter().all(|(_, len)| *len == 1)));
    pair.assert_clean();
}

#[test]
fn an_answer_that_ends_with_its_first_token_never_decodes() {
    for change in [
        (|request: &mut SampleRequest, _: u32| request.sampling.max_tokens = 1) as fn(&mut SampleRequest, u32),
        |request, first| request.sampling.stop_token_ids = vec![first],
        |request, first| request.sampling.stop = vec![((b'a' + first as u8) as char).to_string()],
    ] {
        let mut asked = request(&[5, 4, 3, 2, 1], 8);
        asked.sampling.ignore_eos = true;
        let first = tokens(&alone(DECODE, &asked))[0];
        change(&mut asked, first);
        let mut pair = Pair::new();
        let id = pair.submit(&asked, 1, false);
        pair.settle();
        assert_eq!(pair.decode.said[&id], alone(DECODE, &asked));
        assert_eq!(tokens(&pair.decode.said[&id]), [first]);
        assert!(pair.decode.toy.state.lock().unwrap().steps.is_empty(), "D ran a step");
        pair.assert_clean();
    }
}

#[test]
fn a_page_that_changes_on_its_way_fails_its_request_and_no_other() {
    let mut pair = Pair::new();
    pair.wire.lock().unwrap().damage_next = true;
    let asked = request(&[5, 4, 3, 2, 1, 6, 7, 8, 9], 10);
    let damaged = pair.submit(&asked, 1, false);
    pair.settle();
    let [SampleEvent::Failed(error)] = &pair.decode.said[&damaged][..] else { panic!("{:?}", pair.decode.said) };
    assert!(error.message.contains("page 0 of the prompt") && error.message.contains("KV head 0"), "{}", error.message);
    let whole = pair.submit(&asked, 2, false);
    pair.settle();
    assert_eq!(pair.decode.said[&whole], alone(DECODE, &asked));
    pair.assert_clean();
}

#[test]
fn a_role_server_refuses_a_request_without_ticket() {
    let mut pair = Pair::new();
    for bench in [&mut pair.prefill, &mut pair.decode] {
        let id = bench.submit(&request(&[1, 2], 3));
        let [SampleEvent::Failed(error)] = &bench.said[&id][..] else { panic!("{:?}", bench.said[&id]) };
        assert_eq!(error.kind, SampleErrorKind::BadRequest);
        assert!(error.message.contains("this is a role server, send requests to the gateway"));
    }
}

#[test]
fn a_full_decode_pool_holds_prefill_back() {
    let mut pair = Pair::new();
    let mut long = request(&[3; 16], 8);
    long.sampling.ignore_eos = true;
    let ids: Vec<SeqId> = (0..4).map(|room| pair.submit(&long, room, true)).collect();
    pair.settle();
    for id in ids {
        assert_eq!(pair.decode.said[&id], alone(DECODE, &long));
    }
    pair.assert_clean();
}

#[derive(Clone, Debug)]
enum Act {
    Prefill,
    Decode,
    Deliver(u8, usize),
    AbortPrefill(u64),
    AbortDecode(u64),
    LoseChannel,
    FailStep(bool),
    Damage,
}

fn act(faults: bool) -> impl Strategy<Value = Act> {
    let calm = prop_oneof![
        3 => Just(Act::Prefill),
        3 => Just(Act::Decode),
        6 => (0u8..4, 0usize..9).prop_map(|(kind, pick)| Act::Deliver(kind, pick)),
    ];
    let fault = prop_oneof![
        3 => (0u64..6).prop_map(Act::AbortPrefill),
        3 => (0u64..6).prop_map(Act::AbortDecode),
        1 => Just(Act::LoseChannel),
        1 => any::<bool>().prop_map(Act::FailStep),
        1 => Just(Act::Damage),
    ];
    prop_oneof![20 => calm.boxed(), u32::from(faults) => fault.boxed()]
}

impl Pair {
    fn act(&mut self, act: &Act) {
        match act {
            Act::Prefill => drop(self.prefill.turn(Mail::default())),
            Act::Decode => drop(self.decode.turn(Mail::default())),
            Act::Deliver(kind, pick) => drop(self.deliver(*kind, *pick)),
            Act::AbortPrefill(room) => self.prefill.abort(&format!("r{room}")),
            Act::AbortDecode(room) => self.decode.abort(&format!("r{room}")),
            Act::LoseChannel => {
                let now = self.prefill.now.max(self.decode.now);
                let mut wire = self.wire.lock().unwrap();
                wire.lose(now, "the test cut it");
                wire.pump(now);
            }
            Act::Damage => self.wire.lock().unwrap().damage_next = true,
            Act::FailStep(prefill) => {
                let bench = if *prefill { &self.prefill } else { &self.decode };
                bench.toy.state.lock().unwrap().fail_next = Some("the test broke it".into());
            }
        }
    }
}

type Requests = Vec<(SampleRequest, bool, usize)>;

fn requests() -> impl Strategy<Value = Requests> {
    prop::collection::vec((any_request(), any::<bool>(), 0usize..20), 1..6)
}

fn run(requests: &Requests, acts: &[Act]) -> (Pair, Vec<SeqId>) {
    let mut pair = Pair::new();
    let mut acts = acts.iter();
    let mut ids = vec![];
    for (room, (request, decode_first, pause)) in requests.iter().enumerate() {
        ids.push(pair.submit(request, room as u64, *decode_first));
        acts.by_ref().take(*pause).for_each(|act| pair.act(act));
    }
    acts.for_each(|act| pair.act(act));
    pair.settle();
    (pair, ids)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// H9: split equals unsplit, whatever the order of things.
    #[test]
    fn any_mix_split_equals_each_alone(requests in requests(), acts in prop::collection::vec(act(false), 0..200)) {
        let (mut pair, ids) = run(&requests, &acts);
        for (id, (request, ..)) in ids.iter().zip(&requests) {
            prop_assert_eq!(&pair.decode.said[id], &alone(DECODE, &without_prompt(request)));
            prop_assert!(finished(&pair.prefill.said[id]), "{:?}", pair.prefill.said[id]);
        }
        pair.assert_clean();
    }

    /// H7, H2, H5: whatever fails, each side ends once, nothing wrong is said, and every page comes back.
    #[test]
    fn any_faults_end_each_sample_once(requests in requests(), acts in prop::collection::vec(act(true), 0..250)) {
        let (mut pair, ids) = run(&requests, &acts);
        pair.assert_clean();
        for (id, (request, ..)) in ids.iter().zip(&requests) {
            let said = &pair.decode.said[id];
            prop_assert_eq!(ends(said), 1, "{:?}", said);
            prop_assert_eq!(ends(&pair.prefill.said[id]), 1);
            let expected = alone(DECODE, &without_prompt(request));
            let spoken = if finished(said) { said.len() } else { said.len() - 1 };
            prop_assert_eq!(&said[..spoken], &expected[..spoken]);
        }
    }
}
