//! Why a worker did not start. Errors of requests are [`crate::http::error::ApiError`]. *Pure.*

/// Each message says what happened and what to do; the kind says whose fault it is.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A flag, an environment variable or a line of the settings file.
    #[error("settings: {0}")]
    Settings(String),
    /// The model's files.
    #[error("model: {0}")]
    Model(String),
    /// Memory or threads of this machine.
    #[error("engine: {0}")]
    Engine(String),
    /// The handoff's listener or its key.
    #[error("handoff: {0}")]
    Handoff(String),
    /// The HTTP listener or the runtime.
    #[error("http: {0}")]
    Http(String),
}
