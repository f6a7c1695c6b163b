//! A real prefill role and a real decode role in one process over loopback, moving real pages.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use tandem_fabric::memory::PoolMemory;
use tandem_handoff::{
    fence::PublishedPages,
    ids::{Room, Time},
    layout::PoolShape,
    ticket::Ticket,
    wire::{Cause, CauseKind, FirstToken, Side, hello::PROTOCOL, transfer::Backend},
};
use tokio::runtime::Runtime;

use super::{BootstrapPort, HandoffKey, HandoffParts, HandoffStartError, stats::HandoffStats};
use crate::{
    config::HandoffConfig,
    decode_role::{DecodeFact, DecodeHandoff, DecodeRole},
    kv::sums::Checksums,
    prefill_role::{PrefillFact, PrefillHandoff, PrefillRole},
    request::{SampleErrorKind, SeqId},
};

mod faults;
mod sharing;
mod transfer;

/// What each story is told over: the pages go by TCP, or by shared memory.
const BACKENDS: [Backend; 2] = [Backend::Tcp, Backend::Shm];

/// Nothing here takes longer, unless it hangs.
const LIMIT: Duration = Duration::from_secs(20);
const PROMPT: [u32; 10] = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14];

fn shape(tp: u32) -> PoolShape {
    PoolShape { layers: 2, kv_heads: 2, head_dim: 16, page_size: 4, element_bytes: 4, tp, pages: 8 }
}

fn config(port: u16) -> HandoffConfig {
    HandoffConfig {
        bootstrap_timeout_ms: 10_000,
        waiting_timeout_ms: 10_000,
        heartbeat_interval_ms: 200,
        heartbeat_max_failure: 2,
        key_file: None,
        kv_checksum: true,
        transfer_backend: Backend::Auto,
        bootstrap_host: "127.0.0.1".into(),
        bootstrap_port: port,
    }
}

/// Pools in which each head of each page holds bytes of its own.
fn pools(shape: PoolShape) -> Vec<Arc<PoolMemory>> {
    let filled = |rank| {
        let mut pool = PoolMemory::shared(shape.pool_bytes()).expect("memory");
        for page in 0..shape.pages {
            for (slot, head) in shape.heads_of_rank(rank).enumerate() {
                let at = shape.head_offset(page, slot as u32);
                pool.bytes_mut()[at..at + shape.head_bytes()].copy_from_slice(&pattern(shape, page, head));
            }
        }
        Arc::new(pool)
    };
    (0..shape.tp).map(filled).collect()
}

fn pattern(shape: PoolShape, page: u32, head: u32) -> Vec<u8> {
    (0..shape.head_bytes()).map(|at| (at as u32 ^ (page * 31) ^ (head * 97)) as u8).collect()
}

/// What differs between the workers of a test.
struct Setup {
    config: HandoffConfig,
    shape: PoolShape,
    fingerprint: [u8; 16],
    memories: Vec<Arc<PoolMemory>>,
}

impl Setup {
    fn new(port: u16, tp: u32) -> Self {
        Self { config: config(port), shape: shape(tp), fingerprint: [1; 16], memories: pools(shape(tp)) }
    }

    /// With these settings of `--disaggregation-transfer-backend`.
    fn over(backend: Backend, tp: u32) -> Self {
        let mut setup = Self::new(0, tp);
        setup.config.transfer_backend = backend;
        setup
    }

    fn parts<'a>(&'a self, runtime: &Runtime, stats: &Arc<HandoffStats>) -> HandoffParts<'a> {
        HandoffParts {
            config: &self.config,
            shape: self.shape,
            memories: self.memories.clone(),
            fingerprint: self.fingerprint,
            numerics: "test".into(),
            waker: Arc::new(|| {}),
            runtime: runtime.handle().clone(),
            stats: Arc::clone(stats),
        }
    }
}

impl Setup {
    fn start_prefill(
        &self,
        runtime: &Runtime,
        stats: &Arc<HandoffStats>,
    ) -> Result<(PrefillRole, SocketAddr), HandoffStartError> {
        PrefillRole::start(self.parts(runtime, stats), runtime.block_on(BootstrapPort::take(&self.config))?)
    }

    fn start_decode(&self, runtime: &Runtime, stats: &Arc<HandoffStats>) -> DecodeRole {
        let key = HandoffKey::load(self.config.key_file.as_deref()).expect("the key loads");
        DecodeRole::start(self.parts(runtime, stats), key)
    }
}

/// Both workers, driven by the test in place of their engines.
struct Pair {
    start: Instant,
    runtime: Runtime,
    p: Option<PrefillRole>,
    d: DecodeRole,
    p_facts: Vec<PrefillFact>,
    d_facts: Vec<DecodeFact>,
    port: u16,
    stats: Arc<HandoffStats>,
}

impl Pair {
    fn new(p: Setup, d: Setup) -> Self {
        let runtime = Runtime::new().expect("runtime");
        let stats = Arc::new(HandoffStats::default());
        let (role, address) = p.start_prefill(&runtime, &stats).expect("P starts");
        let d = d.start_decode(&runtime, &stats);
        let port = address.port();
        let (p_facts, d_facts) = (Vec::new(), Vec::new());
        Self { start: Instant::now(), runtime, p: Some(role), d, p_facts, d_facts, port, stats }
    }

    fn same() -> Self {
        Self::over(Backend::Auto)
    }

    fn over(backend: Backend) -> Self {
        Self::new(Setup::over(backend, 1), Setup::over(backend, 1))
    }

    fn now(&self) -> Time {
        Time(self.start.elapsed().as_micros() as u64)
    }

    fn ticket_at(&self, host: &str, room: u64) -> Ticket {
        Ticket { host: host.into(), port: self.port, room: Room::new(room).expect("in range") }
    }

    fn p(&mut self) -> &mut PrefillRole {
        self.p.as_mut().expect("P runs")
    }

    /// Both halves of one sample are asked for.
    fn ask(&mut self, id: u64, room: u64, pages: &[u32]) {
        let (now, ticket) = (self.now(), self.ticket_at("127.0.0.1", room));
        if let Some(p) = &mut self.p {
            p.request(now, SeqId(id), &ticket, &PROMPT);
        }
        self.d.reserve(now, now, SeqId(id), &ticket, &PROMPT, PublishedPages::new(pages.to_vec()));
    }

    fn finish(&mut self, id: u64, pages: &[u32]) {
        let now = self.now();
        self.p().chunk_written(now, SeqId(id), pages, 0..1);
        let first = FirstToken { token: 42, logprob: None, cached_tokens: 0 };
        self.p().finish(now, SeqId(id), pages, 1..pages.len(), first);
    }

    /// Polls both roles until `done`.
    fn until(&mut self, what: &str, done: impl Fn(&[PrefillFact], &[DecodeFact]) -> bool) {
        let start = Instant::now();
        while !done(&self.p_facts, &self.d_facts) {
            let (p, d) = (&self.p_facts, &self.d_facts);
            assert!(start.elapsed() < LIMIT, "waited {LIMIT:?} for: {what}; P {p:?}; D {d:?}");
            let now = self.now();
            if let Some(p) = &mut self.p {
                self.p_facts.extend(p.poll(now));
            }
            self.d_facts.extend(self.d.poll(now));
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn until_reserved(&mut self, id: u64) {
        let reserved = PrefillFact::Reserved { id: SeqId(id), held_tokens: 0 };
        self.until("Reserved", |p, _| p.contains(&reserved));
    }

    fn until_committed(&mut self, id: u64) {
        self.until("Committed", |_, d| {
            d.iter().any(|fact| matches!(fact, DecodeFact::Committed { id: of, .. } if of.0 == id))
        });
    }

    fn until_d_quiet(&mut self) {
        self.until("Quiet at D", |_, d| d.iter().any(|fact| matches!(fact, DecodeFact::Quiet { .. })));
    }

    /// The message and kind with which D's request ended.
    fn d_failure(&mut self, id: u64) -> (SampleErrorKind, String) {
        let failed = |fact: &DecodeFact| matches!(fact, DecodeFact::Failed { id: of, .. } if of.0 == id);
        self.until("Failed at D", |_, d| d.iter().any(failed));
        let at = self.d_facts.iter().position(failed).expect("it is there");
        match self.d_facts.remove(at) {
            DecodeFact::Failed { error, .. } => (error.kind, error.message),
            other => panic!("{other:?}"),
        }
    }

    /// One sample from end to end.
    fn assert_serves(&mut self, id: u64, room: u64) {
        self.ask(id, room, &[3, 0, 6]);
        self.until_reserved(id);
        self.finish(id, &[1, 2, 4]);
        self.until_committed(id);
    }
}

#[test]
fn pages_move_and_their_evidence_frees_them() {
    for backend in BACKENDS {
        pages_move_over(backend);
    }
}

fn pages_move_over(backend: Backend) {
    let (p, d) = (Setup::over(backend, 1), Setup::over(backend, 2));
    let d_pools = d.memories.clone();
    let mut pair = Pair::new(p, d);
    pair.ask(1, 7, &[3, 0, 6]);
    pair.until_reserved(1);
    pair.finish(1, &[1, 2, 4]);
    pair.until_committed(1);
    pair.until("Quiet at P", |p, _| p.contains(&PrefillFact::Quiet { id: SeqId(1) }));
    assert!(pair.p_facts.contains(&PrefillFact::Delivered { id: SeqId(1) }));
    let Some(DecodeFact::Committed { pages, proof, first, .. }) = pair.d_facts.pop() else {
        panic!("{:?}", pair.d_facts);
    };
    assert_eq!((pages.redeem(proof).expect("its own proof"), first.token), (vec![3, 0, 6], 42));
    let bytes = 3 * shape(1).page_bytes() as u64;
    assert_eq!(pair.stats.bytes_posted.load(Ordering::Relaxed), bytes);
    assert_eq!(pair.stats.bytes_received.load(Ordering::Relaxed), bytes);
    let by_shm = if backend == Backend::Shm { 2 } else { 0 };
    assert_eq!(pair.stats.channels_by_shm.load(Ordering::Relaxed), by_shm, "one channel, counted by each side");
    drop(pair);
    let d = shape(2);
    let start = Instant::now();
    while d_pools.iter().any(|pool| Arc::strong_count(pool) > 1) {
        assert!(start.elapsed() < LIMIT, "a thread or a task of the role lives on");
        std::thread::sleep(Duration::from_millis(1));
    }
    for (rank, pool) in d_pools.into_iter().enumerate() {
        let mut pool = Arc::into_inner(pool).expect("the role and its tasks are gone");
        for (page_p, page_d) in [(1, 3), (2, 0), (4, 6)] {
            for (slot, head) in d.heads_of_rank(rank as u32).enumerate() {
                let at = d.head_offset(page_d, slot as u32);
                assert!(pool.bytes_mut()[at..at + d.head_bytes()] == pattern(d, page_p, head)[..]);
            }
        }
    }
}

/// Ranks that share heads in every way: fewer, more, and copies of one head.
#[test]
fn pages_that_arrive_damaged_fail_the_request_by_page_and_head_and_come_back() {
    for (p_tp, d_tp) in [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2)] {
        let (p, d) = (Setup::new(0, p_tp), Setup::new(0, d_tp));
        let shape = p.shape;
        // What P computed for its page 2, the second of the prompt, is not what its fabric sends of head 1.
        let mut computed = pools(shape);
        let (rank, slot) = shape.holder(1);
        let pool = Arc::get_mut(&mut computed[rank as usize]).expect("nobody else has it");
        pool.bytes_mut()[shape.head_offset(2, slot) + shape.head_bytes() - 1] ^= 0x10;
        let mut pair = Pair::new(p, d);
        pair.assert_serves(1, 7);
        let role = pair.p.take().expect("P runs");
        pair.p = Some(role.with_checksums(Checksums::of_memory(shape, computed)));
        pair.ask(2, 8, &[3, 0, 6]);
        pair.until_reserved(2);
        pair.finish(2, &[1, 2, 4]);
        let (kind, message) = pair.d_failure(2);
        assert_eq!(kind, SampleErrorKind::Internal, "{p_tp} to {d_tp}");
        assert!(
            message.contains("page 1 of the prompt (page 0 of the pool), KV head 1"),
            "{p_tp} to {d_tp}: {message}"
        );
        pair.until_d_quiet();
        let Some(DecodeFact::Quiet { pages, proof }) = pair.d_facts.pop() else { panic!("{:?}", pair.d_facts) };
        assert_eq!(pages.redeem(proof).expect("its own proof"), [3, 0, 6]);
        assert_eq!(pair.stats.checksums_failed.load(Ordering::Relaxed), 1);
        pair.ask(3, 9, &[3, 0, 6]);
        pair.until_reserved(3);
        pair.finish(3, &[1, 4, 5]);
        pair.until_committed(3);
    }
}

#[test]
fn many_samples_share_one_channel_under_any_name_of_the_host() {
    let mut pair = Pair::same();
    for id in 1..20 {
        let host = if id % 2 == 0 { "127.0.0.1" } else { "localhost" };
        let (now, ticket) = (pair.now(), pair.ticket_at(host, id));
        pair.d.reserve(now, now, SeqId(id), &ticket, &PROMPT, PublishedPages::new(vec![0, 1, 2]));
        pair.p().request(now, SeqId(id), &ticket, &PROMPT);
        pair.until_reserved(id);
        pair.finish(id, &[1, 2, 4]);
        pair.until_committed(id);
    }
    assert_eq!(pair.stats.channels_opened.load(Ordering::Relaxed), 2, "one channel, counted by each side");
}

#[test]
fn workers_that_differ_are_refused_by_name() {
    let mut d = Setup::new(0, 1);
    d.fingerprint = [2; 16];
    d.shape.page_size = 8;
    let mut pair = Pair::new(Setup::new(0, 1), d);
    let (now, ticket) = (pair.now(), pair.ticket_at("127.0.0.1", 7));
    pair.d.reserve(now, now, SeqId(1), &ticket, &PROMPT, PublishedPages::new(vec![0, 1]));
    let (kind, message) = pair.d_failure(1);
    assert_eq!(kind, SampleErrorKind::Peer, "no fault of the request");
    for named in ["model fingerprint", "page size (prefill 4, decode 8)"] {
        assert!(message.contains(named), "{message}");
    }
    pair.until_d_quiet();
}

fn key_file(directory: &tempfile::TempDir, name: &str, text: &str) -> Option<PathBuf> {
    let path = directory.path().join(name);
    std::fs::write(&path, text).expect("write");
    Some(path)
}

#[test]
fn only_workers_with_the_same_key_speak_to_each_other() {
    let directory = tempfile::tempdir().expect("directory");
    let right = key_file(&directory, "right", "0123456789abcdef0123456789abcdef\n");
    let wrong = key_file(&directory, "wrong", "another key of the same length..");
    for (d_key, serves) in [(right.clone(), true), (wrong, false), (None, false)] {
        let (mut p, mut d) = (Setup::new(0, 1), Setup::new(0, 1));
        p.config.key_file = right.clone();
        d.config.key_file = d_key;
        let mut pair = Pair::new(p, d);
        if serves {
            pair.assert_serves(1, 7);
        } else {
            pair.ask(1, 7, &[3, 0, 6]);
            let (kind, message) = pair.d_failure(1);
            assert!(kind == SampleErrorKind::Peer && message.contains("key"), "{message}");
            pair.until_d_quiet();
            assert_eq!(pair.stats.bytes_posted.load(Ordering::Relaxed), 0);
        }
    }
}

#[test]
fn a_prefill_worker_that_dies_ends_its_attempts_and_its_successor_serves() {
    for backend in BACKENDS {
        prefill_dies_over(backend);
    }
}

fn prefill_dies_over(backend: Backend) {
    let mut pair = Pair::over(backend);
    pair.ask(1, 7, &[3, 0, 6]);
    pair.until_reserved(1);
    let now = pair.now();
    pair.p().chunk_written(now, SeqId(1), &[1, 2, 4], 0..1);
    pair.p = None;
    let (kind, message) = pair.d_failure(1);
    assert_eq!(kind, SampleErrorKind::Peer, "{message}");
    pair.until_d_quiet();
    assert_eq!(pair.d.queues(), Default::default());
    // The same port, another incarnation; the room may be used again.
    let mut setup = Setup::over(backend, 1);
    setup.config.bootstrap_port = pair.port;
    let start = Instant::now();
    let role = loop {
        match setup.start_prefill(&pair.runtime, &pair.stats) {
            Ok((role, _)) => break role,
            Err(error) => assert!(start.elapsed() < LIMIT, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    pair.p = Some(role);
    pair.p_facts.clear();
    pair.assert_serves(2, 7);
}

#[test]
fn a_decode_worker_that_dies_frees_the_prefill_workers_pages() {
    for backend in BACKENDS {
        decode_dies_over(backend);
    }
}

fn decode_dies_over(backend: Backend) {
    let mut pair = Pair::over(backend);
    pair.ask(1, 7, &[3, 0, 6]);
    pair.until_reserved(1);
    let now = pair.now();
    pair.p().chunk_written(now, SeqId(1), &[1, 2, 4], 0..1);
    let setup = Setup::over(backend, 1);
    pair.d = setup.start_decode(&pair.runtime, &pair.stats);
    pair.until("Quiet at P", |p, _| p.contains(&PrefillFact::Quiet { id: SeqId(1) }));
    assert!(pair.p_facts.iter().any(|fact| matches!(fact, PrefillFact::Failed { .. })));
    pair.assert_serves(2, 8);
}

#[test]
fn each_side_hears_why_the_other_ended_the_attempt() {
    for backend in BACKENDS {
        causes_travel_over(backend);
    }
}

fn causes_travel_over(backend: Backend) {
    let mut pair = Pair::over(backend);
    pair.ask(1, 7, &[3, 0, 6]);
    pair.until_reserved(1);
    let now = pair.now();
    let root = Cause::new(Side::Prefill, CauseKind::Internal, "NaN in layer 3");
    pair.p().cancel(now, SeqId(1), root);
    let (_, message) = pair.d_failure(1);
    assert_eq!(message, "prefill worker: NaN in layer 3");
    pair.until_d_quiet();

    pair.d_facts.clear();
    pair.ask(2, 8, &[3, 0, 6]);
    pair.until_reserved(2);
    let now = pair.now();
    pair.d.cancel(now, SeqId(2), Cause::new(Side::Decode, CauseKind::Aborted, "the client left"));
    pair.until("Quiet at P", |p, _| p.contains(&PrefillFact::Quiet { id: SeqId(2) }));
    pair.until_d_quiet();
    assert!(pair.p_facts.iter().any(
        |fact| matches!(fact, PrefillFact::Failed { error, .. } if error.message == "decode worker: the client left")
    ));
    pair.d_facts.clear();
    pair.assert_serves(3, 8);
}

#[test]
fn nobody_at_the_address_fails_the_request_soon() {
    let mut pair = Pair::same();
    pair.p = None;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    pair.port = closed.local_addr().expect("address").port();
    drop(closed);
    pair.ask(1, 7, &[3, 0, 6]);
    let (kind, message) = pair.d_failure(1);
    assert!(kind == SampleErrorKind::Peer && message.contains("cannot be reached"), "{message}");
    pair.until_d_quiet();
}

fn http(port: u16, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
    stream.set_read_timeout(Some(LIMIT)).expect("timeout");
    stream.write_all(request).expect("write");
    let mut answer = Vec::new();
    // A reset after the answer is an end like any other here.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn the_port_answers_strangers_briefly_and_garbage_harms_nobody() {
    let mut pair = Pair::same();
    pair.assert_serves(1, 7);
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: p\r\n\r\n").into_bytes();
    assert!(http(pair.port, &get("/health")).starts_with("HTTP/1.1 200"));
    let route = http(pair.port, &get("/route"));
    let protocol = format!(r#""protocol":{PROTOCOL}"#);
    assert!(route.contains(r#""role":"prefill""#) && route.contains(&protocol), "{route}");
    assert!(http(pair.port, &get("/handoff")).starts_with("HTTP/1.1 426"));
    assert!(http(pair.port, &get("/other")).starts_with("HTTP/1.1 404"));
    assert!(http(pair.port, b"PUT /route HTTP/1.1\r\nhost: p\r\n\r\n").starts_with("HTTP/1.1 405"));
    http(pair.port, &[0xff; 4096]);
    for protocol in ["tandem-control", "tandem-data"] {
        let head = format!("GET /handoff HTTP/1.1\r\nhost: p\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\r\n");
        let mut stream = TcpStream::connect(("127.0.0.1", pair.port)).expect("connect");
        stream.set_read_timeout(Some(LIMIT)).expect("timeout");
        stream.write_all(head.as_bytes()).expect("write");
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 101");
        // A claimed frame of 4 GiB: the connection is closed.
        stream.write_all(&[0xff; 64]).expect("write");
        let _ = stream.read_to_end(&mut Vec::new());
    }
    pair.assert_serves(2, 8);
}

#[test]
fn strangers_that_say_nothing_keep_no_decode_worker_out() {
    let mut pair = Pair::same();
    let silent: Vec<TcpStream> =
        (0..300).map(|_| TcpStream::connect(("127.0.0.1", pair.port)).expect("connect")).collect();
    pair.assert_serves(1, 7);
    drop(silent);
}
