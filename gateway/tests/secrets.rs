//! No key is shown by anything that the gateway writes, at the most talkative level.

mod support;

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde_json::json;
use sha2::{Digest, Sha256};
use support::*;
use tandem_gateway::How;

const SECRETS: [&str; 5] = ["sk-client-a", "sk-worker-b", "sk-admin-c", "sk-wrong-d", "sk-rest-e"];

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Everything that shows anything, told together.
fn assert_silent(what: &str, text: &str) {
    for secret in SECRETS {
        let at = text.find(secret);
        assert!(at.is_none(), "{what} shows {secret}: {}", &text[at.unwrap().saturating_sub(300)..at.unwrap()]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_in_no_log_no_metric_and_no_answer() {
    let lines = Lines::default();
    let writer = lines.clone();
    tracing_subscriber::fmt()
        .with_env_filter(tandem_gateway::log_filter("trace"))
        .with_writer(move || writer.clone())
        .init();
    let folder = tempfile::tempdir().unwrap();
    let (file, log) = (folder.path().join("keys.yaml"), folder.path().join("access.log"));
    let hash: String = Sha256::digest(SECRETS[0]).iter().map(|byte| format!("{byte:02x}")).collect();
    std::fs::write(&file, format!("keys:\n- name: team\n  sha256: {hash}\n")).unwrap();
    let p = Worker::start("prefill", well).await;
    let mut d = Worker::start("decode", |got, socket| async move {
        match got.number % 2 {
            0 => well(got, socket).await,
            _ => say(socket, json_answer(500, r#"{"error":{"message":"broken"}}"#)).await,
        }
    })
    .await;
    let late = Worker::start("null", well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| {
        a.security.api_keys_file = Some(file.clone());
        a.security.api_key = Some(SECRETS[1].into());
        a.security.admin_api_key = Some(SECRETS[2].into());
        a.listen.access_log = Some(log.clone());
    });
    assert_silent("the settings", &format!("{args:?} {:?}", args.clone().checked().unwrap()));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    let mut shown = String::new();
    for key in SECRETS {
        for (path, body) in [("/v1/chat/completions", json!({"messages": []})), ("/workers", json!({"no": "url"}))] {
            let asked = gateway.client.post(gateway.url(path)).bearer_auth(key).header("x-api-key", key);
            let answer = within("an answer", asked.body(body.to_string()).send()).await.unwrap();
            shown += &format!("{:?} {}\n", answer.headers().clone(), answer.text().await.unwrap());
        }
    }
    let body = json!({"url": late.url(), "worker_type": "regular", "api_key": SECRETS[4]}).to_string();
    let added = gateway.client.post(gateway.url("/workers")).bearer_auth(SECRETS[2]).body(body).send();
    assert_eq!(within("the adding", added).await.unwrap().status().as_u16(), 202);
    for path in ["/workers", "/server_info", "/get_loads"] {
        let asked = gateway.client.get(gateway.url(path)).bearer_auth(SECRETS[2]).send();
        shown += &within("an answer", asked).await.unwrap().text().await.unwrap();
    }
    assert!(d.next().await.head.contains(SECRETS[1]), "workers get their key");
    assert_silent("an answer", &shown);
    assert_silent("/metrics", &gateway.metrics().await);
    gateway.stop(How::Drain);
    gateway.ended().await;
    assert_silent("the access log", &std::fs::read_to_string(&log).unwrap());
    let log = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("TRACE") && log.contains("request failed"), "{log}");
    assert_silent("the log", &log);
}
