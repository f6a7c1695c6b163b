//! Workers as processes of their own: killed in mid-copy, stopped and continued. The children are this test program, told
//! by an environment variable to play one side.

use std::{
    io::{BufRead, BufReader, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream as StdStream},
    },
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tandem_handoff::{ids::Attempt, layout::Mapping};
use tokio::{net::UnixStream, runtime::Runtime};

use super::{large, shared};
use crate::{
    SinkFabric, SinkReport, SourceFabric,
    shm::{ShmSink, ShmSource, receive_pools, send_pools},
    testkit::{CHANNEL, LIMIT, Settled, pieces, private, read, until, write},
};

const SIDE: &str = "TANDEM_TEST_SHM_SIDE";
const SOCKET: &str = "TANDEM_TEST_SHM_SOCKET";

/// Pieces of 1 MiB, over and over the same pages: about a second to copy.
const PIECES: usize = 8000;
const PAGES: u32 = 4;

fn pages() -> Vec<u32> {
    (0..PIECES as u32).map(|at| at % PAGES).collect()
}

fn attempt() -> Attempt {
    CHANNEL.attempt(1)
}

/// A child process; killed when dropped, whatever state it is in.
struct Process {
    child: Child,
    commands: Option<ChildStdin>,
}

impl Process {
    /// Starts this program as `side`, and waits for it to connect.
    fn start(side: &str) -> (Self, StdStream) {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("tandem-test-{}-{count}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let listener = UnixListener::bind_addr(&address).expect("bind");
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "shm::tests::children::plays_a_side_when_told", "--nocapture"])
            .env(SIDE, side)
            .env(SOCKET, &name)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("a child");
        let commands = child.stdin.take();
        let process = Self { child, commands };
        listener.set_nonblocking(true).expect("settable");
        let mut stream = None;
        until(|| {
            stream = listener.accept().ok();
            stream.is_some()
        });
        (process, stream.expect("it connected").0)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it is there");
    }

    fn stop(&self) {
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", self.child.id());
        until(|| std::fs::read_to_string(&stat).is_ok_and(|text| text.contains(") T ")));
    }

    fn kill(&mut self) {
        self.child.kill().expect("it is there");
        self.child.wait().expect("it ends");
    }

    fn tell(&mut self, command: &str) {
        let commands = self.commands.as_mut().expect("it listens");
        writeln!(commands, "{command}").expect("it reads");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tokio_stream(runtime: &Runtime, stream: StdStream) -> UnixStream {
    let _runtime = runtime.enter();
    stream.set_nonblocking(true).expect("settable");
    UnixStream::from_std(stream).expect("a stream")
}

/// P with all pieces posted, their pages filled with ones.
fn posting_source(runtime: &Runtime, stream: StdStream) -> ShmSource {
    let p = large(PAGES);
    let pools = shared(&p);
    write(&pools[0], 0, &vec![1; p.pool_bytes()]);
    let stream = tokio_stream(runtime, stream);
    runtime.block_on(send_pools(&stream, &pools)).expect("the pools are shared");
    let mut source = ShmSource::new(runtime.handle().clone(), Arc::new(|| {}));
    source.attach(CHANNEL, stream).expect("P attaches");
    source.post(attempt(), pieces(&p, &p, &pages(), &pages()));
    source
}

/// D that expects all pieces.
fn expecting_sink(runtime: &Runtime, stream: StdStream) -> (ShmSink, Vec<Arc<crate::memory::PoolMemory>>) {
    let p = large(PAGES);
    let pools = private(&p);
    let mut sink = ShmSink::new(p, pools.clone(), Arc::new(|| {}));
    sink.expect(attempt(), &pages(), Mapping::new(&p, &p));
    let stream = tokio_stream(runtime, stream);
    let mapped = runtime.block_on(receive_pools(&stream, &p)).expect("pools");
    sink.attach(CHANNEL, stream, mapped).expect("D attaches");
    (sink, pools)
}

/// Pieces that landed, and whether the channel broke.
fn take(sink: &mut ShmSink, landed: &mut usize) -> bool {
    let mut broken = false;
    for report in sink.poll() {
        match report {
            SinkReport::Landed { pieces, .. } => *landed += pieces.len(),
            SinkReport::Broken { .. } => broken = true,
            SinkReport::Quiet { .. } => {}
        }
    }
    broken
}

#[test]
fn d_survives_the_death_of_p_in_mid_copy() {
    let runtime = Runtime::new().expect("runtime");
    let (mut p, stream) = Process::start("prefill");
    let (mut sink, pools) = expecting_sink(&runtime, stream);
    let mut landed = 0;
    until(|| {
        take(&mut sink, &mut landed);
        landed > 10
    });
    p.kill();
    until(|| take(&mut sink, &mut landed));
    // The copier was at work: the dead worker's memory lasts as long as D's mapping of it.
    assert!(landed < PIECES, "all {landed} pieces landed");
    sink.revoke(attempt());
    until(|| sink.poll().contains(&SinkReport::Quiet { attempt: attempt() }));
    assert!(read(&pools[0], 0, pools[0].len()).iter().all(|&byte| byte == 1));
    // And it serves another prefill worker.
    let (_p, stream) = Process::start("prefill");
    sink.close(CHANNEL);
    let p = large(PAGES);
    let stream = tokio_stream(&runtime, stream);
    let mapped = runtime.block_on(receive_pools(&stream, &p)).expect("pools");
    sink.expect(attempt(), &pages(), Mapping::new(&p, &p));
    sink.attach(CHANNEL, stream, mapped).expect("D attaches");
    let mut landed = 0;
    until(|| take(&mut sink, &mut landed) || landed > 100);
    assert!(landed > 100);
}

#[test]
fn d_stopped_with_open_ranges_and_continued_writes_into_no_page_that_it_gave_up() {
    let runtime = Runtime::new().expect("runtime");
    let (mut d, stream) = Process::start("decode");
    let mut source = posting_source(&runtime, stream);
    let mut settled = Settled::default();
    until(|| settled.poll(&mut source).sent > 10);
    d.stop();
    source.stop(attempt());
    std::thread::sleep(Duration::from_millis(200));
    let when_stopped = settled.poll(&mut source);
    assert!(when_stopped.dropped > 0 && when_stopped.all() < PIECES as u64, "{when_stopped:?}");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(settled.poll(&mut source), when_stopped, "a stopped worker proves nothing");
    d.tell("revoke");
    d.signal(Signal::CONT);
    until(|| settled.poll(&mut source).all() == PIECES as u64);
    assert_eq!(settled.unknown, 0);
    d.tell("check");
    assert!(d.child.wait().expect("it ends").success(), "it found foreign bytes in its pages");
}

#[test]
fn the_death_of_d_frees_p_s_pages_though_its_socket_lives_on() {
    let runtime = Runtime::new().expect("runtime");
    let (mut d, stream) = Process::start("decode with an heir");
    let mut source = posting_source(&runtime, stream);
    let mut settled = Settled::default();
    until(|| settled.poll(&mut source).sent > 10);
    d.stop();
    source.stop(attempt());
    std::thread::sleep(Duration::from_millis(100));
    assert!(settled.poll(&mut source).all() < PIECES as u64);
    d.kill();
    let mut why = String::new();
    until(|| {
        for report in source.poll() {
            match report {
                crate::SourceReport::Broken { why: text, .. } => why = text,
                crate::SourceReport::Settled { pieces, .. } => settled.unknown += pieces,
            }
        }
        settled.all() == PIECES as u64
    });
    assert!(why.contains("process is gone"), "{why}");
}

/// No test by itself: what a child does.
#[test]
fn plays_a_side_when_told() {
    let Ok(side) = std::env::var(SIDE) else {
        return;
    };
    let name = std::env::var(SOCKET).expect("the parent's socket");
    let address = SocketAddr::from_abstract_name(name).expect("a name");
    let stream = StdStream::connect_addr(&address).expect("the parent listens");
    let runtime = Runtime::new().expect("runtime");
    match side.as_str() {
        "prefill" => {
            let _source = posting_source(&runtime, stream);
            std::thread::sleep(LIMIT);
        }
        "decode" => {
            let (sink, pools) = expecting_sink(&runtime, stream);
            obey(sink, &pools[0]);
        }
        "decode with an heir" => {
            // It holds the socket as its output until the parent, whose pipe is its input, is done.
            let heirloom = stream.try_clone().expect("a descriptor");
            let cat = Command::new("cat").stdin(Stdio::inherit()).stdout(std::os::fd::OwnedFd::from(heirloom)).spawn();
            let _sink = expecting_sink(&runtime, stream);
            cat.expect("cat").wait().expect("it ends with the parent's pipe");
        }
        other => panic!("no side {other}"),
    }
}

/// D's engine in small: gives its pages up when told, uses them for something else, and looks at them in the end.
fn obey(mut sink: ShmSink, pool: &crate::memory::PoolMemory) {
    for command in BufReader::new(std::io::stdin()).lines() {
        match command.expect("the parent's command").as_str() {
            "revoke" => {
                sink.revoke(attempt());
                until(|| sink.poll().contains(&SinkReport::Quiet { attempt: attempt() }));
                write(pool, 0, &vec![9; pool.len()]);
            }
            "check" => {
                assert!(read(pool, 0, pool.len()).iter().all(|&byte| byte == 9), "a page was written to");
                return;
            }
            other => panic!("no command {other}"),
        }
    }
}
