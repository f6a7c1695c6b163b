//! The engine thread: a loop around [`Core`] that takes mail, lets the core take a turn, and waits when nothing is due.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tandem_handoff::ids::Time;

use super::{
    core::{Core, Turn},
    handle::{EngineHandle, Shared},
    inbox::EngineWaker,
};
use crate::{
    backend::Backend, config::EngineConfig, decode_role::DecodeHandoff, output::Detokenizers,
    prefill_role::PrefillHandoff,
};

/// The longest sleep of an idle engine.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// The worker's role, with its side of the handoff.
pub enum RoleDriver {
    /// Prefill and decode in one worker.
    Null,
    Prefill(Box<dyn PrefillHandoff>),
    Decode(Box<dyn DecodeHandoff>),
}

/// What an engine is made of.
pub struct EngineParts {
    pub config: EngineConfig,
    pub backend: Box<dyn Backend>,
    /// Makes one incremental detokenizer per sample.
    pub text: Arc<dyn Detokenizers>,
    /// The model's end-of-sequence tokens.
    pub eos: Arc<[u32]>,
    pub role: RoleDriver,
    /// The waker that the role was started with; a new one for role null.
    pub waker: EngineWaker,
    /// The clock of the whole worker, shared with the role's drivers.
    pub clock: Arc<dyn Fn() -> Time + Send + Sync>,
}

/// Starts the engine thread.
///
/// # Errors
/// When the operating system gives no thread.
pub fn spawn(parts: EngineParts) -> std::io::Result<EngineHandle> {
    let inbox = parts.waker.0.clone();
    let config = &parts.config;
    let tokens_max = config.context_length.min(config.max_total_tokens) as usize;
    let shared = Arc::new(Shared::new(inbox, config.queue_requests_max as usize, tokens_max));
    let handle = EngineHandle(shared.clone());
    let clock = parts.clock.clone();
    let mut core = Core::new(parts);
    shared.set_loads(core.loads());
    std::thread::Builder::new().name("engine".into()).spawn(move || {
        let end = catch_unwind(AssertUnwindSafe(|| run(&mut core, &shared, &*clock)));
        if end.is_err() {
            tracing::error!("the engine thread panicked: every sample fails and /health turns 503; restart the worker");
        }
        // The order matters to a caller that sees its stream end: the engine is dead before the streams close.
        shared.alive.store(false, Ordering::Release);
        shared.inbox.close();
        shared.turn_began.store(0, Ordering::Release);
        drop(core);
    })?;
    Ok(handle)
}

/// Turns until shutdown.
fn run(core: &mut Core, shared: &Shared, clock: &(dyn Fn() -> Time + Send + Sync)) {
    let mut patience = None;
    loop {
        let mail = shared.inbox.take(patience);
        shared.turn_began.store((shared.born.elapsed().as_micros() as u64).max(1), Ordering::Release);
        if mail.shutdown {
            core.shut_down(clock(), mail.submissions);
            return;
        }
        let turn = core.turn(clock(), mail);
        shared.inbox.set_waiting(core.waiting());
        shared.set_loads(core.loads());
        patience = match turn {
            Turn::Worked => None,
            Turn::Idle { until } => Some(Duration::from_micros(until.micros_since(clock())).min(IDLE_MAX)),
        };
        if patience.is_some() {
            shared.turn_began.store(0, Ordering::Release);
        }
    }
}
