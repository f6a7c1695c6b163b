//! Workers that come and go by a file or by DNS while requests are served.

mod support;

use std::path::Path;

use serde_json::Value;
use support::*;
use tandem_gateway::GatewayArgs;

fn list(prefill: &Worker, decode: &Worker) -> String {
    let (p, d) = (prefill.url(), decode.url());
    format!("workers:\n- {{url: \"{p}\", role: prefill, bootstrap_port: 8998}}\n- {{url: \"{d}\", role: decode}}\n")
}

fn by_file(path: &Path) -> GatewayArgs {
    with(GatewayArgs::default(), |a| {
        a.discovery.workers_file = Some(path.to_owned());
        a.discovery.workers_file_interval_ms = Some(20);
    })
}

fn has(value: &Value, worker: &Worker) -> bool {
    value["workers"].as_array().is_some_and(|list| list.iter().any(|w| w["url"] == worker.url()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_replaces_a_worker_and_its_running_stream_ends_well() {
    let prefill = Worker::start("prefill", stream_well).await;
    let (go_on, may_go_on) = tokio::sync::watch::channel(false);
    let mut old = Worker::start("decode", move |got, socket| {
        let mut may_go_on = may_go_on.clone();
        async move {
            let _ = may_go_on.wait_for(|go| *go).await;
            stream_well(got, socket).await
        }
    })
    .await;
    let new = Worker::start("decode", stream_well).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.yaml");
    std::fs::write(&path, list(&prefill, &old)).unwrap();
    let gateway = Gateway::start(by_file(&path)).await;
    gateway.until_ready().await;
    let running = tokio::spawn({
        let (client, url) = (gateway.client.clone(), gateway.url("/v1/chat/completions"));
        async move { client.post(url).body(r#"{"messages":[],"stream":true}"#).send().await.unwrap().text().await.unwrap() }
    });
    old.next().await;
    std::fs::write(&path, list(&prefill, &new)).unwrap();
    gateway.until("/workers", |_, value| has(value, &new)).await;
    gateway.until_ready().await;
    let answer = gateway.chat(true).await.text().await.unwrap();
    assert!(answer.ends_with("data: [DONE]\n\n"), "the new worker serves: {answer}");
    go_on.send_replace(true);
    let answer = within("the old stream's end", running).await.unwrap();
    assert!(answer.ends_with("data: [DONE]\n\n"), "what ran on the removed worker ends well: {answer}");
    gateway.until("/workers", |_, value| !has(value, &old)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_file_changes_nothing_and_an_empty_one_is_meant() {
    let (prefill, decode) = (Worker::start("prefill", well).await, Worker::start("decode", well).await);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.yaml");
    std::fs::write(&path, list(&prefill, &decode)).unwrap();
    let gateway = Gateway::start(by_file(&path)).await;
    gateway.until_ready().await;
    std::fs::write(&path, "workers:\n- url: [\n").unwrap();
    let deadline = std::time::Instant::now() + LIMIT;
    while !gateway.metrics().await.contains("tandem_gateway_discovery_in_sync{source=\"file\"} 0") {
        assert!(std::time::Instant::now() < deadline, "the broken file is not shown");
    }
    assert_eq!(gateway.chat(false).await.status(), 200);
    std::fs::write(&path, "").unwrap();
    gateway.until("/workers", |_, value| value["total"] == 0).await;
    assert_eq!(gateway.chat(false).await.status(), 503);
}

#[test]
fn a_file_that_is_broken_or_missing_at_the_start_is_an_error_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.yaml");
    for (text, expected) in [(None, "No such file"), (Some("workers:\n- url: ftp://x\n"), "line 2")] {
        if let Some(text) = text {
            std::fs::write(&path, text).unwrap();
        }
        let args = with(by_file(&path), |a| {
            a.listen.port = Some(0);
            a.listen.prometheus_port = Some(0);
        });
        let (_keep, stop) = tokio::sync::watch::channel(None);
        let refused = tandem_gateway::serve(args.checked().unwrap(), tandem_gateway::Stop::Channel(stop), |_| {});
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("workers.yaml") && error.contains(expected), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_becomes_its_addresses() {
    let worker = Worker::start("null", well).await;
    let gateway = Gateway::start(with(GatewayArgs::default(), |a| {
        a.discovery.worker_dns = vec![format!("localhost:{}", worker.address.port())];
    }))
    .await;
    gateway.until_ready().await;
    let workers = gateway.until("/workers", |_, value| has(value, &worker)).await;
    assert_eq!(workers["total"], 1, "{workers}");
    assert_eq!(gateway.chat(false).await.status(), 200);
}
