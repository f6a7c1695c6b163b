//! From raw fields to checked ones: sampling parameters, rooms, logprob requests. Each refusal names the field. *Pure.*

use std::borrow::Cow;

use tandem_handoff::{ids::Room, ticket::Ticket};
use tandem_model::Generation;

use super::{
    error::ApiError,
    fields::{BootstrapFields, Listed, Object, OneOrMany, SamplingFields},
};
use crate::request::SamplingParams;

/// Samples that one request may ask for, over all its prompts.
pub const SAMPLES_MAX: usize = 1024;
const STOPS_MAX: usize = 64;
const STOP_BYTES_MAX: usize = 4096;
const LOGIT_BIAS_MAX: usize = 4096;
/// A logit divided by less could leave the numbers that f32 has.
const REPETITION_PENALTY_MIN: f64 = 0.01;

/// What a dialect of the API assumes where the client is silent.
#[derive(Clone, Copy, Debug)]
pub struct Defaults<'a> {
    /// `None`: to the end of the context.
    pub max_tokens: Option<u32>,
    /// OpenAI's endpoints start from the model's `generation_config.json`.
    pub generation: Option<&'a Generation>,
}

/// Parameters of all the samples of one prompt. `max_tokens` is not yet capped by any prompt's length.
#[derive(Clone, Debug)]
pub struct Sampling {
    pub params: SamplingParams,
    pub n: usize,
    /// The field in which the client gave `max_tokens`; none where the dialect's default holds, which may be cut.
    pub max_tokens_field: Option<&'static str>,
}

/// Checks every value.
///
/// # Errors
/// 400 that names the field.
pub fn sampling(
    fields: SamplingFields,
    defaults: Defaults<'_>,
    vocab: usize,
    draw_seed: impl FnOnce() -> u64,
) -> Result<Sampling, ApiError> {
    refuse_constraints(&fields)?;
    let n = int("n", fields.n.unwrap_or(1), 1..=SAMPLES_MAX as i64)?;
    if fields.best_of.is_some_and(|best_of| best_of != n) {
        return Err(ApiError::invalid("best_of", format!("best_of must equal n, which is {n}")));
    }
    let model = defaults.generation;
    let from_model = |pick: fn(&Generation) -> Option<f32>| model.and_then(pick).map(f64::from);
    let given_max = given_max_tokens(&fields);
    let (max_tokens, min_tokens) = token_counts(&fields, given_max, defaults.max_tokens)?;
    let temperature = fields.temperature.or_else(|| from_model(|g| g.temperature)).unwrap_or(1.0);
    let top_p = fields.top_p.or_else(|| from_model(|g| g.top_p)).unwrap_or(1.0);
    let min_p = fields.min_p.or_else(|| from_model(|g| g.min_p)).unwrap_or(0.0);
    let repetition = fields.repetition_penalty.or_else(|| from_model(|g| g.repetition_penalty)).unwrap_or(1.0);
    let top_p = float("top_p", top_p, 0.0, 1.0)?;
    let repetition_penalty = float("repetition_penalty", repetition, REPETITION_PENALTY_MIN, 2.0)?;
    if top_p == 0.0 {
        return Err(ApiError::invalid("top_p", "top_p must be above 0"));
    }
    let seed = fields.seed.or(fields.sampling_seed).map(|seed| seed as u64);
    let params = SamplingParams {
        max_tokens,
        min_tokens,
        temperature: float("temperature", temperature, 0.0, 2.0)?,
        top_p,
        top_k: top_k(fields.top_k, model)?,
        min_p: float("min_p", min_p, 0.0, 1.0)?,
        frequency_penalty: float("frequency_penalty", fields.frequency_penalty.unwrap_or(0.0), -2.0, 2.0)?,
        presence_penalty: float("presence_penalty", fields.presence_penalty.unwrap_or(0.0), -2.0, 2.0)?,
        repetition_penalty,
        logit_bias: logit_bias(fields.logit_bias.unwrap_or_default(), vocab)?,
        seed: seed.unwrap_or_else(draw_seed),
        stop: stops(fields.stop.map(Listed::into_list).unwrap_or_default())?,
        stop_token_ids: token_ids("stop_token_ids", &fields.stop_token_ids.unwrap_or_default(), vocab)?,
        ignore_eos: fields.ignore_eos.unwrap_or(false),
        include_stop: fields.include_stop_str_in_output.or(fields.no_stop_trim).unwrap_or(false),
        skip_special_tokens: fields.skip_special_tokens.unwrap_or(true),
    };
    Ok(Sampling { params, n: n as usize, max_tokens_field: given_max.map(|(field, _)| field) })
}

/// A constraint that is ignored is an answer that breaks it.
fn refuse_constraints(fields: &SamplingFields) -> Result<(), ApiError> {
    let format = fields.response_format.as_ref().filter(|Object(format)| format.r#type != "text");
    if let Some(Object(format)) = format {
        let message = format!("response_format {:?} is not supported by this worker; only \"text\" is", format.r#type);
        return Err(ApiError::invalid("response_format", message));
    }
    for (field, given) in [
        ("json_schema", fields.json_schema.is_some()),
        ("regex", fields.regex.is_some()),
        ("ebnf", fields.ebnf.is_some()),
        ("structural_tag", fields.structural_tag.is_some()),
        ("stop_regex", fields.stop_regex.is_some()),
        ("lora_path", fields.lora_path.is_some()),
    ] {
        refuse(field, given)?;
    }
    Ok(())
}

/// 400 for a field that changes answers in a way this worker cannot, where it is given.
pub fn refuse(field: &'static str, given: bool) -> Result<(), ApiError> {
    if given { Err(ApiError::invalid(field, format!("{field} is not supported by this worker"))) } else { Ok(()) }
}

fn given_max_tokens(fields: &SamplingFields) -> Option<(&'static str, i64)> {
    let given = [
        ("max_completion_tokens", fields.max_completion_tokens),
        ("max_tokens", fields.max_tokens),
        ("max_new_tokens", fields.max_new_tokens),
    ];
    given.into_iter().find_map(|(name, value)| Some((name, value?)))
}

fn token_counts(
    fields: &SamplingFields,
    given_max: Option<(&'static str, i64)>,
    default_max: Option<u32>,
) -> Result<(u32, u32), ApiError> {
    let max = match given_max {
        Some((name, value)) => Some(int(name, value, 0..=i64::from(u32::MAX))? as u32),
        None => None,
    };
    let min = fields.min_tokens.or(fields.min_new_tokens).unwrap_or(0);
    let min = int("min_tokens", min, 0..=i64::from(u32::MAX))? as u32;
    if max.is_some_and(|max| min > max) {
        let message = format!("min_tokens {min} is over max_tokens {}", max.unwrap_or(0));
        return Err(ApiError::invalid("min_tokens", message));
    }
    Ok((max.or(default_max).unwrap_or(u32::MAX), min))
}

fn top_k(given: Option<i64>, model: Option<&Generation>) -> Result<Option<u32>, ApiError> {
    match given {
        None => Ok(model.and_then(|g| g.top_k).filter(|&k| k > 0)),
        Some(-1 | 0) => Ok(None),
        Some(k) => Ok(Some(int("top_k", k, 1..=i64::from(u32::MAX))? as u32)),
    }
}

fn logit_bias(bias: std::collections::BTreeMap<String, f64>, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    if bias.len() > LOGIT_BIAS_MAX {
        let message = format!("logit_bias has {} entries, at most {LOGIT_BIAS_MAX} are allowed", bias.len());
        return Err(ApiError::invalid("logit_bias", message));
    }
    let mut list = Vec::with_capacity(bias.len());
    for (key, value) in bias {
        let token = key.parse::<u32>().ok().filter(|&token| (token as usize) < vocab).ok_or_else(|| {
            ApiError::invalid("logit_bias", format!("logit_bias key {key:?} is no token id below {vocab}"))
        })?;
        list.push((token, float("logit_bias", value, -100.0, 100.0)?));
    }
    list.sort_unstable_by_key(|&(token, _)| token);
    Ok(list)
}

fn stops(stops: Vec<String>) -> Result<Vec<String>, ApiError> {
    if stops.len() > STOPS_MAX {
        let message = format!("stop has {} strings, at most {STOPS_MAX} are allowed", stops.len());
        return Err(ApiError::invalid("stop", message));
    }
    match stops.iter().find(|stop| stop.is_empty() || stop.len() > STOP_BYTES_MAX) {
        Some(stop) => {
            let message = format!("a stop string has {} bytes, allowed are 1 to {STOP_BYTES_MAX}", stop.len());
            Err(ApiError::invalid("stop", message))
        }
        None => Ok(stops),
    }
}

/// Token ids that the model has.
pub fn token_ids(field: &'static str, ids: &[i64], vocab: usize) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|&id| match u32::try_from(id) {
            Ok(token) if (token as usize) < vocab => Ok(token),
            _ => Err(ApiError::invalid(field, format!("{field} has {id}, but token ids go from 0 to {}", vocab - 1))),
        })
        .collect()
}

/// `value` if it lies in `range`.
pub fn int(field: &'static str, value: i64, range: std::ops::RangeInclusive<i64>) -> Result<i64, ApiError> {
    if range.contains(&value) {
        return Ok(value);
    }
    let message = format!("{field} is {value}, but must be between {} and {}", range.start(), range.end());
    Err(ApiError::invalid(field, message))
}

fn float(field: &'static str, value: f64, low: f64, high: f64) -> Result<f32, ApiError> {
    if value >= low && value <= high {
        return Ok(value as f32);
    }
    Err(ApiError::invalid(field, format!("{field} is {value}, but must be between {low} and {high}")))
}

/// One ticket per sample, room `i` for prompt `i / n`, sample `i % n`; `None` when the request carries no room.
///
/// # Errors
/// 400 when a list is shorter or longer than the samples, or one room is to serve several.
pub fn tickets(fields: BootstrapFields, samples: usize, port_default: u16) -> Result<Option<Vec<Ticket>>, ApiError> {
    let Some(rooms) = fields.bootstrap_room else { return Ok(None) };
    let rooms = match rooms.value {
        OneOrMany::One(_) if samples != 1 => {
            let message = format!("{samples} samples need {samples} rooms: bootstrap_room must be a list");
            return Err(ApiError::invalid("bootstrap_room", message));
        }
        OneOrMany::One(room) => vec![room],
        OneOrMany::Many(rooms) => exactly("bootstrap_room", rooms, samples)?,
    };
    let hosts = match fields.bootstrap_host.map(|hosts| hosts.value) {
        None | Some(OneOrMany::One(None)) => {
            return Err(ApiError::invalid("bootstrap_host", "bootstrap_room came without bootstrap_host"));
        }
        Some(OneOrMany::One(host)) => vec![host; samples],
        Some(OneOrMany::Many(hosts)) => exactly("bootstrap_host", hosts, samples)?,
    };
    let ports = match fields.bootstrap_port.map(|ports| ports.value) {
        None => vec![None; samples],
        Some(OneOrMany::One(port)) => vec![port; samples],
        Some(OneOrMany::Many(ports)) => exactly("bootstrap_port", ports, samples)?,
    };
    let mut tickets = Vec::with_capacity(samples);
    for ((host, port), room) in hosts.into_iter().zip(ports).zip(rooms) {
        let host = host
            .filter(|host| !host.is_empty() && host.len() <= 255)
            .ok_or_else(|| ApiError::invalid("bootstrap_host", "bootstrap_host has an entry that is no host name"))?;
        let room = Room::new(room)
            .ok_or_else(|| ApiError::invalid("bootstrap_room", format!("bootstrap_room {room} is not below 2^63")))?;
        tickets.push(Ticket { host, port: port.unwrap_or(port_default), room });
    }
    Ok(Some(tickets))
}

fn exactly<T>(field: &'static str, list: Vec<T>, samples: usize) -> Result<Vec<T>, ApiError> {
    if list.len() == samples {
        return Ok(list);
    }
    let message =
        format!("{field} has {} entries, but the request has {samples} samples (prompts times n)", list.len());
    Err(ApiError::invalid(Cow::Borrowed(field), message))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::http::body::parse;

    const DEFAULTS: Defaults<'static> = Defaults { max_tokens: Some(16), generation: None };

    fn checked(json: &str) -> Result<Sampling, ApiError> {
        sampling(parse(json.as_bytes()).unwrap(), DEFAULTS, 100, || 7)
    }

    #[test]
    fn silence_means_the_defaults() {
        let Sampling { params, n, .. } = checked("{}").unwrap();
        assert_eq!((n, params.max_tokens, params.seed, params.top_k), (1, 16, 7, None));
        assert_eq!((params.temperature, params.repetition_penalty), (1.0, 1.0));
        let given =
            checked(r#"{"max_tokens": 3, "max_completion_tokens": 4, "top_k": -1, "seed": -1, "n": 2}"#).unwrap();
        assert_eq!((given.n, given.params.max_tokens, given.params.seed), (2, 4, u64::MAX));
    }

    #[test]
    fn every_refusal_names_its_field() {
        for (json, field) in [
            (r#"{"temperature": -0.1}"#, "temperature"),
            (r#"{"temperature": 2.1}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_p": 1.5}"#, "top_p"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"min_p": 2}"#, "min_p"),
            (r#"{"frequency_penalty": 3}"#, "frequency_penalty"),
            (r#"{"presence_penalty": -3}"#, "presence_penalty"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (r#"{"repetition_penalty": 1e-40}"#, "repetition_penalty"),
            (r#"{"repetition_penalty": 2.5}"#, "repetition_penalty"),
            (r#"{"logit_bias": {"100": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": {"x": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": {"1": 101}}"#, "logit_bias"),
            (r#"{"stop": ""}"#, "stop"),
            (r#"{"stop_token_ids": [100]}"#, "stop_token_ids"),
            (r#"{"n": 0}"#, "n"),
            (r#"{"n": 2, "best_of": 3}"#, "best_of"),
            (r#"{"max_tokens": -1}"#, "max_tokens"),
            (r#"{"max_tokens": 2, "min_tokens": 3}"#, "min_tokens"),
            (r#"{"regex": "a+"}"#, "regex"),
            (r#"{"lora_path": "a"}"#, "lora_path"),
            (r#"{"response_format": {"type": "json_object"}}"#, "response_format"),
        ] {
            let error = checked(json).expect_err(json);
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(field)), "{json}");
        }
    }

    proptest! {
        #[test]
        fn checked_floats_are_finite(temperature: f64, top_p: f64, min_p: f64) {
            let fields = SamplingFields {
                temperature: Some(temperature), top_p: Some(top_p), min_p: Some(min_p), ..Default::default()
            };
            if let Ok(Sampling { params, .. }) = sampling(fields, DEFAULTS, 10, || 0) {
                prop_assert!(params.temperature.is_finite() && params.temperature >= 0.0);
                prop_assert!(params.top_p.is_finite() && params.min_p.is_finite());
            }
        }
    }

    fn ticketed(json: &str, samples: usize) -> Result<Option<Vec<Ticket>>, ApiError> {
        tickets(parse(json.as_bytes()).unwrap(), samples, 8998)
    }

    #[test]
    fn rooms_go_to_samples_in_order() {
        assert_eq!(ticketed("{}", 3).unwrap(), None);
        let one = ticketed(r#"{"bootstrap_host": "[::1]", "bootstrap_port": null, "bootstrap_room": 5}"#, 1);
        assert_eq!(one.unwrap().unwrap(), [Ticket { host: "[::1]".into(), port: 8998, room: Room::new(5).unwrap() }]);
        let two = ticketed(r#"{"bootstrap_host": ["a", "b"], "bootstrap_port": 9, "bootstrap_room": [5, 6]}"#, 2);
        let two = two.unwrap().unwrap();
        assert_eq!((two[1].host.as_str(), two[1].port, two[1].room.get()), ("b", 9, 6));
    }

    #[test]
    fn lists_of_another_length_are_refused() {
        for (json, samples, field) in [
            (r#"{"bootstrap_host": "h", "bootstrap_room": 5}"#, 2, "bootstrap_room"),
            (r#"{"bootstrap_host": "h", "bootstrap_room": [5]}"#, 2, "bootstrap_room"),
            (r#"{"bootstrap_host": ["h"], "bootstrap_room": [5, 6]}"#, 2, "bootstrap_host"),
            (r#"{"bootstrap_host": "h", "bootstrap_port": [1, 2], "bootstrap_room": 5}"#, 1, "bootstrap_port"),
            (r#"{"bootstrap_room": 5}"#, 1, "bootstrap_host"),
            (r#"{"bootstrap_host": "", "bootstrap_room": 5}"#, 1, "bootstrap_host"),
            (r#"{"bootstrap_host": "h", "bootstrap_room": 9223372036854775808}"#, 1, "bootstrap_room"),
        ] {
            let error = ticketed(json, samples).expect_err(json);
            assert_eq!(error.param.as_deref(), Some(field), "{json}");
        }
    }
}
