//! Tests of judging whole answers and streams.

use super::*;
use crate::leg::http1::take_response_head;
use crate::stream::events::HELD_EVENT_BYTES_MAX;

fn answer(side: Side, content_type: &str) -> Answer {
    answer_of(side, content_type, 1)
}

fn answer_of(side: Side, content_type: &str, samples: usize) -> Answer {
    let text = format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n\r\n");
    let head = take_response_head(&mut BytesMut::from(text.as_bytes())).unwrap().unwrap();
    Answer::new(side, "http://w", &head, Expected { endpoint: Endpoint::Chat, samples })
}

fn code(step: &Step) -> &'static str {
    match &step.meaning {
        Meaning::Failed(failure) => failure.code,
        other => panic!("{other:?} is no failure"),
    }
}

const TOKEN: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a data: [DONE] b\"},\"finish_reason\":null}]}\n\n";
const LAST: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\r\n\r\n";
const DONE: &str = "data: [DONE]\n\n";

#[test]
fn a_stream_split_at_every_byte_is_forwarded_whole_and_understood() {
    let text = format!(": hi\n\n{TOKEN}{LAST}{DONE}");
    for cut in 0..text.len() {
        let mut events = answer(Side::Decode, "text/event-stream");
        let (mut sent, mut tokens, mut complete) = (Vec::new(), 0, 0);
        for part in [&text[..cut], &text[cut..]] {
            let step = events.push(Bytes::copy_from_slice(part.as_bytes()));
            sent.extend_from_slice(&step.forward);
            match step.meaning {
                Meaning::Token => tokens += 1,
                Meaning::Complete => complete += 1,
                Meaning::None => {}
                Meaning::Failed(f) => panic!("{f:?}"),
            }
            assert!(sent.is_empty() || sent.ends_with(b"\n"), "only whole events leave");
        }
        assert_eq!(String::from_utf8(sent).unwrap(), text);
        assert_eq!(complete, 1, "cut at {cut}");
        assert!(tokens <= 1);
    }
}

#[test]
fn ends_that_are_no_ends() {
    let mut empty = answer(Side::Decode, "text/event-stream");
    assert_eq!(code(&empty.end(true)), "decode_empty_answer");
    let mut early = answer(Side::Decode, "text/event-stream");
    early.push(Bytes::from_static(TOKEN.as_bytes()));
    assert_eq!(code(&early.end(true)), "decode_truncated");
    let mut only_done = answer(Side::Decode, "text/event-stream");
    let step = only_done.push(Bytes::from_static(DONE.as_bytes()));
    assert_eq!((code(&step), step.forward.len()), ("decode_truncated", 0));
    let mut without_done = answer(Side::Decode, "text/event-stream");
    without_done.push(Bytes::from_static(LAST.as_bytes()));
    assert_eq!(code(&without_done.end(true)), "decode_truncated");
}

#[test]
fn a_stream_is_good_with_each_samples_finish_reason_and_done() {
    let chat = |i: u64| format!("data: {{\"choices\":[{{\"index\":{i},\"finish_reason\":\"stop\"}}]}}\n\n");
    let native = |i: u64| {
        format!("data: {{\"text\":\"x\",\"index\":{i},\"meta_info\":{{\"finish_reason\":{{\"type\":\"stop\"}}}}}}\n\n")
    };
    let usage = "data: {\"choices\":[],\"usage\":{\"total_tokens\":3}}\n\n".to_owned();
    let both =
        "data: {\"choices\":[{\"index\":0,\"finish_reason\":\"stop\"},{\"index\":1,\"finish_reason\":\"length\"}]}\n\n";
    let done = DONE.to_owned();
    let cases: Vec<(usize, Vec<String>, bool)> = vec![
        (1, vec![chat(0), done.clone()], true),
        (1, vec![chat(0), usage.clone(), done.clone()], true),
        (1, vec![chat(0), usage.clone()], false),
        (1, vec![chat(0)], false),
        (2, vec![chat(0), chat(1), done.clone()], true),
        (2, vec![both.to_owned(), done.clone()], true),
        (2, vec![chat(1), native(0), done.clone()], true),
        (2, vec![native(1), native(0), done.clone()], true),
        (2, vec![chat(0), chat(1)], false),
        (2, vec![chat(0), done.clone()], false),
        (2, vec![chat(0), chat(0), done.clone()], false),
        (2, vec![chat(0), chat(7), done.clone()], false),
        (8, vec![native(3)], false),
    ];
    for (samples, events, good) in cases {
        for clean in [true, false] {
            let mut stream = answer_of(Side::Decode, "text/event-stream", samples);
            let mut meaning = Meaning::None;
            for event in &events {
                meaning = stream.push(Bytes::from(event.clone())).meaning;
            }
            if !matches!(meaning, Meaning::Complete | Meaning::Failed(_)) {
                meaning = stream.end(clean).meaning;
            }
            assert_eq!(meaning == Meaning::Complete, good, "{samples} {events:?}: {meaning:?}");
        }
    }
}

#[test]
fn a_last_event_too_large_to_judge_needs_done() {
    let last = format!(
        "data: {{\"text\":\"{}\",\"meta_info\":{{\"finish_reason\":{{\"type\":\"stop\"}}}}}}\n\n",
        "x".repeat(2 * HELD_EVENT_BYTES_MAX)
    );
    for done in [true, false] {
        let mut stream = answer(Side::Decode, "text/event-stream");
        stream.push(Bytes::copy_from_slice(&last.as_bytes()[..last.len() - 9]));
        stream.push(Bytes::copy_from_slice(&last.as_bytes()[last.len() - 9..]));
        let step = if done { stream.push(Bytes::from_static(DONE.as_bytes())) } else { stream.end(true) };
        assert_eq!(step.meaning == Meaning::Complete, done);
    }
}

#[test]
fn errors_inside_a_stream_carry_the_workers_words() {
    let cases = [
        (r#"{"error":{"message":"kv lost","code":500}}"#, 500, "kv lost"),
        (r#"{"error":"plain"}"#, 502, "plain"),
        (r#"{"object":"error","message":"too long","code":400}"#, 400, "too long"),
        (
            r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"gone","status_code":503}}}"#,
            503,
            "gone",
        ),
    ];
    for (event, status, message) in cases {
        let mut events = answer(Side::Decode, "text/event-stream");
        let step = events.push(Bytes::from(format!("{TOKEN}data: {event}\n\n")));
        assert_eq!(step.forward, TOKEN, "what came before still leaves");
        let Meaning::Failed(failure) = step.meaning else { panic!("{event}") };
        assert_eq!((failure.status, failure.message.as_str()), (status, message));
    }
}

#[test]
fn a_megabyte_event_passes_without_being_held() {
    let mut events = answer(Side::Decode, "text/event-stream");
    let text = format!("data: {{\"choices\":[{{\"text\":\"{}\"}}]}}\n\n{LAST}{DONE}", "x".repeat(1 << 20));
    let mut sent = Vec::new();
    let mut complete = false;
    for part in text.as_bytes().chunks(1000) {
        let step = events.push(Bytes::copy_from_slice(part));
        sent.extend_from_slice(&step.forward);
        complete |= step.meaning == Meaning::Complete;
        let Kind::Events(state) = &events.kind else { unreachable!() };
        assert!(state.held_bytes() <= HELD_EVENT_BYTES_MAX + 1000);
    }
    assert!(complete && sent == text.as_bytes());
}

#[test]
fn whole_answers() {
    let judge = |body: &str| {
        let mut whole = answer(Side::Decode, "application/json");
        assert_eq!(whole.push(Bytes::copy_from_slice(body.as_bytes())), Step::quiet());
        whole.end(true)
    };
    for good in [
        r#"{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}"#,
        r#"{"choices":[{"message":{"content":""},"finish_reason":"stop"}]}"#,
        r#"{"text":"x","meta_info":{"finish_reason":{"type":"length","length":1}}}"#,
        r#"[{"text":"x","meta_info":{"finish_reason":{"type":"stop"}}},{"text":"y","meta_info":{"finish_reason":{"type":"stop"}}}]"#,
    ] {
        let step = judge(good);
        assert_eq!((step.meaning, &step.forward[..]), (Meaning::Complete, good.as_bytes()));
    }
    for (bad, expected) in [
        ("", "decode_empty_answer"),
        ("{}", "decode_empty_answer"),
        ("[]", "decode_empty_answer"),
        (r#"{"choices":[]}"#, "decode_empty_answer"),
        (r#"{"choices":[{"message":{"content":"x"}}]}"#, "decode_truncated"),
        ("<html>", "decode_bad_answer"),
        (r#"{"error":{"message":"m"}}"#, "decode_reported_error"),
    ] {
        assert_eq!(code(&judge(bad)), expected, "{bad}");
    }
    let mut cut = answer(Side::Decode, "application/json");
    cut.push(Bytes::from_static(br#"{"choices":[{"finish_reason":"stop"}]}"#));
    assert_eq!(code(&cut.end(false)), "decode_truncated");
}

#[test]
fn a_prefill_answer_needs_no_token_but_may_not_be_an_error() {
    let mut empty = answer(Side::Prefill, "application/json");
    assert_eq!(empty.end(true).meaning, Meaning::Complete);
    let mut stream = answer(Side::Prefill, "text/event-stream");
    assert_eq!(stream.push(Bytes::from_static(DONE.as_bytes())).meaning, Meaning::Complete);
    let mut failed = answer(Side::Prefill, "text/event-stream");
    let step = failed.push(Bytes::from_static(b"data: {\"error\":{\"message\":\"oom\",\"code\":503}}\n\n"));
    assert_eq!(code(&step), "prefill_reported_error");
    let mut cut = answer(Side::Prefill, "text/event-stream");
    cut.push(Bytes::from_static(TOKEN.as_bytes()));
    assert_eq!(code(&cut.end(false)), "prefill_truncated");
}

fn judged(endpoint: Endpoint, content_type: &str, body: &str) -> (String, Meaning) {
    let text = format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n\r\n");
    let head = take_response_head(&mut BytesMut::from(text.as_bytes())).unwrap().unwrap();
    let mut answer = Answer::new(Side::Decode, "http://w", &head, Expected { endpoint, samples: 1 });
    let pushed = answer.push(Bytes::copy_from_slice(body.as_bytes()));
    let ended = match pushed.meaning {
        Meaning::None | Meaning::Token => answer.end(true),
        meaning => Step { forward: Bytes::new(), meaning },
    };
    (String::from_utf8([pushed.forward, ended.forward].concat()).unwrap(), ended.meaning)
}

#[test]
fn streams_of_the_responses_api() {
    let delta =
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n";
    let last = |kind: &str, more: &str| {
        format!("event: {kind}\ndata: {{\"type\":\"{kind}\",\"response\":{{\"object\":\"response\"{more}}}}}\n\n")
    };
    for kind in ["response.completed", "response.incomplete"] {
        for end in ["", DONE] {
            let stream = format!("{delta}{}{end}", last(kind, ""));
            let got = judged(Endpoint::Responses, "text/event-stream", &stream);
            assert_eq!(
                got,
                (format!("{delta}{}", last(kind, "")), Meaning::Complete),
                "what follows the last event is nothing"
            );
        }
    }
    let failed = last("response.failed", r#","error":{"code":"server_error","message":"kv lost"}"#);
    let (sent, Meaning::Failed(failure)) =
        judged(Endpoint::Responses, "text/event-stream", &format!("{delta}{failed}"))
    else {
        panic!("a failed response is no success")
    };
    assert_eq!((sent.as_str(), failure.message.as_str()), (delta, "kv lost"));
    assert!(
        matches!(judged(Endpoint::Responses, "text/event-stream", delta).1, Meaning::Failed(f) if f.code == "decode_truncated")
    );
}

#[test]
fn streams_of_the_messages_api() {
    let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[]}}\n\n";
    let delta = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":1,\"delta\":{\"type\":\"text_delta\",\"text\":\"x\"}}\n\n";
    let stop = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    let stream = format!("{start}{delta}{stop}");
    assert_eq!(judged(Endpoint::Messages, "text/event-stream", &stream), (stream, Meaning::Complete));
    let error =
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"busy\"}}\n\n";
    let stream = format!("{start}{delta}{error}");
    assert!(
        matches!(judged(Endpoint::Messages, "text/event-stream", &stream).1, Meaning::Failed(f) if f.message == "busy")
    );
}

#[test]
fn whole_answers_of_the_other_apis() {
    let cases = [
        (Endpoint::Responses, r#"{"object":"response","status":"completed","output":[{"x":1}]}"#, ""),
        (
            Endpoint::Responses,
            r#"{"object":"response","status":"failed","error":{"message":"m"},"output":[]}"#,
            "decode_reported_error",
        ),
        (Endpoint::Messages, r#"{"type":"message","content":[{"text":"x"}],"stop_reason":"end_turn"}"#, ""),
        (Endpoint::Messages, r#"{"type":"message","content":[],"stop_reason":null}"#, "decode_empty_answer"),
        (Endpoint::Embeddings, r#"{"object":"list","data":[{"embedding":[1]}]}"#, ""),
        (Endpoint::Rerank, r#"[{"score":1,"index":0}]"#, ""),
        (Endpoint::Score, r#"{"object":"error","message":"m","code":400}"#, "decode_reported_error"),
        (Endpoint::Classify, "", "decode_empty_answer"),
    ];
    for (endpoint, body, expected) in cases {
        let got = match judged(endpoint, "application/json", body).1 {
            Meaning::Complete => "",
            Meaning::Failed(failure) => failure.code,
            other => panic!("{other:?}"),
        };
        assert_eq!(got, expected, "{body}");
    }
}
