//! What is asked of the kernel about mapped pages: lock them, make them present, place them.
//!
//! The functions are `unsafe` because they take an address range, not because they could corrupt it:
//! none of them changes a byte that is there.
#![expect(
    unsafe_code,
    reason = "system calls that take an address range, one of which has no wrapper"
)]

use std::io;
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

/// The size of an ordinary page, bytes.
#[must_use]
pub fn page_bytes() -> u64 {
    // SAFETY: `sysconf` takes a number and touches no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Linux always answers; 4096 stands in for an impossible refusal.
    u64::try_from(bytes).unwrap_or(4096)
}
