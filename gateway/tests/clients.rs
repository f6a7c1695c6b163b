//! Clients that leave, read slowly, send ahead, or speak HTTP/1.0.

mod support;

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use support::*;
use tandem_gateway::{GatewayArgs, How};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_both_legs() {
    for phase in ["before the first token", "in mid-stream"] {
        let (play, mut p_told) = hang();
        let p = Worker::start("prefill", play).await;
        let (mut d, mut d_told) = match phase {
            "in mid-stream" => {
                let (play, told) = hang_after_a_token();
                (Worker::start("decode", play).await, told)
            }
            _ => {
                let (play, told) = hang();
                (Worker::start("decode", play).await, told)
            }
        };
        let gateway = Gateway::pd(&[&p], &[&d]).await;
        let mut client = gateway.connect().await;
        client.write_all(&raw_chat(r#"{"stream":true}"#)).await.unwrap();
        d.next().await;
        if phase == "in mid-stream" {
            let mut seen = Vec::new();
            while !String::from_utf8_lossy(&seen).contains("Pa") {
                assert!(within("a token", client.read_buf(&mut seen)).await.unwrap() > 0);
            }
        }
        drop(client);
        within("the close of P's leg", p_told.recv()).await.unwrap();
        within("the close of D's leg", d_told.recv()).await.unwrap();
        gateway.until_idle().await;
        assert!(gateway.metrics().await.contains("tandem_gateway_clients_gone_total 1"));
    }
}

/// A stream that was complete at its first write has a length, any other comes in chunks.
fn is_whole(answer: &[u8]) -> bool {
    let has_length = String::from_utf8_lossy(answer).contains("\r\nContent-Length: ");
    if has_length { answer.ends_with(b"[DONE]\n\n") } else { answer.ends_with(b"0\r\n\r\n") }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_reused_on_both_sides() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", stream_well).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let mut client = gateway.connect().await;
    for _ in 0..200 {
        client.write_all(&raw_chat(r#"{"stream":true}"#)).await.unwrap();
        let mut seen = Vec::new();
        while !is_whole(&seen) {
            assert!(within("an answer", client.read_buf(&mut seen)).await.unwrap() > 0, "the gateway closed");
        }
        assert!(seen.starts_with(b"HTTP/1.1 200"));
    }
    // A leg's connection returns to the pool a moment after its answer's end, so a fast client may need a second one.
    assert!(d.connections.load(SeqCst) <= 3, "{}", d.connections.load(SeqCst));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_sent_ahead_are_answered_in_order() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let mut client = gateway.connect().await;
    let two = [raw_chat("{}"), b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_vec()].concat();
    client.write_all(&two).await.unwrap();
    let mut seen = String::new();
    within("both answers", client.read_to_string(&mut seen)).await.unwrap();
    let (ok, missing) = (seen.find("200 OK").unwrap(), seen.find("404 Not Found").unwrap());
    assert!(ok < missing, "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_slows_its_worker_and_loses_nothing() {
    const EVENTS: usize = 2000;
    let (tell, sent) = watch::channel(0usize);
    let tell = std::sync::Arc::new(tell);
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", move |_, socket| {
        let tell = tell.clone();
        async move {
            let mut socket = say(socket, SSE_HEAD).await?;
            let event = chunk(&token(&"x".repeat(32 * 1024)));
            for _ in 0..EVENTS {
                socket = say(socket, &event).await?;
                tell.send_modify(|n| *n += 1);
            }
            say(socket, format!("{}0\r\n\r\n", chunk(&finish()))).await
        }
    })
    .await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let mut client = gateway.connect().await;
    client.write_all(&raw_chat(r#"{"stream":true}"#)).await.unwrap();
    // D runs ahead until the buffers on the way are full, and then stands.
    let mut before = 0;
    let stalled = async {
        loop {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let now = *sent.borrow();
            if now > 0 && now == before {
                return now;
            }
            before = now;
        }
    };
    assert!(within("the stall", stalled).await < EVENTS, "nothing held D back");
    let mut seen = 0;
    let mut tail = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    while !tail.ends_with(b"0\r\n\r\n") {
        let n = within("the rest", client.read(&mut buffer)).await.unwrap();
        assert!(n > 0);
        seen += n;
        tail = buffer[n.saturating_sub(8)..n].to_vec();
    }
    assert!(seen > EVENTS * 32 * 1024);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_1_0_client_gets_a_stream_without_chunks() {
    let (go, went) = watch::channel(false);
    let w = Worker::start("null", move |_, socket| {
        let mut went = went.clone();
        async move {
            let socket = say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?;
            went.wait_for(|went| *went).await.ok()?;
            say(socket, format!("{}0\r\n\r\n", chunk(&finish()))).await
        }
    })
    .await;
    let gateway = Gateway::start(with(GatewayArgs::default(), |a| a.fleet.worker_urls = vec![w.url()])).await;
    gateway.until_ready().await;
    let body = r#"{"stream":true}"#;
    let head =
        format!("POST /v1/chat/completions HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: {}", body.len());
    let mut client = gateway.connect().await;
    client.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("Pa") {
        assert!(within("a token", client.read_buf(&mut seen)).await.unwrap() > 0);
    }
    go.send(true).unwrap();
    within("the end of the connection", client.read_to_end(&mut seen)).await.unwrap();
    let seen = String::from_utf8(seen).unwrap();
    let (head, stream) = seen.split_once("\r\n\r\n").unwrap();
    let head = head.to_ascii_lowercase();
    assert!(!head.contains("transfer-encoding") && head.contains("connection: close"), "{head}");
    assert_eq!(stream, format!("{}{}", token("Pa"), finish()));
}

/// Streams large events until its connection is closed, and tells that.
fn flood() -> (impl Fn(Got, TcpStream) -> Played + Send + Sync + 'static, mpsc::Receiver<()>) {
    let (tell, told) = mpsc::channel(1024);
    let play = move |_: Got, mut socket: TcpStream| {
        let tell = tell.clone();
        let played: Played = Box::pin(async move {
            socket.write_all(SSE_HEAD.as_bytes()).await.ok()?;
            let event = chunk(&token(&"x".repeat(32 * 1024)));
            while socket.write_all(event.as_bytes()).await.is_ok() {}
            let _ = tell.try_send(());
            None
        });
        played
    };
    (play, told)
}

/// What happens to a request whose client does not read is seen as if it did.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_hides_nothing() {
    for what in ["client leaves", "whole deadline", "gateway stops"] {
        let p = Worker::start("prefill", well).await;
        let (play, mut told) = flood();
        let d = Worker::start("decode", play).await;
        let gateway = Gateway::pd(&[&p], &[&d]).await;
        let mut client = gateway.connect().await;
        let limit = if what == "whole deadline" { "x-tandem-timeout-ms: 1000\r\n" } else { "" };
        let body = r#"{"stream":true}"#;
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{limit}content-length: {}", body.len());
        client.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
        let mut begun = [0; 1024];
        within("the stream's beginning", client.read_exact(&mut begun)).await.unwrap();
        // Nothing more is read: the buffers on the way fill, and a write to the client is pending.
        tokio::time::sleep(Duration::from_millis(300)).await;
        match what {
            "client leaves" => drop(client),
            "gateway stops" => gateway.stop(How::Now),
            _ => {}
        }
        within(what, told.recv()).await.unwrap();
        if what != "gateway stops" {
            gateway.until_idle().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prefills_end_is_seen_while_the_client_does_not_read() {
    let (fail, failed) = watch::channel(false);
    let p = Worker::start("prefill", move |_, socket| {
        let mut failed = failed.clone();
        async move {
            failed.wait_for(|failed| *failed).await.ok()?;
            reset(socket);
            None
        }
    })
    .await;
    let (play, mut told) = flood();
    let d = Worker::start("decode", play).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    // Each of two prompts needs its own pages, so that P's failure ends the whole request.
    let body = r#"{"prompt":["a","b"],"stream":true}"#;
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}", body.len());
    let mut client = gateway.connect().await;
    client.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
    let mut begun = [0; 1024];
    within("the stream's beginning", client.read_exact(&mut begun)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    fail.send(true).unwrap();
    within("the close of D's leg", told.recv()).await.unwrap();
    let mut rest = Vec::new();
    while !rest.ends_with(b"0\r\n\r\n") {
        assert!(within("the end", client.read_buf(&mut rest)).await.unwrap() > 0);
    }
    let end = String::from_utf8_lossy(&rest[rest.len() - 300..]);
    assert!(end.contains("prefill_transport_error") && !end.contains("[DONE]"), "{end}");
}
