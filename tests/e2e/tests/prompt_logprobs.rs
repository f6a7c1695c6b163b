//! Logprobs of the prompt through a pair: the prefill worker computes them, the decode worker's answer brings them, and the
//! client sees what an unsplit worker answers.

use serde_json::{Value, json};
use tandem_e2e::compare::{first_difference, normalise};
use tandem_e2e::fleet::MODEL;
use tandem_e2e::{Answer, Fleet, FleetOptions};

/// Prompts of one token, of a page, and of more than a chunk.
const LENGTHS: [u32; 4] = [1, 16, 17, 150];

fn prompt(length: u32) -> Vec<u32> {
    (0..length).map(|i| 3 + (i * 37) % 509).collect()
}

/// Path and body of each question, streamed or not.
fn questions() -> Vec<(&'static str, Value)> {
    let mut questions = Vec::new();
    for (length, stream) in LENGTHS.into_iter().flat_map(|length| [(length, false), (length, true)]) {
        let ids = prompt(length);
        let echo = json!({"model": MODEL, "prompt": ids, "max_tokens": 5, "temperature": 0, "echo": true, "logprobs": 2,
                          "stream": stream});
        let generate = json!({"input_ids": ids, "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 2,
                              "sampling_params": {"max_new_tokens": 5, "temperature": 0}, "stream": stream});
        questions.extend([("/v1/completions", echo), ("/generate", generate)]);
    }
    let batch = json!({"input_ids": [prompt(5), prompt(20)], "return_logprob": true, "logprob_start_len": 0,
                       "sampling_params": {"max_new_tokens": 3, "temperature": 0}});
    questions.push(("/generate", batch));
    questions
}

async fn answers(test: &str, options: FleetOptions) -> Vec<Answer> {
    let fleet = Fleet::start(test, options).await;
    let client = fleet.client();
    let mut answers = Vec::new();
    for (path, body) in questions() {
        let answer = client.post(path, &body).await.unwrap_or_else(|error| panic!("{test}: {body}: {error}"));
        assert_eq!(answer.status, 200, "{test}: {body}: {}", answer.text());
        answers.push(answer);
    }
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_prompt_logprobs_are_the_same_split_or_not() {
    let plain = answers("prompt-logprobs-plain", FleetOptions::plain()).await;
    let pair = FleetOptions::pd(1, 1).prefill_args("--chunked-prefill-size 64");
    let split = answers("prompt-logprobs-1p1d", pair).await;
    for (((path, body), expected), got) in questions().iter().zip(&plain).zip(&split) {
        let text = expected.text();
        assert!(text.contains("_logprobs\":[") || text.contains("token_logprobs\": ["), "no logprobs at all: {text}");
        let (expected, got) = (normalise(expected).unwrap(), normalise(got).unwrap());
        assert_eq!(first_difference(&expected, &got), None, "{path} {body}");
    }
}
