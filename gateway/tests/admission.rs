//! Who may ask, how many may run, who waits and who is sent away.

mod support;

use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::*;
use tandem_gateway::GatewayArgs;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A worker that holds each prompt until it is released.
async fn holding() -> (Worker, watch::Sender<bool>) {
    let (release, released) = watch::channel(false);
    let worker = Worker::start("null", move |got, socket| {
        let mut released = released.clone();
        async move {
            released.wait_for(|r| *r).await.ok()?;
            well(got, socket).await
        }
    })
    .await;
    (worker, release)
}

async fn plain(worker: &Worker, change: impl FnOnce(&mut GatewayArgs)) -> Gateway {
    let args = with(GatewayArgs::default(), |a| a.fleet.worker_urls = vec![worker.url()]);
    let gateway = Gateway::start(with(args, change)).await;
    gateway.until_ready().await;
    gateway
}

/// Waits until `/metrics` shows a line.
async fn until_shown(gateway: &Gateway, line: &str) {
    let deadline = Instant::now() + LIMIT;
    while !gateway.metrics().await.lines().any(|l| l == line) {
        assert!(Instant::now() < deadline, "{line}: {}", gateway.metrics().await);
    }
}

fn chat(gateway: &Gateway, headers: &[(&str, &str)], body: Value) -> Asked {
    let mut request = gateway.client.post(gateway.url("/v1/chat/completions")).body(body.to_string());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    Box::pin(async move { within("an answer", request.send()).await.unwrap() })
}

type Asked = std::pin::Pin<Box<dyn Future<Output = reqwest::Response> + Send>>;

#[tokio::test(flavor = "multi_thread")]
async fn exactly_the_queue_waits_and_the_rest_is_sent_away() {
    let (mut w, release) = holding().await;
    let gateway = plain(&w, |a| {
        a.admission.max_concurrent_requests = Some(2);
        a.admission.queue_size = Some(3);
    })
    .await;
    let mut asked = JoinSet::new();
    for _ in 0..12 {
        asked.spawn(chat(&gateway, &[], json!({})));
    }
    let mut refused = 0;
    while refused < 7 {
        let answer = within("a refusal", asked.join_next()).await.unwrap().unwrap();
        assert_eq!(answer.headers()["retry-after"], "1");
        let (status, code, error) = error_of(answer).await;
        assert_eq!((status, code.as_str(), &error["type"]), (429, "queue_full", &json!("rate_limit_error")));
        refused += 1;
    }
    until_shown(&gateway, "tandem_gateway_requests_running 2").await;
    until_shown(&gateway, "tandem_gateway_requests_queued 3").await;
    w.next().await;
    w.next().await;
    assert!(w.got.try_recv().is_err(), "the cap is hard");
    release.send(true).unwrap();
    while let Some(answer) = asked.join_next().await {
        assert_eq!(answer.unwrap().status(), 200);
    }
    until_shown(&gateway, "tandem_gateway_requests_running 0").await;
    until_shown(&gateway, "smg_http_rate_limit_total{result=\"allowed\"} 5").await;
    until_shown(&gateway, "smg_http_rate_limit_total{result=\"rejected\"} 7").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_in_vain_is_503_and_who_leaves_gives_its_place_back() {
    let (mut w, release) = holding().await;
    let gateway = plain(&w, |a| {
        a.admission.max_concurrent_requests = Some(1);
        a.admission.queue_size = Some(1);
        a.admission.queue_timeout_secs = Some(600);
    })
    .await;
    let first = tokio::spawn(chat(&gateway, &[], json!({})));
    w.next().await;
    let late = chat(&gateway, &[("x-tandem-queue-timeout-ms", "50")], json!({})).await;
    assert_eq!(late.headers()["retry-after"], "1");
    let (status, code, error) = error_of(late).await;
    assert_eq!((status, code.as_str(), &error["type"]), (503, "queue_timeout", &json!("server_error")));
    // One that waits and leaves makes room for another.
    let waiting = tokio::spawn(chat(&gateway, &[], json!({})));
    until_shown(&gateway, "tandem_gateway_requests_queued 1").await;
    waiting.abort();
    until_shown(&gateway, "tandem_gateway_requests_queued 0").await;
    // One that runs and leaves does, too.
    let second = tokio::spawn(chat(&gateway, &[], json!({})));
    until_shown(&gateway, "tandem_gateway_requests_queued 1").await;
    first.abort();
    w.next().await;
    release.send(true).unwrap();
    assert_eq!(second.await.unwrap().status(), 200);
    until_shown(&gateway, "tandem_gateway_requests_running 0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_more_urgent_run_first() {
    let (mut w, release) = holding().await;
    let gateway = plain(&w, |a| a.admission.max_concurrent_requests = Some(1)).await;
    let mut asked = JoinSet::new();
    asked.spawn(chat(&gateway, &[], json!({})));
    w.next().await;
    for (queued, priority) in [(1, -1), (2, 0), (3, 5)] {
        asked.spawn(chat(&gateway, &[], json!({"priority": priority})));
        until_shown(&gateway, &format!("tandem_gateway_requests_queued {queued}")).await;
    }
    release.send(true).unwrap();
    for expected in [5, 0, -1] {
        assert_eq!(w.next().await.json()["priority"], expected);
    }
    while let Some(answer) = asked.join_next().await {
        assert_eq!(answer.unwrap().status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_worker_is_503_and_a_rate_beyond_is_429() {
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |a| a.admission.rate_limit_tokens_per_second = Some(1)).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    let beyond = gateway.chat(false).await;
    assert_eq!(beyond.headers()["retry-after"], "1");
    assert_eq!(error_of(beyond).await.1, "rate_limited");
    let gateway = plain(&w, |_| {}).await;
    w.kill().await;
    let answer = gateway.chat(false).await;
    assert!(answer.headers().contains_key("retry-after"));
    assert_eq!(error_of(answer).await.0, 503);
}

struct Keys {
    _dir: tempfile::TempDir,
    file: PathBuf,
}

fn keys(entries: &[(&str, &str, &str)]) -> Keys {
    let dir = tempfile::tempdir().unwrap();
    let mut text = String::from("keys:\n");
    for (name, key, rest) in entries {
        let hash: String = Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect();
        text += &format!("- name: {name}\n  sha256: {hash}\n{rest}");
    }
    let file = dir.path().join("keys.yaml");
    std::fs::write(&file, text).unwrap();
    Keys { _dir: dir, file }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_key_has_its_models_rights_and_limits() {
    let (mut w, release) = holding().await;
    let keys = keys(&[
        ("team-a", "sk-a", "  models: [mock]\n  max_concurrent_requests: 1\n"),
        ("team-b", "sk-b", "  requests_per_second: 0.01\n"),
        ("ops", "sk-ops", "  admin: true\n"),
    ]);
    let gateway = plain(&w, |a| {
        a.security.api_keys_file = Some(keys.file.clone());
        a.security.api_key = Some("sk-worker".into());
    })
    .await;
    let ask = |key: &str, body: Value| chat(&gateway, &[("authorization", &format!("Bearer {key}"))], body);
    for (key, body, status, code) in [
        ("sk-x", json!({}), 401, "invalid_api_key"),
        ("sk-a", json!({"model": "other"}), 403, "forbidden"),
        ("sk-a", json!({}), 403, "forbidden"),
    ] {
        let (got, shown, _) = error_of(ask(key, body).await).await;
        assert_eq!((got, shown.as_str()), (status, code));
    }
    // The concurrency of one key is no matter of another's.
    let first = tokio::spawn(ask("sk-a", json!({"model": "mock"})));
    let head = w.next().await.head;
    assert!(head.contains("authorization: Bearer sk-worker\r\n"), "workers never see clients' keys: {head}");
    let beyond = ask("sk-a", json!({"model": "mock"})).await;
    assert_eq!(beyond.headers()["retry-after"], "1");
    assert_eq!(error_of(beyond).await.1, "key_concurrency");
    let other = tokio::spawn(ask("sk-b", json!({})));
    w.next().await;
    release.send(true).unwrap();
    assert!(first.await.unwrap().status().is_success() && other.await.unwrap().status().is_success());
    let beyond = ask("sk-b", json!({})).await;
    let wait: u64 = beyond.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((90..=100).contains(&wait), "{wait}");
    assert_eq!(error_of(beyond).await.1, "key_rate");
    // What administers needs a key that may.
    for (key, status) in [("sk-a", 403), ("sk-ops", 200), ("sk-worker", 200), ("", 401)] {
        let answer = gateway.client.get(gateway.url("/workers")).bearer_auth(key).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{key}");
    }
    let metrics = gateway.metrics().await;
    for line in ["{key=\"team-a\",result=\"ok\"} 1", "{key=\"team-b\",result=\"ok\"} 1"] {
        assert!(metrics.contains(&format!("tandem_gateway_key_requests_total{line}")), "{metrics}");
    }
    assert!(!metrics.contains("sk-"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admin_key_closes_administering_only() {
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |a| a.security.admin_api_key = Some("sk-admin".into())).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    for (path, key, status) in [("/workers", "", 401), ("/workers", "sk-admin", 200), ("/v1/models", "", 200)] {
        let answer = gateway.client.get(gateway.url(path)).bearer_auth(key).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{path} {key}");
    }
}
