//! A shared mapping of a memory file, and the only ways to touch it.
//!
//! Other processes map the same file and NICs write to it, so its bytes are never a `&[u8]`: they
//! are copied in and out between raw pointers, within bounds.
#![expect(
    unsafe_code,
    reason = "bounded copies between raw pointers into a shared mapping"
)]

use std::fs::File;
use std::io;
use std::ptr::NonNull;

use memmap2::{MmapOptions, MmapRaw};

/// A range lies outside the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("bytes {offset}+{len} lie outside a mapping of {size} bytes")]
pub struct OutOfBounds {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// The mapping's length in bytes.
    pub size: u64,
}

/// A whole memory file, mapped shared, readable and writable. Unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    map: MmapRaw,
    len: u64,
}

impl Mapping {
    /// Maps the first `len` bytes of `file`.
    ///
    /// # Errors
    /// What `mmap` answers, or `InvalidInput` for a length that no mapping can have.
    pub fn new(file: &File, len: u64) -> io::Result<Self> {
        let bytes = usize::try_from(len).map_err(|_too_long| io::ErrorKind::InvalidInput)?;
        let map = MmapOptions::new().len(bytes).map_raw(file)?;
        Ok(Self { map, len })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the mapping has no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A pointer to `len` bytes at `offset`, valid as long as `self` lives. Whoever writes through it
    /// or reads from it does so by copies that tolerate concurrent writers, as `read(2)` and a NIC do.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    pub fn pointer(&self, offset: u64, len: u64) -> Result<NonNull<u8>, OutOfBounds> {
        let outside = OutOfBounds {
            offset,
            len,
            size: self.len,
        };
        let end = offset.checked_add(len).ok_or(outside)?;
        if end > self.len {
            return Err(outside);
        }
        let start = usize::try_from(offset).map_err(|_too_long| outside)?;
        NonNull::new(self.map.as_mut_ptr().wrapping_add(start)).ok_or(outside)
    }

    /// Copies `bytes` into the mapping.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was written then.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let to = self.pointer(offset, bytes.len() as u64)?;
        // SAFETY: `to` is valid for `bytes.len()` bytes (checked by `pointer`) and stays mapped while
        // `self` is borrowed; `bytes` is a live slice; a Rust slice never lies inside the mapping, as
        // no reference to mapped bytes is ever made, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of the mapping.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was copied then.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), OutOfBounds> {
        let from = self.pointer(offset, bytes.len() as u64)?;
        // SAFETY: as in `write`, with the directions exchanged; `bytes` is exclusively borrowed.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}
