//! Whether two answers are the same in the sense of H9: bit for bit, apart from ids, times and `cached_tokens`. *Pure.*
//!
//! A streamed answer is compared event by event, per choice: only the interleaving of several choices is left to
//! chance.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::client::Answer;

/// Fields that may differ between two runs of one request: ids, times, and how much of a prompt was cached.
const VOLATILE: [&str; 5] = ["id", "rid", "created", "cached_tokens", "e2e_latency"];

/// The part of an answer that must not depend on where and with whom the request ran.
///
/// # Errors
/// The answer is broken: not JSON, cut off, or a stream without exactly one `[DONE]` at its end.
pub fn normalise(answer: &Answer) -> Result<Value, String> {
    if let Some(broken) = &answer.broken {
        return Err(format!("the body broke off: {broken}"));
    }
    let body = if answer.is_stream() { by_choice(&answer.events()?)? } else { strip(parse(&answer.text())?) };
    Ok(json!({"status": answer.status, "content_type": answer.content_type, "body": body}))
}

/// The path and the two values of the first difference.
pub fn first_difference(left: &Value, right: &Value) -> Option<String> {
    difference("", left, right)
}

/// The events of each choice in their order; `usage` events, which belong to no choice, stand on their own.
fn by_choice(events: &[String]) -> Result<Value, String> {
    let (done, events) = events.split_last().ok_or("an empty stream")?;
    if done != "[DONE]" {
        return Err(format!("the stream ends with {done:?}"));
    }
    let mut choices: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for event in events {
        let event = parse(event)?;
        let index = event.pointer("/choices/0/index").or_else(|| event.get("index")).and_then(Value::as_u64);
        let key = index.map_or_else(|| "all".to_owned(), |index| index.to_string());
        choices.entry(key).or_default().push(strip(event));
    }
    Ok(json!(choices))
}

fn parse(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("{error}: {text:?}"))
}

/// The value without its volatile fields, at every depth.
fn strip(value: Value) -> Value {
    match value {
        Value::Object(fields) => Value::Object(
            fields
                .into_iter()
                .filter(|(key, _)| !VOLATILE.contains(&key.as_str()))
                .map(|(key, value)| (key, strip(value)))
                .collect::<Map<_, _>>(),
        ),
        Value::Array(items) => Value::Array(items.into_iter().map(strip).collect()),
        other => other,
    }
}

fn difference(path: &str, left: &Value, right: &Value) -> Option<String> {
    match (left, right) {
        (Value::Object(a), Value::Object(b)) => {
            let absent = Value::String("(absent)".into());
            let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
            keys.into_iter().find_map(|key| {
                let (x, y) = (a.get(key).unwrap_or(&absent), b.get(key).unwrap_or(&absent));
                difference(&format!("{path}/{key}"), x, y)
            })
        }
        (Value::Array(a), Value::Array(b)) => a
            .iter()
            .zip(b)
            .enumerate()
            .find_map(|(i, (x, y))| difference(&format!("{path}/{i}"), x, y))
            .or_else(|| (a.len() != b.len()).then(|| format!("{path}: {} items or {} items", a.len(), b.len()))),
        _ => {
            // As text, so that -0.0 and 0.0 differ: the same bits are asked for.
            let (a, b) = (left.to_string(), right.to_string());
            (a != b).then(|| format!("{path}: {a} or {b}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(body: &Value) -> Answer {
        Answer {
            status: 200,
            content_type: "application/json".into(),
            body: body.to_string().into_bytes(),
            broken: None,
        }
    }

    fn streamed(events: &[Value]) -> Answer {
        let mut body: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        body.push_str("data: [DONE]\n\n");
        Answer { status: 200, content_type: "text/event-stream".into(), body: body.into_bytes(), broken: None }
    }

    fn chat() -> Value {
        json!({"id": "a", "created": 1, "object": "chat.completion", "model": "tiny",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "no"}, "finish_reason": "stop",
                "logprobs": {"content": [{"token": "no", "logprob": -0.25, "bytes": [110, 111], "top_logprobs": []}]}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}})
    }

    fn generate() -> Value {
        json!({"text": "no", "output_ids": [7], "meta_info": {"id": "a", "e2e_latency": 0.5, "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 3, "completion_tokens": 1,
            "output_token_logprobs": [[-0.25, 7, null]]}})
    }

    fn chunks() -> Vec<Value> {
        let chunk = |index: u64, text: &str, finish: Value| {
            json!({"id": "a", "created": 1, "choices": [{"index": index, "delta": {"content": text},
                "finish_reason": finish}]})
        };
        vec![
            chunk(0, "a", Value::Null),
            chunk(1, "x", Value::Null),
            chunk(0, "b", json!("stop")),
            chunk(1, "y", json!("length")),
            json!({"id": "a", "choices": [], "usage": {"completion_tokens": 4}}),
        ]
    }

    fn same(a: &Answer, b: &Answer) -> bool {
        match (normalise(a), normalise(b)) {
            (Ok(a), Ok(b)) => first_difference(&a, &b).is_none(),
            _ => false,
        }
    }

    /// Replaces the value at `path`.
    fn planted(mut body: Value, path: &str, fault: Value) -> Value {
        *body.pointer_mut(path).unwrap_or_else(|| panic!("no {path}")) = fault;
        body
    }

    #[test]
    fn planted_faults_are_caught() {
        let next = f64::from(f32::from_bits((-0.25f32).to_bits() + 1));
        let faults = [
            (chat(), "/choices/0/message/content", json!("nO")),
            (chat(), "/choices/0/logprobs/content/0/logprob", json!(next)),
            (chat(), "/choices/0/logprobs/content/0/token", json!("on")),
            (chat(), "/choices/0/finish_reason", json!("length")),
            (chat(), "/usage/completion_tokens", json!(2)),
            (chat(), "/usage/prompt_tokens", json!(4)),
            (chat(), "/model", json!("other")),
            (generate(), "/output_ids/0", json!(8)),
            (generate(), "/text", json!("")),
            (generate(), "/meta_info/output_token_logprobs/0/0", json!(next)),
            (generate(), "/meta_info/finish_reason/type", json!("stop")),
            (generate(), "/meta_info/completion_tokens", json!(0)),
        ];
        for (body, path, fault) in faults {
            let (sound, faulty) = (whole(&body), whole(&planted(body.clone(), path, fault)));
            assert!(same(&sound, &sound) && !same(&sound, &faulty), "{path} went unseen");
        }
        let mut teapot = whole(&chat());
        teapot.status = 418;
        assert!(!same(&whole(&chat()), &teapot));
    }

    #[test]
    fn ids_times_and_cached_tokens_are_let_through() {
        let body = planted(chat(), "/id", json!("b"));
        let body = planted(body, "/created", json!(2));
        let body = planted(body, "/usage/prompt_tokens_details/cached_tokens", json!(2));
        assert!(same(&whole(&chat()), &whole(&body)));
        let body = planted(generate(), "/meta_info/e2e_latency", json!(0.75));
        assert!(same(&whole(&generate()), &whole(&body)));
    }

    #[test]
    fn planted_faults_of_a_stream_are_caught() {
        let sound = streamed(&chunks());
        let (mut lost, mut doubled, mut swapped) = (chunks(), chunks(), chunks());
        lost.remove(2);
        doubled.insert(0, chunks()[0].clone());
        swapped.swap(0, 2);
        let text = planted(chunks()[1].clone(), "/choices/0/delta/content", json!("z"));
        let finish = planted(chunks()[3].clone(), "/choices/0/finish_reason", json!("stop"));
        let usage = planted(chunks()[4].clone(), "/usage/completion_tokens", json!(5));
        let replaced = |at: usize, chunk: Value| {
            let mut all = chunks();
            all[at] = chunk;
            all
        };
        for faulty in [lost, doubled, swapped, replaced(1, text), replaced(3, finish), replaced(4, usage)] {
            assert!(!same(&sound, &streamed(&faulty)), "{faulty:?}");
        }
        let mut interleaved = chunks();
        interleaved.swap(0, 1);
        assert!(same(&sound, &streamed(&interleaved)), "the interleaving of choices is left to chance");
    }

    #[test]
    fn a_stream_that_does_not_end_well_is_no_answer() {
        let mut undone = streamed(&chunks());
        undone.body.truncate(undone.body.len() - "data: [DONE]\n\n".len());
        assert!(normalise(&undone).is_err());
        let mut cut = streamed(&chunks());
        cut.body.pop();
        assert!(normalise(&cut).is_err());
        let mut broken = streamed(&chunks());
        broken.broken = Some("reset".into());
        assert!(normalise(&broken).is_err());
    }
}
