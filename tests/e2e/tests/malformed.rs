//! Wrong input, at every door: a precise status and an error object that names what is wrong, never a panic. The fleet's
//! logs are searched for panics when its processes end.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tandem_e2e::fleet::MODEL;
use tandem_e2e::process::{LogFolder, Process};
use tandem_e2e::{Client, Fleet, FleetOptions, Role, binary, checkpoint, net};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const GENERATE: &str = "/generate";
/// A process that cannot start says so within this.
const START_LIMIT: Duration = Duration::from_secs(30);
const BODY_BYTES_MAX: usize = 100_000;

/// A body, the status that it must get, and words that the message must hold.
struct Case {
    path: &'static str,
    body: Vec<u8>,
    status: u16,
    words: &'static [&'static str],
}

fn case(path: &'static str, body: impl AsRef<[u8]>, status: u16, words: &'static [&'static str]) -> Case {
    Case { path, body: body.as_ref().to_vec(), status, words }
}

/// A sound chat request with these fields on top.
fn chat(status: u16, fields: Value, words: &'static [&'static str]) -> Case {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4});
    merge(&mut body, fields);
    case(CHAT, body.to_string(), status, words)
}

fn completion(status: u16, fields: Value, words: &'static [&'static str]) -> Case {
    let mut body = json!({"model": MODEL, "prompt": "Hi", "max_tokens": 4});
    merge(&mut body, fields);
    case(COMPLETIONS, body.to_string(), status, words)
}

fn merge(body: &mut Value, fields: Value) {
    if let (Value::Object(body), Value::Object(fields)) = (body, fields) {
        body.extend(fields);
    }
}

fn cases() -> Vec<Case> {
    let ids = |count: usize| vec![5; count];
    let nan = r#"{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}"#;
    vec![
        case(CHAT, "", 400, &[]),
        case(CHAT, "{\"model\": \"tiny\",", 400, &["JSON"]),
        case(CHAT, "[1, 2]", 400, &[]),
        case(CHAT, "{\"model\": \"tiny\"}", 400, &["messages"]),
        case(CHAT, b"{\"model\": \"tiny\", \"messages\": \"\xff\"}", 400, &[]),
        case(CHAT, [b"{\"x\":".as_slice(), &b"[".repeat(50_000)].concat(), 400, &[]),
        case(CHAT, nan, 400, &[]),
        case(CHAT, vec![b' '; BODY_BYTES_MAX + 1], 413, &["100000"]),
        chat(400, json!({"messages": "Hi"}), &["messages"]),
        chat(400, json!({"messages": []}), &["messages"]),
        chat(400, json!({"messages": [{"content": "Hi"}]}), &["role"]),
        chat(400, json!({"max_tokens": "ten"}), &["max_tokens"]),
        chat(400, json!({"max_tokens": -1}), &["max_tokens"]),
        chat(400, json!({"temperature": "hot"}), &["temperature"]),
        chat(400, json!({"temperature": -0.5}), &["temperature", "-0.5"]),
        chat(400, json!({"top_p": 0}), &["top_p"]),
        chat(400, json!({"top_k": -7}), &["top_k"]),
        chat(400, json!({"n": 0}), &["n"]),
        chat(400, json!({"logit_bias": {"512": 1}}), &["logit_bias", "512"]),
        chat(400, json!({"logit_bias": {"5": 1000}}), &["logit_bias"]),
        chat(400, json!({"stop": [1]}), &["stop"]),
        chat(400, json!({"stop_token_ids": [99999]}), &["stop_token_ids", "99999"]),
        chat(400, json!({"min_tokens": 9}), &["min_tokens"]),
        chat(400, json!({"logprobs": true, "top_logprobs": 1000}), &["top_logprobs"]),
        chat(400, json!({"stream": "yes"}), &["stream"]),
        chat(400, json!({"stream_options": {"include_usage": true}}), &["stream_options"]),
        chat(400, json!({"response_format": {"type": "json_object"}}), &["response_format"]),
        chat(404, json!({"model": "gpt-9"}), &["gpt-9", MODEL]),
        completion(400, json!({"prompt": ids(3000)}), &["3000", "2048"]),
        completion(400, json!({"prompt": []}), &["prompt"]),
        completion(400, json!({"prompt": [1, 99999]}), &["99999"]),
        completion(400, json!({"prompt": {"text": "Hi"}}), &["prompt"]),
        case(GENERATE, json!({"sampling_params": {}}).to_string(), 400, &["input_ids"]),
        case(GENERATE, json!({"text": "Hi", "input_ids": [5]}).to_string(), 400, &[]),
        case(GENERATE, json!({"input_ids": ids(2500)}).to_string(), 400, &["2500", "2048"]),
        case(
            GENERATE,
            json!({"text": "Hi", "sampling_params": {"temperature": []}}).to_string(),
            400,
            &["temperature"],
        ),
    ]
}

/// Sends every case; the answer is an error object with the right status and words.
async fn assert_refused(door: &str, client: &Client, cases: &[Case]) {
    let mut wrong = Vec::new();
    for case in cases {
        let shown: String = String::from_utf8_lossy(&case.body).chars().take(120).collect();
        let verdict = match client.post_bytes(case.path, case.body.clone()).await {
            Err(error) => Some(error),
            Ok(answer) => match answer.error_message() {
                _ if answer.status != case.status => Some(format!("status {}: {}", answer.status, answer.text())),
                None => Some(format!("no error object: {}", answer.text())),
                Some(message) => {
                    let missing: Vec<_> = case.words.iter().filter(|word| !message.contains(**word)).collect();
                    (!missing.is_empty()).then(|| format!("{missing:?} missing in {message:?}"))
                }
            },
        };
        wrong.extend(verdict.map(|verdict| format!("{} {shown}\n    wants {}, got {verdict}", case.path, case.status)));
    }
    assert!(wrong.is_empty(), "{door}: {} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

async fn assert_no_such_route(client: &Client) {
    let answer = client.post("/v1/nonsense", &json!({})).await.expect("an answer");
    assert_eq!(answer.status, 404, "{}", answer.text());
    let answer = client.get(CHAT).await.expect("an answer");
    assert_eq!(answer.status, 405, "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_refuses_malformed_requests_at_an_unsplit_worker() {
    let limit = format!("--max-body-bytes {BODY_BYTES_MAX}");
    let mut fleet = Fleet::start("malformed-plain", FleetOptions::plain().worker_args(&limit).without_gateway()).await;
    let client = fleet.first(Role::Plain).client();
    assert_refused("worker", &client, &cases()).await;
    assert_no_such_route(&client).await;
    let sound = chat(200, json!({}), &[]);
    assert_eq!(client.post_bytes(CHAT, sound.body).await.expect("an answer").status, 200);
    fleet.until_at_rest(START_LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_refuses_malformed_requests_at_the_gateway_and_at_role_servers() {
    let limit = format!("--max-payload-size {BODY_BYTES_MAX}");
    let mut fleet = Fleet::start("malformed-pd", FleetOptions::pd(1, 1).gateway_args(&limit)).await;
    let client = fleet.client();
    assert_refused("gateway", &client, &cases()).await;
    assert_no_such_route(&client).await;
    let without_room = [
        chat(400, json!({}), &["role server", "gateway"]),
        completion(400, json!({"stream": true}), &["role server", "gateway"]),
        chat(400, json!({"bootstrap_host": "127.0.0.1", "bootstrap_room": "x"}), &["bootstrap_room"]),
        chat(400, json!({"bootstrap_host": "127.0.0.1", "bootstrap_room": [1, 2]}), &["bootstrap_room"]),
    ];
    for role in [Role::Prefill, Role::Decode] {
        assert_refused(&format!("{role:?}"), &fleet.first(role).client(), &without_room).await;
    }
    let sound = chat(200, json!({}), &[]);
    assert_eq!(client.post_bytes(CHAT, sound.body).await.expect("an answer").status, 200);
    fleet.until_at_rest(START_LIMIT).await;
}

/// Starts a process that must end by itself with an error that holds `word`.
fn assert_start_error(logs: &Path, number: usize, arguments: &str, word: &str) {
    let name = format!("start-{number}");
    let mut process = Process::spawn(&name, Command::new(binary::tandem()).args(arguments.split_whitespace()), logs);
    let status = process.wait(START_LIMIT);
    let log = process.log();
    assert!(!status.success(), "{arguments}: exit status {status}\n{log}");
    assert!(log.contains(word), "{arguments}: {word:?} missing in\n{log}");
}

#[test]
fn fleet_workers_that_cannot_start_say_why() {
    let logs = LogFolder::new("start-errors");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let damaged = |name: &str, damage: &dyn Fn(&Path)| {
        let place = folder.path().join(name);
        std::fs::create_dir(&place).expect("a temporary folder is writable");
        let checkpoint = checkpoint::copy(&place);
        damage(&checkpoint);
        checkpoint.display().to_string()
    };
    let edited = |name: &str, field: &str, value: Value| {
        damaged(name, &|path| checkpoint::edit_config(path, |config| config[field] = value.clone()))
    };
    let cut = |path: &Path| {
        let weights = path.join("model.safetensors");
        let bytes = std::fs::read(&weights).expect("weights");
        std::fs::write(weights, &bytes[..bytes.len() / 2]).expect("writable");
    };
    let sound = checkpoint::golden(checkpoint::TINY).display().to_string();
    let taken = std::net::TcpListener::bind((net::host(), 0)).expect("a free port");
    let port = taken.local_addr().expect("a bound socket").port().to_string();
    let models = [
        ("/no/such/model".to_owned(), "", "/no/such/model"),
        (checkpoint::truncated_gguf(folder.path()).display().to_string(), "", "cut.gguf"),
        (damaged("shard", &checkpoint::lose_shard), "", "model-00002-of-00002.safetensors"),
        (damaged("cut", &cut), "", "model.safetensors"),
        (
            damaged("tokenizer", &|path| std::fs::remove_file(path.join("tokenizer.json")).expect("a file")),
            "",
            "tokenizer.json",
        ),
        (
            damaged("config", &|path| std::fs::write(path.join("config.json"), "{").expect("writable")),
            "",
            "config.json",
        ),
        (edited("mamba", "architectures", json!(["MambaForCausalLM"])), "", "MambaForCausalLM"),
        (edited("rope", "rope_parameters", json!({"rope_type": "spiral", "rope_theta": 1e4})), "", "spiral"),
        (sound.clone(), "--disaggregation-mode both", "both"),
        (sound.clone(), "--disaggregation-mode decode --disaggregation-transfer-backend pigeon", "pigeon"),
        (sound.clone(), "--page-size 0", "page"),
        (sound.clone(), "--chunked-prefill-size 17", "17"),
        (sound.clone(), "--tp-size 3", "3"),
        (sound.clone(), "--device cuda", "CUDA"),
        (sound.clone(), "--context-length 9999999", "9999999"),
        (sound.clone(), &format!("--port {port}"), port.as_str()),
        (sound.clone(), "--config /no/such/file.toml", "/no/such/file.toml"),
        (sound, "--no-such-flag", "--no-such-flag"),
    ];
    for (number, (model, arguments, word)) in models.iter().enumerate() {
        let port = if arguments.contains("--port") { "" } else { "--port 0" };
        let line = format!("worker --host {} {port} --model-path {model} {arguments}", net::host());
        assert_start_error(logs.path(), number, &line, word);
    }
}

#[test]
fn fleet_gateways_that_cannot_start_say_why() {
    let logs = LogFolder::new("gateway-start-errors");
    let host = net::host();
    let taken = std::net::TcpListener::bind((host, 0)).expect("a free port");
    let port = taken.local_addr().expect("a bound socket").port().to_string();
    let url = format!("http://{host}:9");
    let cases = [
        (format!("--pd-disaggregation --prefill {url} 8998"), "decode"),
        (format!("--pd-disaggregation --decode {url}"), "prefill"),
        (format!("--pd-disaggregation --prefill {url} 99999 --decode {url}"), "99999"),
        ("--worker-urls ftp://x".to_owned(), "ftp://x"),
        (String::new(), "worker"),
        (format!("--worker-urls {url} --policy fairest"), "fairest"),
        (format!("--worker-urls {url} --port {port}"), port.as_str()),
    ];
    for (number, (arguments, word)) in cases.iter().enumerate() {
        let ports = if arguments.contains("--port") { "--prometheus-port 0" } else { "--port 0 --prometheus-port 0" };
        assert_start_error(logs.path(), number, &format!("gateway --host {host} {ports} {arguments}"), word);
    }
}
