//! A shared mapping of a memory file, and the only ways to touch it.
//!
//! Other processes map the same file and NICs write to it, so its bytes are never a `&[u8]`: they
//! are copied in and out between raw pointers, within bounds.
#![expect(unsafe_code, reason = "bounded copies between raw pointers into a shared mapping")]

use std::fmt;
use std::fs::File;
use std::io;
use std::ptr::NonNull;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::MemfdFlags;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::sys;

/// Bytes that a checksum copies out at a time: they and the hash state stay in the first-level cache.
const CHECKSUM_CHUNK_BYTES: usize = 16 << 10;

/// The checksum of a block's bytes: XXH3, 64 bits, no seed. [`Mapping::checksum`] gives the same for
/// the same bytes. It finds torn and stale reads; it is no defence against a forger.
#[must_use]
pub fn checksum_bytes(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// The checksum of a block that lies in pieces, taken piece by piece in the order of its bytes. It is what
/// [`checksum_bytes`] gives for all of them in a row.
#[derive(Clone, Default)]
pub struct Checksum(Xxh3);

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Checksum").field(&self.value()).finish()
    }
}

impl Checksum {
    /// Adds `len` bytes at `offset` of a mapping. Bytes that change meanwhile give the checksum of some
    /// mixture.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was added then.
    pub fn add(&mut self, mapping: &Mapping, offset: u64, len: u64) -> Result<(), OutOfBounds> {
        mapping.pointer(offset, len)?;
        let mut chunk = [0; CHECKSUM_CHUNK_BYTES];
        let mut done = 0;
        while done < len {
            let step = usize::try_from(len - done).unwrap_or(usize::MAX);
            let (bytes, _rest) = chunk.split_at_mut(step.min(CHECKSUM_CHUNK_BYTES));
            mapping.read(offset + done, bytes)?;
            self.0.update(bytes);
            done += bytes.len() as u64;
        }
        Ok(())
    }

    /// The checksum of what was added so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.digest()
    }
}

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
    /// The memory file, to pass on to a process that maps it too.
    file: Option<File>,
}

impl Mapping {
    /// Maps the first `len` bytes of `file`.
    ///
    /// # Errors
    /// What `mmap` answers, or `InvalidInput` for a length that no mapping can have.
    pub fn new(file: &File, len: u64) -> io::Result<Self> {
        let bytes = usize::try_from(len).map_err(|_too_long| io::ErrorKind::InvalidInput)?;
        let map = MmapOptions::new().len(bytes).map_raw(file)?;
        Ok(Self { map, len, file: None })
    }

    /// Maps the first `len` bytes of a memory file and keeps the file, so that fabrics can pass it to
    /// peers on this host.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn keeping(file: File, len: u64) -> io::Result<Self> {
        let mapping = Self::new(&file, len)?;
        Ok(Self { file: Some(file), ..mapping })
    }

    /// A new memory file of `len` zeros, sealed at its length, mapped and kept.
    ///
    /// # Errors
    /// What the system answers.
    pub fn anonymous(name: &str, len: u64) -> io::Result<Self> {
        let file = sys::memfd::create(name, MemfdFlags::empty())?;
        file.set_len(len)?;
        sys::memfd::seal_length(&file)?;
        Self::keeping(file, len)
    }

    /// The memory file, where the mapping keeps it.
    #[must_use]
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
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
        let outside = OutOfBounds { offset, len, size: self.len };
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

    /// Copies `len` bytes of another mapping, from `at` on, to `offset`.
    ///
    /// # Errors
    /// [`OutOfBounds`] of either one; nothing was copied then.
    pub fn copy_from(
        &self,
        offset: u64,
        (other, at): (&Self, u64),
        len: u32,
    ) -> Result<(), OutOfBounds> {
        let to = self.pointer(offset, len.into())?;
        let from = other.pointer(at, len.into())?;
        // SAFETY: both pointers are valid for `len` bytes (checked by `pointer`) and stay mapped while
        // both mappings are borrowed. `copy` allows for ranges that overlap.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), len as usize) };
        Ok(())
    }

    /// The checksum of `len` bytes at `offset`, as [`checksum_bytes`] gives it. Bytes that change
    /// meanwhile give the checksum of some mixture.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    pub fn checksum(&self, offset: u64, len: u64) -> Result<u64, OutOfBounds> {
        let mut sum = Checksum::default();
        sum.add(self, offset, len)?;
        Ok(sum.value())
    }

    /// Locks the pages in memory as they become present.
    ///
    /// # Errors
    /// What `mlock2` answers.
    pub(super) fn lock_on_fault(&self) -> io::Result<()> {
        // SAFETY: `whole` is this mapping, which stays mapped while `self` is borrowed.
        unsafe { sys::memory::lock_on_fault(self.whole()?, self.map.len()) }
    }

    /// Makes all pages present and locks them in memory.
    ///
    /// # Errors
    /// What `mlock` answers.
    pub(super) fn lock(&self) -> io::Result<()> {
        // SAFETY: as in `lock_on_fault`.
        unsafe { sys::memory::lock(self.whole()?, self.map.len()) }
    }

    /// Makes all pages present.
    ///
    /// # Errors
    /// What `madvise` answers; `EINVAL` before Linux 5.14.
    pub(super) fn populate(&self) -> io::Result<()> {
        // SAFETY: as in `lock_on_fault`; `new` maps for reading and writing.
        unsafe { sys::memory::populate(self.whole()?, self.map.len()) }
    }

    /// Binds pages that are not present yet to one NUMA node.
    ///
    /// # Errors
    /// What `mbind` answers.
    pub(super) fn bind_to_node(&self, node: u32) -> io::Result<()> {
        // SAFETY: as in `lock_on_fault`.
        unsafe { sys::memory::bind_to_node(self.whole()?, self.map.len(), node) }
    }

    fn whole(&self) -> io::Result<NonNull<u8>> {
        NonNull::new(self.map.as_mut_ptr()).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(len: u64) -> Mapping {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        Mapping::new(&file, len).unwrap()
    }

    #[test]
    fn bytes_come_back_as_written_and_only_within_bounds() {
        let map = mapping(100);
        map.write(90, b"0123456789").unwrap();
        let mut bytes = [0; 10];
        map.read(90, &mut bytes).unwrap();
        assert_eq!(&bytes, b"0123456789");
        let outside = OutOfBounds { offset: 91, len: 10, size: 100 };
        assert_eq!(map.write(91, b"0123456789"), Err(outside));
        assert_eq!(map.read(91, &mut bytes), Err(outside));
        assert_eq!(map.checksum(91, 10), Err(outside));
        assert!(map.pointer(u64::MAX, 2).is_err());
        assert!(map.pointer(100, 0).is_ok());
    }

    #[test]
    fn a_streamed_checksum_is_that_of_the_bytes() {
        let len = 3 * CHECKSUM_CHUNK_BYTES + 17;
        let bytes: Vec<u8> = (0..=250).cycle().take(len).collect();
        let map = mapping(len as u64);
        map.write(0, &bytes).unwrap();
        for end in [0, 1, 240, 241, CHECKSUM_CHUNK_BYTES, len] {
            let expected = checksum_bytes(&bytes[..end]);
            assert_eq!(map.checksum(0, end as u64), Ok(expected), "{end} bytes");
        }
        assert_eq!(map.checksum(5, 7), Ok(checksum_bytes(&bytes[5..12])));
        let mut in_pieces = Checksum::default();
        for (offset, len) in [(100, 700), (20, 17), (30, 0), (0, len as u64 - 3)] {
            in_pieces.add(&map, offset, len).unwrap();
        }
        assert!(in_pieces.add(&map, 0, len as u64 + 1).is_err());
        let whole = [&bytes[100..800], &bytes[20..37], &bytes[..len - 3]].concat();
        assert_eq!(in_pieces.value(), checksum_bytes(&whole));
        // The value travels between nodes, so it is fixed for ever.
        assert_eq!(checksum_bytes(b""), 0x2d06_8005_38d3_94c2);
    }
}
