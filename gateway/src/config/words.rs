//! How single values are read where the environment and files write them in more than one way. *Pure.*

use serde::{Deserialize, Deserializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Word {
    Text(String),
    Number(u64),
}

impl Word {
    fn text(self) -> String {
        match self {
            Word::Text(text) => text,
            Word::Number(number) => number.to_string(),
        }
    }
}

/// A string or number: the environment's `1234` is a key as much as `abcd` is.
pub fn word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<Word>::deserialize(deserializer)?.map(Word::text))
}

/// A flag: the environment's `1` is as good as its `true`.
pub fn switch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Switch {
        Bool(bool),
        Word(Word),
    }
    let text = match Switch::deserialize(deserializer)? {
        Switch::Bool(on) => return Ok(on),
        Switch::Word(word) => word.text(),
    };
    match text.as_str() {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        _ => Err(serde::de::Error::custom(format!("{text:?} is none of true, false, 1 and 0"))),
    }
}

/// A list, or one string of words separated by blanks or commas.
pub fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Words {
        Many(Vec<Word>),
        One(Word),
    }
    let words = match Words::deserialize(deserializer)? {
        Words::Many(words) => words,
        Words::One(word) => vec![word],
    };
    let split = |word: Word| {
        let text = word.text();
        text.split([' ', ',', '\t', '\n']).filter(|w| !w.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    Ok(words.into_iter().flat_map(split).collect())
}
