//! Memory that several parties touch by agreement: KV pools, perhaps shared with other processes, and mapped model files.
//!
//! A [`PoolMemory`] is written by the backend, by the receiving side of a fabric, and read by the sending side. Which
//! of them may touch which page at a time is decided by page ownership (H1, H5, H10), not by this type: it hands out a
//! raw pointer, and each user states in its SAFETY comment why the page is its own.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    ptr::NonNull,
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    process::{Resource, getrlimit},
};
use tandem_handoff::checksum::head_checksum;

/// A zeroed mapping that lives as long as this value. Huge pages are asked for and not insisted on.
///
/// Private memory, unless it was made [`PoolMemory::shared`]: then it has a descriptor, by which a process of this host
/// can map the same memory and read it.
#[derive(Debug)]
pub struct PoolMemory {
    base: NonNull<u8>,
    bytes: usize,
    sharing: Sharing,
}

#[derive(Debug)]
enum Sharing {
    Shared(OwnedFd),
    /// With the reason, where it was to be shared.
    Private(Option<io::Error>),
}

// SAFETY: the mapping is plain memory owned by this value; access through the pointer is synchronised by page
// ownership, which every user of the pointer states for itself.
unsafe impl Send for PoolMemory {}
// SAFETY: as above; the methods of this type itself do not touch the mapped bytes.
unsafe impl Sync for PoolMemory {}

/// What is sealed on shared memory: its size for ever, and every way to write but the mapping that its maker has.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

impl PoolMemory {
    pub fn new(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.max(1);
        let base = map(bytes, libc::PROT_READ | libc::PROT_WRITE, None)?;
        Ok(Self { base, bytes, sharing: Sharing::Private(None) })
    }

    /// Memory that another process can map for reading, by [`PoolMemory::descriptor`]. Nobody can change its size, and
    /// nobody but this value can write it: it is sealed, once this value's own mapping exists.
    ///
    /// # Errors
    /// When the system has no memory files, or cannot seal them in this way (Linux before 5.1), or this process may not
    /// make files of this size.
    pub fn shared(bytes: usize) -> io::Result<Self> {
        Self::shared_within(getrlimit(Resource::Fsize).current, bytes)
    }

    /// Making a file longer than the limit of the process does not fail: the signal `SIGXFSZ` ends the process.
    fn shared_within(file_bytes_max: Option<u64>, bytes: usize) -> io::Result<Self> {
        let bytes = bytes.max(1);
        if let Some(max) = file_bytes_max.filter(|max| *max < bytes as u64) {
            let message = format!(
                "this process may make files of {max} bytes (RLIMIT_FSIZE, ulimit -f) and shared memory takes {bytes}"
            );
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
        }
        let file = memfd_create("tandem-kv", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        let base = map(bytes, libc::PROT_READ | libc::PROT_WRITE, Some(file.as_fd()))?;
        let memory = Self { base, bytes, sharing: Sharing::Shared(file) };
        fcntl_add_seals(memory.descriptor().expect("it was just made"), SEALS | SealFlags::SEAL)?;
        Ok(memory)
    }

    /// As [`PoolMemory::shared`], or private memory with a warning where the system has no such files.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn shared_if_possible(bytes: usize) -> io::Result<Self> {
        Self::shared(bytes).or_else(|error| {
            tracing::warn!(%error, "the KV pool is private memory: decode workers of this host cannot map it");
            let mut memory = Self::new(bytes)?;
            memory.sharing = Sharing::Private(Some(error));
            Ok(memory)
        })
    }

    /// The memory's file, where it is shared.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.sharing {
            Sharing::Shared(file) => Some(file.as_fd()),
            Sharing::Private(_) => None,
        }
    }

    /// Why it is private, where it was to be shared.
    pub fn why_private(&self) -> Option<&io::Error> {
        match &self.sharing {
            Sharing::Private(why) => why.as_ref(),
            Sharing::Shared(_) => None,
        }
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// All bytes, for the one who holds the pool alone.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length and is initialised (zeroed by the kernel); `&mut self` says that nobody else
        // has a handle on the pool, and users of the raw pointer keep one while they use it. Processes that share the
        // memory can only read it.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }

    /// The [`head_checksum`] of `bytes` bytes from offset `at` on. The page that they belong to is the caller's to read:
    /// its owner has finished writing, and nobody else may write (H1, H5, H10).
    pub fn checksum(&self, at: usize, bytes: usize) -> u32 {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.bytes), "{bytes} bytes at {at} of {}", self.bytes);
        // SAFETY: the range lies in the mapping, whose bytes are initialised; that nobody writes to it during the call is
        // what the caller promises. The slice does not outlive the call.
        let bytes = unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at), bytes) };
        head_checksum(bytes)
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Drop for PoolMemory {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping that was made with this value, and no one can hold a reference
        // from us.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Maps `bytes` of the file, or of fresh private memory, and advises huge pages.
pub(crate) fn map(bytes: usize, protection: libc::c_int, file: Option<BorrowedFd<'_>>) -> io::Result<NonNull<u8>> {
    let (kind, descriptor) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let base =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, kind | libc::MAP_NORESERVE, descriptor, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    #[cfg(target_os = "linux")]
    // SAFETY: the range is the mapping just made; the advice changes no contents.
    unsafe {
        libc::madvise(base, bytes, libc::MADV_HUGEPAGE);
    }
    Ok(NonNull::new(base.cast()).expect("mmap returns no null mapping"))
}

/// A model file mapped read-only. The file must not be truncated while it is mapped; a model directory is treated as
/// immutable, as every engine does.
#[derive(Debug)]
pub struct FileMap(memmap2::Mmap);

impl FileMap {
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the mapping is read-only and private to us; see the type's documentation for the one condition.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Self(map))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::fcntl_get_seals;

    use super::*;

    /// The same memory file, opened once more: what a peer has that got the descriptor.
    fn received(memory: &PoolMemory) -> OwnedFd {
        memory.descriptor().expect("it is shared").try_clone_to_owned().expect("a descriptor")
    }

    #[test]
    fn shared_memory_keeps_its_size_and_is_written_by_its_maker_alone() {
        let mut memory = PoolMemory::shared(3 * 4096).expect("memory");
        let peer = received(&memory);
        assert!(fcntl_get_seals(&peer).expect("seals").contains(SEALS | SealFlags::SEAL));
        for bytes in [0, 4096, 4 * 4096] {
            assert!(ftruncate(&peer, bytes).is_err(), "resized to {bytes}");
        }
        assert!(File::from(received(&memory)).write_all(b"x").is_err(), "written by a call");
        let writable = map(3 * 4096, libc::PROT_READ | libc::PROT_WRITE, Some(peer.as_fd()));
        assert!(writable.is_err(), "mapped for writing");
        let view = map(3 * 4096, libc::PROT_READ, Some(peer.as_fd())).expect("a view");
        memory.bytes_mut()[4096..][..3].copy_from_slice(b"abc");
        // SAFETY: the view has this length, and nobody writes to the memory while it is read.
        let seen = unsafe { std::slice::from_raw_parts(view.as_ptr(), 3 * 4096) };
        assert_eq!((&seen[4096..4099], seen[0]), (&b"abc"[..], 0));
        // SAFETY: the mapping was made above, and `seen` is not used any more.
        unsafe { libc::munmap(view.as_ptr().cast(), 3 * 4096) };
    }

    #[test]
    fn shared_memory_beyond_the_limit_of_files_is_an_error_by_name() {
        assert!(PoolMemory::shared_within(Some(8192), 8192).is_ok());
        let error = PoolMemory::shared_within(Some(8191), 8192).expect_err("a byte too many").to_string();
        assert!(error.contains("8191 bytes (RLIMIT_FSIZE") && error.contains("takes 8192"), "{error}");
    }

    #[test]
    fn private_memory_has_no_descriptor() {
        assert!(PoolMemory::new(1).expect("memory").descriptor().is_none());
    }
}
