//! Whole exchanges through a gateway in this process, against workers that do what the test says.

mod support;

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::*;
use tandem_gateway::{GatewayArgs, How, PolicyName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};

#[tokio::test(flavor = "multi_thread")]
async fn both_legs_get_the_clients_bytes_and_the_same_room() {
    let mut p = Worker::start("prefill", well).await;
    let mut d = Worker::start("decode", well).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let body = r#"{ "messages":[], "odd" : 1.50e2,"bootstrap_room":5 ,"rid":"x", "bootstrap_port":"y"}"#;
    let answer = gateway.post("/v1/chat/completions", body).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()["content-type"], "application/json");
    assert_eq!(answer.text().await.unwrap(), good_body());
    let (at_p, at_d) = (p.next().await, d.next().await);
    assert_eq!(at_p.body, at_d.body);
    let text = String::from_utf8(at_p.body.clone()).unwrap();
    assert!(text.ends_with(r#", "messages":[], "odd" : 1.50e2 ,"rid":"x"}"#), "{text}");
    assert_eq!((&at_p.json()["bootstrap_host"], &at_p.json()["bootstrap_port"]), (&json!("127.0.0.1"), &json!(8998)));
    assert!(at_p.room() != 5 && at_p.room() <= i64::MAX as u64);
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_arrives_as_it_was_sent() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", stream_well).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let answer = gateway.chat(true).await;
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["content-type"]),
        (200, &"text/event-stream".parse().unwrap())
    );
    assert_eq!(answer.text().await.unwrap(), format!("{}{}{}", token("Pa"), token("ris"), finish()));
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_get_a_room_each() {
    let p = Worker::start("prefill", well).await;
    let mut d = Worker::start("decode", well).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let body = json!({"prompt": ["a", "b"], "n": 2}).to_string();
    assert_eq!(gateway.post("/v1/completions", body).await.status(), 200);
    let got = d.next().await.json();
    let rooms: std::collections::HashSet<u64> =
        got["bootstrap_room"].as_array().unwrap().iter().map(|r| r.as_u64().unwrap()).collect();
    assert_eq!(rooms.len(), 4);
    assert_eq!(got["bootstrap_host"], json!(vec!["127.0.0.1"; 4]));
    assert_eq!(got["bootstrap_port"], json!(vec![8998; 4]));
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_never_waits_for_prefill() {
    let (release, released) = watch::channel(false);
    let p = Worker::start("prefill", move |got, socket| {
        let mut released = released.clone();
        async move {
            released.wait_for(|r| *r).await.ok()?;
            well(got, socket).await
        }
    })
    .await;
    let d = Worker::start("decode", stream_well).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let whole = within("the whole answer", async { gateway.chat(true).await.text().await.unwrap() }).await;
    assert!(whole.ends_with("[DONE]\n\n"));
    let busy = |_: u16, v: &Value| v["workers"][0]["load"] == 1;
    gateway.until("/workers", busy).await;
    release.send(true).unwrap();
    gateway.until_idle().await;
    assert_eq!(gateway.chat(true).await.status(), 200);
    assert_eq!(p.connections.load(SeqCst), 1, "P's connection was pooled after its leg ended");
}

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
    let gateway = Gateway::pd(&[&p], &[&d]).await;
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
async fn a_client_that_leaves_ends_both_legs() {
    for phase in ["before the first token", "in mid-stream"] {
        let (play, mut p_told) = hang();
        let p = Worker::start("prefill", play).await;
        let (d_tell, mut d_told) = mpsc::channel(1024);
        let mut d = Worker::start("decode", move |_, socket| {
            let tell = d_tell.clone();
            async move {
                let mut socket = match phase {
                    "in mid-stream" => say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?,
                    _ => socket,
                };
                closed(&mut socket).await;
                let _ = tell.try_send(());
                None
            }
        })
        .await;
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

fn raw_chat(body: &str) -> Vec<u8> {
    let length = body.len();
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
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
async fn a_dead_pooled_connection_is_not_the_clients_problem() {
    let mut p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", |got, socket| async move {
        match got.number {
            // The second prompt arrives on a connection that dies before a byte of its answer.
            1 => None,
            _ => well(got, socket).await,
        }
    })
    .await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    gateway.until_idle().await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    let rooms: Vec<u64> = [p.next().await, p.next().await, p.next().await].iter().map(Got::room).collect();
    assert!(rooms[1] != rooms[2], "another attempt has another room");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_closed_while_idle_are_found_out() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", |got, socket| async move {
        well(got, socket).await;
        None
    })
    .await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    for _ in 0..20 {
        assert_eq!(gateway.chat(false).await.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_pass_up_to_the_limit() {
    let p = Worker::start("prefill", well).await;
    let mut d = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.listen.max_payload_size = Some(2 << 20));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    let body = json!({"messages": [{"content": "x".repeat(1 << 20)}]}).to_string();
    assert_eq!(gateway.post("/v1/chat/completions", body.clone()).await.status(), 200);
    let got = String::from_utf8(d.next().await.body).unwrap();
    assert!(got.ends_with(&body[1..]));

    let (status, code, _) = error_of(gateway.post("/v1/chat/completions", "x".repeat((2 << 20) + 1)).await).await;
    assert_eq!((status, code.as_str()), (413, "payload_too_large"));

    let mut client = gateway.connect().await;
    let head =
        format!("POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n", 4 << 20);
    client.write_all(head.as_bytes()).await.unwrap();
    let mut seen = vec![0; 12];
    within("a refusal before the body", client.read_exact(&mut seen)).await.unwrap();
    assert_eq!(seen, b"HTTP/1.1 413");
}

#[tokio::test(flavor = "multi_thread")]
async fn expectations_are_met() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let mut client = gateway.connect().await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    let mut seen = vec![0; 25];
    within("the interim answer", client.read_exact(&mut seen)).await.unwrap();
    assert_eq!(seen, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"{}").await.unwrap();
    let mut seen = vec![0; 12];
    within("the answer", client.read_exact(&mut seen)).await.unwrap();
    assert_eq!(seen, b"HTTP/1.1 200");
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
    let d = Worker::start("decode", |_, socket| async {
        let mut socket = say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?;
        closed(&mut socket).await;
        None
    })
    .await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.deadlines.silence_timeout_secs = Some(1));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    let text = within("the end", async { gateway.chat(true).await.text().await.unwrap() }).await;
    assert!(text.contains("silence_timeout"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_side_is_named_and_served_again_as_soon_as_it_is_back() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.fleet.health_check_interval_secs = Some(600.0));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    let address = d.kill().await;
    let answer = gateway.chat(false).await;
    assert!(answer.headers().contains_key("retry-after"));
    let (status, code, error) = error_of(answer).await;
    assert_eq!((status, code.as_str()), (503, "no_decode_worker"), "{error}");
    let told = "no healthy decode worker is available (nobody listens there); retry in a few seconds";
    assert_eq!(error["message"], told);
    let _d = Worker::start_at(address, Says::mode("decode"), well).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_was_starting_is_asked_again_when_needed() {
    let p = Worker::start("prefill", well).await;
    let starting = Says { health: 503, ..Says::mode("decode") };
    let d = Worker::start_at("127.0.0.1:0".parse().unwrap(), starting, well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.fleet.health_check_interval_secs = Some(600.0));
    let gateway = Gateway::start(args).await;
    let seen = |_: u16, v: &Value| v["unhealthy"].to_string().contains("503") && v["healthy_workers"] == 1;
    gateway.until("/readiness", seen).await;
    let (status, code, error) = error_of(gateway.chat(false).await).await;
    assert_eq!((status, code.as_str()), (503, "no_decode_worker"));
    assert!(error["message"].as_str().unwrap().contains("503"));
    let address = d.kill().await;
    let _d = Worker::start_at(address, Says::mode("decode"), well).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_worker_costs_another_pair_only() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let gone = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p], &[&gone, &d]), |a| a.pair.policy = Some(PolicyName::RoundRobin));
    let gateway = Gateway::start(args).await;
    gateway.until("/readiness", |_, v| v["healthy_workers"] == 3).await;
    gone.kill().await;
    for _ in 0..6 {
        assert_eq!(gateway.chat(false).await.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_role_is_never_used() {
    let p = Worker::start("decode", well).await;
    let d = Worker::start("decode", well).await;
    let gateway = Gateway::start(pd_args(&[&p], &[&d])).await;
    let told = |_: u16, v: &Value| v["unhealthy"].to_string().contains("--disaggregation-mode decode");
    gateway.until("/readiness", told).await;
    let answer = gateway.client.get(gateway.url("/workers")).send().await.unwrap();
    let worker = &answer.json::<Value>().await.unwrap()["workers"][0];
    assert_eq!(worker["health"], "unhealthy");
    assert!(worker["reason"].as_str().unwrap().contains("--disaggregation-mode decode"));
    let (status, code, _) = error_of(gateway.chat(false).await).await;
    assert_eq!((status, code.as_str()), (503, "no_prefill_worker"));
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_workers_get_one_leg_and_may_be_asked_for_prompt_logprobs() {
    let mut w = Worker::start("null", well).await;
    let gateway = Gateway::start(with(GatewayArgs::default(), |a| a.fleet.worker_urls = vec![w.url()])).await;
    gateway.until_ready().await;
    let body = r#"{"prompt":"a", "echo":true ,"bootstrap_room":3}"#;
    assert_eq!(gateway.post("/v1/completions", body).await.status(), 200);
    assert_eq!(w.next().await.body, br#"{"prompt":"a", "echo":true}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_carries_the_requests_id_and_the_worker_gets_the_same() {
    let mut w = Worker::start("null", |_, socket| say(socket, json_answer(500, "{}"))).await;
    let gateway = Gateway::start(with(GatewayArgs::default(), |a| a.fleet.worker_urls = vec![w.url()])).await;
    gateway.until_ready().await;
    for (given, kept) in [(Some("trace-me-7"), true), (Some("two words"), false), (None, false)] {
        for (body, reaches) in [("{}", true), ("no json", false)] {
            let mut request = gateway.client.post(gateway.url("/generate")).body(body);
            if let Some(given) = given {
                request = request.header("x-request-id", given);
            }
            let answer = within("an answer", request.send()).await.unwrap();
            let id = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
            assert_eq!(given == Some(id.as_str()), kept, "{id}");
            assert!(kept || id.len() == 32);
            if reaches {
                assert!(w.next().await.head.contains(&format!("x-request-id: {id}\r\n")));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_are_told_what_is_wrong() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    for (path, body, status, code, param) in [
        ("/v1/chat/completions", "{", 400, "invalid_json", Value::Null),
        ("/v1/chat/completions", "[]", 400, "invalid_json", Value::Null),
        ("/v1/chat/completions", "", 400, "invalid_json", Value::Null),
        ("/v1/chat/completions", r#"{"n":"x"}"#, 400, "invalid_field", json!("n")),
        ("/v1/chat/completions", r#"{"prompt_logprobs":1}"#, 400, "unsupported_with_pd", json!("prompt_logprobs")),
        ("/v1/embeddings", r#"{"input":"a"}"#, 501, "unsupported_with_pd", Value::Null),
        ("/v1/nothing", "{}", 404, "not_found", Value::Null),
        ("/health", "{}", 405, "method_not_allowed", Value::Null),
    ] {
        let (got, got_code, error) = error_of(gateway.post(path, body).await).await;
        assert_eq!((got, got_code.as_str(), &error["param"]), (status, code, &param), "{path} {body}");
    }
    let answer = gateway.client.get(gateway.url("/generate")).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), &answer.headers()["allow"]), (405, &"POST".parse().unwrap()));
    for bytes in [&b"\x16\x03\x01\x02\x00\x01"[..], b"GET\r\n\r\n", b"not http at all\r\n\r\n"] {
        let mut client: TcpStream = gateway.connect().await;
        client.write_all(bytes).await.unwrap();
        client.shutdown().await.unwrap();
        let mut seen = Vec::new();
        let _ = within("the end", client.read_to_end(&mut seen)).await;
        assert!(seen.is_empty() || seen.starts_with(b"HTTP/1.1 400"), "{:?}", String::from_utf8_lossy(&seen));
    }
    assert_eq!(gateway.chat(false).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_questions() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.security.api_key = Some("secret".into()));
    let gateway = Gateway::start(args).await;
    let ready = gateway.until("/readiness", |status, _| status == 200).await;
    assert_eq!(ready, json!({"status": "ready", "healthy_workers": 2, "total_workers": 2}));
    for path in ["/health", "/liveness"] {
        let answer = gateway.client.get(gateway.url(path)).send().await.unwrap();
        assert_eq!(answer.text().await.unwrap(), "OK");
    }
    for path in ["/v1/models", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/workers"] {
        let answer = gateway.client.get(gateway.url(path)).send().await.unwrap();
        assert_eq!(answer.status(), 401, "{path}");
    }
    let get = async |path: &str| {
        let answer = gateway.client.get(gateway.url(path)).bearer_auth("secret").send().await.unwrap();
        (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
    };
    assert_eq!(get("/v1/models").await.1["data"][0]["id"], "mock");
    assert_eq!(get("/get_server_info").await.1["disaggregation_mode"], "prefill");
    let (_, workers) = get("/workers").await;
    assert_eq!(workers["stats"], json!({"prefill_count": 1, "decode_count": 1, "regular_count": 0}));
    let [at_p, at_d] = [0, 1].map(|i| &workers["workers"][i]);
    assert_eq!((&at_p["bootstrap_port"], &at_d["bootstrap_port"]), (&json!(8998), &Value::Null));
    assert_eq!((&at_p["health"], &at_p["reason"]), (&json!("healthy"), &Value::Null));
    assert_eq!(get("/get_loads").await.1["workers"][1], json!({"worker": d.url(), "load": 7}));
    let flushed = gateway.client.post(gateway.url("/flush_cache")).bearer_auth("secret").send().await.unwrap();
    assert_eq!(flushed.json::<Value>().await.unwrap()["status"], "success");
    let abort =
        gateway.client.post(gateway.url("/abort_request")).bearer_auth("secret").body("{}").send().await.unwrap();
    let (status, _, error) = error_of(abort).await;
    assert_eq!((status, &error["code"]), (400, &json!("no_rid")), "the workers' own word");
    let (status, code, _) = error_of(gateway.chat(false).await).await;
    assert_eq!((status, code.as_str()), (401, "invalid_api_key"));
    let metrics = gateway.metrics().await;
    assert!(metrics.contains(&format!("smg_worker_health{{worker=\"{}\"}} 1", p.url())), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_told_to_stop_lets_running_streams_end() {
    let (go, went) = watch::channel(false);
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", move |_, socket| {
        let mut went = went.clone();
        async move {
            let socket = say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?;
            went.wait_for(|w| *w).await.ok()?;
            say(socket, format!("{}0\r\n\r\n", chunk(&finish()))).await
        }
    })
    .await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    let mut answer = gateway.chat(true).await;
    within("a token", answer.chunk()).await.unwrap().unwrap();
    gateway.stop(How::Drain);
    let deadline = Instant::now() + LIMIT;
    while TcpStream::connect(gateway.addresses.data).await.is_ok() {
        assert!(Instant::now() < deadline, "new connections are still taken");
    }
    go.send(true).unwrap();
    assert!(within("the end", answer.text()).await.unwrap().ends_with("[DONE]\n\n"));
    gateway.ended().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_grace_ends_every_client_gets_an_outcome() {
    for how in [How::Drain, How::Now] {
        let p = Worker::start("prefill", well).await;
        let mut d = Worker::start("decode", endless).await;
        let args = with(pd_args(&[&p], &[&d]), |a| a.deadlines.shutdown_grace_period_secs = Some(0));
        let gateway = Gateway::start(args).await;
        gateway.until_ready().await;
        let mut stream = gateway.chat(true).await;
        within("a token", stream.chunk()).await.unwrap().unwrap();
        d.next().await;
        let mut uploading = gateway.connect().await;
        uploading.write_all(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{").await.unwrap();
        let stop = async {
            d.next().await;
            gateway.stop(how);
        };
        let (whole, ()) = tokio::join!(gateway.chat(false), stop);
        assert!(whole.headers().contains_key("retry-after"));
        let (status, code, error) = error_of(whole).await;
        assert_eq!((status, code.as_str(), &error["type"]), (503, "gateway_stopping", &json!("server_error")));
        let rest = within("the stream's end", stream.text()).await.unwrap();
        let event: Value = serde_json::from_str(rest.strip_prefix("data: ").unwrap().trim_end()).unwrap();
        assert_eq!((&event["error"]["code"], &event["error"]["status"]), (&json!("gateway_stopping"), &json!(503)));
        let mut seen = Vec::new();
        let _ = within("the end of the upload", uploading.read_to_end(&mut seen)).await;
        assert!(seen.starts_with(b"HTTP/1.1 503"), "{:?}", String::from_utf8_lossy(&seen));
        gateway.ended().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_port_is_a_start_error() {
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let args = with(GatewayArgs::default(), |a| {
        a.fleet.worker_urls = vec!["http://127.0.0.1:1".into()];
        a.listen.host = Some("127.0.0.1".into());
        a.listen.port = Some(held.local_addr().unwrap().port());
    });
    let (_stop, stopped) = watch::channel(None);
    let error =
        tandem_gateway::serve(args.checked().unwrap(), tandem_gateway::Stop::Channel(stopped), |_| ()).unwrap_err();
    assert!(error.to_string().contains("choose another port"), "{error}");
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
    let d = Worker::start("decode", |_, socket| async {
        let mut socket = say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?;
        closed(&mut socket).await;
        None
    })
    .await;
    let gateway = Gateway::start(with(pd_args(&[&p], &[&d]), |a| a.fleet.health_check_timeout_secs = Some(0.3))).await;
    gateway.until_ready().await;
    let mut answer = gateway.chat(true).await;
    within("a token", answer.chunk()).await.unwrap().unwrap();
    d.frozen.send_replace(true);
    let rest = within("the end", answer.text()).await.unwrap();
    assert!(rest.contains("decode_silent") && rest.ends_with("\n\n") && !rest.contains("[DONE]"), "{rest}");
}

/// Sends raw bytes and reads to the connection's end.
async fn to_the_end(gateway: &Gateway, bytes: &[u8]) -> String {
    let mut client = gateway.connect().await;
    client.write_all(bytes).await.unwrap();
    let mut seen = Vec::new();
    let _ = within("the end of the connection", client.read_to_end(&mut seen)).await;
    String::from_utf8(seen).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn ambiguous_heads_and_malformed_bodies_are_refused_with_words() {
    let w = Worker::start("null", well).await;
    let gateway = Gateway::start(with(GatewayArgs::default(), |a| a.fleet.worker_urls = vec![w.url()])).await;
    gateway.until_ready().await;
    for (headers, body, code) in [
        ("content-length: 2", "{}", "malformed_request"),
        ("host: x\r\ncontent-length: 2, 2", "{}", "malformed_request"),
        ("host: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked", "2\r\n{}\r\n0\r\n\r\n", "malformed_request"),
        ("host: x\r\ntransfer-encoding: chunked", "zz\r\n{}\r\n0\r\n\r\n", "malformed_body"),
        ("host: x\r\ntransfer-encoding: chunked", "ffffffffffffffff\r\n{}\r\n", "malformed_body"),
    ] {
        let text = format!("POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n\r\n{body}");
        let seen = to_the_end(&gateway, text.as_bytes()).await;
        assert!(seen.starts_with("HTTP/1.1 400 ") && seen.contains(code), "{headers}: {seen}");
        assert!(seen.contains("\"error\""), "{seen}");
    }
    assert_eq!(gateway.chat(false).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_drips_is_let_go() {
    let w = Worker::start("null", well).await;
    let args = with(GatewayArgs::default(), |a| {
        a.fleet.worker_urls = vec![w.url()];
        a.deadlines.client_read_timeout_secs = Some(1);
    });
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    for (start, expected) in [
        ("POST /v1/chat/completions HTTP/1.1\r\nx: ", "HTTP/1.1 408 "),
        ("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n{", "HTTP/1.1 408 "),
    ] {
        let (mut read, mut write) = gateway.connect().await.into_split();
        write.write_all(start.as_bytes()).await.unwrap();
        let drip = async {
            while write.write_all(b" ").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            std::future::pending::<()>().await
        };
        let mut seen = Vec::new();
        tokio::select! {
            _ = within("the end of the connection", read.read_to_end(&mut seen)) => {}
            () = drip => unreachable!(),
        }
        let seen = String::from_utf8(seen).unwrap();
        assert!(seen.starts_with(expected), "{seen}");
    }
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
