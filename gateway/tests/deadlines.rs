//! Each deadline has its own code, its own counter, and a header by which a client chooses.

mod support;

use std::time::Duration;

use serde_json::{Value, json};
use support::*;
use tandem_gateway::{GatewayArgs, PolicyName};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;

#[tokio::test(flavor = "multi_thread")]
async fn deadlines_have_their_own_codes() {
    let (play, mut told) = hang();
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", play).await;
    let args = with(pd_args(&[&p], &[&d]), |a| {
        a.deadlines.first_token_timeout_secs = Some(1);
        a.deadlines.request_timeout_secs = Some(2);
    });
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    for (stream, code) in [(true, "first_token_timeout"), (false, "request_timeout")] {
        let (status, got, _) = error_of(gateway.chat(stream).await).await;
        assert_eq!((status, got.as_str()), (504, code));
        within("the close of D's leg", told.recv()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_in_mid_stream_ends_it() {
    let p = Worker::start("prefill", well).await;
    let (play, _told) = hang_after_a_token();
    let d = Worker::start("decode", play).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.deadlines.silence_timeout_secs = Some(1));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    let text = within("the end", async { gateway.chat(true).await.text().await.unwrap() }).await;
    assert!(text.contains("silence_timeout"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_chooses_its_deadlines_and_each_is_counted() {
    let (play_p, mut p_told) = hang();
    let p = Worker::start("prefill", play_p).await;
    let (play_d, mut d_told) = hang_after_a_token();
    let d = Worker::start("decode", play_d).await;
    let (play_d, mut silent_told) = hang();
    let silent = Worker::start("decode", play_d).await;
    for (decode, header, stream, code, counter) in [
        (&silent, "x-tandem-timeout-ms", false, "request_timeout", "whole"),
        (&silent, "x-tandem-prefill-timeout-ms", true, "prefill_timeout", "prefill"),
        (&silent, "x-tandem-first-token-timeout-ms", true, "first_token_timeout", "first_token"),
        (&d, "x-tandem-silence-timeout-ms", true, "silence_timeout", "silence"),
    ] {
        let gateway = Gateway::pd(&[&p], &[decode]).await;
        let body = json!({"messages": [], "stream": stream}).to_string();
        let asked = gateway.client.post(gateway.url("/v1/chat/completions")).header(header, "150").body(body);
        let text = within(code, async { asked.send().await.unwrap().text().await.unwrap() }).await;
        assert!(text.contains(code), "{text}");
        within("the close of P's leg", p_told.recv()).await.unwrap();
        let told = if counter == "silence" { &mut d_told } else { &mut silent_told };
        within("the close of D's leg", told.recv()).await.unwrap();
        let line = format!("tandem_gateway_timeouts_total{{deadline=\"{counter}\"}} 1");
        assert!(gateway.metrics().await.contains(&line), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_deadline_is_refused() {
    let w = Worker::start("null", well).await;
    let gateway = Gateway::start(with(GatewayArgs::default(), |a| a.fleet.worker_urls = vec![w.url()])).await;
    gateway.until_ready().await;
    for value in ["soon", "0", "1800001"] {
        let asked = gateway.client.post(gateway.url("/generate")).header("x-tandem-timeout-ms", value).body("{}");
        let (status, code, error) = error_of(within("an answer", asked.send()).await.unwrap()).await;
        assert_eq!((status, code.as_str()), (400, "invalid_timeout"), "{error}");
    }
    let (status, code, _) = error_of(gateway.post("/generate", "no json").await).await;
    assert_eq!((status, code.as_str()), (400, "invalid_json"), "the connection serves on");
}

/// A socket that listens and takes no connection, as of a machine that lost its network, at a worker's old address.
async fn deaf(address: std::net::SocketAddr) -> (TcpListener, Vec<TcpStream>) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    let listener = socket.listen(1).unwrap();
    let mut waiting = Vec::new();
    while let Ok(connected) = timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        waiting.push(connected.unwrap());
        assert!(waiting.len() < 16, "the queue of connections never fills");
    }
    (listener, waiting)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_takes_no_connection_is_passed_over_and_named_where_it_is_alone() {
    for others in [1, 0] {
        let p = Worker::start("prefill", well).await;
        let lost = Worker::start("decode", well).await;
        let other = Worker::start("decode", well).await;
        let decode: Vec<&Worker> = [&lost, &other].into_iter().take(1 + others).collect();
        let args = with(pd_args(&[&p], &decode), |a| {
            a.deadlines.connect_timeout_ms = Some(200);
            a.fleet.health_check_interval_secs = Some(600.0);
            a.pair.policy = Some(PolicyName::RoundRobin);
        });
        let gateway = Gateway::start(args).await;
        let healthy = |v: &Value| v["workers"].as_array().unwrap().iter().filter(|w| w["is_healthy"] == true).count();
        gateway.until("/workers", |_, v| healthy(v) == 2 + others).await;
        let _deaf = deaf(lost.kill().await).await;
        if others == 1 {
            for _ in 0..2 {
                assert_eq!(gateway.chat(false).await.status(), 200);
            }
            gateway.until_metrics(|m| m.contains("smg_worker_retries_total{") && !m.contains("retries_total 0")).await;
        } else {
            let (status, code, error) = error_of(gateway.chat(false).await).await;
            assert_eq!((status, code.as_str()), (504, "connect_timeout"), "{error}");
        }
        gateway.until_metrics(|m| m.contains("tandem_gateway_timeouts_total{deadline=\"connect\"} 1")).await;
    }
}
