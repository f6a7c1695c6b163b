//! Memory that several parties touch by agreement: KV pools and mapped model files.
//!
//! A [`PoolMemory`] is written by the backend, by the receiving side of a fabric, and read by the sending side. Which
//! of them may touch which page at a time is decided by page ownership (H1, H5, H10), not by this type: it hands out a
//! raw pointer, and each user states in its SAFETY comment why the page is its own.

use std::{fs::File, io, path::Path, ptr::NonNull};

/// An anonymous, zeroed mapping that lives as long as this value. Huge pages are asked for and not insisted on.
#[derive(Debug)]
pub struct PoolMemory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory owned by this value; access through the pointer is synchronised by page
// ownership, which every user of the pointer states for itself.
unsafe impl Send for PoolMemory {}
// SAFETY: as above; the methods of this type itself do not touch the mapped bytes.
unsafe impl Sync for PoolMemory {}

impl PoolMemory {
    pub fn new(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.max(1);
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the mapping just made; the advice changes no contents.
        unsafe {
            libc::madvise(base, bytes, libc::MADV_HUGEPAGE);
        }
        let base = NonNull::new(base.cast()).expect("mmap returns no null mapping");
        Ok(Self { base, bytes })
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// All bytes, for the one who holds the pool alone.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length and is initialised (zeroed by the kernel); `&mut self` says that nobody else
        // has a handle on the pool, and users of the raw pointer keep one while they use it.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
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
        // SAFETY: base and length are those of the mapping made in `new`, and no one can hold a reference from us.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
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
