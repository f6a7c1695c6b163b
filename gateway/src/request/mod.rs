//! A request's body, looked at once: where its top-level fields stand, what the gateway must know of them, and how to put
//! the bootstrap fields into the client's own bytes. Unknown fields survive byte for byte, since nothing is re-encoded.
//! *Pure.*

use std::borrow::Cow;

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::Failure;
use crate::exchange::ticket::Samples;

/// The routes that carry a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Endpoint {
    Chat,
    Completions,
    Generate,
}

impl Endpoint {
    pub fn of_path(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Endpoint::Chat),
            "/v1/completions" => Some(Endpoint::Completions),
            "/generate" => Some(Endpoint::Generate),
            _ => None,
        }
    }

    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Generate => "/generate",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Endpoint::Chat => "chat",
            Endpoint::Completions => "completions",
            Endpoint::Generate => "generate",
        }
    }
}

/// The names that only the gateway may set.
const OWNED_FIELDS: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];
/// Samples of one request at most, so that one body cannot ask for millions of rooms.
const SAMPLES_MAX: u64 = 4096;

/// A checked body: one JSON object, and what the gateway must know of it.
#[derive(Clone, Debug)]
pub struct Scanned {
    body: Bytes,
    /// Where the three fields go: right behind the opening brace.
    insert_at: usize,
    /// Ranges of the client's own bootstrap fields with one comma each, ascending and disjoint.
    cuts: Vec<(usize, usize)>,
    /// Whether a field of the client's stays.
    has_fields: bool,
    pub stream: bool,
    pub samples: Samples,
    /// A field that asks for logprobs of the prompt, which only the prefill leg could answer.
    pub prompt_logprobs: Option<&'static str>,
}

/// Reads the body once. Fails with a 400 that says where the JSON is wrong or which field is.
pub fn scan(endpoint: Endpoint, body: Bytes) -> Result<Scanned, Failure> {
    let fields: Fields = serde_json::from_slice(&body).map_err(|e| not_json(&e))?;
    let base = body.as_ptr() as usize;
    let span = |raw: &RawValue| {
        let start = raw.get().as_ptr() as usize - base;
        (start, start + raw.get().len())
    };
    let insert_at = body.iter().position(|b| *b == b'{').map_or(0, |i| i + 1);
    let mut entries = Vec::new();
    let mut known = Known::default();
    for (key, value) in &fields.0 {
        let name = key_text(key);
        entries.push(Entry { key: span(key).0, end: span(value).1, ours: OWNED_FIELDS.contains(&&*name) });
        known.note(&name, value);
    }
    let (stream, samples, prompt_logprobs) = known.judge(endpoint)?;
    let cuts = cuts(&entries);
    let has_fields = entries.iter().any(|e| !e.ours);
    Ok(Scanned { insert_at, cuts, has_fields, stream, samples, prompt_logprobs, body })
}

fn not_json(error: &serde_json::Error) -> Failure {
    Failure::client(400, "invalid_json", format!("the request body is not one JSON object: {error}"))
}

impl Scanned {
    /// The bytes of a plain worker's request: the client's, without its bootstrap fields.
    pub fn plain(&self) -> Bytes {
        if self.cuts.is_empty() { self.body.clone() } else { self.assemble("") }
    }

    /// The client's bytes with `fields` (of [`crate::exchange::ticket::fields`]) in front of its own.
    pub fn splice(&self, fields: &str) -> Bytes {
        self.assemble(fields)
    }

    fn assemble(&self, fields: &str) -> Bytes {
        let mut out = BytesMut::with_capacity(self.body.len() + fields.len() + 1);
        out.extend_from_slice(&self.body[..self.insert_at]);
        out.extend_from_slice(fields.as_bytes());
        if self.has_fields && !fields.is_empty() {
            out.extend_from_slice(b",");
        }
        let mut from = self.insert_at;
        for (start, end) in &self.cuts {
            out.extend_from_slice(&self.body[from..*start]);
            from = *end;
        }
        out.extend_from_slice(&self.body[from..]);
        out.freeze()
    }
}

struct Entry {
    /// Where the key's quote stands.
    key: usize,
    /// Just behind the value.
    end: usize,
    ours: bool,
}

/// A field goes with the comma behind it; the last ones go with the comma before them.
fn cuts(entries: &[Entry]) -> Vec<(usize, usize)> {
    let kept = entries.iter().rposition(|e| !e.ours).map_or(0, |last| last + 1);
    let mut cuts: Vec<_> =
        (0..kept).filter(|i| entries[*i].ours).map(|i| (entries[i].key, entries[i + 1].key)).collect();
    if kept < entries.len() {
        let start = if kept == 0 { entries[0].key } else { entries[kept - 1].end };
        cuts.push((start, entries[entries.len() - 1].end));
    }
    cuts
}

/// The top-level fields as borrowed text, in order, duplicates kept.
struct Fields<'a>(Vec<(&'a RawValue, &'a RawValue)>);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Fields<'de>;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::with_capacity(16);
                while let Some(entry) = map.next_entry()? {
                    fields.push(entry);
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

fn key_text(raw: &RawValue) -> Cow<'_, str> {
    let quoted = raw.get();
    match quoted.get(1..quoted.len() - 1) {
        Some(inner) if !inner.contains('\\') => Cow::Borrowed(inner),
        _ => serde_json::from_str::<String>(quoted).map_or(Cow::Borrowed(quoted), Cow::Owned),
    }
}

/// Texts of the fields that decide how the request is carried; of duplicates the last, as JSON parsers take it.
#[derive(Default)]
struct Known<'a> {
    stream: Option<&'a RawValue>,
    n: Option<&'a RawValue>,
    prompt: Option<&'a RawValue>,
    text: Option<&'a RawValue>,
    input_ids: Option<&'a RawValue>,
    sampling_params: Option<&'a RawValue>,
    echo: Option<&'a RawValue>,
    prompt_logprobs: Option<&'a RawValue>,
    return_logprob: Option<&'a RawValue>,
    logprob_start_len: Option<&'a RawValue>,
}

impl<'a> Known<'a> {
    fn note(&mut self, name: &str, value: &'a RawValue) {
        let slot = match name {
            "stream" => &mut self.stream,
            "n" => &mut self.n,
            "prompt" => &mut self.prompt,
            "text" => &mut self.text,
            "input_ids" => &mut self.input_ids,
            "sampling_params" => &mut self.sampling_params,
            "echo" => &mut self.echo,
            "prompt_logprobs" => &mut self.prompt_logprobs,
            "return_logprob" => &mut self.return_logprob,
            "logprob_start_len" => &mut self.logprob_start_len,
            _ => return,
        };
        *slot = Some(value);
    }

    fn judge(&self, endpoint: Endpoint) -> Result<(bool, Samples, Option<&'static str>), Failure> {
        let stream = match self.stream.map(RawValue::get) {
            None | Some("null" | "false") => false,
            Some("true") => true,
            Some(_) => return Err(bad_field("stream", "must be true or false")),
        };
        let (prompts, n) = match endpoint {
            Endpoint::Chat => (None, count_of("n", self.n)?),
            Endpoint::Completions => (list_length(self.prompt, "prompt")?, count_of("n", self.n)?),
            Endpoint::Generate => {
                let prompts = list_length(self.text, "text")?.or(list_length(self.input_ids, "input_ids")?);
                (prompts, self.generate_n()?)
            }
        };
        let total = prompts.unwrap_or(1).saturating_mul(n);
        if total > SAMPLES_MAX {
            return Err(bad_field("n", &format!("asks for {total} samples, the limit is {SAMPLES_MAX}")));
        }
        let samples = if prompts.is_some() || n > 1 { Samples::List(total as usize) } else { Samples::One };
        Ok((stream, samples, self.asks_prompt_logprobs(endpoint)))
    }

    /// `sampling_params.n`; one object or a list of them, of which the first counts, as in SGLang.
    fn generate_n(&self) -> Result<u64, Failure> {
        #[derive(Deserialize)]
        struct Params<'a> {
            #[serde(borrow)]
            n: Option<&'a RawValue>,
        }
        let Some(raw) = self.sampling_params else { return Ok(1) };
        let n = match raw.get().as_bytes().first() {
            Some(b'{') => serde_json::from_str::<Params>(raw.get()).ok().and_then(|p| p.n),
            Some(b'[') => serde_json::from_str::<Vec<Params>>(raw.get()).ok().and_then(|v| v.first()?.n),
            _ => None,
        };
        count_of("sampling_params.n", n)
    }

    fn asks_prompt_logprobs(&self, endpoint: Endpoint) -> Option<&'static str> {
        if self.prompt_logprobs.is_some_and(|v| !matches!(v.get(), "null" | "false")) {
            return Some("prompt_logprobs");
        }
        match endpoint {
            Endpoint::Completions if self.echo.is_some_and(|v| v.get() == "true") => Some("echo"),
            Endpoint::Generate => {
                let wanted = self.return_logprob.is_some_and(|v| v.get().contains("true"));
                let from_prompt = self.logprob_start_len.is_some_and(|v| any_position(v.get()));
                (wanted && from_prompt).then_some("logprob_start_len")
            }
            _ => None,
        }
    }
}

fn bad_field(name: &'static str, what: &str) -> Failure {
    Failure::client(400, "invalid_field", format!("`{name}` {what}")).at(name)
}

fn count_of(name: &'static str, raw: Option<&RawValue>) -> Result<u64, Failure> {
    match raw.map(RawValue::get) {
        None | Some("null") => Ok(1),
        Some(text) => match text.parse::<u64>() {
            Ok(n) if n >= 1 => Ok(n),
            _ => Err(bad_field(name, "must be a whole number of at least 1")),
        },
    }
}

/// The number of prompts where the field holds a list of prompts; `None` for one prompt (a string or one list of token ids).
fn list_length(raw: Option<&RawValue>, name: &'static str) -> Result<Option<u64>, Failure> {
    let Some(raw) = raw.filter(|r| r.get().starts_with('[')) else { return Ok(None) };
    let items: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| not_json(&e))?;
    match items.first().map(|i| i.get().as_bytes()[0]) {
        None => Err(bad_field(name, "must not be an empty list")),
        Some(b'"' | b'[') => Ok(Some(items.len() as u64)),
        Some(_) => Ok(None),
    }
}

/// Whether a `logprob_start_len` (a number, or a list of them) names a position of the prompt: any that is not negative.
fn any_position(text: &str) -> bool {
    text.trim_matches(['[', ']']).split(',').map(str::trim).any(|t| t.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn scanned(endpoint: Endpoint, text: &str) -> Scanned {
        scan(endpoint, Bytes::copy_from_slice(text.as_bytes())).unwrap()
    }

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
            (r#"{"a":1,"bootstrap_room":[5,{"x":"}"}] , "b":2}"#, r#","a":1,"b":2"#.into()),
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
        assert_eq!(asks(Endpoint::Completions, r#"{"echo":true}"#), Some("echo"));
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
}
