//! The course of a request that asks for samples, the same for every endpoint: body, engine, then events or one JSON.

use std::{sync::Arc, time::Instant};

use axum::{
    body::Body,
    extract::{Extension, State},
    response::Response,
};
use http::HeaderMap;

use super::{App, Arrival, answers::Whole, error::ApiError, prompt::Batch, sse};

/// What an endpoint has of its own. A value knows all of one request that its answer needs; streamed, it is the dialect.
pub trait Endpoint: sse::Dialect + Sized {
    /// Reads a body that arrived at this time.
    ///
    /// # Errors
    /// 400 that names the field, 404 for another model.
    fn prepare(app: &Arc<App>, arrived: Instant, body: &[u8]) -> Result<(Self, Batch), ApiError>;

    fn is_streamed(&self) -> bool;

    /// The answer that is not streamed.
    fn whole(self, wholes: Vec<Whole>) -> Response;
}

pub async fn handle<E: Endpoint>(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (endpoint, batch) = app.prepare(&headers, body, move |app, body| E::prepare(app, arrival.at, body)).await?;
    let answers = app.submit(batch, arrival.at)?;
    if endpoint.is_streamed() {
        return sse::respond(answers, endpoint).await;
    }
    Ok(endpoint.whole(answers.collect().await?))
}
