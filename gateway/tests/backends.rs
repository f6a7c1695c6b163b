//! The legs of other fleets than ours, and what of the prefill worker's answer reaches the client.

mod support;

use serde_json::{Value, json};
use support::*;
use tandem_gateway::Backend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;

async fn gateway(backend: Backend, p: &Worker, d: &Worker) -> Gateway {
    let gateway = Gateway::start(with(pd_args(&[p], &[d]), |a| a.fleet.pd_backend = Some(backend))).await;
    gateway.until_ready().await;
    gateway
}

#[tokio::test(flavor = "multi_thread")]
async fn nixl_sends_prefill_first_and_hands_its_word_to_decode() {
    let mut p = Worker::start("prefill", |_, socket| async {
        let answer = json!({
            "choices": [{"message": {"content": "P"}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}},
            "kv_transfer_params": {"remote_engine_id": "e7", "remote_block_ids": [1, 2]},
        });
        say(socket, json_answer(200, &answer.to_string())).await
    })
    .await;
    let mut d = Worker::start("decode", |_, socket| async {
        let answer = json!({
            "choices": [{"message": {"content": "Paris"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9}},
        });
        say(socket, json_answer(200, &answer.to_string())).await
    })
    .await;
    let gateway = gateway(Backend::VllmNixl, &p, &d).await;
    let body = r#"{"messages":[],"max_tokens":50,"kv_transfer_params":{"remote_host":"evil"}}"#;
    let answer: Value = gateway.post("/v1/chat/completions", body).await.json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "Paris");
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3, "as P found it");
    let (at_p, at_d) = (p.next().await.json(), d.next().await.json());
    assert_eq!((&at_p["max_tokens"], &at_p["stream"]), (&json!(1), &json!(false)));
    assert_eq!(at_p["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(at_d["kv_transfer_params"], json!({"remote_engine_id": "e7", "remote_block_ids": [1, 2]}));
    assert_eq!((&at_d["max_tokens"], &at_d["stream"]), (&json!(50), &Value::Null));
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_prefill_that_goes_first_never_reaches_decode() {
    let p = Worker::start("prefill", |_, socket| {
        say(socket, json_answer(422, r#"{"error":{"message":"too long","code":7}}"#))
    })
    .await;
    let mut d = Worker::start("decode", well).await;
    let gateway = gateway(Backend::VllmNixl, &p, &d).await;
    let (status, code, error) = error_of(gateway.chat(true).await).await;
    assert_eq!((status, code.as_str(), &error["message"]), (422, "prefill_refused", &json!("too long")));
    assert!(d.got.try_recv().is_err());
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_that_is_gone_by_then_costs_another_one() {
    let (release, released) = watch::channel(false);
    let mut p = Worker::start("prefill", move |got, socket| {
        let mut released = released.clone();
        async move {
            released.wait_for(|released| *released).await.ok()?;
            well(got, socket).await
        }
    })
    .await;
    let gone = Worker::start("decode", well).await;
    let mut d = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p], &[&gone, &d]), |a| a.fleet.pd_backend = Some(Backend::VllmNixl));
    let gateway = Gateway::start(args).await;
    gateway.until("/readiness", |_, v| v["healthy_workers"] == 3).await;
    let asked = async { tokio::join!(gateway.chat(false), gateway.chat(false)) };
    let goes = async {
        p.next().await;
        p.next().await;
        gone.kill().await;
        release.send(true).unwrap();
    };
    let ((one, two), ()) = tokio::join!(asked, goes);
    assert_eq!((one.status().as_u16(), two.status().as_u16()), (200, 200));
    d.next().await;
    d.next().await;
    assert!(p.got.try_recv().is_err(), "the prompt was computed once");
}

#[tokio::test(flavor = "multi_thread")]
async fn mooncake_asks_the_bootstrap_server_for_its_engine() {
    let bootstrap = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = bootstrap.local_addr().unwrap().port();
    let (count, counted) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            let (mut socket, _) = bootstrap.accept().await.unwrap();
            let mut seen = vec![0; 4096];
            let n = socket.read(&mut seen).await.unwrap();
            assert!(seen[..n].starts_with(b"GET /query HTTP/1.1\r\n"));
            let answer = json_answer(200, r#"{"engine-7":{"0":{}}}"#);
            socket.write_all(answer.as_bytes()).await.unwrap();
            count.send_modify(|n| *n += 1);
        }
    });
    let mut p = Worker::start("prefill", well).await;
    let mut d = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| {
        a.fleet.pd_backend = Some(Backend::VllmMooncake);
        a.fleet.prefill = vec![p.url(), port.to_string()];
    });
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    for _ in 0..3 {
        assert_eq!(gateway.chat(false).await.status(), 200);
        let (at_p, at_d) = (p.next().await.json(), d.next().await.json());
        let (at_p, at_d) = (&at_p["kv_transfer_params"], &at_d["kv_transfer_params"]);
        assert_eq!(at_p["transfer_id"], at_d["transfer_id"]);
        assert_eq!(at_d["remote_engine_id"], "engine-7");
        assert_eq!(at_d["remote_bootstrap_addr"], format!("http://127.0.0.1:{port}"));
    }
    assert_eq!(*counted.borrow(), 1, "asked once");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_logprobs_of_prefill_are_in_front_of_decodes() {
    let (release, released) = watch::channel(false);
    let answer = |tokens: Value| {
        let meta = json!({"finish_reason": {"type": "stop"}, "input_token_logprobs": tokens});
        json_answer(200, &json!({"text": "x", "output_ids": [1], "meta_info": meta}).to_string())
    };
    let p = Worker::start("prefill", move |_, socket| {
        let mut released = released.clone();
        async move {
            released.wait_for(|released| *released).await.ok()?;
            say(socket, answer(json!([[-0.5, 1, null]]))).await
        }
    })
    .await;
    let mut d = Worker::start("decode", move |_, socket| say(socket, answer(json!([[-0.25, 2, null]])))).await;
    let gateway = gateway(Backend::Tandem, &p, &d).await;
    let asked = gateway.post("/generate", r#"{"text":"a","return_logprob":true,"logprob_start_len":0}"#);
    let (got, ()) = tokio::join!(asked, async {
        d.next().await;
        release.send(true).unwrap();
    });
    let got: Value = got.json().await.unwrap();
    assert_eq!(got["meta_info"]["input_token_logprobs"], json!([[-0.5, 1, null], [-0.25, 2, null]]));
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_told_by_the_clients_id_that_nobody_waits_any_more() {
    for (rid, told) in [("a-request-of-mine-0001", true), ("short", false)] {
        let (play, mut p_told) = hang();
        let mut p = Worker::start("prefill", play).await;
        let (play, mut d_told) = hang();
        let mut d = Worker::start("decode", play).await;
        let gateway = gateway(Backend::Sglang, &p, &d).await;
        let mut client = gateway.connect().await;
        client.write_all(&raw_chat(&json!({"messages": [], "rid": rid}).to_string())).await.unwrap();
        p.next().await;
        d.next().await;
        drop(client);
        within("the close of P's leg", p_told.recv()).await.unwrap();
        within("the close of D's leg", d_told.recv()).await.unwrap();
        if told {
            assert_eq!(within("P's abort", p.aborted.recv()).await.unwrap(), rid);
            assert_eq!(within("D's abort", d.aborted.recv()).await.unwrap(), rid);
        }
        gateway.until_idle().await;
        assert!(p.aborted.try_recv().is_err() && d.aborted.try_recv().is_err());
    }
}

/// Which legs a request has follows from the pool of its own model, not from the rest of the fleet.
#[tokio::test(flavor = "multi_thread")]
async fn a_split_model_beside_a_plain_one() {
    let of = |mode, model| Says { model, ..Says::mode(mode) };
    let free = "127.0.0.1:0".parse().unwrap();
    let mut p = Worker::start_at(free, of("prefill", "split"), well).await;
    let mut d = Worker::start_at(free, of("decode", "split"), well).await;
    let mut plain = Worker::start_at(free, of("null", "plain"), well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.fleet.worker_urls = vec![plain.url()]);
    let gateway = Gateway::start(args).await;
    let known = |_: u16, v: &Value| v["data"].as_array().is_some_and(|models| models.len() == 2);
    gateway.until("/v1/models", known).await;
    gateway.until_ready().await;
    let ask = |path: &'static str, body: Value| gateway.post(path, body.to_string());
    for stream in [false, true] {
        let of_split = json!({"model": "split", "messages": [], "stream": stream});
        assert_eq!(ask("/v1/chat/completions", of_split).await.status(), 200);
        assert_eq!(p.next().await.room(), d.next().await.room());
    }
    assert_eq!(ask("/v1/chat/completions", json!({"model": "plain", "messages": []})).await.status(), 200);
    assert_eq!(plain.next().await.json()["bootstrap_room"], Value::Null);
    let embed = |model: &str| ask("/v1/embeddings", json!({"model": model, "input": "a"}));
    assert_eq!(embed("plain").await.status(), 200);
    plain.next().await;
    let (status, code, _) = error_of(embed("split").await).await;
    assert_eq!((status, code.as_str()), (501, "unsupported_with_pd"));
    let (status, code, error) = error_of(embed("none").await).await;
    assert_eq!((status, code.as_str(), &error["param"]), (404, "model_not_found", &json!("model")));
    assert!(p.got.try_recv().is_err() && d.got.try_recv().is_err() && plain.got.try_recv().is_err());
}
