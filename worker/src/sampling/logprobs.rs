//! Logprobs of the raw distribution: temperature 1, before penalties, bias and bans. *Pure.*

use crate::request::TokenLogprob;

/// The logprob of `token` in raw logits `[vocab]`, and of the `top` most likely tokens, ties by lower id.
pub fn of(logits: &[f32], token: u32, top: u32) -> TokenLogprob {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from((logit - max).exp())).sum();
    let log_sum = f64::from(max) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
    TokenLogprob {
        token,
        logprob: logits.get(token as usize).map_or(f32::NEG_INFINITY, |&logit| logprob(logit)),
        top: greatest(logits, top as usize).into_iter().map(|(logit, token)| (token, logprob(logit))).collect(),
    }
}

/// The `count` greatest logits, greatest first; of equal ones the lower id first.
fn greatest(logits: &[f32], count: usize) -> Vec<(f32, u32)> {
    let count = count.min(logits.len());
    let mut kept: Vec<(f32, u32)> = Vec::with_capacity(count + 1);
    for (token, &logit) in logits.iter().enumerate() {
        if kept.len() == count && kept.last().is_none_or(|&(least, _)| logit <= least) {
            continue;
        }
        let place = kept.partition_point(|&(other, _)| other >= logit);
        kept.insert(place, (logit, token as u32));
        kept.truncate(count);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uniform_row_splits_evenly_and_ties_go_to_lower_ids() {
        let found = of(&[3.0; 4], 2, 3);
        assert!((found.logprob - 0.25f32.ln()).abs() < 1e-6);
        assert_eq!(found.top.iter().map(|&(token, _)| token).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn more_alternatives_than_tokens_gives_them_all_in_order() {
        let found = of(&[0.0, 2.0, 1.0], 0, 9);
        assert_eq!(found.top.iter().map(|&(token, _)| token).collect::<Vec<_>>(), [1, 2, 0]);
        let mass: f32 = found.top.iter().map(|&(_, logprob)| logprob.exp()).sum();
        assert!((mass - 1.0).abs() < 1e-6);
        assert!(of(&[0.0], 0, 0).top.is_empty());
    }
}
