//! The main job once, with the real default model, as a user starts it: `tandem up`.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tandem_e2e::process::{LogFolder, Process};
use tandem_e2e::wait::{self, within};
use tandem_e2e::{Client, binary, checkpoint};

/// Loading SmolLM2 in two workers at once, on a busy machine, with the model in the cache.
const READY_LIMIT: Duration = Duration::from_secs(90);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Starts `tandem up` and waits for its ready file.
async fn up(logs: &LogFolder, arguments: &[&str]) -> (Process, Value) {
    let ready = logs.path().join("ready.json");
    let mut command = Command::new(binary::tandem());
    command.arg("up").args(arguments).args(["--port", "0", "--ready-file"]).arg(&ready);
    let mut process = Process::spawn("up", &mut command, logs.path());
    let file = {
        let process = std::cell::RefCell::new(&mut process);
        wait::until("tandem up to be ready", READY_LIMIT, || async {
            let ended = process.borrow_mut().exit_status();
            assert!(ended.is_none(), "tandem up ended: {ended:?}\n{}", process.borrow().log_tail());
            std::fs::read(&ready).map_err(|error| error.to_string())
        })
        .await
    };
    (process, serde_json::from_slice(&file).expect("the ready file is JSON"))
}

fn assert_stops(mut process: Process, ready: &Value) {
    process.signal("INT");
    assert!(process.wait(Duration::from_secs(30)).success(), "{}", process.log_tail());
    for child in ready["children"].as_array().expect("children") {
        let id = child["pid"].as_u64().expect("a process id");
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists(), "{child} outlived tandem up");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_up_names_the_capital_of_france() {
    let logs = LogFolder::new("smoke");
    let (process, ready) = up(&logs, &["1p1d"]).await;
    let client = Client::new(ready["url"].as_str().expect("a url"));
    // As the quickstart asks: with this system message the answer has wide margins in either arithmetic.
    let system = json!({"role": "system", "content": "Answer in one sentence."});
    let user = json!({"role": "user", "content": "What is the capital of France?"});
    let body =
        json!({"messages": [system, user], "model": "smollm2", "temperature": 0, "max_tokens": 32, "stream": true});
    let answer =
        within("the answer", ANSWER_LIMIT, client.post("/v1/chat/completions", &body)).await.expect("an answer");
    let events = answer.events().expect("a sound stream");
    let text: String = events
        .iter()
        .filter_map(|event| serde_json::from_str::<Value>(event).ok())
        .filter_map(|event| event.pointer("/choices/0/delta/content")?.as_str().map(str::to_owned))
        .collect();
    assert!(text.contains("Paris"), "{text:?} in {}", answer.text());
    let first: Value = serde_json::from_str(&events[0]).expect("a chunk");
    let delta = &first["choices"][0]["delta"];
    assert!(delta["role"] == "assistant" && delta["content"].as_str().is_some_and(|text| !text.is_empty()), "{first}");
    assert_stops(process, &ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_up_runs_plain_workers_and_reports_a_dead_child() {
    let logs = LogFolder::new("up-plain");
    let model = checkpoint::golden(checkpoint::TINY).display().to_string();
    let (mut process, ready) = up(&logs, &["0p0d", "--plain", "2", "--model-path", &model]).await;
    let client = Client::new(ready["url"].as_str().expect("a url"));
    let answer = client.post("/generate", &json!({"text": "Hi", "sampling_params": {"max_new_tokens": 4}})).await;
    assert_eq!(answer.expect("an answer").status, 200);
    let children = ready["children"].as_array().expect("children");
    let victim = children.iter().find(|child| child["role"] == "null").expect("a plain worker");
    let status = Command::new("kill").args(["-9", &victim["pid"].to_string()]).status();
    assert!(status.is_ok_and(|status| status.success()));
    assert!(!process.wait(Duration::from_secs(30)).success());
    let name = victim["name"].as_str().expect("a name");
    assert!(process.log_tail().contains(name), "{name} is not named in {}", process.log_tail());
}
