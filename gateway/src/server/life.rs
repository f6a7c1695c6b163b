//! A process's life from its first accepted connection to its end: serving, handing over to a new process, taking back what
//! a dead one had, stopping.
//!
//! ```text
//!   Entering ──(old process relieved or dead)──▶ Serving ──(told to stop)──▶ Stopping ──▶ the end
//!   (only with --upgrade)                         ▲    │
//!                       (successor died, or never │    │ (successor ready)
//!                        said that it serves)     │    ▼
//!                                                Relieved ──(last connection ended, or the drain's limit)──▶ the end
//! ```

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use pingora::server::{ShutdownSignal, ShutdownSignalWatch};
use tokio::time::{Instant, sleep, sleep_until};

use super::Addresses;
use super::sockets::Sockets;
use super::stop::{How, Stop, Wishes};
use super::upgrade::{self, Meeting, OldProcess, Predecessor, Probation, Successor, Word};
use crate::error::StartError;
use crate::gateway::Gateway;

/// How long clients whose exchange outlived the grace may take to receive its end.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// For this long after a new process said that it serves, its death makes the old one serve again.
const PROBATION: Duration = Duration::from_secs(10);
/// How often a new process looks whether its workers are ready.
const READY_LOOK: Duration = Duration::from_millis(20);

/// What the process does once it serves: says so.
pub type Announce = Box<dyn FnOnce(Addresses) -> Result<(), StartError> + Send>;

/// All that decides about this process's life.
pub struct Life {
    pub gateway: Arc<Gateway>,
    pub sockets: Arc<Sockets>,
    pub addresses: Addresses,
    pub stop: Stop,
    pub upgrade_sock: Option<PathBuf>,
    /// Taken once each; the lock is only there because pingora lends this out shared.
    pub start: Mutex<Option<Start>>,
    /// Why the process ended, where that was not as it should be.
    pub failure: Arc<Mutex<Option<StartError>>>,
}

/// What is needed at the beginning only.
pub struct Start {
    /// The process to take over from.
    pub predecessor: Option<Predecessor>,
    pub announce: Announce,
}

/// Why serving ended.
enum End {
    Stop(How),
    Relieved(Successor),
    /// Accepting had stopped for a new process that then did not serve.
    Unrelieved(String),
    /// The old process serves on after all.
    Recalled(String),
}

/// How a relieved process goes on.
enum Next {
    Leave,
    Stop(How),
    ServeAgain(&'static str),
}

#[async_trait]
impl ShutdownSignalWatch for Life {
    async fn recv(&self) -> ShutdownSignal {
        if let Err(error) = self.live().await {
            *self.failure.lock().expect("no panic under this lock") = Some(error);
        }
        // Pingora's runtimes end without delay; nothing is left to wait for.
        ShutdownSignal::FastShutdown
    }
}

impl Life {
    async fn live(&self) -> Result<(), StartError> {
        let mut wishes = Wishes::new(&self.stop);
        let Some(start) = self.start.lock().expect("no panic under this lock").take() else { return Ok(()) };
        let mut old = None;
        if let Some(predecessor) = start.predecessor {
            let mut process = predecessor.awake()?;
            tokio::select! {
                entered = self.enter(&mut process) => entered?,
                _ = wishes.next() => {
                    process.tell_refused("it was told to stop").await;
                    return Ok(());
                }
            }
            old = Some(process);
        }
        // All that may fail comes before the first connection is accepted. Until then connections wait in the kernel, and the
        // old process, which sees this one end, accepts them.
        let mut meeting = self.meet()?;
        (start.announce)(self.addresses)?;
        self.sockets.open();
        if let Some(process) = &mut old {
            process.tell_serving().await;
        }
        loop {
            match self.serve(&mut wishes, meeting.as_ref(), &mut old).await {
                End::Stop(how) => {
                    if let Some(process) = &mut old {
                        process.tell_leaving().await;
                    }
                    self.end(how, &mut wishes).await;
                    return Ok(());
                }
                End::Recalled(why) => {
                    self.end(How::Drain, &mut wishes).await;
                    return Err(StartError::Upgrade(format!("the running gateway serves on: {why}")));
                }
                End::Relieved(successor) => {
                    // Whom this one took over from must not wake up when this one leaves.
                    if let Some(process) = &mut old {
                        process.tell_leaving().await;
                    }
                    match self.relieved(successor, &mut wishes).await {
                        Next::Leave => return Ok(()),
                        Next::Stop(how) => {
                            self.end(how, &mut wishes).await;
                            return Ok(());
                        }
                        Next::ServeAgain(why) => self.serve_again(why, &mut meeting),
                    }
                }
                End::Unrelieved(why) => self.serve_again(&why, &mut meeting),
            }
        }
    }

    fn meet(&self) -> Result<Option<Meeting>, StartError> {
        let Some(path) = &self.upgrade_sock else { return Ok(None) };
        let made = Meeting::at(path);
        made.map(Some).map_err(|e| StartError::Upgrade(format!("cannot listen at {}: {e}", path.display())))
    }

    /// Gets ready, then has the old process stop accepting.
    async fn enter(&self, old: &mut OldProcess) -> Result<(), StartError> {
        let limit = self.gateway.config().upgrade.timeout;
        tokio::select! {
            () = self.until_ready() => {}
            () = sleep(limit) => {
                let what = format!("the workers are not ready after {} s (--upgrade-timeout-secs)", limit.as_secs());
                old.tell_refused(&what).await;
                return Err(StartError::Upgrade(format!("{what}; the running gateway serves on")));
            }
            word = old.word() => match word {
                Word::Refused(why) => return Err(StartError::Upgrade(why)),
                // Nobody accepts: better served by who can be served than not at all.
                Word::Died | Word::Relieved => {
                    tracing::warn!(pid = old.pid, "upgrade: the old process is gone");
                    return Ok(());
                }
            },
        }
        tracing::info!(pid = old.pid, "upgrade: the workers are ready, the old process may stop accepting");
        old.tell_ready().await;
        match old.word().await {
            Word::Refused(why) => Err(StartError::Upgrade(format!("the running gateway serves on: {why}"))),
            Word::Relieved => {
                tracing::info!(pid = old.pid, "upgrade: took over");
                Ok(())
            }
            Word::Died => {
                tracing::warn!(pid = old.pid, "upgrade: the old process is gone");
                Ok(())
            }
        }
    }

    async fn until_ready(&self) {
        while !self.gateway.is_ready() {
            sleep(READY_LOOK).await;
        }
    }

    /// Serves until told to stop, or until another process serves instead.
    async fn serve(&self, wishes: &mut Wishes, meeting: Option<&Meeting>, old: &mut Option<OldProcess>) -> End {
        let mut successor = loop {
            let asked = async {
                match meeting {
                    Some(meeting) => {
                        let limit = self.gateway.config().upgrade.timeout;
                        upgrade::next_successor(meeting, &self.sockets, limit, |why| self.handover_failed(why)).await
                    }
                    None => std::future::pending().await,
                }
            };
            let recalled = async {
                match old {
                    Some(process) => process.word().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                how = wishes.next() => return End::Stop(how),
                word = recalled => match word {
                    Word::Refused(why) => return End::Recalled(why),
                    // It has left; all is this process's.
                    Word::Died | Word::Relieved => {
                        *old = None;
                        continue;
                    }
                },
                successor = asked => break successor,
            }
        };
        self.gateway.set_draining(true);
        self.sockets.close();
        let relieved = tokio::select! {
            relieved = successor.relieve() => relieved,
            how = wishes.next() => return End::Stop(how),
        };
        match relieved {
            Ok(()) => {
                self.gateway.metrics.server.handed_over();
                End::Relieved(successor)
            }
            Err(why) => {
                successor.refuse(&why).await;
                self.gateway.metrics.server.handover_failed();
                End::Unrelieved(why)
            }
        }
    }

    fn handover_failed(&self, why: &str) {
        self.gateway.metrics.server.handover_failed();
        tracing::warn!("upgrade: {why}; this process serves on");
    }

    fn serve_again(&self, why: &str, meeting: &mut Option<Meeting>) {
        tracing::warn!("upgrade: {why}; this process accepts again");
        self.gateway.set_draining(false);
        self.sockets.open();
        if meeting.as_ref().is_some_and(|meeting| !meeting.is_in_place()) {
            match self.meet() {
                Ok(new) => *meeting = new,
                Err(error) => tracing::error!(%error, "no further upgrade of this process is possible"),
            }
        }
    }

    /// Lets the connections end, ready to serve again where the successor dies within its probation.
    async fn relieved(&self, successor: Successor, wishes: &mut Wishes) -> Next {
        let limit = self.gateway.config().deadlines.handed_over;
        tracing::info!(
            pid = successor.pid,
            "upgrade: handed over; running exchanges may end within {} s (--drain-timeout-secs)",
            limit.as_secs()
        );
        let drained_by = Instant::now() + limit;
        let proven_at = Instant::now() + PROBATION;
        let mut successor = Some(successor);
        loop {
            let on_probation = successor.is_some();
            let probation = async {
                match &mut successor {
                    Some(successor) => successor.ended().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                how = wishes.next() => return Next::Stop(how),
                ended = probation => match ended {
                    Probation::Died => return Next::ServeAgain("the new process died"),
                    Probation::Leaves => tracing::info!("upgrade: the new process stops, too"),
                },
                () = sleep_until(proven_at), if on_probation => {}
                () = self.gateway.until_no_connection(), if !on_probation => {
                    tracing::info!("upgrade: all connections ended");
                    return Next::Leave;
                }
                () = sleep_until(drained_by) => {
                    tracing::warn!("upgrade: exchanges still ran after {} s", limit.as_secs());
                    self.break_off().await;
                    return Next::Leave;
                }
            }
            // Proven, or leaving: the sockets are no more this process's business.
            self.sockets.release();
            successor = None;
        }
    }

    /// Stops for good.
    async fn end(&self, how: How, wishes: &mut Wishes) {
        self.gateway.set_draining(true);
        self.sockets.release();
        if how == How::Drain {
            let limit = self.gateway.config().deadlines.drain;
            tracing::info!("stopping: no new connections, running exchanges may end within {} s", limit.as_secs());
            tokio::select! {
                _ = self.gateway.until_idle() => tracing::info!("all exchanges ended"),
                _ = sleep(limit) => tracing::warn!("exchanges still ran after {} s", limit.as_secs()),
                _ = wishes.next() => tracing::warn!("told again to stop: running exchanges are broken off"),
            }
        }
        self.break_off().await;
    }

    /// What still runs ends now; its clients are told.
    async fn break_off(&self) {
        self.gateway.end_grace();
        tokio::select! {
            _ = self.gateway.until_idle() => {}
            _ = sleep(LAST_WORDS) => {}
        }
    }
}
