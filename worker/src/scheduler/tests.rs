//! Plans without a device.
use proptest::prelude::*;
use tandem_handoff::ids::Time;

use super::*;
use crate::backend::LogitRows;

fn limits(role: Role) -> Limits {
    Limits {
        role,
        page_size: 4,
        chunk_tokens: 8,
        running_max: 4,
        reserved_decode_tokens: 4,
        prompt_rows: 4,
        context: 1000,
        planted: Planted::default(),
    }
}

fn sequence(id: u64, prompt: usize) -> Sequence {
    Sequence::new(SeqId(id), Time(0), &vec![1; prompt], prompt + 20, None)
}

fn spans(plan: &Plan) -> Vec<(u64, usize, usize, bool)> {
    plan.slices.iter().map(|slice| (slice.id.0, slice.start, slice.len, slice.last)).collect()
}

#[test]
fn chunks_that_are_not_the_last_end_on_a_page_boundary() {
    let mut scheduler = Scheduler::new(limits(Role::Null), 20);
    scheduler.add(sequence(1, 3));
    scheduler.add(sequence(2, 11));
    let plan = scheduler.plan();
    assert_eq!(spans(&plan), [(1, 0, 3, true), (2, 0, 4, false)]);
    scheduler.computed(SeqId(1), 3);
    scheduler.append(SeqId(1), 9);
    scheduler.computed(SeqId(2), 4);
    assert_eq!(spans(&scheduler.plan()), [(1, 3, 1, true), (2, 4, 7, true)]);
}

#[test]
fn a_prompt_that_wants_its_rows_goes_in_small_chunks() {
    let mut scheduler = Scheduler::new(limits(Role::Null), 20);
    scheduler.add(Sequence { prompt_rows_from: Some(6), ..sequence(1, 12) });
    let plan = scheduler.plan();
    assert_eq!((plan.slices[0].len, plan.slices[0].rows), (4, LogitRows::None));
    scheduler.computed(SeqId(1), 4);
    let plan = scheduler.plan();
    assert_eq!((plan.slices[0].start, plan.slices[0].len, plan.slices[0].rows), (4, 4, LogitRows::All));
}

#[test]
fn an_unreserved_prompt_blocks_nobody_and_a_large_one_keeps_its_turn() {
    let mut scheduler = Scheduler::new(limits(Role::Prefill), 4);
    scheduler.add(sequence(1, 4));
    scheduler.add(sequence(2, 12));
    scheduler.add(sequence(3, 12));
    scheduler.add(sequence(4, 4));
    scheduler.reserved(SeqId(2));
    scheduler.reserved(SeqId(3));
    scheduler.reserved(SeqId(4));
    assert_eq!(spans(&scheduler.plan()), [(2, 0, 8, false)]);
    assert_eq!(scheduler.waiting().iter().map(|s| s.id.0).collect::<Vec<_>>(), [1, 3, 4]);
}

#[test]
fn decode_keeps_room_for_live_sequences_and_waits_for_returning_ones() {
    let mut scheduler = Scheduler::new(limits(Role::Decode), 5);
    for id in 1..=3 {
        scheduler.add(sequence(id, 4));
    }
    let (first, pages) = scheduler.next_reserve().unwrap();
    assert_eq!((first.id, pages.len()), (SeqId(1), 1));
    assert_eq!(scheduler.next_reserve().unwrap().0.id, SeqId(2));
    assert!(scheduler.next_reserve().is_none(), "3 free pages: 1 to reserve, and 1 to grow for each of three");
    assert!(scheduler.plan().slices.is_empty());
}

#[test]
fn the_newest_landed_is_preempted_last() {
    let mut scheduler = Scheduler::new(limits(Role::Decode), 3);
    for id in 1..=3 {
        // As if landed: the pages of an attempt cannot be made without its proof.
        let pages = scheduler.pool.allocate_many(1).unwrap();
        scheduler.handoff.insert(SeqId(id), sequence(id, 4));
        scheduler.landed(SeqId(id), pages).unwrap();
        scheduler.append(SeqId(id), 7);
    }
    assert_eq!(spans(&scheduler.plan()), [(3, 4, 1, true)], "2 goes for 1, then 1 for the one that just landed");
    assert_eq!(scheduler.retracted().iter().map(|s| s.id.0).collect::<Vec<_>>(), [1, 2]);
    let mut scheduler = Scheduler::new(limits(Role::Decode), 4);
    for id in 1..=2 {
        let pages = scheduler.pool.allocate_many(2).unwrap();
        scheduler.handoff.insert(SeqId(id), sequence(id, 8));
        scheduler.landed(SeqId(id), pages).unwrap();
    }
    scheduler.append(SeqId(1), 7);
    scheduler.append(SeqId(2), 7);
    assert_eq!(spans(&scheduler.plan()), [(2, 8, 1, true)]);
    assert_eq!(scheduler.retracted().front().map(|s| s.id), Some(SeqId(1)));
    scheduler.add(sequence(3, 1));
    assert!(scheduler.next_reserve().is_none(), "no Reserve while one waits to return");
}

proptest! {
    /// faults 23: the union of pushed ranges is each page exactly once, in order, for any chunk and length.
    #[test]
    fn pushed_ranges_cover_each_page_once(prompt in 1usize..60, chunk in 1usize..30, page_size in 1usize..9) {
        let limits = Limits { page_size, chunk_tokens: chunk.max(page_size), ..limits(Role::Prefill) };
        let mut scheduler = Scheduler::new(limits, 80);
        scheduler.add(sequence(1, prompt));
        scheduler.reserved(SeqId(1));
        let mut pushed = 0;
        loop {
            let plan = scheduler.plan();
            let slice = plan.slices[0];
            scheduler.computed(SeqId(1), slice.len);
            let range = scheduler.push(SeqId(1));
            prop_assert_eq!(range.start, pushed);
            pushed = range.end;
            if slice.last {
                break;
            }
            prop_assert_eq!((slice.start + slice.len) % page_size, 0);
        }
        prop_assert_eq!(pushed, prompt.div_ceil(page_size));
        scheduler.prefilled(SeqId(1));
        scheduler.remove(SeqId(1));
        scheduler.check();
        prop_assert_eq!(scheduler.pool().free(), 80);
    }
}
