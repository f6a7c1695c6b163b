//! What arrives, over every pair of TP: each byte of each page, on each rank that holds its head, once.

use tandem_handoff::layout::{Mapping, PoolShape};

use super::small;
use crate::{
    Backend, Failure, ensure,
    lab::{Lab, limits},
    pattern::Prompt,
};

pub fn every_pair_of_tp_with_a_held_prefix(backend: &dyn Backend) -> Result<(), Failure> {
    for p_tp in [1, 2, 4] {
        for d_tp in [1, 2, 4] {
            arrives(backend, small(p_tp, 16), small(d_tp, 16))
                .map_err(|f| f.during(&format!("TP {p_tp} to {d_tp}")))?;
        }
    }
    Ok(())
}

pub fn replicated_heads_arrive_on_every_rank(backend: &dyn Backend) -> Result<(), Failure> {
    for (p_tp, d_tp) in [(1, 4), (4, 1), (4, 4), (2, 4)] {
        let heads = |tp| PoolShape { kv_heads: 2, ..small(tp, 16) };
        arrives(backend, heads(p_tp), heads(d_tp)).map_err(|f| f.during(&format!("TP {p_tp} to {d_tp}")))?;
    }
    Ok(())
}

/// Prompts with no, some and all pages held by D, the last page full or not.
fn arrives(backend: &dyn Backend, p: PoolShape, d: PoolShape) -> Result<(), Failure> {
    let mut lab = Lab::new(backend, p, d, limits())?;
    let mapping = Mapping::new(&p, &d);
    for (id, (tokens, held)) in [(1, 0), (17, 0), (18, 2), (20, 4), (20, 5)].into_iter().enumerate() {
        let id = id as u64 + 1;
        let before = (lab.d.landed_pieces(), lab.p.settled());
        let prompt = Prompt::new(id, tokens);
        lab.transfer(id, id, &prompt, held)?;
        let pieces = mapping.pieces(p.pages_for(tokens) - held);
        let (landed, settled) = (lab.d.landed_pieces() - before.0, lab.p.settled() - before.1);
        ensure!(landed == pieces, "{landed} pieces landed, the prompt has {pieces}");
        ensure!(settled == pieces as u64, "{settled} pieces settled, the prompt has {pieces}");
    }
    lab.assert_over()
}
