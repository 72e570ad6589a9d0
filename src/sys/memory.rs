//! What is asked of the kernel about mapped pages: lock them, make them present, place them.
//!
//! Those that are `unsafe` are so because they take an address range that must be mapped, not because
//! they could corrupt it: none of them changes a byte that is there.
#![expect(
    unsafe_code,
    reason = "system calls that take an address range, one of which has no wrapper"
)]

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use rustix::mm::{Advice, MlockFlags};

/// Words of a NUMA node mask: 1024 nodes, the kernel's own maximum.
const NODE_MASK_WORDS: usize = 16;

/// Locks pages in memory as they become present, which takes no time for pages that are not yet.
///
/// # Errors
/// What `mlock2` answers: `ENOMEM` or `EPERM` beyond the limit on locked memory.
///
/// # Safety
/// `start..start+len` is one mapping, or a part of one, that the caller keeps mapped for the call.
pub unsafe fn lock_on_fault(start: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the caller vouches for the range; locking changes no byte.
    unsafe { rustix::mm::mlock_with(start.as_ptr().cast(), len, MlockFlags::ONFAULT) }?;
    Ok(())
}

/// Makes pages present and locks them in memory.
///
/// # Errors
/// What `mlock` answers, as for [`lock_on_fault`].
///
/// # Safety
/// As for [`lock_on_fault`].
pub unsafe fn lock(start: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the caller vouches for the range; locking changes no byte.
    unsafe { rustix::mm::mlock(start.as_ptr().cast(), len) }?;
    Ok(())
}

/// Makes pages present and writable now, so that no later access faults.
///
/// # Errors
/// What `MADV_POPULATE_WRITE` answers: `EINVAL` before Linux 5.14; `ENOMEM` or `EFAULT` where the
/// memory does not exist, instead of the signal that the first touch would have got.
///
/// # Safety
/// As for [`lock_on_fault`], and the mapping is writable.
pub unsafe fn populate(start: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the caller vouches for the range; populating writes no byte, it only makes present
    // pages that read as they did before.
    unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, Advice::LinuxPopulateWrite) }?;
    Ok(())
}

/// Binds pages that are not present yet to one NUMA node, whichever thread touches them first.
///
/// # Errors
/// What `mbind` answers: `EINVAL` for a node that does not exist, `ENOSYS` or `EPERM` where the
/// kernel or a container's filter does not allow it.
///
/// # Safety
/// As for [`lock_on_fault`].
pub unsafe fn bind_to_node(start: NonNull<u8>, len: usize, node: u32) -> io::Result<()> {
    let mut mask = [0 as libc::c_ulong; NODE_MASK_WORDS];
    let bits = libc::c_ulong::BITS;
    let word = usize::try_from(node / bits)
        .ok()
        .and_then(|word| mask.get_mut(word))
        .ok_or(io::ErrorKind::InvalidInput)?;
    *word = 1 << (node % bits);
    // The kernel reads one bit fewer than it is told.
    let max_node = NODE_MASK_WORDS as libc::c_ulong * libc::c_ulong::from(bits) + 1;
    // SAFETY: the caller vouches for the range; `mask` lives through the call and has the
    // `max_node - 1` bits that the kernel reads; the policy changes no byte.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start.as_ptr(),
            len,
            libc::MPOL_BIND,
            mask.as_ptr(),
            max_node,
            0_u32,
        )
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Asks for huge pages where memory is not present yet, and for ordinary ones to be joined some time
/// where it is: random access to large tables is slowed down by the walks through page tables.
///
/// # Errors
/// What `madvise` answers: `EINVAL` where the kernel has no transparent huge pages, `ENOMEM` where
/// nothing is mapped at a part of the range.
pub fn prefer_huge_pages(addresses: Range<*const u8>) -> io::Result<()> {
    let Range { start, end } = addresses;
    let page = usize::try_from(page_bytes()).unwrap_or(4096);
    // A part of a page belongs to somebody else as well.
    let first = start.addr().next_multiple_of(page);
    let len = (end.addr() / page * page).saturating_sub(first);
    if len == 0 {
        return Ok(());
    }
    let first = start.with_addr(first).cast_mut();
    // SAFETY: `first` is a whole number of pages. The advice changes no byte and takes no page away,
    // whatever is mapped there, so it can do no harm to memory that the caller does not own.
    unsafe { rustix::mm::madvise(first.cast(), len, Advice::LinuxHugepage) }?;
    Ok(())
}

/// The size of an ordinary page, bytes.
#[must_use]
pub fn page_bytes() -> u64 {
    // SAFETY: `sysconf` takes a number and touches no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Linux always answers; 4096 stands in for an impossible refusal.
    u64::try_from(bytes).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the kernel has noted the advice for the mapping of an address.
    fn is_advised(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        maps.lines().any(|line| {
            let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
            let ends = range.and_then(|(start, end)| {
                let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16));
                Some(start.ok()?..end.ok()?)
            });
            if let Some(mapping) = ends {
                inside = mapping.contains(&address);
            }
            inside && line.starts_with("VmFlags:") && line.split_whitespace().any(|it| it == "hg")
        })
    }

    #[test]
    fn advice_covers_the_whole_pages_of_a_range_and_no_others() {
        // A mapping of its own: what an allocator gives may have been advised by whoever had it before.
        let mapping = memmap2::MmapMut::map_anon(8 << 20).unwrap();
        let table = mapping.get(100..).unwrap();
        let addresses = table.as_ptr_range();
        let middle = addresses.start.addr() + table.len() / 2;
        assert!(!is_advised(middle));
        match prefer_huge_pages(addresses.clone()) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                eprintln!("SKIPPED: this kernel has no transparent huge pages");
                return;
            }
            answer => answer.unwrap(),
        }
        assert!(is_advised(middle));
        assert!(!is_advised(addresses.start.addr() - 1));
        let part_of_a_page = table.get(1..100).unwrap().as_ptr_range();
        prefer_huge_pages(part_of_a_page).unwrap();
    }
}
