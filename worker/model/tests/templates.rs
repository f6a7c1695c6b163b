//! Chat templates against Jinja itself: constructs that public templates use render to the same text.

use std::{fs, path::Path};

use serde::Deserialize;
use tandem_model::{ChatInput, ChatValue, LoadOptions, TokenizerError, load};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/data/llama-gqa");

#[derive(Deserialize)]
struct Reference {
    messages: ChatValue,
    tools: ChatValue,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    expected: String,
}

fn render(template: &str, input: &ChatInput) -> Result<String, TokenizerError> {
    let options = LoadOptions { chat_template: Some(template.to_owned()), ..LoadOptions::default() };
    load(GOLDEN, &options).unwrap().tokenizer.apply_chat_template(input)
}

#[test]
fn templates_render_as_jinja_renders_them() {
    let reference: Reference = serde_json::from_str(include_str!("data/templates.json")).unwrap();
    let input = ChatInput {
        messages: reference.messages,
        tools: Some(reference.tools),
        add_generation_prompt: true,
        ..ChatInput::default()
    };
    let mut different = Vec::new();
    for case in reference.cases {
        match render(&case.template, &input) {
            Ok(rendered) if rendered == case.expected => {}
            other => different.push(format!("{}:\n {other:?}\n {:?}", case.name, case.expected)),
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}

#[test]
fn a_template_refuses_messages_in_its_own_words() {
    let input = ChatInput::default();
    let error = render("{{ raise_exception('Roles must alternate') }}", &input).unwrap_err().to_string();
    assert_eq!(error, "the chat template refuses these messages: Roles must alternate");
    let error = render("{{ messages[0]['role'] }}", &input).unwrap_err().to_string();
    assert!(error.contains("undefined value"), "{error}");
}

#[test]
fn extra_variables_and_the_date_reach_the_template() {
    let extra = vec![("enable_thinking".to_owned(), ChatValue::from(false))];
    let input = ChatInput { extra, ..ChatInput::default() };
    assert_eq!(render("{{ enable_thinking }}{{ bos_token }}", &input).unwrap(), "False<s>");
    let year = render("{{ strftime_now('%Y') }}", &input).unwrap();
    assert!(year.len() == 4 && year.parse::<u32>().is_ok(), "{year}");
    assert!(render("{{ strftime_now('%!') }}", &input).is_err());
}

#[test]
fn a_template_that_does_not_compile_is_refused_at_start() {
    let options = LoadOptions { chat_template: Some("{% if %}".to_owned()), ..LoadOptions::default() };
    let error = load(GOLDEN, &options).unwrap_err().to_string();
    assert!(error.contains("the chat template of") && error.contains("does not compile"), "{error}");
}

#[test]
fn a_template_may_stand_in_the_tokenizer_configuration() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(Path::new(GOLDEN).join(name), directory.path().join(name)).unwrap();
    }
    let write = |template: serde_json::Value| {
        let config = serde_json::json!({"bos_token": {"content": "<s>"}, "chat_template": template});
        fs::write(directory.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        load(directory.path().to_str().unwrap(), &LoadOptions::default()).unwrap().tokenizer
    };
    let tokenizer = write(serde_json::json!("one {{ bos_token }}"));
    assert_eq!(tokenizer.apply_chat_template(&ChatInput::default()).unwrap(), "one <s>");
    let tokenizer = write(serde_json::json!([
        {"name": "tool_use", "template": "two"},
        {"name": "default", "template": "three"},
    ]));
    assert_eq!(tokenizer.apply_chat_template(&ChatInput::default()).unwrap(), "three");
    let tokenizer = write(serde_json::Value::Null);
    assert!(matches!(tokenizer.apply_chat_template(&ChatInput::default()), Err(TokenizerError::NoTemplate)));
}
