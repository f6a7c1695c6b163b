//! A relay between two streams that passes as much as its gate allows: it plays a slow network, a peer that has stopped
//! reading, and a cut: when its task is aborted both ends are gone at once.

use std::{
    io,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf},
    sync::Notify,
};

use crate::backend::Flow;

const BUFFER_BYTES: usize = 64 * 1024;

/// How much all relays of a link may pass.
pub struct Gate {
    flow: Mutex<Flow>,
    changed: Notify,
}

impl Default for Gate {
    fn default() -> Self {
        Self { flow: Mutex::new(Flow::Open), changed: Notify::new() }
    }
}

impl Gate {
    pub fn set(&self, flow: Flow) {
        *self.lock() = flow;
        self.changed.notify_waiters();
    }

    /// Waits until something may pass, and takes at most `most` bytes of the allowance.
    async fn take(&self, most: usize) -> usize {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            match &mut *self.lock() {
                Flow::Open => return most,
                Flow::Bytes(left) if *left > 0 => {
                    let taken = usize::try_from(*left).unwrap_or(most).min(most);
                    *left -= taken as u64;
                    return taken;
                }
                Flow::Bytes(_) | Flow::Held => {}
            }
            changed.await;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Passes bytes on until D's end is gone; what D says back passes freely. When P's end is gone, or at `cut`, D hears the
/// end of the stream, and P hears it once D has closed its own: a relay must not claim for D that it has.
pub async fn relay<S: AsyncRead + AsyncWrite>(gate: Arc<Gate>, cut: Arc<Notify>, near: S, far: S) {
    let (mut from_p, mut to_p) = tokio::io::split(near);
    let (mut from_d, mut to_d) = tokio::io::split(far);
    let mut back = pin!(tokio::io::copy(&mut from_d, &mut to_p));
    tokio::select! {
        _ = &mut back => return,
        () = cut.notified() => {}
        // An error means that one of the two is gone, as the end of the stream does.
        _ = pass(&gate, &mut from_p, &mut to_d) => {}
    }
    if to_d.shutdown().await.is_ok() {
        let _ = back.await;
    }
}

/// From P to D, as the gate allows, to the end of P's stream.
async fn pass<S: AsyncRead + AsyncWrite>(
    gate: &Gate,
    from_p: &mut ReadHalf<S>,
    to_d: &mut WriteHalf<S>,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let filled = from_p.read(&mut buffer).await?;
        if filled == 0 {
            return Ok(());
        }
        let mut passed = 0;
        while passed < filled {
            let end = passed + gate.take(filled - passed).await;
            to_d.write_all(&buffer[passed..end]).await?;
            passed = end;
        }
    }
}
