//! Small workers that do what a test says, and a gateway in this process in front of them. Every wait has a limit.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod cluster;

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_gateway::{Addresses, GatewayArgs, How, Settings, Stop};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};

/// No wait of a test is longer.
pub const LIMIT: Duration = Duration::from_secs(20);

pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not happen within {LIMIT:?}"),
    }
}

/// A request with a prompt as a worker received it.
#[derive(Clone, Debug)]
pub struct Got {
    pub head: String,
    pub body: Vec<u8>,
    /// Counts from 0 over the worker's connections.
    pub connection: usize,
    /// Counts from 0 over the worker's prompts.
    pub number: usize,
}

impl Got {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("a worker must get JSON")
    }

    pub fn room(&self) -> u64 {
        self.json()["bootstrap_room"].as_u64().expect("a room")
    }
}

/// Gives the socket back to keep the connection.
pub type Played = Pin<Box<dyn Future<Output = Option<TcpStream>> + Send>>;
type Script = Arc<dyn Fn(Got, TcpStream) -> Played + Send + Sync>;

pub struct Worker {
    pub address: SocketAddr,
    pub got: mpsc::Receiver<Got>,
    /// The ids that it was told to abort.
    pub aborted: mpsc::Receiver<String>,
    pub connections: Arc<AtomicUsize>,
    /// While true no new request gets an answer, as of a stopped process: connections stand, bytes are taken.
    pub frozen: watch::Sender<bool>,
    /// What it says of itself from now on.
    pub says: watch::Sender<Says>,
    stop: Option<oneshot::Sender<()>>,
    stopped: Option<oneshot::Receiver<()>>,
}

/// What a worker says of itself.
#[derive(Clone, Copy)]
pub struct Says {
    pub mode: &'static str,
    pub health: u16,
    /// How long an answer to a health check takes.
    pub health_takes: Duration,
    pub tokens: u64,
    pub model: &'static str,
    /// The path of its loads; `/get_load` answers in its own shape.
    pub loads: &'static str,
}

impl Says {
    pub fn mode(mode: &'static str) -> Self {
        Says { mode, health: 200, health_takes: Duration::ZERO, tokens: 7, model: "mock", loads: "/v1/loads" }
    }
}

impl Worker {
    pub async fn start<F, Fut>(mode: &'static str, play: F) -> Worker
    where
        F: Fn(Got, TcpStream) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<TcpStream>> + Send + 'static,
    {
        Worker::start_at("127.0.0.1:0".parse().unwrap(), Says::mode(mode), play).await
    }

    pub async fn start_at<F, Fut>(address: SocketAddr, says: Says, play: F) -> Worker
    where
        F: Fn(Got, TcpStream) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<TcpStream>> + Send + 'static,
    {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let script: Script = Arc::new(move |got, socket| Box::pin(play(got, socket)));
        let (tell, got) = mpsc::channel(1024);
        let (tell_aborted, aborted) = mpsc::channel(1024);
        let (stop, mut stopping) = oneshot::channel();
        let (done, stopped) = oneshot::channel();
        let connections = Arc::new(AtomicUsize::new(0));
        let counts = Counts { connections: connections.clone(), ..Default::default() };
        let (frozen, freezing) = watch::channel(false);
        let (says, saying) = watch::channel(says);
        tokio::spawn(async move {
            let mut tasks = tokio::task::JoinSet::new();
            loop {
                let socket = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap().0,
                    _ = &mut stopping => break,
                };
                tasks.spawn(serve(
                    socket,
                    saying.clone(),
                    script.clone(),
                    (tell.clone(), tell_aborted.clone()),
                    counts.clone(),
                    freezing.clone(),
                ));
            }
            drop(listener);
            tasks.shutdown().await;
            let _ = done.send(());
        });
        Worker { address, got, aborted, connections, frozen, says, stop: Some(stop), stopped: Some(stopped) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub async fn next(&mut self) -> Got {
        within("a request at the worker", self.got.recv()).await.unwrap()
    }

    /// Closes the listener and all connections, as a killed process does.
    pub async fn kill(mut self) -> SocketAddr {
        drop(self.stop.take());
        within("the worker's end", self.stopped.take().unwrap()).await.unwrap();
        self.address
    }
}

#[derive(Clone, Default)]
struct Counts {
    connections: Arc<AtomicUsize>,
    numbers: Arc<AtomicUsize>,
    prompts: Arc<AtomicUsize>,
}

async fn serve(
    mut socket: TcpStream,
    says: watch::Receiver<Says>,
    script: Script,
    (tell, tell_aborted): (mpsc::Sender<Got>, mpsc::Sender<String>),
    counts: Counts,
    mut frozen: watch::Receiver<bool>,
) {
    let Counts { connections, numbers, prompts } = counts;
    let mut connection = None;
    while let Some((head, body)) = read_request(&mut socket).await {
        if frozen.wait_for(|frozen| !frozen).await.is_err() {
            return;
        }
        if head.starts_with("POST /generate") || head.starts_with("POST /v1/") {
            let connection = *connection.get_or_insert_with(|| {
                connections.fetch_add(1, SeqCst);
                numbers.fetch_add(1, SeqCst)
            });
            let got = Got { head, body, connection, number: prompts.fetch_add(1, SeqCst) };
            let _ = tell.try_send(got.clone());
            match script(got, socket).await {
                Some(back) => socket = back,
                None => return,
            }
            continue;
        }
        let path = head.split(' ').nth(1).unwrap_or("");
        let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
        if let Some(rid) = asked["rid"].as_str().filter(|_| path == "/abort_request") {
            let _ = tell_aborted.try_send(rid.to_owned());
        }
        let says = *says.borrow();
        if path == "/health" {
            tokio::time::sleep(says.health_takes).await;
        }
        let (status, body) = match path {
            "/health" => (says.health, json!({})),
            "/server_info" => (200, json!({"disaggregation_mode": says.mode, "disaggregation_bootstrap_port": 8998})),
            "/v1/loads" if says.loads == path => (200, json!({"loads": [{"num_total_tokens": says.tokens}]})),
            "/get_load" if says.loads == path => (200, json!([{"num_tokens": says.tokens}])),
            "/v1/models" => (200, json!({"object": "list", "data": [{"id": says.model}]})),
            "/abort_request" => (400, json!({"error": {"message": "say a rid", "code": "no_rid"}})),
            "/flush_cache" => (200, json!({})),
            _ => (404, json!({})),
        };
        if socket.write_all(json_answer(status, &body.to_string()).as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn read_request(socket: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut seen = Vec::new();
    let end = loop {
        if let Some(at) = seen.windows(4).position(|w| w == b"\r\n\r\n") {
            break at + 4;
        }
        if socket.read_buf(&mut seen).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(seen[..end].to_vec()).ok()?;
    let length = head.lines().find_map(|l| l.strip_prefix("content-length: ")?.trim().parse().ok()).unwrap_or(0);
    let mut body = seen[end..].to_vec();
    while body.len() < length {
        if socket.read_buf(&mut body).await.ok()? == 0 {
            return None;
        }
    }
    Some((head, body))
}

pub fn json_answer(status: u16, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
}

pub const SSE_HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

pub fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

pub fn token(text: &str) -> String {
    format!("data: {}\n\n", json!({"choices": [{"delta": {"content": text}, "finish_reason": null}]}))
}

pub fn finish() -> String {
    format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
}

pub fn good_body() -> String {
    json!({"choices": [{"message": {"content": "Paris"}, "finish_reason": "stop"}]}).to_string()
}

pub async fn say(mut socket: TcpStream, text: impl AsRef<[u8]>) -> Option<TcpStream> {
    socket.write_all(text.as_ref()).await.ok()?;
    Some(socket)
}

/// Answers every prompt whole.
pub async fn well(_: Got, socket: TcpStream) -> Option<TcpStream> {
    say(socket, json_answer(200, &good_body())).await
}

/// Answers every prompt with a short stream, each event in its own write.
pub async fn stream_well(_: Got, socket: TcpStream) -> Option<TcpStream> {
    let socket = say(socket, SSE_HEAD).await?;
    let socket = say(socket, chunk(&token("Pa"))).await?;
    let socket = say(socket, chunk(&token("ris"))).await?;
    say(socket, format!("{}0\r\n\r\n", chunk(&finish()))).await
}

/// Returns when the peer has closed the connection.
pub async fn closed(socket: &mut TcpStream) {
    let mut byte = [0u8; 64];
    while matches!(socket.read(&mut byte).await, Ok(n) if n > 0) {}
}

/// A closing with RST instead of FIN.
pub fn reset(socket: TcpStream) {
    socket.set_zero_linger().unwrap();
}

/// Shows one token of a stream, or nothing of a whole answer, and then works until its connection is closed.
pub async fn endless(got: Got, socket: TcpStream) -> Option<TcpStream> {
    let mut socket = match got.json()["stream"] == true {
        true => say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?,
        false => socket,
    };
    closed(&mut socket).await;
    None
}

/// A script that never answers, and what tells that its connection was closed.
pub fn hang() -> (impl Fn(Got, TcpStream) -> Played + Send + Sync + 'static, mpsc::Receiver<()>) {
    let (tell, told) = mpsc::channel(1024);
    let play = move |_: Got, mut socket: TcpStream| {
        let tell = tell.clone();
        let played: Played = Box::pin(async move {
            closed(&mut socket).await;
            let _ = tell.try_send(());
            None
        });
        played
    };
    (play, told)
}

/// A script that shows one token of a stream and then works on, and what tells that its connection was closed.
pub fn hang_after_a_token() -> (impl Fn(Got, TcpStream) -> Played + Send + Sync + 'static, mpsc::Receiver<()>) {
    let (hang, told) = hang();
    let hang = Arc::new(hang);
    let play = move |got: Got, socket: TcpStream| {
        let hang = hang.clone();
        let played: Played = Box::pin(async move {
            let socket = say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?;
            hang(got, socket).await
        });
        played
    };
    (play, told)
}

/// The bytes of a chat request.
pub fn raw_chat(body: &str) -> Vec<u8> {
    let length = body.len();
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

pub struct Gateway {
    pub addresses: Addresses,
    pub client: reqwest::Client,
    stop: watch::Sender<Option<How>>,
    served: Option<std::thread::JoinHandle<()>>,
}

impl Gateway {
    /// In front of these workers, once each side is ready.
    pub async fn pd(prefill: &[&Worker], decode: &[&Worker]) -> Gateway {
        let gateway = Gateway::start(pd_args(prefill, decode)).await;
        gateway.until_ready().await;
        gateway
    }

    pub async fn start(args: GatewayArgs) -> Gateway {
        let (stop, stopped) = watch::channel(None);
        Gateway::start_with(args, Stop::Channel(stopped), stop).await
    }

    /// One that signals to this process stop.
    pub async fn start_for_signals(args: GatewayArgs) -> Gateway {
        Gateway::start_with(args, Stop::Signals, watch::channel(None).0).await
    }

    /// One that reads its settings again, on SIGHUP and when their file changes.
    pub async fn start_reading(args: GatewayArgs) -> Gateway {
        let (stop, stopped) = watch::channel(None);
        let settings = Settings::read(on_this_machine(args)).unwrap();
        Gateway::serving(settings, Stop::Channel(stopped), stop).await
    }

    async fn start_with(args: GatewayArgs, stopped: Stop, stop: watch::Sender<Option<How>>) -> Gateway {
        Gateway::serving(on_this_machine(args).checked().unwrap().into(), stopped, stop).await
    }

    async fn serving(settings: Settings, stopped: Stop, stop: watch::Sender<Option<How>>) -> Gateway {
        let (tell, told) = oneshot::channel();
        let served = std::thread::spawn(move || {
            tandem_gateway::serve(settings, stopped, |addresses| tell.send(addresses).unwrap()).unwrap();
        });
        let addresses = within("the gateway's start", told).await.unwrap();
        let client = reqwest::Client::builder().no_proxy().timeout(LIMIT).build().unwrap();
        Gateway { addresses, client, stop, served: Some(served) }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addresses.data)
    }

    pub async fn until_ready(&self) {
        self.until("/readiness", |status, _| status == 200).await;
    }

    /// Asks until the answer is as wanted.
    pub async fn until(&self, path: &str, wanted: impl Fn(u16, &Value) -> bool) -> Value {
        let deadline = Instant::now() + LIMIT;
        loop {
            let last = match self.client.get(self.url(path)).send().await {
                Ok(answer) => {
                    let status = answer.status().as_u16();
                    let value = answer.json().await.unwrap_or_default();
                    if wanted(status, &value) {
                        return value;
                    }
                    format!("{status} {value}")
                }
                Err(error) => error.to_string(),
            };
            assert!(Instant::now() < deadline, "{path} stayed at {last}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// All legs have ended.
    pub async fn until_idle(&self) {
        let idle = |_: u16, v: &Value| v["workers"].as_array().unwrap().iter().all(|w| w["load"] == 0);
        self.until("/workers", idle).await;
    }

    pub async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> reqwest::Response {
        let sent = self.client.post(self.url(path)).header("content-type", "application/json").body(body).send();
        within("an answer", sent).await.unwrap()
    }

    pub async fn chat(&self, stream: bool) -> reqwest::Response {
        self.post("/v1/chat/completions", json!({"messages": [], "stream": stream}).to_string()).await
    }

    pub async fn metrics(&self) -> String {
        let url = format!("http://{}/metrics", self.addresses.metrics);
        self.client.get(url).send().await.unwrap().text().await.unwrap()
    }

    /// Asks until the metrics are as wanted.
    pub async fn until_metrics(&self, wanted: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let text = self.metrics().await;
            if wanted(&text) {
                return;
            }
            assert!(Instant::now() < deadline, "the metrics stayed at {text}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addresses.data).await.unwrap()
    }

    pub fn stop(&self, how: How) {
        self.stop.send_replace(Some(how));
    }

    pub async fn ended(mut self) {
        let served = self.served.take().unwrap();
        within("the gateway's end", tokio::task::spawn_blocking(move || served.join())).await.unwrap().unwrap();
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.stop.send_replace(Some(How::Now));
    }
}

/// Ports that the system chooses, and health asked often.
fn on_this_machine(args: GatewayArgs) -> GatewayArgs {
    with(args, |a| {
        a.listen.host = Some("127.0.0.1".into());
        a.listen.port = Some(0);
        a.listen.prometheus_host = Some("127.0.0.1".into());
        a.listen.prometheus_port = Some(0);
        a.fleet.health_check_interval_secs.get_or_insert(0.4);
        a.listen.threads = Some(2);
    })
}

/// Settings with a few changed.
pub fn with(mut args: GatewayArgs, change: impl FnOnce(&mut GatewayArgs)) -> GatewayArgs {
    change(&mut args);
    args
}

pub fn pd_args(prefill: &[&Worker], decode: &[&Worker]) -> GatewayArgs {
    with(GatewayArgs::default(), |a| {
        a.fleet.pd_disaggregation = true;
        a.fleet.prefill = prefill.iter().flat_map(|w| [w.url(), "8998".into()]).collect();
        a.fleet.decode = decode.iter().map(|w| w.url()).collect();
    })
}

/// Plain workers only.
pub fn plain_args(workers: &[&Worker]) -> GatewayArgs {
    with(GatewayArgs::default(), |a| a.fleet.worker_urls = workers.iter().map(|w| w.url()).collect())
}

/// The error object of an answer, with its status and code header checked against it.
pub async fn error_of(answer: reqwest::Response) -> (u16, String, Value) {
    let status = answer.status().as_u16();
    let code = answer.headers().get("x-smg-error-code").map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
    let body: Value = within("the error's body", answer.json()).await.unwrap();
    assert!(body["error"]["message"].is_string(), "no error object: {body}");
    (status, code, body["error"].clone())
}
