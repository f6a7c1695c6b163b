//! Settings that change while the gateway runs. One test, since a signal is for the whole process.

mod support;

use std::path::Path;
use std::time::Instant;

use rustix::process::{Signal, getpid, kill_process};
use support::*;
use tandem_gateway::GatewayArgs;

/// Replaced as editors and Kubernetes do it.
fn write(path: &Path, worker: &Worker, more: &str) {
    let beside = path.with_extension("new");
    std::fs::write(&beside, format!("worker_urls = [\"{}\"]\n{more}\n", worker.url())).unwrap();
    std::fs::rename(beside, path).unwrap();
}

/// Waits until the metrics have a line.
async fn until_counted(gateway: &Gateway, line: &str) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let url = format!("http://{}/metrics", gateway.addresses.metrics);
        let text = gateway.client.get(url).send().await.unwrap().text().await.unwrap();
        if text.lines().any(|l| l == line) {
            return;
        }
        assert!(Instant::now() < deadline, "no {line:?} in\n{text}");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_file_and_a_hangup_are_taken_and_a_wrong_file_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gateway.toml");
    let (old, new) = (Worker::start("null", well).await, Worker::start("null", well).await);
    write(&path, &old, "max_payload_size = 100");
    let gateway = Gateway::start_reading(with(GatewayArgs::default(), |a| a.config = Some(path.clone()))).await;
    gateway.until_ready().await;
    let large = format!(r#"{{"messages":[],"pad":"{}"}}"#, "x".repeat(200));
    assert_eq!(gateway.post("/v1/chat/completions", large.clone()).await.status(), 413);

    // Another limit and another worker; the listening port cannot change and does not.
    write(&path, &new, "max_payload_size = 1000\nthreads = 3");
    until_counted(&gateway, "tandem_gateway_config_reloads_total{result=\"taken\"} 1").await;
    let workers = gateway.until("/workers", |_, said| said["total"] == 1).await;
    assert_eq!(workers["workers"][0]["url"], new.url());
    assert_eq!(gateway.post("/v1/chat/completions", large.clone()).await.status(), 200);

    write(&path, &old, "max_payload_size = \"much\"");
    until_counted(&gateway, "tandem_gateway_config_reloads_total{result=\"failed\"} 1").await;
    assert_eq!(gateway.post("/v1/chat/completions", large.clone()).await.status(), 200);

    write(&path, &new, "max_payload_size = 100");
    kill_process(getpid(), Signal::HUP).unwrap();
    until_counted(&gateway, "tandem_gateway_config_reloads_total{result=\"taken\"} 2").await;
    assert_eq!(gateway.post("/v1/chat/completions", large).await.status(), 413);
}
