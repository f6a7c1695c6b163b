//! Each deadline has its own code, its own counter, and a header by which a client chooses.

mod support;

use serde_json::json;
use support::*;
use tandem_gateway::GatewayArgs;

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
