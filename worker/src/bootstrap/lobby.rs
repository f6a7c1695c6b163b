//! The connections that have not passed their handshake: so many at most, the oldest gives way. *Pure.*
//!
//! A handshake takes some round trips, a silent stranger stays until its deadline: the oldest connection is the one that
//! least looks like a worker.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

pub(super) struct Lobby {
    places_max: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    entered: u64,
    /// By order of entrance.
    present: BTreeMap<u64, Arc<Notify>>,
}

/// One connection's place, free again when dropped.
pub(super) struct Place {
    lobby: Arc<Lobby>,
    number: u64,
    displaced: Arc<Notify>,
}

impl Lobby {
    pub fn new(places_max: usize) -> Self {
        Self { places_max, inner: Mutex::default() }
    }

    /// A place for a newcomer, and whether another connection had to give way for it.
    pub fn enter(lobby: &Arc<Lobby>) -> (Place, bool) {
        let mut inner = lobby.inner();
        let oldest = if inner.present.len() < lobby.places_max { None } else { inner.present.pop_first() };
        if let Some((_, oldest)) = &oldest {
            oldest.notify_one();
        }
        let number = inner.entered;
        inner.entered += 1;
        let displaced = Arc::new(Notify::new());
        inner.present.insert(number, Arc::clone(&displaced));
        (Place { lobby: Arc::clone(lobby), number, displaced }, oldest.is_some())
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Resolves when the connection has to give way.
    pub async fn displaced(&self) {
        self.displaced.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.lobby.inner().present.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn the_oldest_gives_way_and_a_place_is_free_again_when_dropped() {
        let lobby = Arc::new(Lobby::new(2));
        let (first, _) = Lobby::enter(&lobby);
        let (second, displaced) = Lobby::enter(&lobby);
        assert!(!displaced && first.displaced().now_or_never().is_none());
        let (third, displaced) = Lobby::enter(&lobby);
        assert!(displaced && first.displaced().now_or_never().is_some());
        assert!(second.displaced().now_or_never().is_none() && third.displaced().now_or_never().is_none());
        drop((first, third));
        let (_fourth, displaced) = Lobby::enter(&lobby);
        assert!(!displaced, "the third's place was free");
        assert_eq!(lobby.inner().present.len(), 2);
    }
}
