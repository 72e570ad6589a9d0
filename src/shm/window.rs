//! A peer's region as we see it: its memory file, mapped for reading.
//!
//! The file cannot shrink, so that no read of the mapping is past its end. A file in huge pages has
//! them all made present before the first read, because a huge page that cannot be had is a signal
//! then; ordinary pages are made present by the reads themselves, sixteen at a time.
#![expect(unsafe_code, reason = "bounded copies out of a peer's mapping")]

use std::io;
use std::os::fd::OwnedFd;

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::wire::Grant;
use crate::fabric::RemoteSpan;
use crate::memory::{Mapping, OutOfBounds};
use crate::sys::memfd;

/// A peer's region. Unmapped when dropped.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) slot: usize,
    pub(super) rkey: u32,
    address: u64,
    len: u64,
    map: MmapRaw,
}

impl Window {
    /// Maps the region that a peer granted, out of the file that came along.
    ///
    /// # Errors
    /// `InvalidData` where file and grant do not belong together, or the file is not one that can be
    /// read safely; else what `mmap` answers.
    pub(super) fn new(grant: &Grant, file: OwnedFd) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let is = memfd::examine(&file)?;
        // Huge pages are unmapped whole.
        let fits = if is.huge { grant.len == is.len } else { grant.len <= is.len };
        let end = grant.address.checked_add(grant.len);
        if !fits || grant.len == 0 || grant.rkey == 0 || end.is_none() {
            return Err(invalid());
        }
        let len = usize::try_from(grant.len).map_err(|_too_long| invalid())?;
        let slot = usize::try_from(grant.slot).map_err(|_too_large| invalid())?;
        let map = MmapOptions::new().len(len).map_raw_read_only(&file)?;
        if is.huge {
            map.advise(Advice::PopulateRead)?;
        }
        // A neighbour's blocks are not for our core dumps. Where the kernel refuses they are, as its
        // own are.
        map.advise(Advice::DontDump).ok();
        Ok(Self { slot, rkey: grant.rkey, address: grant.address, len: grant.len, map })
    }

    /// Where a span begins in this region; `None` where it leaves the region.
    pub(super) fn offset(&self, span: &RemoteSpan) -> Option<u64> {
        let offset = span.address.checked_sub(self.address)?;
        let end = offset.checked_add(u64::from(span.len))?;
        (end <= self.len).then_some(offset)
    }

    /// Copies `len` bytes at `from` to `at` in our memory.
    ///
    /// # Errors
    /// [`OutOfBounds`], of this region or of our memory; nothing was copied then.
    pub(super) fn copy_to(
        &self,
        from: u64,
        (memory, at): (&Mapping, u64),
        len: usize,
    ) -> Result<(), OutOfBounds> {
        let outside = OutOfBounds { offset: from, len: len as u64, size: self.len };
        let end = from.checked_add(len as u64).ok_or(outside)?;
        let start = usize::try_from(from).map_err(|_too_long| outside)?;
        if end > self.len {
            return Err(outside);
        }
        let to = memory.pointer(at, len as u64)?;
        let source = self.map.as_ptr().wrapping_add(start);
        // SAFETY: `source` is valid for reading `len` bytes: they lie in this mapping (checked above),
        // which stays while `self` is borrowed and whose file cannot shrink; `to` is valid for `len`
        // bytes (checked by `pointer`) and stays mapped while `memory` is borrowed. The two are
        // different mappings, so the addresses do not overlap. Bytes that the peer changes meanwhile
        // arrive as some mixture, which the caller finds out afterwards.
        unsafe { std::ptr::copy_nonoverlapping(source, to.as_ptr(), len) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::wire::GRANT;

    const LEN: u64 = 8192;

    fn grant() -> Grant {
        Grant { kind: GRANT, slot: 0, rkey: 9, reserved: 0, address: 1 << 20, len: LEN }
    }

    fn file() -> OwnedFd {
        let memory = Mapping::anonymous("kvrail-test", LEN).unwrap();
        memory.write(100, b"payload").unwrap();
        memory.file().unwrap().try_clone().unwrap().into()
    }

    #[test]
    fn bytes_are_copied_within_both_bounds_only() {
        let window = Window::new(&grant(), file()).unwrap();
        let span = |address, len| RemoteSpan { rkey: 9, address, len };
        assert_eq!(window.offset(&span((1 << 20) + 100, 7)), Some(100));
        assert_eq!(window.offset(&span((1 << 20) - 1, 7)), None);
        assert_eq!(window.offset(&span((1 << 20) + LEN - 6, 7)), None);
        assert_eq!(window.offset(&span(u64::MAX, 7)), None);
        let memory = Mapping::anonymous("kvrail-test", 64).unwrap();
        window.copy_to(100, (&memory, 57), 7).unwrap();
        let mut bytes = [0; 7];
        memory.read(57, &mut bytes).unwrap();
        assert_eq!(&bytes, b"payload");
        assert!(window.copy_to(100, (&memory, 58), 7).is_err());
        assert!(window.copy_to(LEN - 6, (&memory, 0), 7).is_err());
        assert!(window.copy_to(u64::MAX, (&memory, 0), 7).is_err());
    }

    #[test]
    fn a_grant_that_lies_is_refused() {
        let lies: [fn(&mut Grant); 5] = [
            |grant| grant.len = LEN + 1,
            |grant| grant.len = u64::MAX,
            |grant| grant.len = 0,
            |grant| grant.rkey = 0,
            |grant| grant.address = u64::MAX - LEN + 1,
        ];
        for (case, lie) in lies.into_iter().enumerate() {
            let mut grant = grant();
            lie(&mut grant);
            assert!(Window::new(&grant, file()).is_err(), "case {case}");
        }
        assert!(Window::new(&grant(), file()).is_ok());
    }

    #[test]
    fn a_file_that_may_shrink_is_refused() {
        let open = memfd::create("kvrail-test", rustix::fs::MemfdFlags::empty()).unwrap();
        open.set_len(LEN).unwrap();
        assert!(Window::new(&grant(), open.into()).is_err());
        let disk = tempfile::tempfile().unwrap();
        disk.set_len(LEN).unwrap();
        assert!(Window::new(&grant(), disk.into()).is_err());
        let null = std::fs::File::open("/dev/zero").unwrap();
        assert!(Window::new(&grant(), null.into()).is_err());
    }
}
