//! A worker and a gateway whose log nobody reads any more: they serve and stop as if somebody did. Each wait has a limit.

use std::{
    io::Read as _,
    net::TcpListener,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

const LIMIT: Duration = Duration::from_secs(60);
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/llama-gqa");

/// Killed by drop, so that a failed test leaves nothing.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Process {
    /// Neither its stdout nor its stderr has a reader.
    fn start(arguments: &[&str]) -> Self {
        let (reader, writer) = std::io::pipe().expect("pipe");
        drop(reader);
        let child = Command::new(env!("CARGO_BIN_EXE_tandem"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().expect("a second end"))
            .stderr(writer)
            .spawn()
            .expect("it starts");
        Process(child)
    }

    fn answers(&mut self, url: &str) {
        let deadline = Instant::now() + LIMIT;
        while !reqwest::blocking::get(url).is_ok_and(|answer| answer.status().is_success()) {
            assert_eq!(self.0.try_wait().expect("wait"), None, "it ended");
            assert!(Instant::now() < deadline, "waited {LIMIT:?} for {url}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn terminated(&mut self) -> ExitStatus {
        let status = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status().expect("kill runs");
        assert!(status.success());
        let deadline = Instant::now() + LIMIT;
        while self.0.try_wait().expect("wait").is_none() {
            assert!(Instant::now() < deadline, "waited {LIMIT:?} for the end");
            thread::sleep(Duration::from_millis(10));
        }
        self.0.wait().expect("wait")
    }
}

fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    listener.local_addr().expect("address").port().to_string()
}

#[test]
fn a_worker_and_a_gateway_that_nobody_hears_serve_and_stop_in_order() {
    let [worker_port, gateway_port] = [free_port(), free_port()];
    let worker_url = format!("http://127.0.0.1:{worker_port}");
    let mut worker = Process::start(&["worker", "--model-path", MODEL, "--port", &worker_port]);
    worker.answers(&format!("{worker_url}/ready"));
    let listen = ["gateway", "--host", "127.0.0.1", "--prometheus-host", "127.0.0.1", "--prometheus-port", "0"];
    let more = ["--port", &gateway_port, "--shutdown-grace-period-secs", "1", "--worker-urls", &worker_url];
    let mut gateway = Process::start(&[&listen[..], &more[..]].concat());
    gateway.answers(&format!("http://127.0.0.1:{gateway_port}/readiness"));
    assert_eq!(gateway.terminated().code(), Some(0), "the gateway");
    assert_eq!(worker.terminated().code(), Some(0), "the worker");
}

#[test]
fn an_error_that_nobody_reads_is_still_a_plain_failure() {
    let (mut reader, writer) = std::io::pipe().expect("pipe");
    let silent = Process::start(&["worker", "--model-path", "/nonexistent/model", "--port", "0"]).0.wait();
    let heard = Command::new(env!("CARGO_BIN_EXE_tandem"))
        .args(["worker", "--model-path", "/nonexistent/model", "--port", "0"])
        .stderr(writer)
        .status();
    assert_eq!(silent.expect("wait").code(), heard.expect("runs").code());
    let mut message = String::new();
    reader.read_to_string(&mut message).expect("UTF-8");
    assert!(message.contains("tandem: ") && message.ends_with('\n'), "{message}");
}
