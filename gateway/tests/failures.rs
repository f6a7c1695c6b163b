//! What a client sees, and what becomes of the other leg, when a worker fails.

mod support;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::*;
use tokio::sync::watch;

#[tokio::test(flavor = "multi_thread")]
async fn prefills_failure_ends_decode_and_is_what_the_client_sees() {
    for (kind, status, code) in [
        ("refuse", 400, "prefill_refused"),
        ("fail", 500, "prefill_refused"),
        ("reset", 502, "prefill_transport_error"),
    ] {
        // P fails once D has its request, so that D's leg is there to be ended.
        let (arrive, arrived) = watch::channel(0);
        let p = Worker::start("prefill", move |got, socket| {
            let mut arrived = arrived.clone();
            async move {
                arrived.wait_for(|n| *n > got.number).await.ok()?;
                match kind {
                    "refuse" => {
                        say(socket, json_answer(400, r#"{"error":{"message":"too long: 9 > 8","code":7}}"#)).await
                    }
                    "fail" => say(socket, json_answer(500, r#"{"detail":"kv pool lost"}"#)).await,
                    _ => {
                        reset(socket);
                        None
                    }
                }
            }
        })
        .await;
        let (play, mut told) = hang();
        let d = Worker::start("decode", move |got, socket| {
            arrive.send_replace(got.number + 1);
            play(got, socket)
        })
        .await;
        let gateway = Gateway::pd(&[&p], &[&d]).await;
        for stream in [false, true] {
            let (got, got_code, error) = error_of(gateway.chat(stream).await).await;
            assert_eq!((got, got_code.as_str()), (status, code), "{kind}");
            let message = error["message"].as_str().unwrap();
            match kind {
                "refuse" => assert_eq!((message, &error["code"]), ("too long: 9 > 8", &json!(7))),
                "fail" => assert_eq!(message, "kv pool lost"),
                _ => assert!(
                    message.contains("the prefill worker failed") && !message.contains("127.0.0.1"),
                    "{message}"
                ),
            }
            within("the close of D's leg", told.recv()).await.unwrap();
        }
        gateway.until_idle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prefills_word_counts_when_decode_complains_first() {
    let (complained, complaint) = watch::channel(false);
    let p = Worker::start("prefill", move |_, socket| {
        let mut complaint = complaint.clone();
        async move {
            complaint.wait_for(|c| *c).await.ok()?;
            say(socket, json_answer(413, r#"{"message":"root cause","object":"error"}"#)).await
        }
    })
    .await;
    let complained = std::sync::Arc::new(complained);
    let d = Worker::start("decode", move |_, socket| {
        let complained = complained.clone();
        async move {
            let socket = say(socket, json_answer(500, r#"{"detail":"prefill failed"}"#)).await;
            complained.send_replace(true);
            socket
        }
    })
    .await;
    let gateway = Gateway::start(with(pd_args(&[&p], &[&d]), |a| a.deadlines.prefill_verdict_ms = Some(10_000))).await;
    gateway.until_ready().await;
    let answer = gateway.chat(false).await;
    assert_eq!(answer.status(), 413);
    assert_eq!(answer.json::<Value>().await.unwrap()["message"], "root cause");
}

#[tokio::test(flavor = "multi_thread")]
async fn decodes_failure_ends_prefill() {
    let cases: [(&str, u16, &str); 6] = [
        ("reset", 502, "decode_transport_error"),
        ("busy", 429, "decode_refused"),
        ("empty", 502, "decode_empty_answer"),
        ("tokenless", 502, "decode_empty_answer"),
        ("cut", 502, "decode_truncated"),
        ("reported", 503, "decode_reported_error"),
    ];
    for (kind, status, code) in cases {
        let (play, mut told) = hang();
        let p = Worker::start("prefill", play).await;
        let d = Worker::start("decode", move |_, socket| async move {
            let answer = match kind {
                "reset" => {
                    reset(socket);
                    return None;
                }
                "busy" => "HTTP/1.1 429 X\r\nretry-after: 3\r\ncontent-length: 4\r\n\r\nbusy".to_owned(),
                "empty" => json_answer(200, ""),
                "tokenless" => format!("{SSE_HEAD}0\r\n\r\n"),
                "cut" => "HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{\"choices\":[".to_owned(),
                _ => format!("{SSE_HEAD}{}", chunk("data: {\"error\":{\"message\":\"pool full\",\"code\":503}}\n\n")),
            };
            drop(say(socket, answer).await);
            None
        })
        .await;
        let gateway = Gateway::pd(&[&p], &[&d]).await;
        let answer = gateway.chat(matches!(kind, "tokenless" | "reported")).await;
        let retry_after = answer.headers().get("retry-after").cloned();
        let (got, got_code, _) = error_of(answer).await;
        assert_eq!((got, got_code.as_str()), (status, code), "{kind}");
        assert_eq!(retry_after.is_some(), kind == "busy");
        within("the close of P's leg", told.recv()).await.unwrap();
        gateway.until_idle().await;
        assert!(gateway.metrics().await.contains("smg_worker_errors_total"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_first_bytes_a_failure_is_a_valid_event() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", |_, socket| async {
        let half = format!("{SSE_HEAD}{}{}", chunk(&token("Pa")), chunk("data: {\"choices\":[{\"del"));
        drop(say(socket, half).await);
        None
    })
    .await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let answer = gateway.chat(true).await;
    assert_eq!(answer.status(), 200);
    let text = within("the end of the stream", answer.text()).await.unwrap();
    let rest = text.strip_prefix(&token("Pa")).unwrap();
    let event: Value = serde_json::from_str(rest.strip_prefix("data: ").unwrap().trim_end()).unwrap();
    assert_eq!(event["error"]["code"], "decode_truncated");
    assert!(rest.ends_with("\n\n") && !rest.contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_failure_of_prefill_does_not_hurt_a_committed_stream() {
    let (go, went) = watch::channel(0);
    let at_p = went.clone();
    let p = Worker::start("prefill", move |_, socket| {
        let mut went = at_p.clone();
        async move {
            went.wait_for(|w| *w == 1).await.ok()?;
            reset(socket);
            None
        }
    })
    .await;
    let d = Worker::start("decode", move |_, socket| {
        let mut went = went.clone();
        async move {
            let socket = say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?;
            went.wait_for(|w| *w == 2).await.ok()?;
            say(socket, format!("{}0\r\n\r\n", chunk(&finish()))).await
        }
    })
    .await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let mut answer = gateway.chat(true).await;
    let first = within("the first token", answer.chunk()).await.unwrap().unwrap();
    assert_eq!(first, token("Pa"));
    go.send(1).unwrap();
    let deadline = Instant::now() + LIMIT;
    while !gateway.metrics().await.contains("late_prefill_failures_total 1") {
        assert!(Instant::now() < deadline);
    }
    go.send(2).unwrap();
    assert!(within("the end", answer.text()).await.unwrap().ends_with("[DONE]\n\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_worker_fails_its_legs_is_not_used_and_serves_again_when_it_wakes() {
    for side in ["prefill", "decode"] {
        let (play_p, mut p_told) = hang();
        let (play_d, mut d_told) = hang();
        let mut p = Worker::start("prefill", play_p).await;
        let mut d = Worker::start("decode", play_d).await;
        let args = with(pd_args(&[&p], &[&d]), |a| a.fleet.health_check_timeout_secs = Some(0.3));
        let gateway = Gateway::start(args).await;
        gateway.until_ready().await;
        let both = async { tokio::join!(gateway.chat(true), gateway.chat(false)) };
        let freeze = async {
            for _ in 0..2 {
                p.next().await;
                d.next().await;
            }
            let worker = if side == "prefill" { &p } else { &d };
            worker.frozen.send_replace(true);
        };
        let ((streamed, whole), ()) = tokio::join!(both, freeze);
        for answer in [streamed, whole] {
            let (status, code, error) = error_of(answer).await;
            assert_eq!((status, code), (504, format!("{side}_silent")), "{error}");
            assert!(error["message"].as_str().unwrap().contains("/health"), "{error}");
            within("the close of P's leg", p_told.recv()).await.unwrap();
            within("the close of D's leg", d_told.recv()).await.unwrap();
        }
        gateway.until_idle().await;
        let began = Instant::now();
        let (status, code, _) = error_of(gateway.chat(false).await).await;
        assert_eq!((status, code), (503, format!("no_{side}_worker")));
        assert!(began.elapsed() < Duration::from_millis(900), "a silent worker is not waited for");
        (if side == "prefill" { &p } else { &d }).frozen.send_replace(false);
        gateway.until_ready().await;
        let again = tokio::join!(gateway.chat(true), async {
            p.next().await;
            d.next().await;
            d.kill().await
        });
        let (_, code, _) = error_of(again.0).await;
        assert_eq!(code, "decode_transport_error", "the request reached D");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_a_worker_that_freezes_ends_with_an_event() {
    let p = Worker::start("prefill", well).await;
    let (play, _told) = hang_after_a_token();
    let d = Worker::start("decode", play).await;
    let gateway = Gateway::start(with(pd_args(&[&p], &[&d]), |a| a.fleet.health_check_timeout_secs = Some(0.3))).await;
    gateway.until_ready().await;
    let mut answer = gateway.chat(true).await;
    within("a token", answer.chunk()).await.unwrap().unwrap();
    d.frozen.send_replace(true);
    let rest = within("the end", answer.text()).await.unwrap();
    assert!(rest.contains("decode_silent") && rest.ends_with("\n\n") && !rest.contains("[DONE]"), "{rest}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_answer_is_held_for_prefills_verdict_but_not_for_its_work() {
    let (answered, answer) = watch::channel(false);
    let answered = std::sync::Arc::new(answered);
    let start_p = async |fails: bool| {
        let answer = answer.clone();
        Worker::start("prefill", move |got, mut socket| {
            let mut answer = answer.clone();
            async move {
                answer.wait_for(|answered| *answered).await.ok()?;
                match fails {
                    true => say(socket, json_answer(507, r#"{"message":"pages lost","object":"error"}"#)).await,
                    false => {
                        closed(&mut socket).await;
                        well(got, socket).await
                    }
                }
            }
        })
        .await
    };
    let d = Worker::start("decode", move |got, socket| {
        let answered = answered.clone();
        async move {
            let socket = well(got, socket).await;
            answered.send_replace(true);
            socket
        }
    })
    .await;
    let p = start_p(true).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.deadlines.prefill_verdict_ms = Some(10_000));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    let answer = gateway.chat(false).await;
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["x-smg-error-code"]),
        (507, &"prefill_refused".parse().unwrap())
    );
    assert_eq!(answer.json::<Value>().await.unwrap()["message"], "pages lost");

    // One that works on does not cost the client its answer.
    let busy = start_p(false).await;
    let gateway = Gateway::pd(&[&busy], &[&d]).await;
    let answer = gateway.chat(false).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.text().await.unwrap(), good_body());
}
