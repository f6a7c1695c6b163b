//! P's answer merged into D's: it comes to what a merge of both as JSON values comes to.

use bytes::Bytes;
use serde_json::{Map, Value};
use tandem_gateway::{
    Side,
    request::Endpoint,
    stream::{Meaning, Merge, PromptLogprobs},
};

use crate::{Target, targets::answers::answer};

/// Stands between P's answer and D's in an input.
const BETWEEN: u8 = b'|';
const PROMPT_LISTS: [&str; 3] = ["input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"];
const CHOICE_LISTS: [&str; 4] = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];

/// D's answer with P's part, or `None` where one of them is no good answer.
pub type Merged = fn(Merge, &[u8], &[u8]) -> Option<Bytes>;

/// Tries this merge.
pub struct Merges(pub Merged);

impl Merges {
    pub fn real() -> Self {
        Self(merged)
    }
}

/// The gateway's own.
pub fn merged(merge: Merge, prefill: &[u8], decode: &[u8]) -> Option<Bytes> {
    let mut p = answer(Side::Prefill, "application/json", Endpoint::Generate, 1).keeping();
    p.push(Bytes::copy_from_slice(prefill));
    if p.end(true).meaning != Meaning::Complete {
        return None;
    }
    let mut d = answer(Side::Decode, "application/json", Endpoint::Generate, 1).merging(merge);
    d.push(Bytes::copy_from_slice(decode));
    if matches!(d.end(true).meaning, Meaning::Failed(_)) {
        return None;
    }
    let step = d.prefill(p.take_prefill());
    (step.meaning == Meaning::Complete).then_some(step.forward)
}

impl Target for Merges {
    fn name(&self) -> &'static str {
        "merges"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let pairs = [
            r#"{"meta_info":{"input_token_logprobs":[[null,1,"a"],[-1.5,2,null]],"input_top_logprobs":[null,[[1,2]]]}}|{"text":"x","meta_info":{"finish_reason":"stop","input_token_logprobs":[],"input_top_logprobs":null}}"#,
            r#"[{"meta_info":{"input_token_logprobs":[1]}},{"meta_info":{"input_token_logprobs":[2]}}]|[{"text":"x","meta_info":{"finish_reason":"stop","input_token_logprobs":[3]}},{"text":"y","meta_info":{"finish_reason":"stop"}}]"#,
            r#"{"choices":[{"index":0,"logprobs":{"tokens":["a","b"],"token_logprobs":[null,-1],"text_offset":[0,1]}}]}|{"choices":[{"index":0,"finish_reason":"stop","logprobs":{"tokens":["b"],"token_logprobs":[-1],"text_offset":[1]}}]}"#,
            r#"{"choices":[{"logprobs":{"tokens":["a","b"],"token_logprobs":[0,1]},"prompt_logprobs":[null]}],"prompt_logprobs":[1]}|{"choices":[{"finish_reason":"stop","logprobs":{"tokens":["a","b"],"token_logprobs":[null,1]},"prompt_logprobs":null}]}"#,
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":3}}}|{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens_details":{"cached_tokens":9}}}"#,
            r#"{"usage":{"input_tokens_details":{"cached_tokens":3}}}|{"object":"response","status":"completed","output":[1],"usage":{"input_tokens":1}}"#,
        ];
        pairs.iter().map(|pair| pair.as_bytes().to_vec()).collect()
    }

    fn words(&self) -> &'static [&'static str] {
        &[
            "\"meta_info\":{",
            "\"input_token_logprobs\":[1]",
            "\"input_top_logprobs\":",
            "\"logprobs\":{",
            "\"tokens\":[\"a\"]",
            "\"choices\":[",
            "\"index\":1,",
            "\"usage\":{}",
            "\"prompt_logprobs\":[2]",
            "\"cached_tokens\":4",
            "\\u0061",
            "null",
            "[]",
            "{}",
            ",",
            "|",
        ]
    }

    fn memory_bytes_max(&self, input_bytes: usize) -> usize {
        (1 << 20) + 512 * input_bytes
    }

    fn run(&self, input: &[u8]) -> String {
        let Some(at) = input.iter().position(|byte| *byte == BETWEEN) else { return "no pair".into() };
        let (prefill, decode) = (&input[..at], &input[at + 1..]);
        let styles = [Some(PromptLogprobs::InFront), Some(PromptLogprobs::Replaced), None];
        let ends = styles.map(|prompt_logprobs| {
            let merge = Merge { prompt_logprobs, usage: prompt_logprobs != Some(PromptLogprobs::InFront) };
            let Some(out) = (self.0)(merge, prefill, decode) else { return "not merged" };
            let [Ok(p), Ok(d)] = [prefill, decode].map(serde_json::from_slice::<Value>) else { return "no values" };
            let got: Value = serde_json::from_slice(&out).expect("what was JSON stays JSON");
            let expected = oracle(merge, &p, d.clone());
            assert_eq!(got, expected, "{merge:?}");
            if got == d { "unchanged" } else { "merged" }
        });
        ends.join(";")
    }
}

fn oracle(merge: Merge, prefill: &Value, mut decode: Value) -> Value {
    let messages: Vec<&Value> = match prefill {
        Value::Array(list) => list.iter().collect(),
        one => vec![one],
    };
    match &mut decode {
        Value::Array(list) => {
            let mut begun = Vec::new();
            for (sample, message) in list.iter_mut().enumerate() {
                into_message(merge, prefill, &messages, sample, message, &mut begun);
            }
        }
        one => into_message(merge, prefill, &messages, 0, one, &mut Vec::new()),
    }
    decode
}

fn into_message(
    merge: Merge,
    prefill: &Value,
    messages: &[&Value],
    sample: usize,
    message: &mut Value,
    begun: &mut Vec<u64>,
) {
    let Some(message) = message.as_object_mut() else { return };
    if merge.usage {
        into_usage(prefill, message);
    }
    let Some(style) = merge.prompt_logprobs else { return };
    let is_some = |value: &Value| !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty());
    let of_sample = |name: &str| messages.get(sample).map(|m| &m[name]);
    if let Some(value) = of_sample("prompt_logprobs").filter(|value| is_some(value)) {
        message.insert("prompt_logprobs".into(), value.clone());
    }
    if let Some(meta) = message.get_mut("meta_info").and_then(Value::as_object_mut) {
        for list in PROMPT_LISTS {
            let value = of_sample("meta_info").map(|meta| &meta[list]).filter(|value| is_some(value));
            let Some(theirs) = value.and_then(Value::as_array) else { continue };
            let own = meta.get(list).and_then(Value::as_array).cloned().unwrap_or_default();
            meta.insert(list.into(), [theirs.clone(), own].concat().into());
        }
    }
    let choices = messages.iter().filter_map(|m| m["choices"].as_array()).flat_map(|list| list.iter().enumerate());
    let theirs: Vec<(u64, &Value)> = choices
        .filter(|(_, c)| c.is_object() && !(c["logprobs"].is_null() && c["prompt_logprobs"].is_null()))
        .map(|(at, choice)| (choice["index"].as_u64().unwrap_or(at as u64), choice))
        .collect();
    let Some(own) = message.get_mut("choices").and_then(Value::as_array_mut) else { return };
    for (at, choice) in own.iter_mut().enumerate() {
        let index = choice["index"].as_u64().unwrap_or(at as u64);
        let Some((_, theirs)) = theirs.iter().find(|(of, _)| *of == index) else { continue };
        let Some(choice) = choice.as_object_mut() else { continue };
        if !theirs["prompt_logprobs"].is_null() {
            choice.insert("prompt_logprobs".into(), theirs["prompt_logprobs"].clone());
        }
        if let Some(own) = choice.get_mut("logprobs").and_then(Value::as_object_mut)
            && theirs.get("logprobs").is_some()
            && !begun.contains(&index)
        {
            begun.push(index);
            into_logprobs(style, &theirs["logprobs"], own);
        }
    }
}

fn into_logprobs(style: PromptLogprobs, theirs: &Value, own: &mut Map<String, Value>) {
    let without_last = |list: &Value| list.as_array().map(|list| list[..list.len().saturating_sub(1)].to_vec());
    let Some(prompt) = without_last(&theirs["tokens"]) else { return };
    let has_them = own.get("tokens").and_then(Value::as_array).is_some_and(|own| own.starts_with(&prompt));
    for list in CHOICE_LISTS {
        let (Some(own), Some(theirs)) = (own.get_mut(list).and_then(Value::as_array_mut), without_last(&theirs[list]))
        else {
            continue;
        };
        if theirs.is_empty() {
            continue;
        }
        let replaced =
            if style == PromptLogprobs::Replaced && has_them && own.len() >= prompt.len() { prompt.len() } else { 0 };
        own.splice(..replaced, theirs);
    }
}

fn into_usage(prefill: &Value, message: &mut Map<String, Value>) {
    let details = ["prompt_tokens_details", "input_tokens_details"];
    let cached = |name: &str| prefill["usage"].get(name)?.get("cached_tokens");
    let Some(cached) = details.iter().find_map(|name| cached(name)).and_then(Value::as_u64) else { return };
    let own = match message.get("usage") {
        Some(_) => message.get_mut("usage"),
        None => message.get_mut("response").and_then(|response| response.get_mut("usage")),
    };
    let Some(usage) = own.and_then(Value::as_object_mut) else { return };
    let name = details[usize::from(usage.contains_key("input_tokens"))];
    match usage.get_mut(name).and_then(Value::as_object_mut) {
        Some(details) => drop(details.insert("cached_tokens".into(), cached.into())),
        None => drop(usage.insert(name.into(), serde_json::json!({"cached_tokens": cached}))),
    }
}
