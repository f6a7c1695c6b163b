//! The fleet as its gateway sees it: workers that come and go, change, fail, are slow or full, and what requests and operators
//! notice of it.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::SeqCst};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::*;
use tandem_gateway::PolicyName;
use tokio::net::TcpStream;

const ANYWHERE: &str = "127.0.0.1:0";

/// A worker that says this of itself and answers well.
async fn saying(says: Says) -> Worker {
    Worker::start_at(ANYWHERE.parse().unwrap(), says, well).await
}

/// A script whose status the test sets: 200 is a good answer.
fn with_status() -> (Arc<AtomicU16>, impl Fn(Got, TcpStream) -> Played + Send + Sync + 'static) {
    let status = Arc::new(AtomicU16::new(200));
    let now = status.clone();
    let play = move |_: Got, socket: TcpStream| {
        let status = now.load(SeqCst);
        let body = if status == 200 { good_body() } else { json!({"error": {"message": "scripted"}}).to_string() };
        let played: Played = Box::pin(say(socket, json_answer(status, &body)));
        played
    };
    (status, play)
}

async fn workers(gateway: &Gateway) -> Vec<Value> {
    let listed = gateway.client.get(gateway.url("/workers")).send().await.unwrap();
    listed.json::<Value>().await.unwrap()["workers"].as_array().unwrap().clone()
}

/// `/workers/{id}` of a worker.
async fn place(gateway: &Gateway, worker: &Worker) -> String {
    let all = workers(gateway).await;
    let found = all.iter().find(|w| w["url"] == worker.url()).expect("the worker is listed");
    format!("/workers/{}", found["id"].as_str().unwrap())
}

async fn order(gateway: &Gateway, method: reqwest::Method, path: &str, body: Value) -> (u16, Value) {
    let answer = gateway.client.request(method, gateway.url(path)).json(&body).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

/// How many prompts came so far since the last look.
fn prompts(worker: &mut Worker) -> usize {
    std::iter::from_fn(|| worker.got.try_recv().ok()).count()
}

async fn chat_with(gateway: &Gateway, model: &str) -> reqwest::Response {
    gateway.post("/v1/chat/completions", json!({"messages": [], "model": model}).to_string()).await
}

fn healthy(count: usize) -> impl Fn(u16, &Value) -> bool {
    move |_, v| v["workers"].as_array().unwrap().iter().filter(|w| w["is_healthy"] == true).count() == count
}

/// Fault 61.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_added_over_http_serves_and_a_removed_one_leaves_no_series() {
    let (mut first, mut second) = (Worker::start("null", well).await, Worker::start("null", well).await);
    let gateway = Gateway::start(plain_args(&[&first])).await;
    gateway.until_ready().await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    assert!(gateway.metrics().await.contains(&first.url()));
    let (status, accepted) = order(&gateway, reqwest::Method::POST, "/workers", json!({"url": second.url()})).await;
    assert_eq!((status, &accepted["status"]), (202, &json!("accepted")));
    assert_eq!(accepted["location"], place(&gateway, &second).await);
    gateway.until("/workers", healthy(2)).await;
    let at = place(&gateway, &first).await;
    assert_eq!(order(&gateway, reqwest::Method::DELETE, &at, json!({})).await.0, 202);
    gateway.until("/workers", |_, v| v["total"] == 1).await;
    prompts(&mut first);
    for _ in 0..4 {
        assert_eq!(gateway.chat(false).await.status(), 200);
    }
    assert_eq!((prompts(&mut first), prompts(&mut second)), (0, 4));
    let metrics = gateway.metrics().await;
    assert!(!metrics.contains(&first.url()) && metrics.contains(&second.url()), "{metrics}");
    assert_eq!(order(&gateway, reqwest::Method::DELETE, &at, json!({})).await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_worker_drains_and_is_cut_when_its_time_is_over() {
    let leaving = Worker::start("null", endless).await;
    let staying = Worker::start("null", well).await;
    let args = with(plain_args(&[&leaving]), |a| a.fleet.worker_drain_timeout_secs = Some(1.0));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    let mut stream = gateway.chat(true).await;
    let first = within("a token", stream.chunk()).await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&first).contains("Pa"));
    assert_eq!(order(&gateway, reqwest::Method::POST, "/workers", json!({"url": staying.url()})).await.0, 202);
    let at = place(&gateway, &leaving).await;
    let removed = Instant::now();
    assert_eq!(order(&gateway, reqwest::Method::DELETE, &at, json!({})).await.0, 202);
    let (_, shown) = order(&gateway, reqwest::Method::GET, &at, json!({})).await;
    assert_eq!((&shown["state"], &shown["load"]), (&json!("draining"), &json!(1)));
    let draining = format!("tandem_gateway_worker_draining{{worker=\"{}\"}} 1", leaving.url());
    assert!(gateway.metrics().await.contains(&draining));
    assert_eq!(gateway.chat(false).await.status(), 200, "new requests go to the other one");
    let mut rest = String::new();
    while let Some(piece) = within("the stream's end", stream.chunk()).await.unwrap() {
        rest.push_str(&String::from_utf8_lossy(&piece));
    }
    assert!(removed.elapsed() >= Duration::from_secs(1), "it had its time");
    assert!(rest.contains("decode_removed"), "{rest}");
    gateway.until("/workers", |_, v| v["total"] == 1).await;
}

/// Faults 11 and 12: the open breaker of P keeps the leg of D from being sent, and closes by itself.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_breaker_of_prefill_sends_decode_nothing_and_closes_by_itself() {
    let (status, play) = with_status();
    let p = Worker::start("prefill", play).await;
    let mut d = Worker::start("decode", endless).await;
    let args = with(pd_args(&[&p], &[&d]), |a| {
        a.fleet.cb_failure_threshold = Some(3);
        a.retry.disable_retries = true;
    });
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    status.store(500, SeqCst);
    for _ in 0..3 {
        assert_eq!(gateway.chat(false).await.status(), 500);
    }
    prompts(&mut d);
    let answer = gateway.chat(false).await;
    assert!(answer.headers().contains_key("retry-after"));
    let (code, name, error) = error_of(answer).await;
    assert_eq!((code, name.as_str()), (503, "no_prefill_worker"));
    assert!(error["message"].as_str().unwrap().contains("circuit breaker is open"), "{error}");
    assert_eq!(prompts(&mut d), 0, "nothing was sent to decode");
    let metrics = gateway.metrics().await;
    for (worker, state) in [(&p, 1), (&d, 0)] {
        let line = format!("smg_worker_cb_state{{worker=\"{}\"}} {state}", worker.url());
        assert!(metrics.contains(&line), "only the leg that failed counts: {line}\n{metrics}");
    }
    status.store(200, SeqCst);
    let healed = Instant::now();
    // Until the breaker lets a trial through requests get 503; the trial's stream shows decode's token.
    while gateway.chat(true).await.status() != 200 {
        assert!(healed.elapsed() < LIMIT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(healed.elapsed() < Duration::from_secs(5), "recovery takes seconds");
    let closed = |metrics: &str| metrics.contains(&format!("smg_worker_cb_state{{worker=\"{}\"}} 0", p.url()));
    while !closed(&gateway.metrics().await) {
        assert!(healed.elapsed() < LIMIT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Faults 8 and 9.
#[tokio::test(flavor = "multi_thread")]
async fn clients_mistakes_and_full_workers_open_no_breaker_and_keep_their_status() {
    let p = Worker::start("prefill", well).await;
    let (status, play) = with_status();
    let d = Worker::start("decode", play).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.fleet.cb_failure_threshold = Some(3));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    for refused in [400, 429] {
        status.store(refused, SeqCst);
        for _ in 0..10 {
            assert_eq!(gateway.chat(false).await.status().as_u16(), refused);
        }
        status.store(200, SeqCst);
        assert_eq!(gateway.chat(false).await.status(), 200);
    }
    assert!(workers(&gateway).await.iter().all(|w| w["circuit_breaker"] == "closed"));
}

/// Fault 57: the health check takes longer than its deadline, three times over.
#[tokio::test(flavor = "multi_thread")]
async fn slow_is_not_dead() {
    let slow = Says { health_takes: Duration::from_millis(700), ..Says::mode("null") };
    let w = saying(slow).await;
    let args = with(plain_args(&[&w]), |a| a.fleet.health_check_timeout_secs = Some(0.3));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    let watched = Instant::now();
    while watched.elapsed() < Duration::from_secs(3) {
        assert!(workers(&gateway).await[0]["is_healthy"] == true);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(gateway.chat(false).await.status(), 200);
}

/// Faults 58 and 59.
#[tokio::test(flavor = "multi_thread")]
async fn workers_that_are_not_up_or_not_ready_hold_up_nobody() {
    let gone = Worker::start("decode", well).await;
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let mut starting = saying(Says { health: 503, ..Says::mode("decode") }).await;
    let args = pd_args(&[&p], &[&gone, &starting, &d]);
    gone.kill().await;
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    for _ in 0..8 {
        assert_eq!(gateway.chat(false).await.status(), 200);
    }
    assert_eq!(prompts(&mut starting), 0);
    let all = workers(&gateway).await;
    assert!(all.iter().any(|w| w["reason"].as_str().is_some_and(|why| why.contains("503"))), "{all:?}");
    starting.says.send_modify(|says| says.health = 200);
    gateway.until("/workers", healthy(3)).await;
}

/// Fault 30: with whichever endpoint the workers have, the one that holds less is picked.
#[tokio::test(flavor = "multi_thread")]
async fn loads_come_from_where_a_worker_reports_them() {
    for loads in ["/v1/loads", "/get_load"] {
        let mut busy = saying(Says { tokens: 1_000_000, loads, ..Says::mode("null") }).await;
        let mut idle = saying(Says { tokens: 0, loads, ..Says::mode("null") }).await;
        let args = with(plain_args(&[&busy, &idle]), |a| a.pair.policy = Some(PolicyName::PowerOfTwo));
        let gateway = Gateway::start(args).await;
        let known = |_: u16, v: &Value| v["workers"].as_array().unwrap().iter().all(|w| w["reported_tokens"].is_u64());
        gateway.until("/workers", known).await;
        for _ in 0..6 {
            assert_eq!(gateway.chat(false).await.status(), 200);
        }
        assert_eq!((prompts(&mut busy), prompts(&mut idle)), (0, 6), "{loads}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn several_models_have_pools_of_their_own_and_one_takes_any_name() {
    let mut a = saying(Says { model: "a", ..Says::mode("null") }).await;
    let mut b = saying(Says { model: "b", ..Says::mode("null") }).await;
    let gateway = Gateway::start(plain_args(&[&a, &b])).await;
    gateway.until("/workers", healthy(2)).await;
    for (model, expected) in [("a", (1, 0)), ("b", (0, 1)), ("b:adapter", (0, 1))] {
        assert_eq!(chat_with(&gateway, model).await.status(), 200);
        assert_eq!((prompts(&mut a), prompts(&mut b)), expected, "{model}");
    }
    let (status, code, error) = error_of(chat_with(&gateway, "c").await).await;
    assert_eq!((status, code.as_str(), &error["param"]), (404, "model_not_found", &json!("model")));
    assert!(error["message"].as_str().unwrap().contains("a, b"), "{error}");
    let (status, code, _) = error_of(gateway.chat(false).await).await;
    assert_eq!((status, code.as_str()), (400, "model_required"));
    let at = place(&gateway, &b).await;
    order(&gateway, reqwest::Method::DELETE, &at, json!({})).await;
    gateway.until("/workers", |_, v| v["total"] == 1).await;
    assert_eq!(chat_with(&gateway, "c").await.status(), 200, "one model takes any name");
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_workers_take_over_where_a_side_has_nobody() {
    let mut p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let mut plain = Worker::start("null", well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.fleet.worker_urls = vec![plain.url()]);
    let gateway = Gateway::start(args).await;
    gateway.until("/workers", healthy(3)).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    assert_eq!((prompts(&mut p), prompts(&mut plain)), (1, 0), "pairs come first");
    let address = d.kill().await;
    gateway.until("/workers", healthy(2)).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    let got = plain.next().await;
    assert!(got.json().get("bootstrap_room").is_none());
    assert_eq!(prompts(&mut p), 0);
    let _d = Worker::start_at(address, Says::mode("decode"), well).await;
    gateway.until("/workers", healthy(3)).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    assert_eq!((prompts(&mut p), prompts(&mut plain)), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_changes_when_the_worker_says_so_or_the_operator() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let mut moving = Worker::start("decode", well).await;
    let gateway = Gateway::start(pd_args(&[&p], &[&d, &moving])).await;
    gateway.until("/workers", healthy(3)).await;
    moving.says.send_modify(|says| says.mode = "prefill");
    let roles =
        |wanted: &'static str| move |_: u16, v: &Value| v["workers"][2]["worker_type"] == wanted && healthy(3)(200, v);
    gateway.until("/workers", roles("prefill")).await;
    prompts(&mut moving);
    while prompts(&mut moving) == 0 {
        assert_eq!(gateway.chat(false).await.status(), 200);
    }
    // The operator moves it back; until it says the same it is not used.
    let at = place(&gateway, &moving).await;
    let (status, _) = order(&gateway, reqwest::Method::PUT, &at, json!({"worker_type": "decode"})).await;
    assert_eq!(status, 202);
    let refused = |_: u16, v: &Value| v["workers"][2]["reason"].to_string().contains("--disaggregation-mode prefill");
    gateway.until("/workers", refused).await;
    moving.says.send_modify(|says| says.mode = "decode");
    gateway.until("/workers", roles("decode")).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_may_start_without_workers() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let gateway = Gateway::start(with(tandem_gateway::GatewayArgs::default(), |a| a.fleet.enable_igw = true)).await;
    let (status, code, _) = error_of(gateway.chat(false).await).await;
    assert_eq!((status, code.as_str()), (503, "no_worker"));
    for (worker, role) in [(&p, "prefill"), (&d, "decode")] {
        let body = json!({"url": worker.url(), "worker_type": role, "bootstrap_port": 8998});
        assert_eq!(order(&gateway, reqwest::Method::POST, "/workers", body).await.0, 202);
    }
    gateway.until_ready().await;
    assert_eq!(gateway.chat(false).await.status(), 200);
}
