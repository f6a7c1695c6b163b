//! The toy model as the engine's device: rows are bytes in modelled memory, and a step reads its page table late (H10).

use std::sync::Arc;

use tandem_fabric::memory::PoolMemory;
use tandem_handoff::ids::Incarnation;
use tandem_worker::{
    backend::{Backend, BackendError, LogitRows, Slice},
    output::{Detokenize, Detokenizers},
};

use crate::{
    fabric::{SharedWire, lock},
    ground::Ground,
    model,
    wire::Wire,
};

pub struct SimBackend {
    pub wire: SharedWire,
    pub process: Incarnation,
}

impl Backend for SimBackend {
    fn step(&mut self, slices: &[Slice<'_>], out: &mut Vec<f32>) -> Result<(), BackendError> {
        let mut wire = lock(&self.wire);
        let most = wire.ground.late_us;
        let late = wire.ground.now + wire.ground.rng.range(0, most);
        wire.run_writes(late);
        let Wire { ground, .. } = &mut *wire;
        let host = ground.hosts.get_mut(&self.process).expect("a process that steps is known");
        if host.fail_steps > 0 {
            host.fail_steps -= 1;
            return Err(BackendError("the device gave up".into()));
        }
        for slice in slices {
            self.slice(ground, slice, out);
        }
        Ok(())
    }

    fn zero_tail(&mut self, page: u32, from_token: u32) {
        lock(&self.wire).ground.memory(self.process).zero_tail(page, from_token as usize);
    }

    fn vocab(&self) -> usize {
        model::VOCAB
    }

    fn memory(&self) -> &[Arc<PoolMemory>] {
        &[]
    }

    fn numerics_id(&self) -> String {
        "toy".into()
    }
}

impl SimBackend {
    fn slice(&self, ground: &mut Ground, slice: &Slice<'_>, out: &mut Vec<f32>) {
        let (start, end) = (slice.start as usize, slice.start as usize + slice.tokens.len());
        let page_size = ground.memory(self.process).shape.page_size as usize;
        for &page in &slice.pages[..end.div_ceil(page_size)] {
            if let Some(request) = ground.memory(self.process).holder(page) {
                let name = ground.name(self.process).to_owned();
                ground.violation(
                    "H10",
                    format!("a step of {name} names page {page}, which request {request} has offered"),
                );
            }
        }
        let memory = ground.memory(self.process);
        let (mut chain, mut state) = (model::START, model::START);
        let mut wrong = None;
        for position in 0..start {
            match memory.read_position(slice.pages, position) {
                Ok(found) => chain = found,
                Err(what) => wrong = Some(what),
            }
            state = model::fold(state, chain);
        }
        for (offset, &token) in slice.tokens.iter().enumerate() {
            chain = model::extend(chain, token);
            memory.write_position(slice.pages, start + offset, chain);
            state = model::fold(state, chain);
            let wanted = match slice.logits {
                LogitRows::None => false,
                LogitRows::Last => offset + 1 == slice.tokens.len(),
                LogitRows::All => true,
            };
            if wanted {
                out.extend(model::logits(state));
            }
        }
        if let Some(what) = wrong {
            let name = ground.name(self.process).to_owned();
            ground.violation("H4", format!("a step of {name} reads what is no KV: {what}"));
        }
    }
}

/// The simulator compares tokens; its answers have no text.
pub struct NoText;

impl Detokenizers for NoText {
    fn start(&self, _: bool) -> Box<dyn Detokenize> {
        Box::new(NoText)
    }
}

impl Detokenize for NoText {
    fn push(&mut self, _: u32, _: &mut String) {}

    fn finish(&mut self, _: &mut String) {}
}
