//! What operators ask the gateway, and what it writes down for them.

mod support;

use std::time::Instant;

use serde_json::{Value, json};
use support::*;
use tandem_gateway::GatewayArgs;

/// The line of the request with this id, once it is written: a moment after the answer's end.
async fn line(path: &std::path::Path, id: &str) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let all: Vec<Value> = whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        if let Some(line) = all.into_iter().find(|line| line["id"] == id) {
            return line;
        }
        assert!(Instant::now() < deadline, "{text}");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_access_log_tells_each_request_in_a_line_and_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", stream_well).await;
    let gateway = Gateway::start(with(pd_args(&[&p], &[&d]), |a| {
        a.security.api_key = Some("sk-hush".into());
        a.listen.access_log = Some(path.clone());
    }))
    .await;
    gateway.until_ready().await;
    let body = json!({"model": "mock", "messages": [], "stream": true}).to_string();
    let asked = gateway.client.post(gateway.url("/v1/chat/completions?key=sk-hush")).bearer_auth("sk-hush");
    let answer = asked.header("x-request-id", "mine").body(body.clone()).send().await.unwrap();
    let answered = answer.text().await.unwrap().len();
    let refused = gateway.client.post(gateway.url("/generate")).bearer_auth("sk-hush2").header("x-request-id", "bad");
    assert_eq!(refused.body("{}").send().await.unwrap().status(), 401);
    let (good, bad) = (line(&path, "mine").await, line(&path, "bad").await);
    let shown = ["id", "key", "method", "path", "status", "model", "prefill", "decode"].map(|name| good[name].clone());
    let expected = [
        json!("mine"),
        json!("default"),
        json!("POST"),
        json!("/v1/chat/completions"),
        json!(200),
        json!("mock"),
        json!(p.url()),
        json!(d.url()),
    ];
    assert_eq!(shown, expected);
    assert_eq!((&good["request_bytes"], &good["response_bytes"]), (&json!(body.len()), &json!(answered)));
    assert!(good["first_byte_ms"].as_f64() <= good["total_ms"].as_f64() && good["queue_ms"].is_number(), "{good}");
    assert_eq!(
        (&bad["status"], &bad["code"], &bad["path"]),
        (&json!(401), &json!("invalid_api_key"), &json!("/generate"))
    );
    assert!(!std::fs::read_to_string(&path).unwrap().contains("hush"));
}

#[tokio::test(flavor = "multi_thread")]
async fn models_and_metrics_of_the_whole_fleet() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let get = async |path: &str| {
        let answer = gateway.client.get(gateway.url(path)).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let (status, models) = get("/v1/models").await;
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!((status, &models["data"][0]["id"], models["data"].as_array().unwrap().len()), (200, &json!("mock"), 1));
    assert_eq!(get("/v1/models/mock").await.0, 200);
    let (status, missing) = get("/v1/models/a%2Fb").await;
    assert!(status == 404 && missing.contains("model_not_found"), "{missing}");
    assert_eq!(get("/health_generate").await.0, 503, "these workers have no such route");
    assert_eq!(get("/engine_metrics").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_access_log_that_cannot_be_opened_is_a_start_error() {
    let args = with(GatewayArgs::default(), |a| {
        a.fleet.worker_urls = vec!["http://127.0.0.1:1".into()];
        a.listen.port = Some(0);
        a.listen.prometheus_port = Some(0);
        a.listen.access_log = Some("/nowhere/at/all".into());
    });
    let (_, stopped) = tokio::sync::watch::channel(None);
    let config = args.checked().unwrap();
    let served = tokio::task::spawn_blocking(move || {
        tandem_gateway::serve(config, tandem_gateway::Stop::Channel(stopped), |_| {})
    });
    let error = within("the refusal", served).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("--access-log") && error.contains("/nowhere"), "{error}");
}
