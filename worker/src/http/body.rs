//! A request's body: read within a limit and a deadline, then parsed with errors that name the field.
//!
//! A body over the limit is refused unread: the listener throws the rest away once the answer is out.

use std::{borrow::Cow, time::Duration};

use axum::body::{Body, Bytes};
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use super::{error::ApiError, fields::Object};

/// What a worker takes of a body.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimits {
    pub bytes_max: usize,
    pub time_max: Duration,
}

/// The whole body.
///
/// # Errors
/// 413 over the limit, 408 past the deadline, 400 when the client broke off.
pub async fn read(headers: &HeaderMap, body: Body, limits: BodyLimits) -> Result<Bytes, ApiError> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    match tokio::time::timeout(limits.time_max, collect(body, announced, limits.bytes_max)).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            "body_timeout",
            format!("the body did not arrive within {} ms", limits.time_max.as_millis()),
        )),
    }
}

async fn collect(mut body: Body, announced: Option<u64>, bytes_max: usize) -> Result<Bytes, ApiError> {
    if announced.is_some_and(|bytes| bytes > bytes_max as u64) {
        return Err(too_large(bytes_max, announced));
    }
    let mut whole = Vec::with_capacity(announced.unwrap_or(0) as usize);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| ApiError::malformed(format!("the body broke off: {e}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + data.len() > bytes_max {
            return Err(too_large(bytes_max, None));
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.into())
}

fn too_large(bytes_max: usize, announced: Option<u64>) -> ApiError {
    let size = announced.map_or_else(|| "more".into(), |bytes| format!("{bytes} bytes"));
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "body_too_large",
        format!("the body has {size}, but this worker takes {bytes_max} bytes at most (--max-body-bytes)"),
    )
}

/// The body, a JSON object, as a request.
///
/// # Errors
/// 400 that says where and why: not UTF-8, not JSON, or a field that is missing or of the wrong type (then `param` names
/// it).
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|e| ApiError::malformed(format!("the body is not UTF-8: bad byte at offset {}", e.valid_up_to())))?;
    let mut source = serde_json::Deserializer::from_str(text);
    let Object(value) = serde_path_to_error::deserialize(&mut source).map_err(|e| {
        let path = e.path().to_string();
        describe(text, e.inner(), Some(path).filter(|path| path != "."))
    })?;
    source.end().map_err(|e| describe(text, &e, None))?;
    Ok(value)
}

fn describe(text: &str, error: &serde_json::Error, path: Option<String>) -> ApiError {
    if text.trim_ascii().is_empty() {
        return ApiError::malformed("the body is empty; send a JSON object");
    }
    if text.starts_with('\u{feff}') {
        return ApiError::malformed("the body begins with a byte order mark, which JSON forbids; send it without");
    }
    let cause = cause(text, error);
    if let Some(word) = number_that_is_none(text, error) {
        let field = path.map(Cow::Owned);
        let name = field.as_deref().unwrap_or("a value");
        let message = format!("{name} is {word}, which is no JSON number ({cause})");
        return ApiError { param: field, ..ApiError::malformed(message) };
    }
    if let Some(field) = cause.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        let field = path.map_or_else(|| field.to_owned(), |path| format!("{path}.{field}"));
        let message = format!("{field} is required, and the request lacks it");
        return ApiError { code: "missing_required_parameter", ..ApiError::invalid(field, message) };
    }
    match path {
        Some(path) if error.is_data() => {
            ApiError { code: "invalid_type", message: format!("{path}: {cause}"), ..ApiError::invalid(path, "") }
        }
        Some(path) => ApiError::malformed(format!("the body is not valid JSON near {path}: {cause}")),
        None if error.is_data() => {
            ApiError { code: "invalid_type", ..ApiError::malformed(format!("the body: {cause}")) }
        }
        None => ApiError::malformed(format!("the body is not valid JSON: {cause}")),
    }
}

/// What is wrong. A place is told where the syntax is, of a field the name says more; and never of a body to which a
/// gateway added the rendezvous, since its client cannot count in that.
fn cause(text: &str, error: &serde_json::Error) -> String {
    let whole = error.to_string();
    if !error.is_data() && !text.contains("\"bootstrap_room\"") {
        return whole;
    }
    let place = format!(" at line {} column {}", error.line(), error.column());
    whole.strip_suffix(&place).map_or(whole.clone(), str::to_owned)
}

/// Python's `json.dumps` writes NaN and Infinity, which JSON lacks; the bare syntax error would leave people guessing.
fn number_that_is_none(text: &str, error: &serde_json::Error) -> Option<&'static str> {
    if !error.is_syntax() {
        return None;
    }
    // Lines end where the parser counts them, and its columns are bytes: neither needs to be a character's boundary.
    let line = text.as_bytes().split(|&byte| byte == b'\n').nth(error.line().checked_sub(1)?)?;
    let around = line.get(error.column().saturating_sub(3)..).unwrap_or_default();
    // The parser stops at the word's first letter, or at a minus sign's successor.
    let starts = (0..around.len().min(3)).map(|at| &around[at..]);
    starts.flat_map(|start| ["NaN", "Infinity"].into_iter().find(|word| start.starts_with(word.as_bytes()))).next()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize, Debug)]
    struct Sample {
        #[serde(default)]
        temperature: Option<f64>,
    }

    fn refusal(body: &[u8]) -> ApiError {
        parse::<Sample>(body).unwrap_err()
    }

    #[test]
    fn each_malformed_body_is_told_apart() {
        let cases: [(&[u8], &str); 10] = [
            (b"", "empty"),
            (b"{", "not valid JSON"),
            (b"{}x", "trailing characters at line 1 column 3"),
            (b"[0.5]", "invalid type: sequence, expected a JSON object"),
            (b"\"x\"", "expected a JSON object"),
            (b"{\"temperature\": \"hot\"}", "temperature: invalid type: string \"hot\""),
            (b"{\"temperature\": NaN}", "temperature is NaN"),
            (b"{\"temperature\": -Infinity}", "Infinity"),
            (b"{\"temperature\": \xff}", "offset 16"),
            (b"{\"temperature\": 1e999}", "number out of range"),
        ];
        for (body, part) in cases {
            let error = refusal(body);
            assert_eq!(error.status, StatusCode::BAD_REQUEST);
            assert!(error.message.contains(part), "{:?} lacks {part:?}", error.message);
        }
        assert_eq!(refusal(b"{\"temperature\": \"hot\"}").param.as_deref(), Some("temperature"));
    }

    #[test]
    fn a_place_is_told_only_where_the_client_can_find_it() {
        assert!(refusal(b"{\"temperature\": }").message.ends_with("at line 1 column 17"));
        for body in ["{\"temperature\": \"hot\"}", "{\"bootstrap_room\": 7, \"temperature\": }"] {
            let error = refusal(body.as_bytes());
            assert!(!error.message.contains(" column "), "{}", error.message);
        }
    }

    #[test]
    fn a_missing_field_is_named_as_missing() {
        #[derive(Deserialize, Debug)]
        struct Outer {
            #[expect(dead_code)]
            inner: Vec<Inner>,
        }
        #[derive(Deserialize, Debug)]
        struct Inner {
            #[expect(dead_code)]
            role: String,
        }
        for (body, field) in [("{}", "inner"), ("{\"inner\": [{\"role\": \"a\"}, {}]}", "inner[1].role")] {
            let error = parse::<Outer>(body.as_bytes()).unwrap_err();
            assert_eq!((error.code, error.param.as_deref()), ("missing_required_parameter", Some(field)));
        }
    }

    #[test]
    fn a_malformed_body_may_hold_any_characters() {
        for body in ["é", "{éé", "{\"prompt\":\"é\u{1}\"}", "{\"é\u{1}\":1}", "\"😀\\q", "{é", "é\r\n😀\u{1}"]
        {
            let error = refusal(body.as_bytes());
            assert_eq!(error.status, StatusCode::BAD_REQUEST, "{body:?}");
        }
        let marked = refusal("\u{feff}{\"temperature\": 1}".as_bytes());
        assert!(marked.message.contains("byte order mark"), "{}", marked.message);
        assert!(refusal("{\"é\":\n-NaN}".as_bytes()).message.contains("NaN"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_value_or_a_400(body: Vec<u8>) {
            check_any(&body)?;
        }

        #[test]
        fn any_text_that_is_nearly_json_is_a_value_or_a_400(
            body in "(\\{|\\}|\\[|\\]|\"|:|,|-|NaN|Infinity|temperature|[0-9]|\\\\u?|é|😀|\u{1}|\r|\n|\u{feff}){0,24}",
        ) {
            check_any(body.as_bytes())?;
            check_any(format!("{{\"temperature\":{body}}}").as_bytes())?;
        }
    }

    fn check_any(body: &[u8]) -> Result<(), TestCaseError> {
        if let Err(error) = parse::<Sample>(body) {
            prop_assert_eq!(error.status, StatusCode::BAD_REQUEST);
        }
        Ok(())
    }

    #[test]
    fn deep_nesting_is_an_error_and_no_overflow() {
        let body = [b"{\"x\":".as_slice(), &b"[".repeat(100_000)].concat();
        assert_eq!(refusal(&body).status, StatusCode::BAD_REQUEST);
    }

    #[test]
    fn unknown_fields_pass() {
        assert_eq!(parse::<Sample>(b"{\"new\": {\"a\": [1]}, \"temperature\": 0.5}").unwrap().temperature, Some(0.5));
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_413_whether_announced_or_not() {
        let limits = BodyLimits { bytes_max: 10, time_max: Duration::from_secs(5) };
        let mut headers = HeaderMap::new();
        let body = || Body::from(vec![b'x'; 11]);
        assert_eq!(read(&headers, body(), limits).await.unwrap_err().status, StatusCode::PAYLOAD_TOO_LARGE);
        headers.insert(header::CONTENT_LENGTH, 11.into());
        let error = read(&headers, body(), limits).await.unwrap_err();
        assert!(error.message.contains("11 bytes") && error.message.contains("10 bytes"), "{}", error.message);
        assert_eq!(read(&HeaderMap::new(), Body::from("0123456789"), limits).await.unwrap().len(), 10);
    }

    #[tokio::test]
    async fn a_body_that_stalls_is_408() {
        let stalled = Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>());
        let limits = BodyLimits { bytes_max: 10, time_max: Duration::from_millis(1) };
        assert_eq!(read(&HeaderMap::new(), stalled, limits).await.unwrap_err().status, StatusCode::REQUEST_TIMEOUT);
    }
}
