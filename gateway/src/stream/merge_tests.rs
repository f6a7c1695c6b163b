//! Tests of P's part in D's answer: each shape whole and streamed, and what waits for it.

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::leg::http1::take_response_head;

const LOGPROBS: Merge = Merge { prompt_logprobs: Some(PromptLogprobs::InFront), usage: false };
const VLLM: Merge = Merge { prompt_logprobs: Some(PromptLogprobs::Replaced), usage: true };
const USAGE: Merge = Merge { prompt_logprobs: None, usage: true };

fn answer(side: Side, content_type: &str, samples: usize) -> Answer {
    let text = format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n\r\n");
    let head = take_response_head(&mut BytesMut::from(text.as_bytes())).unwrap().unwrap();
    Answer::new(side, "http://w", &head, Expected { endpoint: Endpoint::Generate, samples })
}

fn whole_of_prefill(body: &str) -> PrefillAnswer {
    let mut prefill = answer(Side::Prefill, "application/json", 1).keeping();
    prefill.push(Bytes::copy_from_slice(body.as_bytes()));
    assert_eq!(prefill.end(true).meaning, Meaning::Complete);
    prefill.take_prefill()
}

/// D's whole answer, with P's part coming after it.
fn merged_whole(merge: Merge, prefill: &Value, decode: &Value) -> Value {
    let mut d = answer(Side::Decode, "application/json", 1).merging(merge);
    d.push(Bytes::from(decode.to_string()));
    assert!(!d.waits_for_prefill());
    assert_eq!(d.end(true), Step::quiet());
    assert!(d.waits_for_prefill(), "D's answer waits for P's");
    let step = d.prefill(whole_of_prefill(&prefill.to_string()));
    assert_eq!(step.meaning, Meaning::Complete);
    serde_json::from_slice(&step.forward).unwrap()
}

fn generated(input: Value, top: Value) -> Value {
    json!({"text": "x", "meta_info": {"finish_reason": {"type": "stop"}, "input_token_logprobs": input,
        "input_top_logprobs": top, "output_token_logprobs": [[-1.0, 9, null]]}})
}

#[test]
fn generates_lists_are_put_in_front() {
    let (p, d) = (json!([[null, 1, "a"], [-0.5, 2, null]]), json!([]));
    let got = merged_whole(LOGPROBS, &generated(p.clone(), json!([null, [[1, 2]]])), &generated(d, json!([[3]])));
    assert_eq!(got, generated(p, json!([null, [[1, 2]], [3]])));
}

#[test]
fn a_list_of_answers_is_merged_entry_by_entry() {
    let list = |inputs: [Value; 2]| Value::from(inputs.map(|i| generated(i, Value::Null)).to_vec());
    let got = merged_whole(LOGPROBS, &list([json!([1]), json!([2, 3])]), &list([json!([]), json!([4])]));
    assert_eq!(got, list([json!([1]), json!([2, 3, 4])]));
}

#[test]
fn what_d_leaves_out_is_added() {
    let prefill = json!({"meta_info": {"input_token_logprobs": [1], "input_token_ids_logprobs": [[2]]}});
    let decode = json!({"text": "x", "meta_info": {"finish_reason": "stop", "input_token_logprobs": null}});
    let got = merged_whole(LOGPROBS, &prefill, &decode);
    let expected = json!({"finish_reason": "stop", "input_token_logprobs": [1], "input_token_ids_logprobs": [[2]]});
    assert_eq!(got["meta_info"], expected);
}

fn completion(tokens: Value, logprobs: Value, offsets: Value) -> Value {
    json!({"choices": [{"index": 0, "text": "abx", "finish_reason": "stop", "logprobs":
        {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": null, "text_offset": offsets}}]})
}

#[test]
fn an_echos_logprobs_are_ps_without_the_token_it_sampled() {
    let prefill = completion(json!(["a", "b", "x"]), json!([null, -1, -2]), json!([0, 1, 2]));
    let decode = completion(json!(["x", "y"]), json!([-2, -3]), json!([2, 3]));
    let expected = completion(json!(["a", "b", "x", "y"]), json!([null, -1, -2, -3]), json!([0, 1, 2, 3]));
    assert_eq!(merged_whole(LOGPROBS, &prefill, &decode), expected);
    // vLLM's D has the prompt's tokens, too, without their logprobs.
    let decode = completion(json!(["a", "b", "x", "y"]), json!([null, null, -2, -3]), json!([0, 1, 2, 3]));
    assert_eq!(merged_whole(VLLM, &prefill, &decode), expected);
}

#[test]
fn vllms_prompt_logprobs_and_usage_are_ps() {
    let usage = |cached: u64| json!({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": cached}});
    let chat = |logprobs: Value, cached| json!({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "prompt_logprobs": logprobs, "usage": usage(cached)});
    let some = json!([null, {"5": {"logprob": -1}}]);
    let got = merged_whole(VLLM, &chat(some.clone(), 10), &chat(Value::Null, 100));
    assert_eq!(got, chat(some, 10));
    let without =
        json!({"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"prompt_tokens_details": null}});
    let got = merged_whole(USAGE, &chat(Value::Null, 7), &without);
    assert_eq!(got["usage"], json!({"prompt_tokens_details": {"cached_tokens": 7}}));
}

fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

fn events_of(bytes: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(bytes).unwrap();
    let events = text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
    events.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[test]
fn streams_of_both_legs_split_at_every_byte() {
    let mut prefill = answer(Side::Prefill, "text/event-stream", 1).keeping();
    let said = format!("{}data: [DONE]\n\n", event(&generated(json!([[null, 1]]), Value::Null)));
    assert_eq!(prefill.push(Bytes::from(said)).meaning, Meaning::Complete);
    let prefill = prefill.take_prefill();
    let unfinished = json!({"text": "x", "meta_info": {"finish_reason": null, "input_token_logprobs": []}});
    let stream = format!(": hi\n\n{}{}data: [DONE]\n\n", event(&unfinished), event(&generated(json!([]), Value::Null)));
    for cut in 0..stream.len() {
        let mut d = answer(Side::Decode, "text/event-stream", 1).merging(LOGPROBS);
        let mut out = Vec::new();
        for (at, part) in [&stream[..cut], &stream[cut..]].into_iter().enumerate() {
            let step = d.push(Bytes::copy_from_slice(part.as_bytes()));
            assert_eq!(step.meaning, Meaning::None, "no token is told before P's part is there");
            out.extend_from_slice(&step.forward);
            assert!(at == 0 || d.waits_for_prefill());
        }
        assert!(out == b": hi\n\n", "only what needs nothing of P's leaves before");
        let step = d.prefill(prefill.clone());
        assert_eq!(step.meaning, Meaning::Complete);
        let merged = events_of(&step.forward);
        assert_eq!(merged[0]["meta_info"]["input_token_logprobs"], json!([[null, 1]]));
        assert_eq!(merged[1], generated(json!([[null, 1]]), Value::Null), "each event tells all so far");
    }
}

#[test]
fn a_completions_stream_has_ps_part_once() {
    let prefill = whole_of_prefill(&completion(json!(["a", "x"]), json!([null, -2]), json!([0, 1])).to_string());
    let first = completion(json!(["x"]), json!([-2]), json!([1]));
    let second = completion(json!(["y"]), json!([-3]), json!([2]));
    let mut d = answer(Side::Decode, "text/event-stream", 1).merging(LOGPROBS);
    assert_eq!(d.prefill(prefill), Step::quiet(), "P came first");
    let step = d.push(Bytes::from(format!("{}{}data: [DONE]\n\n", event(&first), event(&second))));
    let merged = events_of(&step.forward);
    assert_eq!(merged, [completion(json!(["a", "x"]), json!([null, -2]), json!([0, 1])), second]);
}

#[test]
fn usage_waits_with_its_own_event_only() {
    let token = json!({"choices": [{"text": "x", "finish_reason": "stop"}], "usage": null});
    let usage = |cached: u64| json!({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}});
    let mut d = answer(Side::Decode, "text/event-stream", 1).merging(USAGE);
    let step = d.push(Bytes::from(format!("{}{}data: [DONE]\n\n", event(&token), event(&usage(100)))));
    assert_eq!((step.meaning, events_of(&step.forward)), (Meaning::Token, vec![token]));
    assert!(d.waits_for_prefill());
    let step = d.prefill(whole_of_prefill(&usage(10).to_string()));
    assert_eq!((step.meaning, events_of(&step.forward)), (Meaning::Complete, vec![usage(10)]));
}

#[test]
fn an_error_of_d_waits_for_nobody() {
    let mut d = answer(Side::Decode, "text/event-stream", 1).merging(LOGPROBS);
    let step = d.push(Bytes::from_static(b"data: {\"error\":{\"message\":\"oom\",\"code\":503}}\n\n"));
    assert!(matches!(step.meaning, Meaning::Failed(failure) if failure.status == 503));
}

#[test]
fn a_part_that_is_too_large_is_an_error_with_words() {
    let mut prefill = answer(Side::Prefill, "application/json", 1).keeping();
    for _ in 0..=HELD_ANSWER_BYTES_MAX >> 20 {
        prefill.push(Bytes::from(vec![b' '; 1 << 20]));
    }
    prefill.end(true);
    let mut d = answer(Side::Decode, "application/json", 1).merging(LOGPROBS);
    let Meaning::Failed(failure) = d.prefill(prefill.take_prefill()).meaning else { panic!("it is too large") };
    assert_eq!(failure.code, "prefill_answer_too_large");
}

#[test]
fn ps_words_over_several_lines_stay_one_event() {
    let prefill = whole_of_prefill("{\"meta_info\":{\"input_token_logprobs\":[1,\n 2\r\n]}}");
    let mut d = answer(Side::Decode, "text/event-stream", 1).merging(LOGPROBS);
    d.prefill(prefill);
    let step = d.push(Bytes::from(event(&generated(json!([]), Value::Null))));
    assert_eq!(events_of(&step.forward), [generated(json!([1, 2]), Value::Null)]);
}

proptest! {
    /// However a stream is cut into reads, its bytes leave as they came, and it means the same.
    #[test]
    fn any_chunking_is_the_same_stream(
        parts in prop::collection::vec(0usize..7, 0..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let events = [
            ": ping\n\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"data: [DONE]\\n\\n\"}}]}\n\n",
            "event: x\r\ndata: {\"text\":\"y\"}\r\n\r\n",
            "data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n\r\n",
            "data: not json\n\n",
            "data: {\"a\":\ndata: 1}\n\n",
            "data: [DONE]\n\n",
        ];
        let stream: String = parts.iter().map(|part| events[*part]).collect();
        let run = |cuts: &[usize]| {
            let mut answer = answer(Side::Decode, "text/event-stream", 1);
            let (mut out, mut meanings) = (Vec::new(), Vec::new());
            for cut in cuts.windows(2) {
                let step = answer.push(Bytes::copy_from_slice(&stream.as_bytes()[cut[0]..cut[1]]));
                out.extend_from_slice(&step.forward);
                meanings.push(step.meaning);
                if matches!(meanings.last(), Some(Meaning::Complete | Meaning::Failed(_))) {
                    return (out, meanings.pop());
                }
            }
            (out, Some(answer.end(true).meaning))
        };
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        at.extend([0, stream.len()]);
        at.sort_unstable();
        let (bytes, meaning) = run(&at);
        prop_assert_eq!((&bytes, &meaning), (&run(&[0, stream.len()]).0, &run(&[0, stream.len()]).1));
        prop_assert!(stream.as_bytes().starts_with(&bytes));
        if meaning == Some(Meaning::Complete) {
            let done = stream.find("data: [DONE]\n\n").filter(|at| stream[..*at].ends_with('\n') || *at == 0);
            prop_assert!(done.is_some() && bytes.ends_with(b"data: [DONE]\n\n"));
        }
    }
}
