//! A request that was not served, in OpenAI's shape: `{"error":{"message","type","param","code"}}`. *Pure.*

use std::borrow::Cow;

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;

use crate::request::{SampleError, SampleErrorKind};

/// Seconds after which a client may try again when this worker was full.
const RETRY_AFTER_SECONDS: u16 = 1;

/// nginx's code for a client that went away, or whose request was aborted by name.
const CLIENT_CLOSED_REQUEST: u16 = 499;

#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    /// For programs: stable, lower case.
    pub code: &'static str,
    /// The field that is at fault, as the client spelled it.
    pub param: Option<Cow<'static, str>>,
    pub message: String,
}

impl ApiError {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, code, param: None, message: message.into() }
    }

    /// 400 for a value of `param`.
    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        ApiError { param: Some(param.into()), ..Self::new(StatusCode::BAD_REQUEST, "invalid_value", message) }
    }

    /// 400 for a body that cannot be read as a request.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_json", message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// The body of the answer, and of the error event of a stream.
    pub fn json(&self) -> Vec<u8> {
        #[derive(Serialize)]
        struct Outer<'a> {
            error: Inner<'a>,
        }
        #[derive(Serialize)]
        struct Inner<'a> {
            message: &'a str,
            r#type: &'a str,
            param: Option<&'a str>,
            code: &'a str,
        }
        let error =
            Inner { message: &self.message, r#type: self.kind(), param: self.param.as_deref(), code: self.code };
        serde_json::to_vec(&Outer { error }).expect("four strings always serialise")
    }
}

impl From<SampleError> for ApiError {
    fn from(error: SampleError) -> Self {
        let (status, code) = match error.kind {
            SampleErrorKind::BadRequest => (StatusCode::BAD_REQUEST, "invalid_request"),
            SampleErrorKind::Aborted => {
                (StatusCode::from_u16(CLIENT_CLOSED_REQUEST).expect("499 is a status code"), "aborted")
            }
            SampleErrorKind::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
            SampleErrorKind::Timeout => (StatusCode::GATEWAY_TIMEOUT, "timeout"),
            SampleErrorKind::Peer => (StatusCode::BAD_GATEWAY, "peer_failed"),
            SampleErrorKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        };
        ApiError::new(status, code, error.message)
    }
}

/// Why a request failed, for the log: it rides on the answer to whoever writes the line.
#[derive(Clone)]
pub struct Reason(pub String);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.json()));
        response.extensions_mut().insert(Reason(self.message));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, RETRY_AFTER_SECONDS.into());
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // The body was not read to its end: no request can follow on this connection.
            StatusCode::PAYLOAD_TOO_LARGE => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_is_that_of_openai() {
        let error = ApiError::invalid("temperature", "temperature must be \"small\"");
        assert_eq!(
            String::from_utf8(error.json()).unwrap(),
            r#"{"error":{"message":"temperature must be \"small\"","type":"invalid_request_error","param":"temperature","code":"invalid_value"}}"#
        );
    }

    #[test]
    fn each_kind_of_failure_has_its_status() {
        use SampleErrorKind::*;
        for (kind, status) in
            [(BadRequest, 400), (Aborted, 499), (Unavailable, 503), (Timeout, 504), (Peer, 502), (Internal, 500)]
        {
            let response = ApiError::from(SampleError { kind, message: "m".into() }).into_response();
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers().contains_key("retry-after"), status == 503);
            assert_eq!(response.extensions().get::<Reason>().unwrap().0, "m", "the log's line needs it");
        }
    }
}
