//! Which head, layer and byte goes where, for all pairs of TP and counts of KV heads.

use super::*;

fn shape(tp: u32, kv_heads: u32, pages: u32) -> PoolShape {
    PoolShape { layers: 2, kv_heads, head_dim: 2, page_size: 4, element_bytes: 2, tp, pages }
}

/// The head whose bytes lie in `slot` of `rank`, or `None` for an unused slot.
fn head_in(shape: &PoolShape, rank: u32, slot: u32) -> Option<u32> {
    let heads = shape.heads_of_rank(rank);
    (slot < heads.len() as u32).then(|| heads.start + slot)
}

#[test]
fn every_needed_byte_is_covered_once_for_any_tp_pair_and_head_count() {
    for kv_heads in 1..=8 {
        for p_tp in [1, 2, 3, 4, 8] {
            for d_tp in [1, 2, 3, 4, 8] {
                let (p, d) = (shape(p_tp, kv_heads, 5), shape(d_tp, kv_heads, 7));
                let mapping = Mapping::new(&p, &d);
                let mut covered = vec![vec![0u32; d.heads_per_rank() as usize]; d_tp as usize];
                for route in mapping.routes() {
                    for step in 0..route.heads {
                        let slot = route.decode_head + step;
                        let want = head_in(&d, route.decode_rank, slot);
                        let sent = head_in(&p, route.prefill_rank, route.prefill_head + step);
                        assert!(want.is_some() && want == sent, "{kv_heads} heads, {p_tp}->{d_tp}: {route:?}");
                        covered[route.decode_rank as usize][slot as usize] += 1;
                    }
                    assert_eq!(mapping.bytes(route), route.heads as usize * d.head_bytes());
                }
                for rank in 0..d_tp {
                    for slot in 0..d.heads_per_rank() {
                        let needed = u32::from(head_in(&d, rank, slot).is_some());
                        assert_eq!(covered[rank as usize][slot as usize], needed);
                    }
                }
            }
        }
    }
}

#[test]
fn the_same_tp_moves_each_rank_of_a_page_as_one_piece() {
    for tp in [1, 2, 4] {
        assert_eq!(Mapping::new(&shape(tp, 8, 1), &shape(tp, 8, 1)).routes().len(), tp as usize);
    }
}

#[test]
fn all_ranks_together_hold_all_heads() {
    for kv_heads in 1..=8 {
        for tp in 1..=8 {
            let shape = shape(tp, kv_heads, 1);
            let mut held: Vec<u32> = (0..tp).flat_map(|rank| shape.heads_of_rank(rank)).collect();
            held.dedup();
            assert_eq!(held, (0..kv_heads).collect::<Vec<_>>(), "{kv_heads} heads over {tp} ranks");
            assert!((0..tp).all(|rank| shape.heads_of_rank(rank).len() <= shape.heads_per_rank() as usize));
        }
    }
}

#[test]
fn a_piece_set_counts_each_piece_once() {
    let mut set = PieceSet::new(65);
    assert!(!set.insert(65));
    for piece in 0..65 {
        assert!(!set.is_full());
        assert!(set.insert(piece));
        assert!(!set.insert(piece));
    }
    assert!(set.is_full());
}

/// A byte that says which element of the model's KV cache it belongs to. Never 0, the canary.
fn element(page: usize, head: u32, offset: usize) -> u8 {
    let mixed = (page as u64 * 31 + u64::from(head) * 1009 + offset as u64 * 7919).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    1 + ((mixed >> 40) % 255) as u8
}

/// The pools of a worker, one per rank, in which `pages[i]` holds page `first + i` of a prompt.
fn pools(shape: &PoolShape, pages: &[u32], first: usize, filled: bool) -> Vec<Vec<u8>> {
    let mut pools = vec![vec![0; shape.pool_bytes()]; shape.tp as usize];
    for rank in (0..shape.tp).filter(|_| filled) {
        for (slot, head) in shape.heads_of_rank(rank).enumerate() {
            for (at, &page) in pages.iter().enumerate() {
                let start = shape.head_offset(page, slot as u32);
                for offset in 0..shape.head_bytes() {
                    pools[rank as usize][start + offset] = element(first + at, head, offset);
                }
            }
        }
    }
    pools
}

/// Moves the pages that D does not hold, piece by piece, and compares every byte of D's pools. Returns the pieces.
fn assert_moved(p: &PoolShape, d: &PoolShape, held: usize, layers_per_group: u32) -> usize {
    let case = format!("{p:?} to {d:?}, {held} held, groups of {layers_per_group}");
    let (p_pages, d_pages) = ([4, 0, 3], &[1, 5, 2][held..]);
    let mapping = Mapping::grouped(p, d, layers_per_group);
    let source = pools(p, &p_pages, 0, true);
    let mut target = pools(d, d_pages, held, false);
    for piece in 0..mapping.pieces(d_pages.len()) {
        let (at, route) = mapping.split(piece);
        assert!(route.heads == 1 || route.layers == p.layers, "{case}: a piece is contiguous: {route:?}");
        assert!(route.layers <= layers_per_group.min(p.layers), "{case}: {route:?}");
        let from = route.source_offset(p, p_pages[held + at]);
        let to = route.target_offset(d, d_pages[at]);
        let bytes = mapping.bytes(route);
        let target = &mut target[route.decode_rank as usize][to..to + bytes];
        assert!(target.iter().all(|&byte| byte == 0), "{case}: piece {piece} covers bytes a second time");
        target.copy_from_slice(&source[route.prefill_rank as usize][from..from + bytes]);
    }
    assert!(target == pools(d, d_pages, held, true), "{case}: D's pools are not what P computed");
    mapping.pieces(d_pages.len())
}

#[test]
fn each_needed_byte_moves_once_for_all_tps_heads_pages_prefixes_and_layer_groups() {
    for kv_heads in 1..=8 {
        for p_tp in [1, 2, 3, 4, 8] {
            for d_tp in [1, 2, 3, 4, 8] {
                for (page_size, held) in [(1, 0), (4, 0), (4, 1), (1, 2), (4, 3)] {
                    let p = PoolShape { layers: 3, page_size, ..shape(p_tp, kv_heads, 5) };
                    let d = PoolShape { layers: 3, page_size, ..shape(d_tp, kv_heads, 6) };
                    let whole = assert_moved(&p, &d, held, 3);
                    assert!(whole <= assert_moved(&p, &d, held, 2), "groups make no fewer pieces");
                    assert_moved(&p, &d, held, 1);
                    assert_eq!(whole, assert_moved(&p, &d, held, 3 + kv_heads));
                }
            }
        }
    }
}
