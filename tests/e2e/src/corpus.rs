//! Requests of mixed kinds from one seed: the questions that a split and an unsplit worker must answer alike (H9).
//! *Pure.*
//!
//! Every answer is determined by the request: greedy, or seeded. The endpoints, streamed or not, and the features are
//! crossed by counting, so that each pairing occurs; lengths and parameters are drawn.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};

/// The end-of-sequence token of the tiny checkpoints.
const EOS: u32 = 2;
/// Ids below are special tokens of the tiny checkpoints.
const FIRST_PLAIN_TOKEN: u32 = 3;
const VOCAB: u32 = 512;

/// Prompts around the page (16), around a chunk, and one token alone.
const EDGE_LENGTHS: [usize; 15] = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 256, 257, PROMPT_TOKENS_MAX];
/// The longest prompt.
pub const PROMPT_TOKENS_MAX: usize = 1500;

const WORDS: [&str; 16] = [
    "page", "token", "the", "of", "Prefill", "decode", "42", "naïve", "世界", "🦀", "\n", "a,b", "queue", "x = 1;",
    "Zürich", "und",
];

/// What a request tries; crossed with the endpoint and with streaming.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    Greedy,
    Seeded,
    Penalties,
    StopStrings,
    ThreeSamples,
    Logprobs,
    OneToken,
    EosFirst,
    IgnoreEos,
    StopTokens,
}

const FEATURES: [Feature; 10] = [
    Feature::Greedy,
    Feature::Seeded,
    Feature::Penalties,
    Feature::StopStrings,
    Feature::ThreeSamples,
    Feature::Logprobs,
    Feature::OneToken,
    Feature::EosFirst,
    Feature::IgnoreEos,
    Feature::StopTokens,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    Generate,
}

impl Endpoint {
    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Generate => "/generate",
        }
    }
}

/// One request of the corpus.
#[derive(Clone, Debug)]
pub struct Question {
    pub index: usize,
    pub endpoint: Endpoint,
    pub feature: Feature,
    pub stream: bool,
    pub body: Value,
}

/// `count` requests to `model`; the same seed gives the same bytes.
pub fn questions(seed: u64, count: usize, model: &str) -> Vec<Question> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count).map(|index| question(&mut rng, index, model)).collect()
}

fn question(rng: &mut StdRng, index: usize, model: &str) -> Question {
    let endpoint = [Endpoint::Chat, Endpoint::Completions, Endpoint::Generate][index % 3];
    let stream = (index / 3) % 2 == 1;
    let feature = FEATURES[(index / 6) % FEATURES.len()];
    let params = params(rng, feature);
    let body = match endpoint {
        Endpoint::Chat => chat(rng, model, &params, stream),
        Endpoint::Completions => completions(rng, model, feature, &params, stream),
        Endpoint::Generate => generate(rng, feature, &params, stream),
    };
    Question { index, endpoint, feature, stream, body }
}

/// The parameters in one neutral form; the endpoints spell them differently.
struct Params {
    max_tokens: u32,
    seed: Option<u64>,
    samples: u32,
    top_logprobs: Option<u32>,
    /// Spelt alike by all endpoints.
    common: Map<String, Value>,
    logit_bias: Map<String, Value>,
    min_tokens: Option<u32>,
}

fn params(rng: &mut StdRng, feature: Feature) -> Params {
    let mut params = Params {
        max_tokens: rng.random_range(2..=24),
        seed: Some(rng.random_range(0..1 << 31)),
        samples: 1,
        top_logprobs: None,
        common: Map::new(),
        logit_bias: Map::new(),
        min_tokens: None,
    };
    let mut set = |fields: Value| {
        if let Value::Object(fields) = fields {
            params.common.extend(fields);
        }
    };
    match feature {
        Feature::Greedy | Feature::EosFirst => set(json!({"temperature": 0})),
        Feature::Penalties => set(json!({"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.4,
            "repetition_penalty": 1.2, "min_p": 0.01})),
        Feature::StopStrings => set(json!({"temperature": 1.2, "stop": ["e", " t", "ok", "\n"]})),
        Feature::StopTokens => set(json!({"temperature": 1.3,
            "stop_token_ids": (0..24).map(|_| plain_token(rng)).collect::<Vec<_>>()})),
        Feature::IgnoreEos => set(json!({"temperature": 0.6, "ignore_eos": true})),
        Feature::OneToken if rng.random_bool(0.5) => set(json!({"temperature": 0})),
        _ => set(json!({"temperature": 1.0, "top_p": 0.9, "top_k": 40})),
    }
    match feature {
        Feature::Greedy => params.seed = None,
        Feature::ThreeSamples => params.samples = 3,
        Feature::Logprobs => params.top_logprobs = Some(rng.random_range(1..=5)),
        Feature::OneToken => {
            params.max_tokens = 1;
            params.top_logprobs = rng.random_bool(0.5).then_some(2);
        }
        Feature::EosFirst | Feature::IgnoreEos => {
            params.logit_bias.insert(EOS.to_string(), json!(if feature == Feature::EosFirst { 100 } else { 8 }));
        }
        Feature::StopTokens => params.min_tokens = Some(rng.random_range(1..=params.max_tokens.min(4))),
        _ => {}
    }
    params
}

fn chat(rng: &mut StdRng, model: &str, params: &Params, stream: bool) -> Value {
    let (system, user) = (text(rng, 40), text_of_drawn_length(rng));
    let messages = json!([{"role": "system", "content": system}, {"role": "user", "content": user}]);
    let mut body = openai(rng, model, params, stream);
    body.insert("messages".into(), messages);
    let limit = if rng.random_bool(0.5) { "max_tokens" } else { "max_completion_tokens" };
    body.insert(limit.into(), json!(params.max_tokens));
    if let Some(top) = params.top_logprobs {
        body.insert("logprobs".into(), json!(true));
        body.insert("top_logprobs".into(), json!(top));
    }
    Value::Object(body)
}

fn completions(rng: &mut StdRng, model: &str, feature: Feature, params: &Params, stream: bool) -> Value {
    let mut body = openai(rng, model, params, stream);
    let prompt = match feature {
        Feature::ThreeSamples if rng.random_bool(0.3) => json!([token_ids(rng), token_ids(rng)]),
        _ if rng.random_bool(0.3) => json!(text_of_drawn_length(rng)),
        _ => json!(token_ids(rng)),
    };
    body.insert("prompt".into(), prompt);
    body.insert("max_tokens".into(), json!(params.max_tokens));
    if let Some(top) = params.top_logprobs {
        body.insert("logprobs".into(), json!(top));
    }
    Value::Object(body)
}

/// What chat and completions share.
fn openai(rng: &mut StdRng, model: &str, params: &Params, stream: bool) -> Map<String, Value> {
    let mut body = params.common.clone();
    body.insert("model".into(), json!(model));
    if let Some(seed) = params.seed {
        body.insert("seed".into(), json!(seed));
    }
    if params.samples > 1 {
        body.insert("n".into(), json!(params.samples));
    }
    if !params.logit_bias.is_empty() {
        body.insert("logit_bias".into(), Value::Object(params.logit_bias.clone()));
    }
    if let Some(min) = params.min_tokens {
        body.insert("min_tokens".into(), json!(min));
    }
    if stream {
        body.insert("stream".into(), json!(true));
        if rng.random_bool(0.5) {
            body.insert("stream_options".into(), json!({"include_usage": true}));
        }
    }
    body
}

fn generate(rng: &mut StdRng, feature: Feature, params: &Params, stream: bool) -> Value {
    let mut sampling = params.common.clone();
    sampling.insert("max_new_tokens".into(), json!(params.max_tokens));
    if let Some(seed) = params.seed {
        sampling.insert("sampling_seed".into(), json!(seed));
    }
    if params.samples > 1 {
        sampling.insert("n".into(), json!(params.samples));
    }
    if !params.logit_bias.is_empty() {
        sampling.insert("logit_bias".into(), Value::Object(params.logit_bias.clone()));
    }
    if let Some(min) = params.min_tokens {
        sampling.insert("min_new_tokens".into(), json!(min));
    }
    let mut body = json!({"sampling_params": sampling, "stream": stream});
    match feature {
        Feature::ThreeSamples if rng.random_bool(0.3) => body["input_ids"] = json!([token_ids(rng), token_ids(rng)]),
        _ if rng.random_bool(0.3) => body["text"] = json!(text_of_drawn_length(rng)),
        _ => body["input_ids"] = json!(token_ids(rng)),
    }
    if let Some(top) = params.top_logprobs {
        body["return_logprob"] = json!(true);
        body["top_logprobs_num"] = json!(top);
    }
    body
}

fn plain_token(rng: &mut StdRng) -> u32 {
    rng.random_range(FIRST_PLAIN_TOKEN..VOCAB)
}

fn token_ids(rng: &mut StdRng) -> Vec<u32> {
    (0..prompt_tokens(rng)).map(|_| plain_token(rng)).collect()
}

/// Half on an edge, a third short, the rest up to the longest.
fn prompt_tokens(rng: &mut StdRng) -> usize {
    match rng.random_range(0..6) {
        0..3 => EDGE_LENGTHS[rng.random_range(0..EDGE_LENGTHS.len())],
        3 | 4 => rng.random_range(1..=300),
        _ => rng.random_range(300..=PROMPT_TOKENS_MAX),
    }
}

/// A token of the tiny tokenizers has at least one byte, so the bytes bound the tokens.
fn text_of_drawn_length(rng: &mut StdRng) -> String {
    let bytes = prompt_tokens(rng);
    text(rng, bytes)
}

/// Words of several alphabets, about `bytes` long and at least one character.
fn text(rng: &mut StdRng, bytes: usize) -> String {
    let mut text = String::new();
    while text.len() < bytes {
        text.push_str(WORDS[rng.random_range(0..WORDS.len())]);
        text.push(' ');
    }
    text.chars()
        .scan(0, |used, c| {
            *used += c.len_utf8();
            (*used <= bytes.max(4)).then_some(c)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_gives_the_same_bytes() {
        let bytes = |seed| questions(seed, 300, "m").iter().map(|q| q.body.to_string()).collect::<Vec<_>>();
        assert_eq!(bytes(1), bytes(1));
        assert_ne!(bytes(1), bytes(2));
    }

    #[test]
    fn each_pairing_occurs_and_each_answer_is_determined() {
        let all = questions(1, 300, "m");
        for feature in FEATURES {
            for endpoint in [Endpoint::Chat, Endpoint::Completions, Endpoint::Generate] {
                for stream in [false, true] {
                    let fits = |q: &&Question| (q.feature, q.endpoint, q.stream) == (feature, endpoint, stream);
                    assert!(all.iter().filter(fits).count() >= 5, "{feature:?} {endpoint:?} {stream}");
                }
            }
        }
        for question in &all {
            let body = question.body.to_string();
            assert!(
                body.contains("seed\":") || body.contains("\"temperature\":0,") || body.contains("\"temperature\":0}"),
                "{body} is left to chance"
            );
        }
    }

    #[test]
    fn lengths_reach_from_one_token_to_the_longest() {
        let lengths: Vec<usize> = questions(1, 300, "m")
            .iter()
            .filter_map(|q| q.body.get("prompt").or(q.body.get("input_ids"))?.as_array().map(Vec::len))
            .collect();
        assert!(lengths.contains(&1) && lengths.iter().any(|length| *length > 1400));
        assert!(lengths.iter().all(|length| *length <= PROMPT_TOKENS_MAX));
    }
}
