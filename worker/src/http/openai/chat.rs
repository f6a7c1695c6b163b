//! `POST /v1/chat/completions`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, de::IgnoredAny};
use tandem_model::{ChatInput, ChatValue, Tokenizer};

use super::{
    StreamOptions, TOP_LOGPROBS_MAX, check_model, check_stream,
    logprobs::{self, ChatLogprobs},
    messages::{self, Message},
    reply::{Asked, Piece, Shape},
};
use crate::{
    http::{
        App,
        body::parse,
        error::ApiError,
        fields::{BootstrapFields, Object, SamplingFields},
        params,
        prompt::{self, Batch},
    },
    request::LogprobRequest,
};

#[derive(Deserialize)]
struct ChatBody {
    model: Option<String>,
    messages: Vec<Message>,
    stream: Option<bool>,
    stream_options: Option<Object<StreamOptions>>,
    logprobs: Option<bool>,
    top_logprobs: Option<i64>,
    tools: Option<ChatValue>,
    tool_choice: Option<ToolChoice>,
    chat_template_kwargs: Option<BTreeMap<String, ChatValue>>,
    rid: Option<String>,
}

/// Who decides whether a tool is called. Only the model can here: nothing constrains what it says.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected \"none\", \"auto\", \"required\" or an object that names a function")]
enum ToolChoice {
    Mode(ToolMode),
    Named(Object<IgnoredAny>),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum ToolMode {
    None,
    Auto,
    Required,
}

impl ToolChoice {
    fn check(&self) -> Result<(), ApiError> {
        let asked = match self {
            ToolChoice::Mode(ToolMode::None | ToolMode::Auto) => return Ok(()),
            ToolChoice::Mode(ToolMode::Required) => "tool_choice \"required\"",
            ToolChoice::Named(_) => "tool_choice with a named function",
        };
        let message = format!("{asked} is not supported by this worker; use \"auto\" or \"none\"");
        Err(ApiError::invalid("tool_choice", message))
    }
}

pub struct Chat;

impl Shape for Chat {
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    type Words<'a> = Words<'a>;
    type Logprobs<'a> = ChatLogprobs<'a>;

    fn prepare(app: &App, body: &[u8]) -> Result<(Self, Asked, Batch), ApiError> {
        let chat: ChatBody = parse(body)?;
        check_model(app, chat.model.as_deref())?;
        let (stream, include_usage) = check_stream(chat.stream, chat.stream_options)?;
        chat.tool_choice.as_ref().map_or(Ok(()), ToolChoice::check)?;
        let logprobs = chat.logprobs.unwrap_or(false);
        let top = params::int("top_logprobs", chat.top_logprobs.unwrap_or(0), 0..=TOP_LOGPROBS_MAX)? as u32;
        if top > 0 && !logprobs {
            return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true"));
        }
        let defaults = params::Defaults { max_tokens: None, generation: Some(&app.generation) };
        let sampling = params::sampling(parse::<SamplingFields>(body)?, defaults, app.vocab(), rand::random)?;
        let input = ChatInput {
            messages: messages::for_template(chat.messages)?,
            tools: chat.tools.filter(|tools| !tools.is_none()),
            add_generation_prompt: true,
            extra: chat.chat_template_kwargs.unwrap_or_default().into_iter().collect(),
        };
        let text =
            app.tokenizer.apply_chat_template(&input).map_err(|e| ApiError::invalid("messages", e.to_string()))?;
        let tokens = prompt::encode_text(app, &text, false, "messages")?;
        let id = chat.rid.unwrap_or_else(|| app.new_id("chatcmpl-"));
        let shared = prompt::Shared {
            rids: std::slice::from_ref(&id),
            sampling: vec![sampling],
            logprobs: LogprobRequest { output: logprobs, top, prompt_from: None },
            bootstrap: parse::<BootstrapFields>(body)?,
            prompt_field: "messages",
        };
        let batch = prompt::batch(app, vec![tokens], shared)?;
        Ok((Self, Asked { id, stream, include_usage, logprobs }, batch))
    }

    /// The first chunk carries the role and text together.
    fn words<'a>(&'a self, Piece { is_chunk, is_first, said, .. }: Piece<'a>) -> Words<'a> {
        let content = said.text.as_str();
        if is_chunk {
            let role = is_first.then_some("assistant");
            return Words::Delta(Delta { role, content: (is_first || !content.is_empty()).then_some(content) });
        }
        Words::Message(Said { role: "assistant", content, refusal: None })
    }

    /// Chats have no field for the prompt's logprobs, and ask for none.
    fn logprobs<'a>(&self, tokenizer: &'a Tokenizer, piece: Piece<'_>, _offset: &mut usize) -> ChatLogprobs<'a> {
        logprobs::chat(tokenizer, &piece.said.logprobs)
    }
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Words<'a> {
    Message(Said<'a>),
    Delta(Delta<'a>),
}

#[derive(Serialize)]
pub struct Said<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<&'a str>,
}

#[derive(Serialize)]
pub struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}
