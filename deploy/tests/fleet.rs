//! `tandem up` with real children: it tells where they listen, stops them all, and leaves none behind, whatever ends it.
//! Each wait has a limit; only processes that a test started are signalled, by process id.

use std::{
    io::Read as _,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
/// A model of a few kilobytes.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/llama-gqa");

struct Fleet {
    up: Child,
    ready: Value,
    _folder: tempfile::TempDir,
}

/// Killed by drop, so that a failed test leaves nothing; the children then end by themselves.
impl Drop for Fleet {
    fn drop(&mut self) {
        self.up.kill().ok();
        self.up.wait().ok();
    }
}

impl Fleet {
    fn start(shape: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("ready.json");
        let mut up = Command::new(env!("CARGO_BIN_EXE_tandem"))
            .args(["up", "--port", "0", "--model-path", MODEL, "--ready-file"])
            .arg(&path)
            .args(shape)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("up starts");
        until("the ready file", || path.exists() || up.try_wait().expect("wait").is_some());
        if !path.exists() {
            panic!("up ended: {}", stderr(&mut up));
        }
        let ready = serde_json::from_slice(&std::fs::read(&path).expect("read")).expect("JSON");
        Self { up, ready, _folder: folder }
    }

    fn pids(&self) -> Vec<u32> {
        let children = self.ready["children"].as_array().expect("a list");
        children.iter().map(|child| child["pid"].as_u64().and_then(|pid| pid.try_into().ok()).expect("a pid")).collect()
    }

    fn child(&self, name: &str) -> &Value {
        let children = self.ready["children"].as_array().expect("a list");
        children.iter().find(|child| child["name"] == name).expect(name)
    }

    fn ended(&mut self) -> ExitStatus {
        until("up to end", || self.up.try_wait().expect("wait").is_some());
        self.up.wait().expect("wait")
    }
}

fn stderr(up: &mut Child) -> String {
    let mut text = String::new();
    up.stderr.take().expect("piped").read_to_string(&mut text).expect("UTF-8");
    text
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "waited {LIMIT:?} for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A stream that runs when this returns: its first bytes have come.
fn stream(url: &str) -> reqwest::blocking::Response {
    let body = serde_json::json!({
        "model": MODEL, "prompt": "x", "max_tokens": 1500, "ignore_eos": true, "stream": true,
    });
    let client = reqwest::blocking::Client::builder().timeout(LIMIT).build().expect("client");
    let mut response = client.post(format!("{url}/v1/completions")).json(&body).send().expect("an answer");
    assert!(response.status().is_success(), "{}", response.status());
    response.read_exact(&mut [0; 64]).expect("the first bytes");
    response
}

fn signal(name: &str, pid: u32) {
    let status = Command::new("kill").args([name, &pid.to_string()]).status().expect("kill runs");
    assert!(status.success());
}

/// Gone, or dead and not yet collected by whoever inherited it.
fn is_gone(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")) else {
        return true;
    };
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
}

#[test]
fn fleet_tells_where_it_listens_and_stops_in_order() {
    let mut fleet = Fleet::start(&["1p1d"]);
    let roles: Vec<_> = fleet.ready["children"].as_array().expect("a list").iter().map(|c| c["role"].clone()).collect();
    assert_eq!(roles, ["prefill", "decode", "gateway"]);
    let url = |key: &str| fleet.ready[key].as_str().expect("a URL").to_owned();
    for url in [url("url") + "/readiness", url("metrics_url")] {
        let answer = reqwest::blocking::get(&url).expect("answers");
        assert!(answer.status().is_success(), "{url}: {}", answer.status());
    }
    let pids = fleet.pids();
    signal("-TERM", fleet.up.id());
    let status = fleet.ended();
    let log = stderr(&mut fleet.up);
    assert!(status.success(), "{status}\n{log}");
    assert!(!log.contains("was killed"), "{log}");
    assert!(!log.contains("not healthy"), "the gateway goes first: {log}");
    assert!(pids.iter().all(|pid| is_gone(*pid)));
}

#[test]
fn fleet_leaves_nothing_behind_when_up_is_killed() {
    let mut fleet = Fleet::start(&["1p1d"]);
    signal("-KILL", fleet.up.id());
    fleet.ended();
    for pid in fleet.pids() {
        until("the children to end", || is_gone(pid));
    }
}

#[test]
fn fleet_gives_running_streams_their_outcome_when_up_is_killed() {
    for (shape, direct) in [(&["1p1d"][..], None), (&["0p0d", "--plain", "1"], Some("plain-0"))] {
        let mut fleet = Fleet::start(shape);
        let url = match direct {
            Some(name) => fleet.child(name)["url"].clone(),
            None => fleet.ready["url"].clone(),
        };
        let mut stream = stream(url.as_str().expect("a URL"));
        // With `up`, the reader of its children's logs is gone.
        signal("-KILL", fleet.up.id());
        fleet.ended();
        let mut rest = String::new();
        let end = stream.read_to_string(&mut rest);
        let last = rest.trim_end().lines().next_back().unwrap_or_default();
        assert!(end.is_ok(), "{shape:?}: {end:?} after {last}");
        assert!(last == "data: [DONE]" || last.contains(r#""error""#), "{shape:?}: {last}");
        for pid in fleet.pids() {
            until("the children to end", || is_gone(pid));
        }
    }
}

#[test]
fn fleet_ends_with_the_name_and_the_reason_of_a_dead_child() {
    let mut fleet = Fleet::start(&["0p0d", "--plain", "2"]);
    let pids = fleet.pids();
    signal("-KILL", pids[1]);
    let status = fleet.ended();
    assert_eq!(status.code(), Some(1));
    let log = stderr(&mut fleet.up);
    assert!(log.contains(&format!("plain-1 (pid {}) was killed by signal 9", pids[1])), "{log}");
    assert!(pids.iter().all(|pid| is_gone(*pid)));
}
