//! A team of threads that run the tasks of one call together: the caller and its helpers.
//!
//! Helpers spin for some tens of microseconds after the last task (the next call of the same step comes sooner) and
//! then park, so an idle team costs nothing. Tasks are claimed one at a time; a helper that comes too late takes none,
//! and the caller does not wait for it.
#![allow(unsafe_code)]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{JoinHandle, Thread},
};

/// Rounds of looking for work before a helper parks, each about 50 ns.
const SPINS_MAX: u32 = 1000;

type Task<'a> = &'a (dyn Fn(usize, usize) + Sync);

pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<Helper>,
    /// Held by the caller for the length of one call: the job slot is one.
    call: Mutex<()>,
}

struct Helper {
    thread: Thread,
    handle: Option<JoinHandle<()>>,
}

struct Shared {
    /// Number of tasks of the current call (high half) and the next to claim (low half).
    claims: AtomicU64,
    /// Points to the caller's `Task`, valid while a task of the call is claimed and unfinished.
    job: AtomicPtr<Task<'static>>,
    finished: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    parked: Vec<AtomicBool>,
}

impl Shared {
    /// The next task of the current call, if one is left.
    fn claim(&self) -> Option<usize> {
        let mut word = self.claims.load(Ordering::Acquire);
        while word & 0xffff_ffff < word >> 32 {
            match self.claims.compare_exchange_weak(word, word + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some((word & 0xffff_ffff) as usize),
                Err(now) => word = now,
            }
        }
        None
    }

    fn work(&self, thread: usize) -> bool {
        let mut any = false;
        while let Some(task) = self.claim() {
            any = true;
            // SAFETY: the claimed task is unfinished, so `Team::run` has not returned and its `Task` is alive; the
            // claim acquired the store of `job` that came before the call's claims were published.
            let job = unsafe { *self.job.load(Ordering::Relaxed) };
            if catch_unwind(AssertUnwindSafe(|| job(task, thread))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.finished.fetch_add(1, Ordering::Release);
        }
        any
    }

    fn help(&self, thread: usize) {
        let mut idle = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if self.work(thread) {
                idle = 0;
                continue;
            }
            idle += 1;
            if idle < SPINS_MAX {
                std::hint::spin_loop();
                continue;
            }
            let parked = &self.parked[thread - 1];
            parked.store(true, Ordering::SeqCst);
            let word = self.claims.load(Ordering::SeqCst);
            if word & 0xffff_ffff >= word >> 32 && !self.stop.load(Ordering::SeqCst) {
                std::thread::park();
            }
            parked.store(false, Ordering::SeqCst);
            idle = 0;
        }
    }
}

impl Team {
    /// A team of `threads` in all, the caller among them.
    ///
    /// # Errors
    /// When the system gives no more threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            claims: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            finished: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut team = Self { shared, helpers: Vec::new(), call: Mutex::new(()) };
        for thread in 1..threads {
            let shared = team.shared.clone();
            let handle =
                std::thread::Builder::new().name(format!("cpu-{thread}")).spawn(move || shared.help(thread))?;
            team.helpers.push(Helper { thread: handle.thread().clone(), handle: Some(handle) });
        }
        Ok(team)
    }

    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `task(index, thread)` for each index below `tasks` and returns when all have ended. `thread` is below
    /// [`Self::threads`] and no two tasks run at once with the same.
    ///
    /// # Panics
    /// If a task panicked, after all have ended.
    pub fn run(&self, tasks: usize, task: Task<'_>) {
        if self.helpers.is_empty() || tasks <= 1 {
            (0..tasks).for_each(|index| task(index, 0));
            return;
        }
        assert!(tasks < 1 << 31, "{tasks} tasks in one call");
        let _call = self.call.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.shared;
        shared.finished.store(0, Ordering::Relaxed);
        let job: *const Task<'_> = &task;
        shared.job.store(job.cast_mut().cast(), Ordering::Relaxed);
        shared.claims.store((tasks as u64) << 32, Ordering::SeqCst);
        for (parked, helper) in shared.parked.iter().zip(&self.helpers) {
            if parked.load(Ordering::SeqCst) && parked.swap(false, Ordering::SeqCst) {
                helper.thread.unpark();
            }
        }
        shared.work(0);
        let mut spins = 0;
        while shared.finished.load(Ordering::Acquire) < tasks {
            spins += 1;
            if spins < SPINS_MAX { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        if shared.panicked.swap(false, Ordering::Relaxed) {
            panic!("a task of the CPU backend panicked; its message is above");
        }
    }

    /// Runs `f(item, thread)` for each item, in no order.
    pub fn for_each<T: Send>(
        &self,
        items: impl IntoIterator<IntoIter: ExactSizeIterator<Item = T> + Send>,
        f: impl Fn(T, usize) + Sync,
    ) {
        let items = items.into_iter();
        let tasks = items.len();
        let items = Mutex::new(items);
        self.run(tasks, &|_, thread| {
            let item = items.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).next();
            f(item.expect("as many items as tasks"), thread);
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for helper in &mut self.helpers {
            helper.thread.unpark();
            if let Some(handle) = helper.handle.take() {
                // A helper catches what its tasks throw, so it ends in order.
                let _ = handle.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_team() {
        for threads in 1..=4 {
            let team = Team::new(threads).unwrap();
            for tasks in [0, 1, 2, 3, 100, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                team.run(tasks, &|task, thread| {
                    assert!(thread < threads);
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn many_short_calls_lose_nothing() {
        let team = Team::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        for _ in 0..20_000 {
            team.run(5, &|task, _| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 200_000);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(2).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            team.run(8, &|task, _| assert_ne!(task, 3, "thrown on purpose"));
        }));
        assert!(outcome.is_err());
        let done = AtomicUsize::new(0);
        team.run(8, &|_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 8);
    }
}
