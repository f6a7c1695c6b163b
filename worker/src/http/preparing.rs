//! The turns of long bodies: parsing and tokenizing them happens off the runtime's threads, and never for more bytes at
//! once than memory and cores allow.
//!
//! A turn lasts as long as its work, also when its client has left meanwhile: what runs cannot be stopped, so it keeps
//! its place. Work that has not begun when its client leaves never begins.

use std::sync::Arc;

use tokio::{sync::Semaphore, task::JoinSet};

use super::error::ApiError;

/// Bodies in work at once, in KiB. Tokenizing takes some 200 bytes of memory per byte of text, so this is 800 MiB.
const BODIES_KIB_MAX: u32 = 4 << 10;

/// Hands out turns, first come, first served. A body counts as its KiB, but at least as one core's share: no more
/// bodies are in work than there are cores. One over the whole budget is worked on alone.
pub struct Preparing {
    kib_free: Arc<Semaphore>,
    kib_max: u32,
    kib_min: u32,
}

impl Preparing {
    pub fn new(cores: usize) -> Self {
        Self::with(cores, BODIES_KIB_MAX)
    }

    fn with(cores: usize, kib_max: u32) -> Self {
        let cores = u32::try_from(cores.max(1)).unwrap_or(kib_max).min(kib_max);
        Self { kib_free: Arc::new(Semaphore::new(kib_max as usize)), kib_max, kib_min: kib_max.div_ceil(cores) }
    }

    /// Runs `work` on a body of so many bytes when its turn comes.
    ///
    /// # Errors
    /// 500 when the work panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let kib = u32::try_from(bytes >> 10).unwrap_or(self.kib_max).clamp(self.kib_min, self.kib_max);
        let free = Arc::clone(&self.kib_free);
        let turn = free.acquire_many_owned(kib).await.map_err(|e| ApiError::internal(e.to_string()))?;
        // Dropping the set takes back work that no thread has begun.
        let mut set = JoinSet::new();
        set.spawn_blocking(move || {
            let made = work();
            drop(turn);
            made
        });
        match set.join_next().await {
            Some(Ok(made)) => Ok(made),
            Some(Err(failed)) => Err(ApiError::internal(format!("preparing the request failed: {failed}"))),
            None => Err(ApiError::internal("preparing the request was not begun")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicUsize, Ordering::SeqCst},
            mpsc,
        },
        time::Duration,
    };

    use futures_util::FutureExt;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Work that has begun and goes on until the sender is dropped, for a client that has left.
    async fn abandoned(preparing: &Preparing, bytes: usize) -> mpsc::SyncSender<()> {
        let (began, mut has_begun) = tokio::sync::mpsc::channel(1);
        let (release, wait) = mpsc::sync_channel::<()>(0);
        let work = preparing.run(bytes, move || {
            began.blocking_send(()).unwrap();
            let _ = wait.recv_timeout(LIMIT);
        });
        tokio::select! {
            _ = work => panic!("the work waits"),
            _ = has_begun.recv() => {}
        }
        release
    }

    #[tokio::test]
    async fn a_turn_lasts_as_long_as_its_work_though_the_client_left() {
        let preparing = Preparing::with(1, 64);
        let release = abandoned(&preparing, 1).await;
        assert_eq!(preparing.kib_free.available_permits(), 0, "one core, one turn");
        let ran = Arc::new(AtomicUsize::new(0));
        let count = |ran: &Arc<AtomicUsize>| {
            let ran = ran.clone();
            move || ran.fetch_add(1, SeqCst)
        };
        let mut patient = Box::pin(preparing.run(1, count(&ran)));
        let mut impatient = Box::pin(preparing.run(1, count(&ran)));
        assert!(patient.as_mut().now_or_never().is_none() && impatient.as_mut().now_or_never().is_none());
        drop(impatient);
        drop(release);
        tokio::time::timeout(LIMIT, patient).await.unwrap().unwrap();
        assert_eq!(ran.load(SeqCst), 1, "the work of the client that left while it waited never began");
    }

    #[tokio::test]
    async fn turns_are_bounded_by_bytes_and_by_cores() {
        let preparing = Preparing::with(4, 64);
        let small = abandoned(&preparing, 1).await;
        assert_eq!(preparing.kib_free.available_permits(), 48, "a small body counts as its core's share");
        let large = abandoned(&preparing, 40 << 10).await;
        assert_eq!(preparing.kib_free.available_permits(), 8);
        assert!(preparing.run(usize::MAX, || ()).now_or_never().is_none(), "one over the budget waits for all of it");
        drop((small, large));
        tokio::time::timeout(LIMIT, preparing.run(usize::MAX, || ())).await.unwrap().unwrap();
        let panic = preparing.run(1, || panic!("scripted")).await;
        assert_eq!(panic.unwrap_err().status.as_u16(), 500);
        tokio::time::timeout(LIMIT, preparing.run(usize::MAX, || ())).await.unwrap().unwrap();
    }
}
