//! Whole exchanges through a gateway in this process, against workers that do what the test says.

mod support;

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::*;
use tandem_gateway::{GatewayArgs, How};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

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
