//! Handing P's pools to D: descriptors over a Unix socket, checked before they are mapped.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use rustix::{
    cmsg_space,
    fs::{SealFlags, fcntl_get_seals, fstat, fstatfs},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};
use tandem_handoff::layout::PoolShape;
use tokio::{io::Interest, net::UnixStream};

use crate::memory::{PoolMemory, SEALS, map};

const MESSAGE_BYTES: usize = 8;
const MAGIC: u32 = u32::from_le_bytes(*b"TSF1");
/// `TMPFS_MAGIC` of Linux: the kind of file system that memory files without huge pages belong to.
const TMPFS: i64 = 0x0102_1994;

/// Why the pools of a prefill worker cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    #[error("the pools of this prefill worker are private memory; start it with shared memory in use")]
    Private,
    #[error("the prefill worker handed over something else than its pools: {0}")]
    Handover(String),
    #[error(
        "the pool of rank {rank} lacks the seals {missing}: its size or its contents could change under the reader's hands"
    )]
    Unsealed { rank: u32, missing: String },
    #[error("the pool of rank {rank} is no plain shared memory")]
    Kind { rank: u32 },
    #[error("the pool of rank {rank} has {found} bytes, by the handshake it has {wanted}")]
    Size { rank: u32, found: u64, wanted: u64 },
    #[error("the pools of the prefill worker cannot be mapped: {0}")]
    Io(#[from] io::Error),
}

/// True when the stream's other end was opened by a process of this process's user.
pub fn same_user(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw())
}

/// P's half: one message per rank, with its pool's descriptor.
///
/// # Errors
/// When the pools are private, or the peer has gone.
pub async fn send_pools(stream: &UnixStream, memories: &[Arc<PoolMemory>]) -> Result<(), ShmError> {
    for (rank, memory) in memories.iter().enumerate() {
        let descriptor = [memory.descriptor().ok_or(ShmError::Private)?];
        let message = message(rank as u32);
        let sent = stream.async_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptor)), "there is space for one");
            Ok(sendmsg(stream, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?)
        });
        if sent.await? != MESSAGE_BYTES {
            return Err(ShmError::Handover("a message went out in part".to_owned()));
        }
    }
    Ok(())
}

fn message(rank: u32) -> [u8; MESSAGE_BYTES] {
    let mut out = [0; MESSAGE_BYTES];
    out[..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4..].copy_from_slice(&rank.to_le_bytes());
    out
}

/// The pools of one prefill worker, mapped for reading.
#[derive(Debug)]
pub struct PeerPools(Vec<View>);

/// D's half: receives, checks and maps the pools of a prefill worker whose handshake said `shape`.
///
/// # Errors
/// When what comes is not exactly the sealed pools of that shape. Nothing stays mapped then.
pub async fn receive_pools(stream: &UnixStream, shape: &PoolShape) -> Result<PeerPools, ShmError> {
    let mut views = Vec::with_capacity(shape.tp as usize);
    for rank in 0..shape.tp {
        let file = stream.async_io(Interest::READABLE, || receive(stream, rank)).await??;
        views.push(View::open(&file, rank, shape.pool_bytes())?);
    }
    Ok(PeerPools(views))
}

/// The outer error is one of the call (`WouldBlock` is tried again), the inner one of what came.
fn receive(stream: &UnixStream, rank: u32) -> io::Result<Result<OwnedFd, ShmError>> {
    let wrong = |what: &str| Ok(Err(ShmError::Handover(what.to_owned())));
    let mut bytes = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut files: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    if got.bytes == 0 {
        return wrong("it hung up");
    }
    if got.bytes != MESSAGE_BYTES || bytes != message(rank) {
        return wrong("a message of another form");
    }
    match files.pop() {
        Some(file) if files.is_empty() && !got.flags.contains(ReturnFlags::CTRUNC) => Ok(Ok(file)),
        Some(_) => wrong("more than one descriptor for a rank"),
        None => wrong("no descriptor for a rank"),
    }
}

impl PeerPools {
    /// Where the range begins.
    ///
    /// # Errors
    /// When it does not lie in the pool of the rank.
    pub(super) fn range(&self, rank: u32, offset: u64, bytes: u64) -> Result<*const u8, String> {
        let view = self.0.get(rank as usize);
        let inside = view.filter(|view| offset.checked_add(bytes).is_some_and(|end| end <= view.bytes as u64));
        let Some(view) = inside else {
            return Err(format!("{bytes} bytes at {offset} of rank {rank} lie outside of its pools"));
        };
        Ok(view.base.as_ptr().wrapping_add(offset as usize))
    }
}

/// One pool, mapped for reading.
#[derive(Debug)]
struct View {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is owned by this value and read through raw pointers alone; where it is mapped does not depend on
// the thread.
unsafe impl Send for View {}

impl View {
    fn open(file: &OwnedFd, rank: u32, bytes: usize) -> Result<Self, ShmError> {
        // Only memory files have seals; for anything else this fails, and none are there.
        let missing = SEALS - fcntl_get_seals(file).unwrap_or(SealFlags::empty());
        if !missing.is_empty() {
            let names: Vec<&str> = missing.iter_names().map(|(name, _)| name).collect();
            return Err(ShmError::Unsealed { rank, missing: names.join(" and ") });
        }
        if fstatfs(file).map_err(io::Error::from)?.f_type as i64 != TMPFS {
            return Err(ShmError::Kind { rank });
        }
        // After the seals: from here on the size cannot change.
        let found = fstat(file).map_err(io::Error::from)?.st_size as u64;
        let wanted = bytes.max(1) as u64;
        if found != wanted {
            return Err(ShmError::Size { rank, found, wanted });
        }
        let base = map(bytes.max(1), libc::PROT_READ, Some(file.as_fd()))?;
        Ok(Self { base, bytes })
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping made in `open`; pointers into it are used by the copier alone,
        // which owns this value.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes.max(1)) };
    }
}
