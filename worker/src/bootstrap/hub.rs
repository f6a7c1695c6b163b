//! The open control channels of one worker, and the bounded queue on which they report to its role.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tandem_fabric::Waker;
use tandem_handoff::{
    ids::{Channel, Incarnation},
    layout::PoolShape,
    ticket::Address,
    wire::{Cause, CauseKind, Frame, Side},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::{ControlEvent, ControlPlane, handshake::Nonces};

/// Events that wait for the engine; the channels' readers wait when it is full.
const EVENTS_MAX: usize = 1024;
/// Frames that wait for a channel's writer; a channel that is so far behind is closed.
pub(super) const FRAMES_MAX: usize = 4096;
/// Addresses that wait to be dialled.
const DIALS_MAX: usize = 1024;

/// One open channel as the others see it.
pub(super) struct Line {
    pub frames: mpsc::Sender<Frame>,
    /// Ends the channel's task, for this reason.
    pub close: oneshot::Sender<String>,
    pub nonces: Nonces,
    pub peer_shape: PoolShape,
}

impl Line {
    /// The reason goes out first: it is what the channel's task then finds, and not merely that its frames end.
    fn end(self, why: &str) {
        let Line { frames, close, .. } = self;
        // A task that has ended needs no reason.
        let _ = close.send(why.to_owned());
        drop(frames);
    }
}

/// Shared by the driver's tasks and the role's [`NetControl`].
pub(super) struct Hub {
    lines: Mutex<HashMap<Channel, Line>>,
    events: mpsc::Sender<ControlEvent>,
    waker: Waker,
}

impl Hub {
    pub fn lines(&self) -> MutexGuard<'_, HashMap<Channel, Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The open channel to this prefill process and its shape, if there is one.
    pub fn channel_to(&self, prefill: Incarnation) -> Option<(Channel, PoolShape)> {
        let lines = self.lines();
        let found = lines.iter().find(|(channel, _)| channel.prefill == prefill);
        found.map(|(channel, line)| (*channel, line.peer_shape))
    }

    /// Waits for room in the queue. An error means that the role is gone.
    pub async fn report(&self, event: ControlEvent) -> Result<(), ()> {
        self.events.send(event).await.map_err(|_| ())?;
        (self.waker)();
        Ok(())
    }
}

/// The control channels behind a role. Dropping it ends the driver's tasks and closes the channels.
pub(super) struct NetControl {
    hub: Arc<Hub>,
    events: mpsc::Receiver<ControlEvent>,
    dials: Option<mpsc::Sender<Address>>,
    /// Events that arise in a call of the role itself.
    own: Vec<ControlEvent>,
    driver: Option<JoinHandle<()>>,
}

impl NetControl {
    pub fn new(waker: Waker) -> (Self, Arc<Hub>) {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let hub = Arc::new(Hub { lines: Mutex::default(), events: sender, waker });
        let control = Self { hub: Arc::clone(&hub), events, dials: None, own: Vec::new(), driver: None };
        (control, hub)
    }

    /// The queue of addresses for the dialler.
    pub fn dials(&mut self) -> mpsc::Receiver<Address> {
        let (sender, dials) = mpsc::channel(DIALS_MAX);
        self.dials = Some(sender);
        dials
    }

    pub fn driven_by(mut self, driver: JoinHandle<()>) -> Self {
        self.driver = Some(driver);
        self
    }
}

impl ControlPlane for NetControl {
    fn send(&mut self, channel: Channel, frame: Frame) {
        let refused = match self.hub.lines().get(&channel) {
            Some(line) => line.frames.try_send(frame).is_err(),
            None => false,
        };
        if refused {
            self.close(channel, "the peer does not read its control channel");
        }
    }

    fn close(&mut self, channel: Channel, why: &str) {
        let line = self.hub.lines().remove(&channel);
        if let Some(line) = line {
            line.end(why);
            self.own.push(ControlEvent::Down { channel, why: why.to_owned() });
            (self.hub.waker)();
        }
    }

    fn dial(&mut self, address: Address) {
        let queued = self.dials.as_ref().is_some_and(|dials| dials.try_send(address.clone()).is_ok());
        if !queued {
            let message = "too many prefill workers wait to be reached; a retry is safe";
            let cause = Cause::new(Side::Decode, CauseKind::Unavailable, message);
            self.own.push(ControlEvent::DialFailed { address, cause });
            (self.hub.waker)();
        }
    }

    fn poll(&mut self) -> Vec<ControlEvent> {
        let mut events = std::mem::take(&mut self.own);
        while let Ok(event) = self.events.try_recv() {
            events.push(event);
        }
        events
    }
}

impl Drop for NetControl {
    fn drop(&mut self) {
        if let Some(driver) = &self.driver {
            driver.abort();
        }
        for (_, line) in self.hub.lines().drain() {
            line.end("it is shutting down");
        }
    }
}
