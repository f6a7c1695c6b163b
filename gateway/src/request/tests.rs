//! Tests of the scan, the splice and the routing text.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn scanned(endpoint: Endpoint, text: &str) -> Scanned {
    scan(endpoint, Bytes::copy_from_slice(text.as_bytes())).unwrap()
}

const OWNED_FIELDS: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];
const OURS: &str = r#""bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":2"#;

fn spliced(text: &str) -> String {
    String::from_utf8(scanned(Endpoint::Chat, text).splice(OURS).to_vec()).unwrap()
}

#[test]
fn splices_in_front_and_touches_nothing_else() {
    assert_eq!(spliced("{}"), format!("{{{OURS}}}"));
    assert_eq!(spliced(" {\n \"a\" : 1.50e2 } "), format!(" {{{OURS},\n \"a\" : 1.50e2 }} "));
}

#[test]
fn removes_the_clients_own_fields_wherever_they_stand() {
    let cases = [
        (r#"{"bootstrap_room":5}"#, String::new()),
        (r#"{"bootstrap_room":5,"a":1}"#, r#","a":1"#.into()),
        (r#"{"a":1,"bootstrap_room":5}"#, r#","a":1"#.into()),
        (r#"{"a":1,"bootstrap_room":[5,{"x":"}"}] , "b":2}"#, r#","a":1 , "b":2"#.into()),
        (
            r#"{"routed_dp_rank":3,"bootstrap_pair_key":"k" , "a":1,"kv_transfer_params":{"remote_host":"x"}}"#,
            r#","a":1"#.into(),
        ),
        (r#"{"bootstrap_host":"x","a":1,"bootstrap_room":5,"bootstrap_room":6}"#, r#","a":1"#.into()),
        (r#"{"bootstrap\u005froom":7,"a":{"bootstrap_room":1}}"#, r#","a":{"bootstrap_room":1}"#.into()),
    ];
    for (input, rest) in cases {
        assert_eq!(spliced(input), format!("{{{OURS}{rest}}}"), "{input}");
    }
    assert_eq!(&scanned(Endpoint::Chat, r#"{"a":1,"bootstrap_room":5}"#).plain()[..], br#"{"a":1}"#);
}

#[test]
fn counts_samples_per_endpoint() {
    let cases = [
        (Endpoint::Chat, r#"{"messages":[]}"#, Samples::One),
        (Endpoint::Chat, r#"{"n":1}"#, Samples::One),
        (Endpoint::Chat, r#"{"n":3}"#, Samples::List(3)),
        (Endpoint::Completions, r#"{"prompt":"a","n":2}"#, Samples::List(2)),
        (Endpoint::Completions, r#"{"prompt":["a"]}"#, Samples::List(1)),
        (Endpoint::Completions, r#"{"prompt":["a","b"],"n":2}"#, Samples::List(4)),
        (Endpoint::Completions, r#"{"prompt":[1,2,3]}"#, Samples::One),
        (Endpoint::Completions, r#"{"prompt":[[1],[2]]}"#, Samples::List(2)),
        (Endpoint::Generate, r#"{"text":["a","b"]}"#, Samples::List(2)),
        (Endpoint::Generate, r#"{"input_ids":[1,2]}"#, Samples::One),
        (Endpoint::Generate, r#"{"input_ids":[[1],[2],[3]],"sampling_params":{"n":2}}"#, Samples::List(6)),
    ];
    for (endpoint, body, expected) in cases {
        assert_eq!(scanned(endpoint, body).samples, expected, "{body}");
    }
}

#[test]
fn finds_stream_and_prompt_logprobs() {
    assert!(scanned(Endpoint::Chat, r#"{"stream":true}"#).stream);
    assert!(!scanned(Endpoint::Chat, r#"{"x":{"stream":true}}"#).stream);
    let asks = |e, b| scanned(e, b).prompt_logprobs;
    assert_eq!(asks(Endpoint::Completions, r#"{"echo":true,"logprobs":0}"#), Some("echo"));
    assert_eq!(asks(Endpoint::Completions, r#"{"echo":true,"logprobs":null}"#), None, "both legs know the text");
    assert_eq!(asks(Endpoint::Completions, r#"{"echo":false,"logprobs":2}"#), None);
    assert_eq!(asks(Endpoint::Chat, r#"{"logprobs":true}"#), None);
    assert_eq!(asks(Endpoint::Chat, r#"{"prompt_logprobs":1}"#), Some("prompt_logprobs"));
    assert_eq!(asks(Endpoint::Generate, r#"{"return_logprob":true}"#), None);
    assert_eq!(asks(Endpoint::Generate, r#"{"return_logprob":true,"logprob_start_len":-1}"#), None);
    let from = r#"{"return_logprob":true,"logprob_start_len":0}"#;
    assert_eq!(asks(Endpoint::Generate, from), Some("logprob_start_len"));
}

#[test]
fn refuses_what_it_cannot_carry_and_names_it() {
    let cases = [
        ("", "invalid_json"),
        ("[1]", "invalid_json"),
        ("{\"a\":1", "invalid_json"),
        ("{\"a\":1}}", "invalid_json"),
        (r#"{"n":0}"#, "invalid_field"),
        (r#"{"n":1.5}"#, "invalid_field"),
        (r#"{"n":100000}"#, "invalid_field"),
        (r#"{"stream":"yes"}"#, "invalid_field"),
    ];
    for (body, code) in cases {
        let failure = scan(Endpoint::Chat, Bytes::copy_from_slice(body.as_bytes())).unwrap_err();
        assert_eq!((failure.status, failure.code), (400, code), "{body}");
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((".{0,6}", inner), 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// Key text with some letters written as escapes, as a hostile or odd client may send it.
fn written(key: &str, escape: bool) -> String {
    match escape {
        true => format!("\"{}\"", key.encode_utf16().map(|u| format!("\\u{u:04x}")).collect::<String>()),
        false => Value::from(key).to_string(),
    }
}

proptest! {
    #[test]
    fn splice_keeps_the_rest_byte_for_byte(
        fields in prop::collection::vec(
            (prop_oneof![3 => "[a-z\\PC]{0,6}", 1 => prop::sample::select(&OWNED_FIELDS[..]).prop_map(String::from)],
             any_json(), any::<bool>(), "[ \n\t]{0,2}"), 0..8),
    ) {
        let texts: Vec<(bool, String, String)> = fields.iter()
            .map(|(k, v, escape, space)| (OWNED_FIELDS.contains(&&**k), format!("{}{space}:{v}", written(k, *escape)), k.clone()))
            .collect();
        let body = format!("{{{}}}", texts.iter().map(|t| t.1.as_str()).collect::<Vec<_>>().join(","));
        let known = ["stream", "n", "prompt"];
        prop_assume!(texts.iter().all(|t| !known.contains(&&*t.2)));
        let out = spliced(&body);
        let kept: Vec<&str> = texts.iter().filter(|t| !t.0).map(|t| t.1.as_str()).collect();
        let rest = if kept.is_empty() { String::new() } else { format!(",{}", kept.join(",")) };
        prop_assert_eq!(&out, &format!("{{{OURS}{rest}}}"));
        let mut expected: Value = serde_json::from_str(&body).unwrap();
        for (name, value) in [("bootstrap_host", json!("h")), ("bootstrap_port", json!(1)), ("bootstrap_room", json!(2))] {
            expected[name] = value;
        }
        prop_assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), expected);
    }

    #[test]
    fn scan_never_panics(body in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = scan(Endpoint::Generate, Bytes::from(body));
    }
}

#[test]
fn says_who_asks_whom() {
    let ask = scanned(Endpoint::Chat, r#"{"model":"a\u002fb","user":"u","rid":["x"],"model":"c\u002fd"}"#);
    assert_eq!(ask.model().as_deref(), Some("c/d"), "of duplicates the last");
    assert_eq!((ask.session_user().as_deref(), ask.rid()), (Some("u"), None));
}

#[test]
fn prompts_that_begin_alike_have_texts_that_begin_alike() {
    let text = |endpoint, body: &str| scanned(endpoint, body).routing_text().into_owned();
    let turn = r#"{"role":"system","content":"be \"good\""},{"content":[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"u"}}],"role":"user"}"#;
    let short = text(Endpoint::Chat, &format!(r#"{{"messages":[{turn}]}}"#));
    let long =
        text(Endpoint::Chat, &format!(r#"{{"stream":true,"messages":[{turn},{{"role":"user","content":"more"}}]}}"#));
    assert!(long.starts_with(short.trim_end()) && long.contains("user more"), "{long}");
    assert!(
        short.contains("system be \"good\"") && short.contains("hi") && short.contains(r#"{"url":"u"}"#),
        "{short}"
    );
    assert_eq!(text(Endpoint::Generate, r#"{"input_ids":[1,2,3]}"#), "[1,2,3");
    assert_eq!(text(Endpoint::Completions, r#"{"prompt":"a\nb"}"#), "a\nb");
    assert!(text(Endpoint::Responses, r#"{"input":"q","instructions":"i"}"#).starts_with("i\nq"));
    assert!(
        text(Endpoint::Messages, r#"{"messages":[{"role":"user","content":"q"}],"system":"s"}"#)
            .starts_with("s\nuser q")
    );
    let deep = format!(r#"{{"messages":{}{}}}"#, r#"{"content":["#.repeat(300), "]}".repeat(300));
    assert!(text(Endpoint::Chat, &deep).len() < deep.len());
}
