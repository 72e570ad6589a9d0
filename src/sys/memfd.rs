//! Memory files: made, sealed, reopened for reading only, and examined when another process passes
//! one.
//!
//! A read past the end of a mapped file is a signal that ends the process. So whoever is passed a
//! file maps it only where it can never shrink again ([`examine`]), and whoever makes one seals it
//! ([`seal_length`]).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

/// What `fstatfs` says of files in huge pages.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A new memory file of no bytes, closed on `exec`, to be sealed.
///
/// # Errors
/// What `memfd_create` answers: `EMFILE` at the limit on open files, `ENOSYS` before Linux 3.17.
pub fn create(name: &str, flags: MemfdFlags) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags;
    // Hardened hosts refuse memory files that could be executed; kernels before 6.3 do not know the
    // flag that says so.
    let file = rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_unknown_flag| rustix::fs::memfd_create(name, flags))?;
    Ok(File::from(file))
}

/// Fixes the length of a memory file for ever.
///
/// # Errors
/// What `fcntl` answers: `EPERM` for one that is sealed already.
pub fn seal_length(file: &File) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(file, seals)?;
    Ok(())
}

/// Fixes the length of a memory file for ever, and keeps everybody from mapping it writable or
/// writing to it from now on. Mappings that are there stay as they are.
///
/// # Errors
/// What `fcntl` answers: `EINVAL` before Linux 5.1.
pub fn seal_for_readers(file: &File) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(file, seals)?;
    Ok(())
}

/// The same file under a descriptor that can be read and mapped for reading only.
///
/// # Errors
/// What opening `/proc/self/fd/N` answers: `ENOENT` where `/proc` is not mounted.
pub fn read_only(file: &File) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(fd)
}

/// What a passed file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Examined {
    /// Its length in bytes, which it keeps.
    pub len: u64,
    /// Whether it consists of huge pages.
    pub huge: bool,
}

/// Examines a file that another process passed: a memory file that can never shrink, or refused.
///
/// # Errors
/// `InvalidData` for any other file; else what the system answers.
pub fn examine(fd: impl AsFd) -> io::Result<Examined> {
    // Files of other kinds have no seals to ask for.
    let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_no_seals| io::ErrorKind::InvalidData)?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let len = u64::try_from(rustix::fs::fstat(&fd)?.st_size);
    let len = len.map_err(|_negative| io::ErrorKind::InvalidData)?;
    let kind = rustix::fs::fstatfs(&fd)?.f_type;
    Ok(Examined { len, huge: u64::try_from(kind) == Ok(HUGETLBFS_MAGIC) })
}

#[cfg(test)]
mod tests {
    use memmap2::MmapOptions;

    use super::*;

    fn file(len: u64) -> File {
        let file = create("kvrail-test", MemfdFlags::empty()).unwrap();
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn only_a_file_that_cannot_shrink_is_taken() {
        let open = file(4096);
        assert_eq!(examine(&open).unwrap_err().kind(), io::ErrorKind::InvalidData);
        seal_length(&open).unwrap();
        assert_eq!(examine(&open).unwrap(), Examined { len: 4096, huge: false });
        assert!(open.set_len(0).is_err() && open.set_len(8192).is_err());
        let ordinary = tempfile::tempfile().unwrap();
        assert_eq!(examine(&ordinary).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_descriptor_for_reading_maps_for_reading_only() {
        let file = file(4096);
        seal_length(&file).unwrap();
        let reader = File::from(read_only(&file).unwrap());
        assert_eq!(examine(&reader).unwrap().len, 4096);
        assert!(MmapOptions::new().map_raw_read_only(&reader).is_ok());
        assert!(MmapOptions::new().map_raw(&reader).is_err(), "mapped writable");
        assert!(MmapOptions::new().map_raw(&file).is_ok(), "its owner still may");
    }

    #[test]
    fn a_file_for_readers_is_written_by_its_old_mappings_alone() {
        let file = file(4096);
        let own = MmapOptions::new().map_raw(&file).unwrap();
        seal_for_readers(&file).unwrap();
        assert_eq!(own.len(), 4096);
        assert!(MmapOptions::new().map_raw(&file).is_err(), "mapped writable");
        assert!(rustix::io::write(&file, b"x").is_err());
        // Not even whoever opens it again for writing.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let again = rustix::fs::open(path, OFlags::RDWR, Mode::empty()).map(File::from).unwrap();
        assert!(MmapOptions::new().map_raw(&again).is_err(), "mapped writable");
    }
}
