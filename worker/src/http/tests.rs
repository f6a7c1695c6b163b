//! The whole API in one process, over a scripted engine: shapes, statuses, streams, and what reaches the engine.

use std::{
    path::Path,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt, stream};
use http::Request as HttpRequest;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;
use crate::{
    engine::Loads,
    request::{FinishReason, SampleError, SampleErrorKind, SampleEvent, SampleRequest, TokenLogprob},
};

type Script = fn(&SampleRequest) -> Vec<SampleEvent>;

/// Plays a script for each sample, and remembers what it was asked.
struct Scripted {
    script: Script,
    /// After the script a sample goes silent instead of ending.
    silent: bool,
    seen: Mutex<Vec<SampleRequest>>,
    aborted: Mutex<Vec<String>>,
    /// Streams that exist.
    open: Arc<AtomicUsize>,
    /// How long the engine's present step has been going on.
    step_age: Mutex<Duration>,
}

struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl EnginePort for Scripted {
    fn submit_all(&self, samples: Vec<SampleRequest>) -> Result<Vec<port::Events>, SampleError> {
        if samples[0].rid == "full" {
            return Err(SampleError { kind: SampleErrorKind::Unavailable, message: "the queue is full".into() });
        }
        let streams = samples.iter().map(|sample| {
            self.open.fetch_add(1, Ordering::SeqCst);
            let open = Open(self.open.clone());
            let events = stream::iter((self.script)(sample));
            let tail = stream::iter(self.silent.then_some(())).then(|()| std::future::pending::<SampleEvent>());
            events.chain(tail).map(move |event| (&open, event).1).boxed()
        });
        let streams = streams.collect();
        self.seen.lock().unwrap().extend(samples);
        Ok(streams)
    }

    fn abort(&self, rid: &str) -> Result<(), SampleError> {
        self.aborted.lock().unwrap().push(rid.into());
        Ok(())
    }

    fn loads(&self) -> Loads {
        assert!(self.seen.lock().unwrap().first().is_none_or(|s| s.rid != "panic"), "scripted panic");
        Loads { total_pages: 4, free_pages: 3, page_size: 16, ..Loads::default() }
    }

    fn is_alive(&self) -> bool {
        true
    }

    fn last_step_age(&self) -> Duration {
        *self.step_age.lock().unwrap()
    }
}

fn token(token: u32, text: &str) -> SampleEvent {
    let logprob = TokenLogprob { token, logprob: -0.5, top: vec![(token, -0.5), (36, -2.25)] };
    SampleEvent::Token { token, text: text.into(), logprob: Some(logprob) }
}

fn finished(reason: FinishReason, text: &str) -> SampleEvent {
    SampleEvent::Finished { reason, text: text.into(), cached_tokens: 1 }
}

/// "AB", of which "A" waits for the second token, then an end by EOS. Logprobs only where asked for.
fn says_ab(sample: &SampleRequest) -> Vec<SampleEvent> {
    let mut events = Vec::new();
    if let Some(from) = sample.logprobs.prompt_from {
        let entry =
            |(at, &token): (usize, &u32)| (token, (at > 0).then(|| TokenLogprob { token, logprob: -1.5, top: vec![] }));
        events.push(SampleEvent::Prompt(sample.prompt.iter().enumerate().skip(from as usize).map(entry).collect()));
    }
    events.extend([token(35, ""), token(36, "AB"), token(2, ""), finished(FinishReason::StopToken(2), "")]);
    for event in &mut events {
        if let SampleEvent::Token { logprob, .. } = event
            && !sample.logprobs.output
        {
            *logprob = None;
        }
    }
    events
}

fn fails_at_once(_: &SampleRequest) -> Vec<SampleEvent> {
    vec![SampleEvent::Failed(SampleError { kind: SampleErrorKind::Timeout, message: "no reservation came".into() })]
}

fn fails_later(_: &SampleRequest) -> Vec<SampleEvent> {
    let lost = SampleError { kind: SampleErrorKind::Peer, message: "the prefill worker was lost".into() };
    vec![token(35, "A"), SampleEvent::Failed(lost)]
}

struct Bench {
    engine: Arc<Scripted>,
    router: Router,
}

/// One tokenizer for all tests.
fn tokenizer() -> Tokenizer {
    static LOADED: OnceLock<Tokenizer> = OnceLock::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/data/llama-gqa");
    LOADED.get_or_init(|| tandem_model::load(folder.to_str().unwrap(), &Default::default()).unwrap().tokenizer).clone()
}

fn facts(role: Role) -> Facts {
    Facts {
        model_path: "/models/tiny".into(),
        served_model_name: "tiny".into(),
        model_type: "llama".into(),
        fingerprint: "00".into(),
        host: "127.0.0.1".into(),
        port: 30000,
        role,
        bootstrap_port: 8998,
        tp_size: 1,
        page_size: 16,
        chunked_prefill_size: 256,
        max_running_requests: 8,
        max_total_tokens: 4096,
        context_length: 64,
        num_reserved_decode_tokens: 128,
        device: "cpu",
        cpu_math: CpuMath::Fast,
        threads: 1,
        numerics: "test".into(),
        vocab_size: 512,
        started_unix: 7,
    }
}

impl Bench {
    fn new(role: Role, script: Script) -> Self {
        Self::with(role, script, false, None)
    }

    fn with(role: Role, script: Script, silent: bool, api_key: Option<&str>) -> Self {
        Self::on(facts(role), script, silent, api_key)
    }

    fn on(facts: Facts, script: Script, silent: bool, api_key: Option<&str>) -> Self {
        let engine = Arc::new(Scripted {
            script,
            silent,
            seen: Mutex::default(),
            aborted: Mutex::default(),
            open: Arc::default(),
            step_age: Mutex::default(),
        });
        let app = App {
            engine: engine.clone(),
            tokenizer: tokenizer(),
            generation: Generation::default(),
            metrics: Arc::new(Metrics::new("tiny", facts.role.engine_type())),
            facts,
            body_limits: BodyLimits { bytes_max: 100_000, time_max: Duration::from_secs(5) },
            api_key: api_key.map(Into::into),
            stopping: AtomicBool::new(false),
            preparing: Preparing::new(1),
        };
        Bench { engine, router: router(Arc::new(app)) }
    }

    async fn send(&self, request: HttpRequest<Body>) -> Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    async fn post(&self, path: &str, body: Value) -> (u16, String) {
        let response = self.send(HttpRequest::post(path).body(body.to_string().into()).unwrap()).await;
        (response.status().as_u16(), text(response).await)
    }

    async fn post_json(&self, path: &str, body: Value) -> (u16, Value) {
        let (status, text) = self.post(path, body).await;
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        let response = self.send(HttpRequest::get(path).body(Body::empty()).unwrap()).await;
        (response.status().as_u16(), serde_json::from_str(&text(response).await).unwrap_or_default())
    }
}

async fn text(response: Response) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// The JSON of each event; the stream must end with `[DONE]`.
fn events(stream: &str) -> Vec<Value> {
    let mut events: Vec<&str> = stream.split_terminator("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]"), "{stream}");
    events.iter().map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_chat_answers_in_openais_shape() {
    let bench = Bench::new(Role::Null, says_ab);
    let (status, answer) = bench.post_json("/v1/chat/completions", chat(json!({"max_tokens": 9, "seed": 3}))).await;
    assert_eq!(status, 200);
    assert_eq!((answer["object"].as_str(), answer["model"].as_str()), (Some("chat.completion"), Some("tiny")));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": "AB", "refusal": null}));
    assert_eq!((&choice["finish_reason"], &choice["matched_stop"]), (&json!("stop"), &json!(2)));
    let prompt = tokenizer().encode("<s>user: Hi\n<s>assistant:", false).unwrap();
    let usage = &answer["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(prompt.len()), &json!(3)));
    let seen = bench.engine.seen.lock().unwrap();
    assert_eq!((&*seen[0].prompt, seen[0].sampling.max_tokens, seen[0].sampling.seed), (&*prompt, 9, 3));
    assert_eq!(seen[0].ticket, None);
}

#[tokio::test]
async fn the_first_chunk_of_a_chat_carries_role_and_text() {
    let bench = Bench::new(Role::Null, says_ab);
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true}, "logprobs": true}));
    let (status, stream) = bench.post("/v1/chat/completions", body).await;
    assert_eq!(status, 200);
    let events = events(&stream);
    assert_eq!(events.len(), 3, "{stream}");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": "AB"}));
    let logprobs = events[0]["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(logprobs.len(), 2, "the token without text waited for the one with it");
    assert_eq!((&logprobs[0]["token"], &logprobs[0]["bytes"]), (&json!("A"), &json!([65])));
    assert_eq!(events[1]["choices"][0]["finish_reason"], json!("stop"));
    assert_eq!((&events[2]["choices"], &events[1]["usage"]), (&json!([]), &json!(null)));
    assert_eq!(events[2]["usage"]["completion_tokens"], json!(3));
}

#[tokio::test]
async fn an_early_failure_keeps_its_status_and_a_late_one_is_an_event() {
    for stream in [false, true] {
        let bench = Bench::new(Role::Null, fails_at_once);
        let (status, error) = bench.post_json("/v1/chat/completions", chat(json!({"stream": stream}))).await;
        assert_eq!((status, &error["error"]["message"]), (504, &json!("no reservation came")));
    }
    let bench = Bench::new(Role::Null, fails_later);
    let (status, stream) = bench.post("/generate", json!({"text": "Hi", "stream": true})).await;
    assert_eq!(status, 200);
    let events = events(&stream);
    assert_eq!((&events[0]["text"], &events[1]["error"]["code"]), (&json!("A"), &json!("peer_failed")));
    let (status, _) = bench.post_json("/v1/completions", json!({"model": "tiny", "prompt": "Hi"})).await;
    assert_eq!(status, 502);
}

#[tokio::test]
async fn a_full_queue_is_503_with_retry_after() {
    let bench = Bench::new(Role::Null, says_ab);
    let body = chat(json!({"rid": "full"})).to_string();
    let response = bench.send(HttpRequest::post("/v1/chat/completions").body(body.into()).unwrap()).await;
    assert_eq!((response.status().as_u16(), response.headers()["retry-after"].to_str().unwrap()), (503, "1"));
}

#[tokio::test]
async fn a_role_server_wants_one_room_per_sample() {
    for role in [Role::Prefill, Role::Decode] {
        let bench = Bench::new(role, says_ab);
        let (status, error) = bench.post_json("/v1/chat/completions", chat(json!({}))).await;
        assert_eq!(status, 400);
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("this is a role server, send requests to the gateway"), "{message}");
    }
    let bench = Bench::new(Role::Decode, says_ab);
    let body = json!({"prompt": ["a", "b"], "n": 2, "bootstrap_host": "h", "bootstrap_port": 9,
        "bootstrap_room": [1, 2, 3, 4]});
    let (status, answer) = bench.post_json("/v1/completions", body).await;
    assert_eq!((status, answer["choices"].as_array().unwrap().len()), (200, 4));
    let seen = bench.engine.seen.lock().unwrap();
    let rooms: Vec<_> = seen.iter().map(|s| (s.ticket.as_ref().unwrap().room.get(), s.sample_index)).collect();
    assert_eq!(rooms, [(1, 0), (2, 1), (3, 0), (4, 1)]);
    assert_eq!((&seen[0].prompt, &seen[1].prompt), (&seen[1].prompt, &seen[0].prompt));
    assert_eq!(answer["usage"]["prompt_tokens"], json!(seen[0].prompt.len() + seen[2].prompt.len()));
}

#[tokio::test]
async fn completions_echo_with_prompt_logprobs() {
    let bench = Bench::new(Role::Null, says_ab);
    let body = json!({"prompt": [35, 36], "echo": true, "logprobs": 1});
    let (_, answer) = bench.post_json("/v1/completions", body.clone()).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], json!("ABAB"));
    assert_eq!(choice["logprobs"]["tokens"], json!(["A", "B", "A", "B", "</s>"]));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -1.5, -0.5, -0.5, -0.5]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1, 2, 3, 4]));
    assert_eq!(answer.get("meta_info"), None);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let (_, stream) = bench.post("/v1/completions", streamed).await;
    let events = events(&stream);
    assert_eq!(events[0]["choices"][0]["text"], json!("ABAB"));
    assert_eq!(events[0]["choices"][0]["logprobs"]["text_offset"], json!([0, 1, 2, 3]));
}

#[tokio::test]
async fn a_prefill_leg_carries_prompt_logprobs_and_a_decode_leg_asks_for_none() {
    let room = json!({"prompt": [35, 36], "echo": true, "logprobs": 0, "bootstrap_host": "h", "bootstrap_room": 1});
    let (_, answer) = Bench::new(Role::Prefill, says_ab).post_json("/v1/completions", room.clone()).await;
    assert_eq!(answer["meta_info"]["input_token_logprobs"], json!([[null, 35, null], [-1.5, 36, null]]));
    let bench = Bench::new(Role::Decode, says_ab);
    let (_, answer) = bench.post_json("/v1/completions", room).await;
    assert_eq!(answer["choices"][0]["text"], json!("ABAB"));
    assert_eq!(bench.engine.seen.lock().unwrap()[0].logprobs.prompt_from, None);
}

#[tokio::test]
async fn generate_answers_in_sglangs_shape() {
    let bench = Bench::new(Role::Null, says_ab);
    let body = json!({"input_ids": [35, 36], "rid": "r", "return_logprob": true, "logprob_start_len": 0,
        "top_logprobs_num": 2, "return_text_in_logprobs": true, "sampling_params": {"max_new_tokens": 5}});
    let (status, answer) = bench.post_json("/generate", body).await;
    assert_eq!(status, 200);
    assert_eq!((&answer["text"], &answer["output_ids"]), (&json!("AB"), &json!([35, 36, 2])));
    let meta = &answer["meta_info"];
    assert_eq!((&meta["id"], &meta["prompt_tokens"], &meta["cached_tokens"]), (&json!("r"), &json!(2), &json!(1)));
    assert_eq!(meta["finish_reason"], json!({"type": "stop", "matched": 2}));
    assert_eq!(meta["input_token_logprobs"], json!([[null, 35, "A"], [-1.5, 36, "B"]]));
    assert_eq!(meta["output_token_logprobs"][0], json!([-0.5, 35, "A"]));
    assert_eq!(meta["output_top_logprobs"][0], json!([[-0.5, 35, "A"], [-2.25, 36, "B"]]));
    assert!(meta["e2e_latency"].as_f64().unwrap() >= 0.0);
}

#[tokio::test]
async fn generate_streams_the_whole_text_so_far_and_lists_answer_with_lists() {
    let bench = Bench::new(Role::Null, says_ab);
    let (_, stream) = bench.post("/generate", json!({"text": "Hi", "stream": true})).await;
    let texts: Vec<_> = events(&stream).iter().map(|event| event["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!(texts, ["", "AB", "AB", "AB"]);
    let (_, answer) = bench.post_json("/generate", json!({"text": ["a", "b"], "rid": ["x", "y"]})).await;
    let ids: Vec<_> = answer.as_array().unwrap().iter().map(|one| one["meta_info"]["id"].clone()).collect();
    assert_eq!(ids, ["x", "y"]);
    let (_, stream) = bench.post("/generate", json!({"text": ["a", "b"], "stream": true})).await;
    let indices: Vec<_> = events(&stream).iter().map(|event| event["index"].as_u64().unwrap()).collect();
    assert_eq!((indices.len(), indices.iter().sum::<u64>()), (8, 4));
}

#[tokio::test]
async fn bad_requests_say_what_is_wrong() {
    let bench = Bench::new(Role::Null, says_ab);
    let long: Vec<u32> = vec![35; 64];
    let huge = "x".repeat(200_000);
    let hopeless = "x".repeat(90_000);
    for (path, body, status, part) in [
        ("/v1/chat/completions", json!({"messages": []}), 400, "messages has 0 entries"),
        (
            "/v1/chat/completions",
            json!({"model": "tiny"}),
            400,
            "\"param\":\"messages\",\"code\":\"missing_required_parameter\"",
        ),
        ("/v1/chat/completions", json!({"messages": [{"role": "judge", "content": "x"}]}), 400, "messages[0].role"),
        ("/v1/chat/completions", json!({"messages": [{"role": "user"}]}), 400, "no content"),
        ("/v1/chat/completions", chat(json!({"model": "gpt-9"})), 404, "\\\"gpt-9\\\" does not exist"),
        ("/v1/chat/completions", chat(json!({"temperature": "hot"})), 400, "temperature: invalid type"),
        ("/v1/chat/completions", chat(json!({"top_logprobs": 2})), 400, "needs logprobs"),
        ("/v1/chat/completions", chat(json!({"stream_options": {}})), 400, "stream_options"),
        (
            "/v1/chat/completions",
            chat(json!({"stream": true, "stream_options": [true]})),
            400,
            "stream_options: invalid",
        ),
        ("/v1/chat/completions", chat(json!({"tool_choice": "required"})), 400, "\"param\":\"tool_choice\""),
        ("/v1/chat/completions", chat(json!({"tool_choice": {"type": "function"}})), 400, "a named function"),
        ("/v1/chat/completions", chat(json!({"tool_choice": "any"})), 400, "\"param\":\"tool_choice\""),
        ("/v1/chat/completions", chat(json!({"tool_choice": ["auto"]})), 400, "\"param\":\"tool_choice\""),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": [["text", "x"]]}]}),
            400,
            "messages[0]",
        ),
        ("/v1/chat/completions", chat(json!({"max_tokens": 64})), 400, "but the context length is 64 tokens"),
        ("/v1/completions", json!(["tiny", "a"]), 400, "expected a JSON object"),
        ("/v1/completions", json!({"prompt": [5, 6], "max_tokens": 63}), 400, "or ask for 62 tokens at most"),
        ("/v1/completions", json!({"prompt": "a", "lora_path": "x"}), 400, "lora_path is not supported"),
        ("/v1/completions", json!({"prompt": ""}), 400, "prompt is empty"),
        ("/v1/completions", json!({"prompt": [[1], []]}), 400, "prompt is empty"),
        ("/v1/completions", json!({"prompt": {"a": 1}}), 400, "expected a string, a list of strings"),
        ("/v1/completions", json!({"prompt": [512]}), 400, "token ids go from 0 to 511"),
        ("/v1/completions", json!({"prompt": long}), 400, "the prompt has 64 tokens, but the context length is 64"),
        ("/v1/completions", json!({"prompt": hopeless}), 400, "the prompt has at least "),
        ("/generate", json!({"text": ["a", hopeless]}), 400, " tokens, but the context length is 64"),
        ("/v1/chat/completions", chat(json!({"messages": [{"role": "user", "content": hopeless}]})), 400, "at least "),
        ("/v1/completions", json!({"prompt": "a", "n": 2000}), 400, "n is 2000"),
        ("/v1/completions", json!({"prompt": huge}), 413, "100000 bytes at most"),
        ("/generate", json!({}), 400, "exactly one of text and input_ids"),
        ("/generate", json!({"text": "a", "sampling_params": {"top_p": 7}}), 400, "top_p is 7"),
        ("/generate", json!({"text": ["a", "b"], "rid": ["x", "y", "z"]}), 400, "rid has 3 entries"),
        ("/generate", json!({"text": "a", "lora_path": "x"}), 400, "lora_path is not supported"),
        ("/generate", json!({"text": "a", "sampling_params": [3]}), 400, "sampling_params[0]: invalid type: integer"),
        ("/generate", json!({"text": "a", "sampling_params": [{}, {}]}), 400, "sampling_params has 2 entries for 1"),
        ("/generate", json!({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}), 400, "n must be the same"),
        (
            "/generate",
            json!({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 7}]}),
            400,
            "\"param\":\"sampling_params[1].top_p\"",
        ),
        ("/generate", json!({"text": "a", "sampling_params": {"max_new_tokens": 99}}), 400, "max_new_tokens 99 are"),
        ("/abort_request", json!({}), 400, "send the rid"),
        ("/abort_request", json!(["r77", true]), 400, "expected a JSON object"),
    ] {
        let (got, text) = bench.post(path, body).await;
        assert_eq!(got, status, "{path}: {text}");
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(error["error"].as_object().unwrap().len(), 4, "{text}");
        assert!(text.contains(part), "{text} lacks {part:?}");
    }
    assert!(bench.engine.seen.lock().unwrap().is_empty());
    assert_eq!(bench.get("/nowhere").await.0, 404);
    assert_eq!(bench.get("/generate").await.0, 405);
}

#[tokio::test]
async fn answers_are_capped_by_the_context() {
    let bench = Bench::new(Role::Null, says_ab);
    bench.post("/v1/completions", json!({"prompt": vec![35; 60], "min_tokens": 9})).await;
    bench.post("/v1/completions", json!({"prompt": vec![35; 60], "max_tokens": 4})).await;
    let seen = bench.engine.seen.lock().unwrap();
    assert_eq!((seen[0].sampling.max_tokens, seen[0].sampling.min_tokens), (4, 4));
    assert_eq!(seen[1].sampling.max_tokens, 4);
}

#[tokio::test]
async fn a_small_pool_limits_answers_and_prefill_workers_do_not_judge_by_theirs() {
    let body = json!({"prompt": [35, 36], "max_tokens": 31, "bootstrap_host": "h", "bootstrap_room": 1});
    for (role, status) in [(Role::Null, 400), (Role::Decode, 400), (Role::Prefill, 200)] {
        let bench = Bench::on(Facts { max_total_tokens: 32, ..facts(role) }, says_ab, false, None);
        let (got, text) = bench.post("/v1/completions", body.clone()).await;
        assert_eq!(got, status, "{text}");
        assert!(status == 200 || text.contains("the KV pool of this worker holds 32 tokens"), "{text}");
        assert_eq!(bench.get("/v1/models").await.1["data"][0]["max_model_len"], json!(32));
    }
}

#[tokio::test]
async fn each_prompt_of_a_list_may_have_its_own_sampling() {
    let bench = Bench::new(Role::Null, says_ab);
    let list = json!([{"max_new_tokens": 3, "n": 2}, {"max_new_tokens": 5, "n": 2}]);
    let (status, answer) = bench.post_json("/generate", json!({"text": ["a", "b"], "sampling_params": list})).await;
    assert_eq!((status, answer.as_array().unwrap().len()), (200, 4));
    let seen = bench.engine.seen.lock().unwrap();
    assert_eq!(seen.iter().map(|s| s.sampling.max_tokens).collect::<Vec<_>>(), [3, 3, 5, 5]);
}

#[tokio::test]
async fn tools_are_the_models_choice_and_an_assistant_may_be_silent() {
    let bench = Bench::new(Role::Null, says_ab);
    for choice in [json!("auto"), json!("none"), json!(null)] {
        let body = chat(json!({"tools": [{"type": "function"}], "tool_choice": choice}));
        assert_eq!(bench.post("/v1/chat/completions", body).await.0, 200, "{choice}");
    }
    let said = json!([{"role": "assistant", "content": null}, {"role": "user", "content": "Hi"}]);
    let (status, text) = bench.post("/v1/chat/completions", json!({"messages": said})).await;
    assert_eq!(status, 200, "{text}");
    let prompt = tokenizer().encode("<s>assistant: \n<s>user: Hi\n<s>assistant:", false).unwrap();
    assert_eq!(bench.engine.seen.lock().unwrap()[3].prompt[..], prompt[..]);
}

#[tokio::test]
async fn a_key_guards_all_but_health_and_metrics() {
    let bench = Bench::with(Role::Null, says_ab, false, Some("secret"));
    for (path, status) in [("/health", 200), ("/ready", 200), ("/metrics", 200), ("/v1/models", 401)] {
        assert_eq!(bench.get(path).await.0, status, "{path}");
    }
    for (header, status) in [("Bearer secret", 200), ("bearer secret", 200), ("Bearer secre", 401), ("secret", 401)] {
        let request = HttpRequest::get("/v1/models").header("authorization", header).body(Body::empty()).unwrap();
        assert_eq!(bench.send(request).await.status().as_u16(), status, "{header}");
    }
}

#[tokio::test]
async fn request_ids_come_back_and_odd_ones_are_replaced() {
    let bench = Bench::new(Role::Null, says_ab);
    for (given, echoed) in [("abc-1", true), ("has space", false)] {
        let request = HttpRequest::get("/health").header("x-request-id", given).body(Body::empty()).unwrap();
        let response = bench.send(request).await;
        assert_eq!(response.headers()["x-request-id"].to_str().unwrap() == given, echoed);
    }
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_samples() {
    let bench = Bench::with(Role::Null, |_| vec![token(35, "A")], true, None);
    let body = chat(json!({"stream": true, "n": 3})).to_string();
    let response = bench.send(HttpRequest::post("/v1/chat/completions").body(body.into()).unwrap()).await;
    let mut stream = response.into_body();
    stream.frame().await.unwrap().unwrap();
    assert_eq!(bench.engine.open.load(Ordering::SeqCst), 3);
    drop(stream);
    assert_eq!(bench.engine.open.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn operators_get_their_answers() {
    let bench = Bench::new(Role::Prefill, says_ab);
    let (_, loads) = bench.get("/v1/loads").await;
    assert_eq!(loads["loads"][0]["disaggregation"]["mode"], json!("prefill"));
    assert_eq!((&loads["loads"][0]["pages"]["free"], &loads["loads"][0]["token_usage"]), (&json!(3), &json!(0.25)));
    let (_, info) = bench.get("/get_server_info").await;
    assert_eq!((&info["disaggregation_bootstrap_port"], &info["dp_size"]), (&json!(8998), &json!(1)));
    assert_eq!(bench.get("/model_info").await.1["is_generation"], json!(true));
    assert_eq!(bench.get("/v1/models").await.1["data"][0]["max_model_len"], json!(64));
    assert_eq!(bench.get("/v1/models/tiny").await.0, 200);
    assert_eq!(bench.get("/v1/models/other").await.0, 404);
    assert_eq!(bench.post("/flush_cache", json!({})).await.0, 200);
    assert_eq!(bench.post("/abort_request", json!({"rid": "r"})).await.0, 200);
    assert_eq!(*bench.engine.aborted.lock().unwrap(), ["r"]);
}

#[tokio::test]
async fn a_worker_without_a_peer_is_healthy_and_one_whose_step_hangs_is_not() {
    for role in [Role::Prefill, Role::Decode, Role::Null] {
        let bench = Bench::new(role, says_ab);
        assert_eq!(bench.get("/health").await.0, 200, "{role:?} alone");
        *bench.engine.step_age.lock().unwrap() = Duration::from_secs(121);
        let (status, error) = bench.get("/health").await;
        assert_eq!(status, 503);
        assert!(error["error"]["message"].as_str().unwrap().contains("step has been going on for 121 s"), "{error}");
    }
}

#[tokio::test]
async fn a_panic_is_one_requests_500() {
    let bench = Bench::with(Role::Null, |_| vec![token(35, "A")], true, None);
    let body = chat(json!({"stream": true, "rid": "panic"})).to_string();
    let _open = bench.send(HttpRequest::post("/v1/chat/completions").body(body.into()).unwrap()).await;
    let (status, error) = bench.get("/v1/loads").await;
    assert_eq!((status, &error["error"]["code"]), (500, &json!("internal_error")));
    assert_eq!(bench.get("/v1/models").await.0, 200);
}
