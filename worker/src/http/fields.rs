//! The fields of requests as clients spell them, before any judgement. One body is read through several views (what to
//! say, how to sample, where to rendezvous); each view ignores the fields of the others and those that nobody knows.
//! *Pure.*

use std::{collections::BTreeMap, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{
        IgnoredAny, MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};

/// A struct that is written as a JSON object. serde by itself also takes a list, whose values then are the fields in the
/// order of their declaration, so that `[3]` would set whatever happens to come first.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Self::Value, M::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        source.deserialize_map(Entries(PhantomData))
    }
}

/// One value or a list of them.
#[derive(Clone, Debug, PartialEq)]
pub enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<Object<T>> {
    /// The error of an entry names the entry's field, which an untagged enum's would not.
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = OneOrMany<Object<T>>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object or a list of them")
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Self::Value, M::Error> {
                Object::deserialize(MapAccessDeserializer::new(map)).map(OneOrMany::One)
            }

            fn visit_seq<S: SeqAccess<'de>>(self, list: S) -> Result<Self::Value, S::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(OneOrMany::Many)
            }
        }

        source.deserialize_any(Either(PhantomData))
    }
}

/// OpenAI's and SGLang's sampling fields: the top level of OpenAI's bodies, `sampling_params` of `/generate`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct SamplingFields {
    pub max_tokens: Option<i64>,
    pub max_completion_tokens: Option<i64>,
    pub max_new_tokens: Option<i64>,
    pub min_tokens: Option<i64>,
    pub min_new_tokens: Option<i64>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub logit_bias: Option<BTreeMap<String, f64>>,
    pub seed: Option<i64>,
    pub sampling_seed: Option<i64>,
    pub stop: Option<Texts>,
    pub stop_token_ids: Option<Vec<i64>>,
    pub ignore_eos: Option<bool>,
    pub include_stop_str_in_output: Option<bool>,
    pub no_stop_trim: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub n: Option<i64>,
    pub best_of: Option<i64>,
    // Constraints that this worker cannot keep. Ignoring them would give answers that break them, so they are refused.
    pub response_format: Option<Object<ResponseFormat>>,
    pub json_schema: Option<IgnoredAny>,
    pub regex: Option<IgnoredAny>,
    pub ebnf: Option<IgnoredAny>,
    pub structural_tag: Option<IgnoredAny>,
    pub stop_regex: Option<IgnoredAny>,
    pub lora_path: Option<IgnoredAny>,
}

#[derive(Deserialize, Clone, Debug)]
pub struct ResponseFormat {
    pub r#type: String,
}

/// The three fields that the gateway writes, for one sample or for a list of them.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct BootstrapFields {
    pub bootstrap_host: Option<Hosts>,
    pub bootstrap_port: Option<Ports>,
    pub bootstrap_room: Option<Rooms>,
}

pub type Texts = Listed<String, TextWords>;
pub type Hosts = Listed<Option<String>, TextWords>;
pub type Ports = Listed<Option<u16>, PortWords>;
pub type Rooms = Listed<u64, RoomWords>;

/// A [`OneOrMany`] whose error says what was expected.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed<T, W> {
    pub value: OneOrMany<T>,
    words: PhantomData<W>,
}

/// Says in an error what a [`Listed`] takes.
pub trait Words {
    const EXPECTED: &'static str;
}

macro_rules! words {
    ($($name:ident = $text:literal;)*) => {$(
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name;
        impl Words for $name {
            const EXPECTED: &'static str = $text;
        }
    )*};
}

words! {
    TextWords = "expected a string or a list of strings";
    PortWords = "expected a port number between 0 and 65535, or a list of them";
    RoomWords = "expected a room number below 2^63, or a list of them";
}

impl<'de, T: Deserialize<'de>, W: Words> Deserialize<'de> for Listed<T, W> {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either<T> {
            Many(Vec<T>),
            One(T),
        }
        match Either::deserialize(source) {
            Ok(Either::One(one)) => Ok(Self::new(OneOrMany::One(one))),
            Ok(Either::Many(many)) => Ok(Self::new(OneOrMany::Many(many))),
            Err(_) => Err(serde::de::Error::custom(W::EXPECTED)),
        }
    }
}

impl<T, W> Listed<T, W> {
    pub fn new(value: OneOrMany<T>) -> Self {
        Self { value, words: PhantomData }
    }

    pub fn into_list(self) -> Vec<T> {
        match self.value {
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        }
    }
}

/// A prompt, or several, as text or as token ids.
#[derive(Deserialize, Clone, Debug, PartialEq)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids, or a list of lists of token ids"
)]
pub enum Prompts {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<u32>>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::body::parse;

    #[test]
    fn lists_and_single_values_are_read_alike() {
        let fields: BootstrapFields = parse(
            br#"{"bootstrap_host": "h", "bootstrap_port": [1, null], "bootstrap_room": [5, 9223372036854775807]}"#,
        )
        .unwrap();
        assert_eq!(fields.bootstrap_host.unwrap().into_list(), [Some("h".to_owned())]);
        assert_eq!(fields.bootstrap_port.unwrap().into_list(), [Some(1), None]);
        assert_eq!(fields.bootstrap_room.unwrap().value, OneOrMany::Many(vec![5, i64::MAX as u64]));
    }

    #[test]
    fn a_wrong_type_names_the_field_and_what_it_takes() {
        for (body, field, part) in [
            (r#"{"bootstrap_room": "7"}"#, "bootstrap_room", "room number below 2^63"),
            (r#"{"bootstrap_room": -7}"#, "bootstrap_room", "room number"),
            (r#"{"bootstrap_port": 70000}"#, "bootstrap_port", "port number"),
        ] {
            let error = parse::<BootstrapFields>(body.as_bytes()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field));
            assert!(error.message.contains(part), "{}", error.message);
        }
        let error = parse::<SamplingFields>(br#"{"stop": [1]}"#).unwrap_err();
        assert!(error.message.starts_with("stop: expected a string or a list of strings"), "{}", error.message);
    }

    #[test]
    fn a_list_is_no_object() {
        let error = parse::<SamplingFields>(b"[3]").unwrap_err();
        assert!(error.message.contains("invalid type: sequence, expected a JSON object"), "{}", error.message);
        let error = parse::<SamplingFields>(br#"{"response_format": ["text"]}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("response_format"));
    }

    #[test]
    fn prompts_come_in_four_forms() {
        for (json, expected) in [
            (r#""a""#, Prompts::Text("a".into())),
            (r#"["a", "b"]"#, Prompts::Texts(vec!["a".into(), "b".into()])),
            ("[1, 2]", Prompts::Ids(vec![1, 2])),
            ("[[1], [2]]", Prompts::IdLists(vec![vec![1], vec![2]])),
            ("[]", Prompts::Ids(vec![])),
        ] {
            assert_eq!(serde_json::from_str::<Prompts>(json).unwrap(), expected);
        }
        assert!(serde_json::from_str::<Prompts>("[-1]").is_err());
    }
}
