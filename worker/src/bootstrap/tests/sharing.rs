//! P's socket for shared memory: who is refused and how he hears why, and what D does when it gets no pools there.

use std::{io, sync::Mutex};

use futures_util::FutureExt;
use tandem_handoff::{
    ids::{Channel, Incarnation, SessionId},
    wire::{
        hello::Identity,
        transfer::{Path as TransferPath, Transfer},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream as AsyncStream, UnixListener, UnixStream},
    time::timeout,
};

use super::{
    faults::{no_key, upgraded},
    *,
};
use crate::{
    bootstrap::{
        handshake::{Met, Nonces, accept_stream, ask_for_pools, asked_for_pools, greet_decode, greet_prefill, welcome},
        share::{OTHER_USER, PREFIX, abstract_path, connect},
    },
    host::boot_id,
};

const NONCES: Nonces = Nonces { decode: [1; 32], prefill: [2; 32] };
const CHANNEL: Channel = Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3) };

fn transfer(socket: &str) -> Transfer {
    Transfer { backend: Backend::Auto, host: boot_id(), socket: socket.to_owned() }
}

/// A socket with a worker's kind of name.
fn socket() -> (String, UnixListener) {
    let name = format!("{PREFIX}test-{:032x}", rand::random::<u128>());
    let listener = UnixListener::bind(abstract_path(&name)).expect("bind");
    (name, listener)
}

/// What D hears, and what P says, when D asks at the socket that P knows as `at_p`.
async fn ask(at_d: &str, at_p: &str, found: Result<Nonces, &'static str>) -> (Result<(), String>, Result<(), String>) {
    let (mut d, mut p) = UnixStream::pair().expect("a pair");
    let key = no_key();
    let answer = async {
        let outcome = asked_for_pools(&mut p, &key, at_p, |_| found).await;
        drop(p);
        outcome.map(|channel| assert_eq!(channel, CHANNEL))
    };
    tokio::join!(ask_for_pools(&mut d, &key, at_d, CHANNEL, &NONCES), answer)
}

#[tokio::test]
async fn a_decode_worker_that_gets_no_pools_hears_the_reason_of_the_prefill_worker() {
    let (at_d, at_p) = ask("s", "s", Err(OTHER_USER)).await;
    assert_eq!((at_d, at_p), (Err(OTHER_USER.to_owned()), Err(OTHER_USER.to_owned())));
    assert_eq!(ask("s", "s", Ok(NONCES)).await, (Ok(()), Ok(())));
}

#[tokio::test]
async fn a_name_that_was_changed_on_the_way_gets_no_pools() {
    let (at_d, at_p) = ask("a relay's", "the worker's", Ok(NONCES)).await;
    assert!(at_d.as_ref().is_err_and(|why| why.contains("another name of this socket")), "{at_d:?}");
    assert_eq!(at_d, at_p);
}

#[tokio::test]
async fn a_full_queue_at_the_socket_is_waited_for() {
    let (name, listener) = socket();
    rustix::net::listen(&listener, 0).expect("a queue of one");
    let _first = connect(&name).await.expect("the queue is empty");
    let mut second = std::pin::pin!(connect(&name));
    assert!(second.as_mut().now_or_never().is_none(), "the queue is full, and that is no failure");
    listener.accept().await.expect("the first");
    timeout(LIMIT, second).await.expect("there is room now").expect("it is connected");
}

#[tokio::test]
async fn a_socket_that_is_not_here_is_told_from_one_that_fails() {
    let (name, listener) = socket();
    drop(listener);
    let why = connect(&name).await.expect_err("nobody listens");
    assert!(why.contains("different network namespaces"), "{why}");
    assert!(connect("dbus").await.is_err_and(|why| why.contains("none of a worker")));
}

#[test]
fn strangers_at_the_socket_are_counted_and_keep_no_decode_worker_from_the_pools() {
    let mut pair = Pair::same();
    let port = pair.port;
    let name = pair.runtime.block_on(async {
        let mut stream = upgraded(port, "tandem-control").await;
        let identity = Identity::new([1; 16], shape(1), "test", transfer(""));
        match greet_prefill(&mut stream, &no_key(), Incarnation(77), &identity, |_| None).await {
            Ok(Met::New { path: TransferPath::Shm { socket, .. }, .. }) => socket,
            Ok(_) => panic!("P offers no shared memory"),
            Err(refusal) => panic!("{refusal:?}"),
        }
    });
    let _runtime = pair.runtime.enter();
    let silent: Vec<UnixStream> = (0..300).map(|_| pair.runtime.block_on(connect(&name)).expect("P listens")).collect();
    for _ in 0..100 {
        let mut stream = pair.runtime.block_on(connect(&name)).expect("P listens");
        // P may have hung up already.
        let _ = pair.runtime.block_on(stream.write_all(&[0xff; 64]));
    }
    pair.assert_serves(1, 7);
    assert!(pair.stats.channels_by_shm.load(Ordering::Relaxed) > 0);
    drop(silent);
    let refused = || pair.stats.handshakes_refused.load(Ordering::Relaxed);
    let start = Instant::now();
    while refused() < 400 {
        assert!(start.elapsed() < LIMIT, "{} of 400 strangers were counted", refused());
        std::thread::yield_now();
    }
}

/// What the process logs, from the first call of [`log`] on.
static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct ToLog;

impl io::Write for ToLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.lock().expect("no writer panics").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn log() -> String {
    // A second call changes nothing.
    let _ = tracing_subscriber::fmt().with_ansi(false).with_writer(|| ToLog).try_init();
    String::from_utf8(LOG.lock().expect("no writer panics").clone()).expect("text")
}

/// The one line that D writes of its channel to the port.
fn opened(port: u16) -> String {
    let about = format!("127.0.0.1:{port}");
    let text = log();
    let lines: Vec<&str> =
        text.lines().filter(|line| line.contains(&about) && line.contains("to a prefill worker is open")).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines[0].to_owned()
}

#[test]
fn one_line_at_the_decode_worker_says_why_pages_go_by_tcp() {
    log();
    let private = || vec![Arc::new(PoolMemory::new(shape(1).pool_bytes()).expect("memory"))];
    for (p, memories, why) in [
        (Backend::Auto, private(), "serves no shared memory"),
        (Backend::Tcp, pools(shape(1)), "the prefill worker is set to tcp"),
    ] {
        let mut prefill = Setup::over(p, 1);
        prefill.memories = memories;
        let mut pair = Pair::new(prefill, Setup::over(Backend::Auto, 1));
        pair.assert_serves(1, 7);
        let line = opened(pair.port);
        assert!(line.contains(why) && line.contains(r#"backend="tcp""#), "{line}");
    }
}

async fn leave_http(stream: &mut AsyncStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("a head"));
    }
    let head = String::from_utf8(head).expect("text");
    let protocol = head.lines().find_map(|line| line.strip_prefix("upgrade: ")).expect("an upgrade");
    let answer = format!("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\r\n");
    stream.write_all(answer.as_bytes()).await.expect("write");
}

/// A prefill worker that names the socket, until D's data stream is bound.
async fn play_prefill(listener: TcpListener, socket: String) -> (AsyncStream, AsyncStream) {
    let (mut control, _) = listener.accept().await.expect("D dials");
    leave_http(&mut control).await;
    let identity = Identity::new([1; 16], shape(1), "test", transfer(&socket));
    let greeted = greet_decode(&mut control, &no_key(), CHANNEL.prefill, &identity).await;
    let (decode, _, nonces) = greeted.expect("D fits");
    let channel = Channel { decode, ..CHANNEL };
    welcome(&mut control, channel.session, &identity).await.expect("D reads");
    let (mut data, _) = listener.accept().await.expect("D falls back to TCP");
    leave_http(&mut data).await;
    let bound = accept_stream(&mut data, &no_key(), |of, rank| (of == channel && rank == 0).then_some(nonces)).await;
    assert_eq!(bound, Ok((channel, 0)));
    (control, data)
}

#[test]
fn a_socket_that_says_nothing_or_is_full_costs_a_channel_only_its_shared_memory() {
    log();
    for (full, why) in [(false, "does not answer"), (true, "is busy")] {
        let mut pair = Pair::same();
        let runtime = pair.runtime.handle().clone();
        let _entered = runtime.enter();
        let (name, held) = socket();
        let filling = full.then(|| {
            rustix::net::listen(&held, 0).expect("a queue of one");
            runtime.block_on(connect(&name)).expect("the first")
        });
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("bind");
        pair.port = listener.local_addr().expect("address").port();
        let played = runtime.spawn(play_prefill(listener, name));
        let (now, ticket) = (pair.now(), pair.ticket_at("127.0.0.1", 7));
        pair.d.reserve(now, now, SeqId(1), &ticket, &PROMPT, PublishedPages::new(vec![3, 0, 6]));
        let start = Instant::now();
        while !log().contains(&format!("prefill=127.0.0.1:{} session=3", pair.port)) {
            assert!(start.elapsed() < LIMIT && pair.d_facts.is_empty(), "{:?}", pair.d_facts);
            let now = pair.now();
            pair.d_facts.extend(pair.d.poll(now));
            std::thread::sleep(Duration::from_micros(200));
        }
        let line = opened(pair.port);
        assert!(line.contains(why) && line.contains(r#"backend="tcp""#), "{line}");
        runtime.block_on(played).expect("the data stream was bound");
        drop((filling, held));
    }
}
