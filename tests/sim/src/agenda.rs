//! What happens when: events in the order of virtual time, and among equal times in the order they were made. *Pure.*

use std::{cmp::Reverse, collections::BinaryHeap};

#[derive(Debug)]
pub struct Agenda<E> {
    due: BinaryHeap<Reverse<(u64, usize)>>,
    /// By number; taken when it is due.
    events: Vec<Option<E>>,
}

impl<E> Default for Agenda<E> {
    fn default() -> Self {
        Self { due: BinaryHeap::new(), events: Vec::new() }
    }
}

impl<E> Agenda<E> {
    pub fn at(&mut self, time: u64, event: E) {
        self.due.push(Reverse((time, self.events.len())));
        self.events.push(Some(event));
    }

    pub fn next(&self) -> Option<u64> {
        self.due.peek().map(|Reverse((time, _))| *time)
    }

    pub fn pop(&mut self) -> Option<(u64, E)> {
        let Reverse((time, number)) = self.due.pop()?;
        Some((time, self.events[number].take().expect("an event is due once")))
    }

    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }
}
