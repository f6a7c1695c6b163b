//! `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a directory.

use std::path::Path;

use serde_json::Value;

use super::{read_json, read_small};
use crate::{
    LoadOptions,
    error::ModelError,
    tokenizer::{SpecialTokens, Tokenizer, TokenizerParts},
};

pub(super) struct Loaded {
    pub tokenizer: Tokenizer,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
}

pub(super) fn load(directory: &Path, options: &LoadOptions) -> Result<Loaded, ModelError> {
    let path = directory.join("tokenizer.json");
    let fault = |what: String| ModelError::Tokenizer { path: path.clone(), what };
    let bytes = read_small(&path)?.ok_or_else(|| {
        fault("the file is missing (a tokenizer.model alone is not read: save it again with transformers)".into())
    })?;
    let tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| fault(error.to_string()))?;
    let config = read_json(&directory.join("tokenizer_config.json"))?.unwrap_or(Value::Null);
    let special_tokens = special_tokens(&config);
    let chat_template = match &options.chat_template {
        Some(source) => Some(source.clone()),
        None => chat_template(directory, &config)?,
    };
    let id = |name: &str| {
        let (_, text) = special_tokens.iter().find(|(key, _)| key == name)?;
        tokenizer.token_to_id(text)
    };
    let (bos, eos) = (id("bos_token"), id("eos_token"));
    let parts = TokenizerParts { tokenizer, special_tokens, chat_template };
    let tokenizer = Tokenizer::new(parts).map_err(|error| error.at(&path))?;
    Ok(Loaded { tokenizer, bos, eos })
}

/// A special token is a text or an added-token object with its text in `content`.
fn special_tokens(config: &Value) -> SpecialTokens {
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]
        .into_iter()
        .filter_map(|name| {
            let token = &config[name];
            let text = token.as_str().or(token["content"].as_str())?;
            Some((name.to_owned(), text.to_owned()))
        })
        .collect()
}

/// The file wins over the configuration, where the template is a text or a list of named ones (`default` is ours).
fn chat_template(directory: &Path, config: &Value) -> Result<Option<String>, ModelError> {
    let path = directory.join("chat_template.jinja");
    if let Some(bytes) = read_small(&path)? {
        let source = String::from_utf8(bytes);
        return source.map(Some).map_err(|error| ModelError::Template { path, what: error.to_string() });
    }
    let template = &config["chat_template"];
    let named = template.as_array().into_iter().flatten().find(|entry| entry["name"] == "default");
    Ok(template.as_str().or(named.and_then(|entry| entry["template"].as_str())).map(str::to_owned))
}
