//! Workers that accept and never answer: the gateway's own deadlines end the wait, each with its own code.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tandem_e2e::mock::{Behaviour, Mock, Sight};
use tandem_e2e::process::{LogFolder, Process};
use tandem_e2e::wait::{self, within};
use tandem_e2e::{Client, binary, net};

const LIMIT: Duration = Duration::from_secs(10);

/// A gateway in front of mocks, with short deadlines.
async fn gateway(logs: &LogFolder, members: &[String]) -> (Process, Client) {
    let port = net::free_port();
    let mut command = Command::new(binary::tandem());
    command.args([
        "gateway",
        "--host",
        &net::host().to_string(),
        "--port",
        &port.to_string(),
        "--prometheus-port",
        "0",
    ]);
    command.args(["--first-token-timeout-secs", "1", "--silence-timeout-secs", "1"]).args(members);
    let process = Process::spawn("gateway", &mut command, logs.path());
    let client = Client::new(format!("http://{}:{port}", net::host()));
    wait::until("the gateway to be ready", LIMIT, || async {
        let answer = client.get("/readiness").await?;
        if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
    })
    .await;
    (process, client)
}

fn pair(prefill: &Mock, decode: &Mock) -> Vec<String> {
    ["--pd-disaggregation", "--prefill", &prefill.url(), "8998", "--decode", &decode.url()].map(str::to_owned).into()
}

fn chat(stream: bool) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream})
}

/// Both legs are closed soon after the client got its answer.
async fn assert_closed(mut mock: Mock) {
    assert!(matches!(mock.sight().await, Sight::Request { .. }));
    assert_eq!(mock.sight().await, Sight::Closed);
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_silent_workers_end_in_a_first_token_timeout() {
    let logs = LogFolder::new("silent");
    let (prefill, decode) = (Mock::start(Behaviour::Silent), Mock::start(Behaviour::Silent));
    let (_process, client) = gateway(&logs, &pair(&prefill, &decode)).await;
    let answer =
        within("the deadline", LIMIT, client.post("/v1/chat/completions", &chat(true))).await.expect("an answer");
    assert_eq!(answer.status, 504, "{}", answer.text());
    assert!(answer.error_message().is_some(), "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "first_token_timeout");
    assert_closed(prefill).await;
    assert_closed(decode).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_a_worker_that_falls_silent_ends_in_a_silence_timeout() {
    let logs = LogFolder::new("falls-silent");
    let begin = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
    let bytes = format!("{begin}{:x}\r\n{chunk}\r\n", chunk.len());
    let decode = Mock::start(Behaviour::Raw(bytes.into_bytes()));
    let (_process, client) = gateway(&logs, &["--worker-urls".to_owned(), decode.url()]).await;
    let answer =
        within("the deadline", LIMIT, client.post("/v1/chat/completions", &chat(true))).await.expect("an answer");
    assert_eq!(answer.status, 200);
    assert!(answer.text().contains("silence_timeout"), "{}", answer.text());
    assert_closed(decode).await;
}

/// A worker that refuses connections is the gateway's news, not the client's wait.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_a_worker_that_hangs_up_ends_in_its_own_code() {
    let logs = LogFolder::new("hangs-up");
    let (prefill, decode) = (Mock::start(Behaviour::Silent), Mock::start(Behaviour::Close));
    let (_process, client) = gateway(&logs, &pair(&prefill, &decode)).await;
    let answer =
        within("an answer", LIMIT, client.post("/v1/chat/completions", &chat(false))).await.expect("an answer");
    assert_eq!(answer.status, 502, "{}", answer.text());
    assert!(
        answer.json()["error"]["code"].as_str().is_some_and(|code| code.starts_with("decode")),
        "{}",
        answer.text()
    );
    assert_closed(prefill).await;
}
