//! The frames of the control channel. *Pure.*
mod first;

pub use first::{FirstLogprob, FirstToken, TOP_LOGPROBS_MAX};

pub use crate::cause::{Cause, CauseKind, Side};
