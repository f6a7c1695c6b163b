//! A Kubernetes API of one kind, pods, that does what a test says: lists in pages, watches with bookmarks, a history that
//! is forgotten (410 Gone), streams that are cut, in mid-line too, or say nothing.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::LIMIT;

/// How the API tells that it has forgotten the events since a version.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub enum Gone {
    /// The watch is answered with status 410.
    #[default]
    AsStatus,
    /// The watch is answered with 200, and its first line is an ERROR.
    AsEvent,
}

/// How streams end when they are cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// With the last chunk, as the API does.
    Cleanly,
    /// The connection just closes.
    Off,
    /// In the middle of a line.
    InMidLine,
}

#[derive(Default)]
struct State {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// Type, the pod after it, and the pod before it, by version.
    events: Vec<(u64, &'static str, Value, Option<Value>)>,
    /// Events up to this version are forgotten.
    forgotten: u64,
    gone: Gone,
    /// Every question is answered with this status.
    refuses: Option<u16>,
    /// Watches say nothing.
    mute: bool,
    /// Each cut has a number.
    cuts: (u64, Option<Cut>),
    lists: usize,
    watches: usize,
    gones: usize,
    selectors: Vec<String>,
}

#[derive(Clone)]
pub struct Cluster {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
    news: watch::Sender<u64>,
}

/// A ready pod.
pub fn pod(name: &str, role: &str, ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "serving", "uid": format!("{name}-uid"),
                     "labels": {"app": "llm", "role": role}, "annotations": {"sglang.ai/bootstrap-port": "8998"}},
        "spec": {"containers": [{"name": "worker"}, {"name": "sidecar"}]},
        "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

impl Cluster {
    pub async fn start() -> Cluster {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cluster = Cluster { address, state: Arc::default(), news: watch::channel(0).0 };
        let serving = cluster.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(serving.clone().serve(socket));
            }
        });
        cluster
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state.lock().unwrap());
        self.news.send_modify(|n| *n += 1);
        result
    }

    /// Adds a pod, or changes the one of its name.
    pub fn put(&self, pod: Value) {
        self.with(|state| {
            state.version += 1;
            let mut pod = pod;
            pod["metadata"]["resourceVersion"] = json!(state.version.to_string());
            let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
            let before = state.pods.insert(name, pod.clone());
            let kind = if before.is_some() { "MODIFIED" } else { "ADDED" };
            state.events.push((state.version, kind, pod, before));
        });
    }

    pub fn change(&self, name: &str, pointer: &str, value: Value) {
        let mut pod = self.with(|state| state.pods[name].clone());
        *pod.pointer_mut(pointer).unwrap() = value;
        self.put(pod);
    }

    pub fn delete(&self, name: &str) {
        self.with(|state| {
            state.version += 1;
            let mut pod = state.pods.remove(name).unwrap();
            let before = pod.clone();
            pod["metadata"]["resourceVersion"] = json!(state.version.to_string());
            state.events.push((state.version, "DELETED", pod, Some(before)));
        });
    }

    /// Tells the present version to all watches.
    pub fn bookmark(&self) {
        self.with(|state| {
            state.version += 1;
            let version = state.version.to_string();
            let bookmark = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"resourceVersion": version}});
            state.events.push((state.version, "BOOKMARK", bookmark, None));
        });
    }

    /// Forgets all events so far.
    pub fn forget(&self, gone: Gone) {
        self.with(|state| (state.forgotten, state.gone) = (state.version, gone));
    }

    pub fn mute(&self, on: bool) {
        self.with(|state| state.mute = on);
    }

    pub fn refuse(&self, status: Option<u16>) {
        self.with(|state| state.refuses = status);
    }

    /// Cuts all watches that run.
    pub fn cut(&self, how: Cut) {
        self.with(|state| state.cuts = (state.cuts.0 + 1, Some(how)));
    }

    /// Lists, watches, and watches that were told 410, so far.
    pub fn asked(&self) -> (usize, usize, usize) {
        self.with(|state| (state.lists, state.watches, state.gones))
    }

    pub fn selectors(&self) -> Vec<String> {
        self.with(|state| state.selectors.clone())
    }

    pub async fn until(&self, what: &str, seen: impl Fn(&Cluster) -> bool) {
        let begun = Instant::now();
        while !seen(self) {
            assert!(begun.elapsed() < LIMIT, "{what}: {:?}", self.asked());
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    async fn serve(self, mut socket: TcpStream) {
        let mut head = Vec::new();
        loop {
            while !head.windows(4).any(|w| w == b"\r\n\r\n") {
                match socket.read_buf(&mut head).await {
                    Ok(n) if n > 0 => {}
                    _ => return,
                }
            }
            let text = String::from_utf8(std::mem::take(&mut head)).unwrap();
            let target = text.split(' ').nth(1).unwrap();
            let url = reqwest::Url::parse(&format!("http://x{target}")).unwrap();
            assert_eq!(url.path(), "/api/v1/namespaces/serving/pods");
            let query: BTreeMap<String, String> = url.query_pairs().into_owned().collect();
            let went_on = match query.contains_key("watch") {
                true => self.watch(&mut socket, &query).await,
                false => self.list(&mut socket, &query).await,
            };
            if went_on.is_none() {
                return;
            }
        }
    }

    async fn list(&self, socket: &mut TcpStream, query: &BTreeMap<String, String>) -> Option<()> {
        let selector = query.get("labelSelector").cloned().unwrap_or_default();
        let limit: usize = query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
        let from: usize = query.get("continue").map_or(0, |token| token.parse().unwrap());
        let answer = self.with(|state| {
            state.lists += 1;
            state.selectors.push(selector.clone());
            if let Some(status) = state.refuses {
                return Err(status);
            }
            let matching: Vec<_> = state.pods.values().filter(|pod| selects(&selector, pod)).collect();
            let page: Vec<_> = matching.iter().skip(from).take(limit).collect();
            let next = (from + page.len() < matching.len()).then(|| (from + page.len()).to_string());
            let metadata = json!({"resourceVersion": state.version.to_string(), "continue": next});
            Ok(json!({"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": page}))
        });
        match answer {
            Ok(list) => socket.write_all(super::json_answer(200, &list.to_string()).as_bytes()).await.ok(),
            Err(status) => refuse(socket, status).await,
        }
    }

    async fn watch(&self, socket: &mut TcpStream, query: &BTreeMap<String, String>) -> Option<()> {
        assert!(query["allowWatchBookmarks"] == "true" && query.contains_key("timeoutSeconds"), "{query:?}");
        let selector = &query["labelSelector"];
        let mut sent: u64 = query["resourceVersion"].parse().unwrap();
        let mut news = self.news.subscribe();
        let (cuts, refusal) = self.with(|state| {
            state.watches += 1;
            let gone = sent < state.forgotten;
            state.gones += usize::from(gone);
            (state.cuts.0, state.refuses.or((gone && state.gone == Gone::AsStatus).then_some(410)))
        });
        if let Some(status) = refusal {
            return refuse(socket, status).await;
        }
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
        socket.write_all(head.as_bytes()).await.ok()?;
        loop {
            news.borrow_and_update();
            let (lines, cut) = {
                let state = self.state.lock().unwrap();
                let lines = state.lines(sent, selector);
                sent = state.version;
                (lines, state.cuts.1.filter(|_| state.cuts.0 > cuts))
            };
            for line in lines {
                socket.write_all(super::chunk(&format!("{line}\n")).as_bytes()).await.ok()?;
            }
            match cut {
                Some(Cut::Cleanly) => return socket.write_all(b"0\r\n\r\n").await.ok(),
                Some(Cut::Off) => return None,
                Some(Cut::InMidLine) => {
                    let half = super::chunk("{\"type\":\"DELETED\",\"object\":{\"kind\":\"Po");
                    let _ = socket.write_all(half.as_bytes()).await;
                    return None;
                }
                None => news.changed().await.ok()?,
            }
        }
    }
}

impl State {
    /// What a watch tells of the events after `sent`: a pod that leaves the selector is deleted for it, one that enters is
    /// added.
    fn lines(&self, sent: u64, selector: &str) -> Vec<Value> {
        if sent < self.forgotten && self.gone == Gone::AsEvent {
            let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 410,
                                "reason": "Expired", "message": "too old resource version"});
            return vec![json!({"type": "ERROR", "object": status})];
        }
        let mut lines = Vec::new();
        for (_, kind, pod, before) in self.events.iter().filter(|(version, ..)| *version > sent && !self.mute) {
            let was = before.as_ref().is_some_and(|pod| selects(selector, pod));
            let kind = match (*kind, was, selects(selector, pod)) {
                ("BOOKMARK", ..) => "BOOKMARK",
                ("DELETED", true, _) | (_, true, false) => "DELETED",
                ("DELETED", false, _) | (_, false, false) => continue,
                (_, false, true) => "ADDED",
                (_, true, true) => "MODIFIED",
            };
            lines.push(json!({"type": kind, "object": pod}));
        }
        lines
    }
}

async fn refuse(socket: &mut TcpStream, status: u16) -> Option<()> {
    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": status,
                      "reason": "Because", "message": "because the test says so"});
    socket.write_all(super::json_answer(status, &body.to_string()).as_bytes()).await.ok()
}

/// `a=b,c in (d,e)`.
fn selects(selector: &str, pod: &Value) -> bool {
    let mut rest = selector;
    while !rest.is_empty() {
        let key_end = rest.find(['=', ' ']).unwrap();
        let (key, after) = rest.split_at(key_end);
        let (values, next) = match after.strip_prefix(" in (") {
            Some(list) => list.split_once(')').unwrap(),
            None => after[1..].split_at(after[1..].find(',').unwrap_or(after.len() - 1)),
        };
        let label = pod["metadata"]["labels"][key].as_str();
        if !values.split(',').any(|value| Some(value) == label) {
            return false;
        }
        rest = next.strip_prefix(',').unwrap_or(next);
    }
    true
}
