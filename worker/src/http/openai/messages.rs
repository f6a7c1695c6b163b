//! The messages of a chat, checked and brought into the form that chat templates read. *Pure.*

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tandem_model::ChatValue;

use crate::http::{error::ApiError, fields::Object};

const MESSAGES_MAX: usize = 10_000;

/// One message as clients send it; fields besides role and content (names, tool calls) go to the template as they are.
#[derive(Deserialize)]
pub struct Message {
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(flatten)]
    rest: BTreeMap<String, ChatValue>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of content parts, each with a type")]
enum Content {
    Text(String),
    Parts(Vec<Object<Part>>),
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
}

/// The messages for a template. Parts of text are joined by spaces, as SGLang does for templates that take strings.
///
/// # Errors
/// 400 for no messages, a role that no template knows, missing content, or content that is no text.
pub fn for_template(messages: Vec<Message>) -> Result<ChatValue, ApiError> {
    #[derive(Serialize)]
    struct Rendered {
        role: String,
        content: String,
        #[serde(flatten)]
        rest: BTreeMap<String, ChatValue>,
    }
    if messages.is_empty() || messages.len() > MESSAGES_MAX {
        let message = format!("messages has {} entries, allowed are 1 to {MESSAGES_MAX}", messages.len());
        return Err(ApiError::invalid("messages", message));
    }
    let mut rendered = Vec::with_capacity(messages.len());
    for (at, Message { role, content, rest }) in messages.into_iter().enumerate() {
        if !["system", "developer", "user", "assistant", "tool", "function"].contains(&role.as_str()) {
            let message = format!("messages[{at}].role is {role:?}; use system, developer, user, assistant or tool");
            return Err(ApiError::invalid(format!("messages[{at}].role"), message));
        }
        let content = match content {
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => join(parts, at)?,
            // A turn that only called tools. Templates join strings, and few of them test for none.
            None if role == "assistant" => String::new(),
            None => {
                let message = format!("messages[{at}] of role {role} has no content");
                return Err(ApiError::invalid(format!("messages[{at}].content"), message));
            }
        };
        rendered.push(Rendered { role, content, rest });
    }
    Ok(ChatValue::from_serialize(&rendered))
}

fn join(parts: Vec<Object<Part>>, message: usize) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (at, Object(part)) in parts.into_iter().enumerate() {
        match (part.r#type.as_str(), part.text) {
            ("text", Some(text)) => texts.push(text),
            (kind, _) => {
                let field = format!("messages[{message}].content[{at}]");
                let message = format!("{field} is of type {kind:?}; this model takes text only");
                return Err(ApiError::invalid(field, message));
            }
        }
    }
    Ok(texts.join(" "))
}
