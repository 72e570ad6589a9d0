//! How a pool's memory comes to be, and what the host may answer instead.
//!
//! The order matters: what can be refused is asked for before a single page is touched, because after
//! that the kernel's answer to "too much" is a signal. Node policy and locking come before the pages
//! are made present, so that every page is placed and locked as it appears; making them present last
//! means that no page fault is left for the data path.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use bytesize::ByteSize;
use rustix::fs::{FallocateFlags, MemfdFlags};

use super::Mapping;
use crate::sys;
use crate::sys::host::MemoryBound;
use crate::types::{PoolId, Scope};

/// Bytes that a pool leaves to everything else that runs: its own process among others.
const LEFT_FREE_BYTES: u64 = 64 << 20;

/// One part in so many of a pool is left for page tables: eight bytes per 4 KiB page, for two
/// processes that map the pool.
const PAGE_TABLE_PART: u64 = 256;

/// The size of a huge page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HugePageSize {
    /// 2 MiB.
    TwoMiB,
    /// 1 GiB.
    OneGiB,
}

impl HugePageSize {
    /// Bytes of one page.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::TwoMiB => 2 << 20,
            Self::OneGiB => 1 << 30,
        }
    }

    const fn memfd_flags(self) -> MemfdFlags {
        MemfdFlags::HUGETLB.union(match self {
            Self::TwoMiB => MemfdFlags::HUGE_2MB,
            Self::OneGiB => MemfdFlags::HUGE_1GB,
        })
    }
}

/// What a pool is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOptions {
    /// The pool's place in the configuration.
    pub id: PoolId,
    /// Bytes of memory, at least 1; rounded up to whole pages. All of it is taken at once.
    pub bytes: u64,
    /// Huge pages of this size, which the host must have reserved; `None` for ordinary pages.
    pub huge_pages: Option<HugePageSize>,
    /// Whether the memory must never be swapped out. Counts towards `RLIMIT_MEMLOCK`.
    pub lock: bool,
    /// The NUMA node that all pages must lie on; `None` for the one of the creating thread, as far
    /// as its memory goes.
    pub numa_node: Option<u32>,
}

/// Why a pool could not be made. Each says what was asked, which limit refused it, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A pool of no bytes.
    #[error("memory pool {} was asked for with 0 bytes: give it a size, 512MiB for example", id.0)]
    Empty {
        /// Which pool.
        id: PoolId,
    },
    /// The memory is not there. Nothing was touched.
    #[error(
        "memory pool {} asks for {}, but at most {} fit: {bound} leaves {}, of which some must stay \
         free for page tables and all else that runs; make the pool smaller or free memory",
        id.0, ByteSize(*asked), ByteSize(*largest), ByteSize(*available)
    )]
    TooLarge {
        /// Which pool.
        id: PoolId,
        /// Bytes asked for, in whole pages.
        asked: u64,
        /// Bytes of the largest pool that would fit.
        largest: u64,
        /// Bytes that could be taken.
        available: u64,
        /// What says so.
        bound: MemoryBound,
    },
    /// The kernel has no huge pages of this size.
    #[error(
        "memory pool {} asks for huge pages of {}, which this kernel or processor does not have \
         ({} is absent); use another size or none",
        id.0, ByteSize(size.bytes()), directory.display()
    )]
    HugePageSize {
        /// Which pool.
        id: PoolId,
        /// The size asked for.
        size: HugePageSize,
        /// Where the kernel would say how many it has.
        directory: PathBuf,
    },
    /// Too few huge pages are reserved.
    #[error(
        "memory pool {} needs {asked} huge pages of {}, {free} are free; reserve {} more by raising \
         {}/nr_hugepages",
        id.0, ByteSize(size.bytes()), asked.saturating_sub(*free), directory.display()
    )]
    HugePages {
        /// Which pool.
        id: PoolId,
        /// The size of the pages.
        size: HugePageSize,
        /// Pages asked for.
        asked: u64,
        /// Pages free and not promised to another mapping.
        free: u64,
        /// Where they are reserved.
        directory: PathBuf,
    },
    /// The memory may not be locked.
    #[error(
        "memory pool {} may not lock {}: {source}; the limit on locked memory (RLIMIT_MEMLOCK) is \
         {}; raise it (ulimit -l unlimited, LimitMEMLOCK=infinity), grant CAP_IPC_LOCK, or do not \
         lock the pool",
        id.0, ByteSize(*asked), limit.map_or_else(|| "unlimited".to_owned(), |b| ByteSize(b).to_string())
    )]
    Lock {
        /// Which pool.
        id: PoolId,
        /// Bytes asked for.
        asked: u64,
        /// The limit, bytes; `None` where unlimited.
        limit: Option<u64>,
        /// The system's answer.
        source: io::Error,
    },
    /// There is no such NUMA node.
    #[error("memory pool {} asks for NUMA node {node}, this host has {online}; choose one of these or none", id.0)]
    NoSuchNode {
        /// Which pool.
        id: PoolId,
        /// The node asked for.
        node: u32,
        /// The nodes that there are, as the kernel lists them.
        online: String,
    },
    /// The operating system refused.
    #[error("memory pool {}: {call} of {}: {source}; {remedy}", id.0, ByteSize(*asked))]
    Os {
        /// Which pool.
        id: PoolId,
        /// The call that failed.
        call: &'static str,
        /// Bytes that it was about.
        asked: u64,
        /// The system's answer.
        source: io::Error,
        /// What to try.
        remedy: &'static str,
    },
}

impl PoolError {
    /// Whose fault it is.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        match self {
            Self::Empty { .. } | Self::NoSuchNode { .. } | Self::HugePageSize { .. } => {
                Scope::Request
            }
            _refused_by_the_host => Scope::Local,
        }
    }
}

/// Whether the host has room for all of these pools together, as far as that can be known: it takes long to
/// make the pages of the first one present, only to find that the last one does not fit.
///
/// # Errors
/// [`PoolError`] of the first that does not fit behind those before it.
pub fn check_room(pools: &[PoolOptions]) -> Result<(), PoolError> {
    (0..pools.len()).try_for_each(|at| match pools.split_at(at) {
        (before, [pool, ..]) => check(pool, before).map(drop),
        (_, []) => Ok(()),
    })
}

/// Whether there is room for a pool behind others that are to be made first. Answers its bytes.
fn check(options: &PoolOptions, before: &[PoolOptions]) -> Result<u64, PoolError> {
    let bytes = whole_pages(options)?;
    check_node(options)?;
    match options.huge_pages {
        Some(size) => check_huge_pages(options, size, before)?,
        None => check_available(options, bytes, before)?,
    }
    Ok(bytes)
}

/// Bytes that those of these pools take which are made of the same pages, and of which `counts` says that
/// they lie in the same place.
fn taken(
    options: &PoolOptions,
    before: &[PoolOptions],
    counts: impl Fn(&PoolOptions) -> bool,
) -> u64 {
    let same = before.iter().filter(|one| one.huge_pages == options.huge_pages && counts(one));
    same.filter_map(|one| whole_pages(one).ok()).fold(0, u64::saturating_add)
}

/// A pool's memory file and its mapping, every page present.
pub(super) fn create(options: &PoolOptions) -> Result<(File, Mapping), PoolError> {
    let bytes = check(options, &[])?;
    let os = |call, remedy| {
        move |source: io::Error| PoolError::Os {
            id: options.id,
            call,
            asked: bytes,
            source,
            remedy,
        }
    };
    let file = memory_file(options)
        .map_err(os("memfd_create", "the kernel must allow memory files (Linux 4.16 or later)"))?;
    file.set_len(bytes).map_err(os("ftruncate", "make the pool smaller"))?;
    // Whoever is passed the file may rely on its length: a read past a shrunken file is a signal.
    sys::memfd::seal_length(&file)
        .map_err(os("sealing", "the kernel must allow sealed memory files"))?;
    let copy = file.try_clone().map_err(os("dup", "raise the limit of open files (ulimit -n)"))?;
    let mapping = Mapping::keeping(copy, bytes)
        .map_err(os("mmap", "make the pool smaller, or reserve more huge pages"))?;
    if let Some(node) = options.numa_node {
        mapping.bind_to_node(node).map_err(os(
            "mbind",
            "allow it (CAP_SYS_NICE, the container's seccomp profile), or set no NUMA node",
        ))?;
    }
    if options.lock {
        mapping.lock_on_fault().map_err(lock_refused(options, bytes))?;
    }
    populate(options, &file, &mapping)?;
    Ok((file, mapping))
}

/// Bytes of the whole pages that hold the pool. More than any file can have stays above what fits.
fn whole_pages(options: &PoolOptions) -> Result<u64, PoolError> {
    if options.bytes == 0 {
        return Err(PoolError::Empty { id: options.id });
    }
    let page = match options.huge_pages {
        Some(size) => size.bytes(),
        None => sys::memory::page_bytes(),
    };
    let bytes = options.bytes.checked_next_multiple_of(page);
    Ok(bytes.unwrap_or(u64::MAX - u64::MAX % page))
}

/// The largest pool that leaves enough to everything else.
const fn largest_pool(available: u64) -> u64 {
    let takeable = available.saturating_sub(LEFT_FREE_BYTES);
    takeable - takeable / PAGE_TABLE_PART
}

fn check_node(options: &PoolOptions) -> Result<(), PoolError> {
    let Some(node) = options.numa_node else {
        return Ok(());
    };
    let online = sys::host::numa_nodes();
    match online {
        Some(online) if sys::host::list_names(&online, node) => Ok(()),
        online => Err(PoolError::NoSuchNode {
            id: options.id,
            node,
            online: online
                .map_or_else(|| "no NUMA nodes".to_owned(), |online| format!("node {online}")),
        }),
    }
}

fn check_huge_pages(
    options: &PoolOptions,
    size: HugePageSize,
    before: &[PoolOptions],
) -> Result<(), PoolError> {
    let id = options.id;
    let directory = sys::host::huge_page_directory(size.bytes(), options.numa_node);
    let asked = whole_pages(options)? / size.bytes();
    let node = options.numa_node;
    let taken = taken(options, before, |one| node.is_none() || one.numa_node == node);
    let free = sys::host::free_huge_pages(&directory);
    match free.map(|free| free.saturating_sub(taken / size.bytes())) {
        None => Err(PoolError::HugePageSize { id, size, directory }),
        Some(free) if free < asked => {
            Err(PoolError::HugePages { id, size, asked, free, directory })
        }
        Some(_enough) => Ok(()),
    }
}

fn check_available(
    options: &PoolOptions,
    asked: u64,
    before: &[PoolOptions],
) -> Result<(), PoolError> {
    let node = options.numa_node;
    let Some((available, bound)) = sys::host::available_memory(node) else {
        return Ok(());
    };
    let of_node = matches!(bound, MemoryBound::Node(_));
    let taken = taken(options, before, |one| !of_node || one.numa_node == node);
    let available = available.saturating_sub(taken);
    let largest = largest_pool(available);
    if asked <= largest {
        return Ok(());
    }
    Err(PoolError::TooLarge { id: options.id, asked, largest, available, bound })
}

fn memory_file(options: &PoolOptions) -> io::Result<File> {
    let name = format!("kvrail-pool-{}", options.id.0);
    let huge = options.huge_pages.map_or(MemfdFlags::empty(), HugePageSize::memfd_flags);
    sys::memfd::create(&name, huge)
}

fn lock_refused(options: &PoolOptions, asked: u64) -> impl Fn(io::Error) -> PoolError {
    move |source| PoolError::Lock { id: options.id, asked, limit: sys::limits::memlock(), source }
}

/// Makes every page present. Kernels before 5.14 cannot do it through the mapping: there the file's
/// pages are allocated, which leaves a cheap fault per page but no signal.
fn populate(options: &PoolOptions, file: &File, mapping: &Mapping) -> Result<(), PoolError> {
    let bytes = mapping.len();
    let refused = |call| {
        move |source: io::Error| PoolError::Os {
            id: options.id,
            call,
            asked: bytes,
            source,
            remedy: "make the pool smaller or free memory",
        }
    };
    match mapping.populate() {
        Ok(()) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes)
                .map_err(|errno| refused("fallocate")(errno.into()))?;
            if options.lock {
                mapping.lock().map_err(lock_refused(options, bytes))?;
            }
            Ok(())
        }
        Err(error) => Err(refused("making the pages present")(error)),
    }
}

#[cfg(test)]
mod tests;
