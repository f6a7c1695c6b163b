//! The engine as the HTTP rooms use it, so that they can be tested against a scripted one.

use std::{pin::Pin, time::Duration};

use futures_util::stream::{self, Stream};

use crate::{
    engine::{EngineHandle, Loads},
    request::{SampleError, SampleEvent, SampleRequest},
};

/// A sample's events; dropping it aborts the sample.
pub type Events = Pin<Box<dyn Stream<Item = SampleEvent> + Send>>;

/// See [`EngineHandle`] for what each call promises.
pub trait EnginePort: Send + Sync + 'static {
    fn submit_all(&self, samples: Vec<SampleRequest>) -> Result<Vec<Events>, SampleError>;
    /// With an empty `rid`, every sample.
    fn abort(&self, rid: &str) -> Result<(), SampleError>;
    fn loads(&self) -> Loads;
    fn is_alive(&self) -> bool;
    fn last_step_age(&self) -> Duration;
}

impl EnginePort for EngineHandle {
    fn submit_all(&self, samples: Vec<SampleRequest>) -> Result<Vec<Events>, SampleError> {
        let streams = EngineHandle::submit_all(self, samples)?;
        let events = |sample| {
            let events = stream::unfold(sample, |mut sample: crate::engine::SampleStream| async move {
                sample.recv().await.map(|event| (event, sample))
            });
            Box::pin(events) as Events
        };
        Ok(streams.into_iter().map(events).collect())
    }

    fn abort(&self, rid: &str) -> Result<(), SampleError> {
        EngineHandle::abort(self, rid)
    }

    fn loads(&self) -> Loads {
        EngineHandle::loads(self)
    }

    fn is_alive(&self) -> bool {
        EngineHandle::is_alive(self)
    }

    fn last_step_age(&self) -> Duration {
        EngineHandle::last_step_age(self)
    }
}
