//! Tests of each fleet's bodies: what is on the wire, and what of the client's is not.

use serde_json::{Value, json};

use super::*;
use crate::exchange::ticket::Samples;
use crate::request::scan;

fn scanned(endpoint: Endpoint, body: &str) -> Scanned {
    scan(endpoint, Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

fn rooms(count: usize) -> Vec<Room> {
    (0..count).map(|i| Room::new(5 + i as u64).unwrap()).collect()
}

fn pair(rooms: &[Room]) -> Pairing<'_> {
    Pairing {
        bootstrap_host: "p",
        bootstrap_port: Some(8998),
        prefill_rank: None,
        decode_rank: None,
        engine_id: Some("e1"),
        rooms,
    }
}

fn values(bodies: &Bodies) -> [Value; 2] {
    [&bodies.prefill, &bodies.decode]
        .map(|body| body.as_ref().map_or(Value::Null, |b| serde_json::from_slice(b).unwrap()))
}

/// All that a client could say to lead a worker elsewhere.
const HOSTILE: &str = r#"{"bootstrap_host":"evil","bootstrap_port":1,"bootstrap_room":7,"bootstrap_pair_key":"k","a":1,
    "decode_tp_size":2,"routed_dp_rank":3,"disagg_prefill_dp_rank":4,"data_parallel_rank":5,
    "kv_transfer_params":{"remote_host":"evil","do_remote_prefill":true}}"#;

#[test]
fn a_client_cannot_name_hosts_rooms_or_ranks() {
    let ask = scanned(Endpoint::Chat, HOSTILE);
    let rooms = rooms(1);
    for backend in [Backend::Tandem, Backend::Sglang, Backend::VllmNixl, Backend::VllmMooncake, Backend::Plain] {
        let bodies = backend.bodies(&ask, &pair(&rooms)).unwrap();
        let decode = bodies.decode.clone().unwrap_or_else(|| backend.decode_after(&ask, &PrefillAnswer::default()));
        for body in bodies.prefill.iter().chain([&decode]) {
            let text = String::from_utf8_lossy(body);
            assert!(!text.contains("evil") && !text.contains("pair_key") && !text.contains("decode_tp"), "{text}");
            assert!(text.contains("\"a\":1"));
            let value: Value = serde_json::from_slice(body).unwrap();
            assert!(value["bootstrap_room"] != 7 && value["disagg_prefill_dp_rank"] != 4);
            assert_eq!(value["routed_dp_rank"] == 3, backend == Backend::Plain, "a plain worker's own business");
        }
    }
}

#[test]
fn both_legs_of_sglang_get_the_same_bytes() {
    let ask = scanned(Endpoint::Responses, r#"{"input":"x","stream":true}"#);
    let rooms = rooms(1);
    let bodies = Backend::Sglang.bodies(&ask, &pair(&rooms)).unwrap();
    assert_eq!(Backend::Sglang.order(&ask), Order::Parallel);
    assert_eq!(bodies.prefill, bodies.decode);
    let expected =
        json!({"bootstrap_host": "p", "bootstrap_port": 8998, "bootstrap_room": 5, "input": "x", "stream": true});
    assert_eq!(values(&bodies)[0], expected);
}

#[test]
fn ranks_reach_the_legs_they_are_for() {
    let rooms = rooms(2);
    let ask = scanned(Endpoint::Generate, r#"{"text":["a","b"],"routed_dp_rank":9}"#);
    assert_eq!(ask.samples, Samples::List(2));
    let ranks = Pairing {
        prefill_rank: Some(Rank { index: 1, size: 4 }),
        decode_rank: Some(Rank { index: 2, size: 3 }),
        ..pair(&rooms)
    };
    let [prefill, decode] = values(&Backend::Sglang.bodies(&ask, &ranks).unwrap());
    assert_eq!((&prefill["routed_dp_rank"], &prefill["disagg_prefill_dp_rank"]), (&json!(1), &Value::Null));
    assert_eq!((&decode["routed_dp_rank"], &decode["disagg_prefill_dp_rank"]), (&json!(2), &json!(1)));
    assert_eq!((&prefill["bootstrap_room"], &decode["bootstrap_room"]), (&json!([5, 6]), &json!([5, 6])));
    let plain = values(&Backend::Plain.bodies(&ask, &ranks).unwrap());
    assert_eq!((&plain[0], &plain[1]["routed_dp_rank"]), (&Value::Null, &json!(2)));
    let header = Backend::VllmNixl.header(Side::Prefill, &ranks).unwrap();
    assert_eq!((header.0.as_str(), header.1.to_str().unwrap()), ("x-data-parallel-rank", "1"));
}

#[test]
fn nixl_asks_prefill_for_one_token_and_hands_its_word_on() {
    let body =
        r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"max_tokens":50,"min_tokens":9,"x":[1]}"#;
    let ask = scanned(Endpoint::Completions, body);
    let rooms = rooms(1);
    assert_eq!(Backend::VllmNixl.order(&ask), Order::PrefillFirst);
    let [prefill, decode] = values(&Backend::VllmNixl.bodies(&ask, &pair(&rooms)).unwrap());
    let asks = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    let expected = json!({"model": "m", "stream": false, "max_tokens": 1, "x": [1], "kv_transfer_params": asks});
    assert_eq!((prefill, decode), (expected, Value::Null));
    let answer = PrefillAnswer::of(&Bytes::from_static(
        br#"{"choices":[],"kv_transfer_params":{"remote_block_ids":[[1, 2]],"remote_host":"h"}}"#,
    ));
    let decode: Value = serde_json::from_slice(&Backend::VllmNixl.decode_after(&ask, &answer)).unwrap();
    let mut expected: Value = serde_json::from_str(body).unwrap();
    expected["kv_transfer_params"] = json!({"remote_block_ids": [[1, 2]], "remote_host": "h"});
    assert_eq!(decode, expected);
    let silent = Backend::VllmNixl.decode_after(&ask, &PrefillAnswer::default());
    assert_eq!(silent, body, "without P's word D computes the prompt itself");
}

#[test]
fn each_api_has_its_own_limit_of_tokens() {
    let cases = [
        (Endpoint::Chat, r#"{"max_completion_tokens":7}"#, json!({"max_tokens": 1, "max_completion_tokens": 1})),
        (Endpoint::Chat, r#"{"max_tokens":7}"#, json!({"max_tokens": 1})),
        (Endpoint::Messages, r#"{"max_tokens":7}"#, json!({"max_tokens": 1})),
        (Endpoint::Responses, r#"{"max_output_tokens":7}"#, json!({"max_output_tokens": 1})),
    ];
    let rooms = rooms(1);
    for (endpoint, body, mut expected) in cases {
        let mut prefill = values(&Backend::VllmNixl.bodies(&scanned(endpoint, body), &pair(&rooms)).unwrap())[0].take();
        prefill.as_object_mut().unwrap().remove("kv_transfer_params");
        expected["stream"] = json!(false);
        assert_eq!(prefill, expected, "{body}");
    }
}

#[test]
fn mooncake_joins_both_legs_by_a_transfer() {
    let ask = scanned(Endpoint::Chat, r#"{"messages":[],"stream":true}"#);
    let rooms = rooms(1);
    assert_eq!(Backend::VllmMooncake.order(&ask), Order::Parallel);
    let [prefill, decode] = values(&Backend::VllmMooncake.bodies(&ask, &pair(&rooms)).unwrap());
    let transfer = "xfer-0000000000000005";
    assert_eq!(
        prefill["kv_transfer_params"],
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer})
    );
    assert_eq!(
        decode["kv_transfer_params"],
        json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": transfer,
            "remote_bootstrap_addr": "http://p:8998", "remote_engine_id": "e1"})
    );
    assert_eq!((&prefill["stream"], &decode["stream"]), (&json!(false), &json!(true)));
    let unknown = Pairing { engine_id: None, ..pair(&rooms) };
    assert_eq!(Backend::VllmMooncake.bodies(&ask, &unknown).unwrap_err().status, 503);
}

#[test]
fn several_samples_have_one_leg_at_vllm_and_none_at_sglangs_pairs() {
    let ask = scanned(Endpoint::Chat, r#"{"messages":[],"n":2}"#);
    let rooms = rooms(2);
    for backend in [Backend::VllmNixl, Backend::VllmMooncake] {
        assert_eq!(backend.order(&ask), Order::DecodeOnly);
        let [prefill, decode] = values(&backend.bodies(&ask, &pair(&rooms)).unwrap());
        assert_eq!((prefill, decode), (Value::Null, json!({"messages": [], "n": 2})));
        assert_eq!(backend.merge(&ask), Merge::default());
    }
    assert!(Backend::Tandem.check(&ask).is_ok() && Backend::Plain.check(&ask).is_ok());
    assert_eq!(Backend::Sglang.check(&ask).unwrap_err().param, Some("n"));
}

#[test]
fn what_pairs_cannot_serve_is_refused_with_words() {
    let embeddings = scanned(Endpoint::Embeddings, r#"{"input":"x"}"#);
    let failure = Backend::Tandem.check(&embeddings).unwrap_err();
    assert_eq!((failure.status, failure.code), (501, "unsupported_with_pd"));
    assert!(failure.message.contains("/v1/embeddings") && failure.message.contains("plain worker"));
    assert!(Backend::Plain.check(&embeddings).is_ok());
    let logprobs = scanned(Endpoint::Chat, r#"{"prompt_logprobs":1}"#);
    assert_eq!(Backend::Tandem.check(&logprobs).unwrap_err().status, 400);
    assert!(Backend::VllmNixl.check(&logprobs).is_ok());
    let echo = scanned(Endpoint::Completions, r#"{"echo":true,"logprobs":1}"#);
    assert_eq!(Backend::Tandem.merge(&echo).prompt_logprobs, Some(PromptLogprobs::InFront));
    assert_eq!(Backend::VllmNixl.merge(&logprobs).prompt_logprobs, Some(PromptLogprobs::Replaced));
}

#[test]
fn engine_ids_of_both_shapes() {
    let by_rank = engine_ids(br#"{"0":{"engine_id":"a_dp0","worker_addr":{}},"1":{"engine_id":"a_dp1"}}"#);
    assert_eq!(by_rank.into_iter().collect::<Vec<_>>(), [(0, "a_dp0".into()), (1, "a_dp1".into())]);
    let by_engine = engine_ids(br#"{"a":{"0":{"x":1},"1":{}}}"#);
    assert_eq!(by_engine.into_iter().collect::<Vec<_>>(), [(0, "a_dp0".into()), (1, "a_dp1".into())]);
    assert_eq!(engine_ids(br#"{"a":{"0":{}}}"#).into_iter().collect::<Vec<_>>(), [(0, "a".into())]);
    assert!(engine_ids(b"[]").is_empty() && engine_ids(b"{\"a\":1}").is_empty());
}
