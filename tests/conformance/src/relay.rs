//! A relay between two streams that passes as much as its gate allows: it plays a slow network, a peer that has stopped
//! reading, and, when its task is aborted, a cut.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
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

/// Passes bytes on until either end is gone, and what is said back, freely.
pub async fn relay<S: AsyncRead + AsyncWrite>(gate: Arc<Gate>, near: S, far: S) {
    let (mut from_p, mut to_p) = tokio::io::split(near);
    let (mut from_d, mut to_d) = tokio::io::split(far);
    let forth = async {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let filled = from_p.read(&mut buffer).await?;
            if filled == 0 {
                return to_d.shutdown().await;
            }
            let mut passed = 0;
            while passed < filled {
                let end = passed + gate.take(filled - passed).await;
                to_d.write_all(&buffer[passed..end]).await?;
                passed = end;
            }
        }
    };
    let back = async { tokio::io::copy(&mut from_d, &mut to_p).await };
    // A close or an error of either end ends both.
    let ended: io::Result<()> = tokio::select! {
        ended = forth => ended,
        ended = back => ended.map(|_| ()),
    };
    drop(ended);
}
