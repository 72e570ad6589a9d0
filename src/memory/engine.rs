//! Memory of a local engine that the node copies blocks from and to, and lets peers read: its KV cache.
//!
//! An engine describes its tensors once and then names blocks by their numbers ([`crate::layout`]); the
//! node moves a batch of them by strided copies between that memory and a pool. What the memory is
//! hides behind [`EngineMemory`]. [`SharedMemory`] is host memory that the engine passed as a memory
//! file.
//!
//! Memory is imported by one connection and is kept, by counted references, until that connection and
//! every copy that it began have ended. An engine that dies takes nothing away from under a copy: the
//! node's own mapping keeps the pages. A [`Claim`] keeps memory that can be told from other memory (a file,
//! an allocation by its handle) from being imported twice, by whomever, as long as the first import lives:
//! the node knows of it by one set of blocks at a time.

use std::any::Any;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::claims::{Claim, Claims, Identity, Owner};
use super::{Mapping, OutOfBounds, Registrable, StridedCopy};
use crate::protocol::door::{DeviceUuid, EngineEvent, ImportRefusal};
use crate::sys::memfd;
use crate::types::Scope;

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the engine's memory into a pool.
    Save,
    /// From a pool into the engine's memory.
    Load,
}

/// Why a copy did not happen, or not to its end. What it wrote to is of no use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// A row leaves the memory or the pool.
    #[error("{0}")]
    OutOfBounds(#[from] OutOfBounds),
    /// An event was named for memory whose engine has none.
    #[error("host memory has no events: write the blocks before they are saved")]
    NoEvents,
    /// Memory of another device than the copier's, or of none.
    #[error("the memory is not where this copier copies")]
    Elsewhere,
    /// The driver refused, or the device is lost.
    #[error("{call}: {error}")]
    Device {
        /// The call that failed.
        call: &'static str,
        /// What the driver says.
        error: String,
    },
}

impl CopyError {
    /// Whose fault it is.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        match self {
            Self::OutOfBounds(_) | Self::Elsewhere | Self::Device { .. } => Scope::Local,
            Self::NoEvents => Scope::Request,
        }
    }
}

/// Memory of an engine. It stays reachable until the last reference is dropped, whatever became of the
/// engine.
pub trait EngineMemory: Any + Debug + Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// The GPU that it lies on; `None` for host memory.
    fn device(&self) -> Option<DeviceUuid>;

    /// What copies blocks from and to all memory of the same device, apart from all other copies: on a
    /// GPU a stream of its own.
    ///
    /// # Errors
    /// [`CopyError`].
    fn copier(&self) -> Result<Box<dyn Copier + '_>, CopyError>;

    /// Its mapping, where it is host memory: for who looks at the bytes where they lie.
    fn host(&self) -> Option<&Arc<Mapping>> {
        None
    }

    /// It as fabrics register it: these bytes, and no other ones of the engine.
    fn registrable(&self) -> Registrable;
}

/// Copies between the memory of one device and the pools, in the order asked. Calls come from a thread
/// that may wait, never from the data thread. Dropping it waits for what it has begun.
pub trait Copier: Debug {
    /// Copies that begin after this call begin when the work before the engine's event has run. The
    /// caller does not wait.
    ///
    /// # Errors
    /// [`CopyError`], also for memory whose engine has no events.
    fn wait_for(&mut self, event: &EngineEvent) -> Result<(), CopyError>;

    /// Begins these copies; they may go on when this returns. The caller keeps the pool's ranges until
    /// [`Self::finish`] has returned.
    ///
    /// # Errors
    /// [`CopyError`]; some of the copies may have been begun.
    fn start(
        &mut self,
        direction: Direction,
        memory: (&dyn EngineMemory, &[StridedCopy]),
        pool: &Arc<Mapping>,
    ) -> Result<(), CopyError>;

    /// Waits until all copies that were begun before have ended.
    ///
    /// # Errors
    /// [`CopyError`] where one of them failed. None is running any more.
    fn finish(&mut self) -> Result<(), CopyError>;
}

/// Why memory was not imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The descriptor is missing, or is no memory file that can never shrink.
    #[error(
        "the memory must be a memory file sealed against shrinking, its descriptor passed with the request: memfd_create(MFD_ALLOW_SEALING), then F_SEAL_SHRINK"
    )]
    NotMemory,
    /// The file is shorter than was said.
    #[error("the memory has {got} bytes and the engine says {said}")]
    TooShort {
        /// Its length.
        got: u64,
        /// What was said.
        said: u64,
    },
    /// It is imported already, or is a pool of this node.
    #[error("this memory is imported already, or is the node's own: import each allocation once")]
    AlreadyImported,
    /// It is imported by a client that is gone, and not let go of yet: peers read from it, or copies run.
    #[error(
        "this memory was imported by a client that is gone, and is being read or copied still: import \
         it again in a while"
    )]
    Leaving,
    /// This node has no GPU that it could use.
    #[error("{0}")]
    NoGpu(String),
    /// The memory lies on a GPU that is not this node's.
    #[error("{0}")]
    OtherDevice(String),
    /// The system or the driver refused.
    #[error("{call}: {error}")]
    System {
        /// The call that failed.
        call: &'static str,
        /// What it answered.
        error: String,
    },
}

impl ImportError {
    /// What the engine is told.
    #[must_use]
    pub const fn reason(&self) -> ImportRefusal {
        match self {
            Self::NotMemory => ImportRefusal::NotMemory,
            Self::TooShort { .. } => ImportRefusal::TooShort,
            Self::AlreadyImported | Self::Leaving => ImportRefusal::AlreadyImported,
            Self::NoGpu(_) => ImportRefusal::NoGpu,
            Self::OtherDevice(_) => ImportRefusal::OtherDevice,
            Self::System { .. } => ImportRefusal::System,
        }
    }

    fn system(call: &'static str, error: &io::Error) -> Self {
        Self::System { call, error: error.to_string() }
    }
}

/// Host memory of an engine, mapped here. Copies are done when they are begun.
#[derive(Debug)]
pub struct SharedMemory {
    mapping: Arc<Mapping>,
    _claim: Claim,
}

impl SharedMemory {
    /// Maps the first `bytes` bytes of a memory file that an engine passed.
    ///
    /// # Errors
    /// [`ImportError`].
    pub fn import(
        file: OwnedFd,
        bytes: u64,
        (claims, owner): (&Claims, &Arc<Owner>),
    ) -> Result<Self, ImportError> {
        let examined = memfd::examine(&file).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => ImportError::NotMemory,
            _ => ImportError::system("examining the memory file", &error),
        })?;
        if examined.len < bytes {
            return Err(ImportError::TooShort { got: examined.len, said: bytes });
        }
        let identity =
            Identity::of_file(&file).map_err(|error| ImportError::system("fstat", &error))?;
        let claim = claims.claim(identity, owner)?;
        // With its file, which peers on this host map where they read it in place.
        let mapping = Mapping::keeping(File::from(file), bytes)
            .map_err(|error| ImportError::system("mmap of the engine's memory", &error))?;
        Ok(Self { mapping: Arc::new(mapping), _claim: claim })
    }
}

impl EngineMemory for SharedMemory {
    fn bytes(&self) -> u64 {
        self.mapping.len()
    }

    fn device(&self) -> Option<DeviceUuid> {
        None
    }

    fn copier(&self) -> Result<Box<dyn Copier + '_>, CopyError> {
        Ok(Box::new(SharedCopier))
    }

    fn host(&self) -> Option<&Arc<Mapping>> {
        Some(&self.mapping)
    }

    fn registrable(&self) -> Registrable {
        Registrable::Host(Arc::clone(&self.mapping))
    }
}

/// Copies by the CPU.
#[derive(Debug)]
struct SharedCopier;

impl Copier for SharedCopier {
    fn wait_for(&mut self, _event: &EngineEvent) -> Result<(), CopyError> {
        Err(CopyError::NoEvents)
    }

    fn start(
        &mut self,
        direction: Direction,
        (memory, copies): (&dyn EngineMemory, &[StridedCopy]),
        pool: &Arc<Mapping>,
    ) -> Result<(), CopyError> {
        let memory: &dyn Any = memory;
        let shared = memory.downcast_ref::<SharedMemory>().ok_or(CopyError::Elsewhere)?;
        for copy in copies {
            for row in 0..u64::from(copy.rows) {
                // Offsets come from a checked layout and a reserved extent; whatever else they may be
                // is refused by the bounds of the two mappings.
                let here = copy.memory_offset.saturating_add(row.saturating_mul(copy.memory_pitch));
                let there = copy.pool_offset.saturating_add(row.saturating_mul(copy.pool_pitch));
                match direction {
                    Direction::Save => {
                        pool.copy_from(there, (&shared.mapping, here), copy.width)?
                    }
                    Direction::Load => shared.mapping.copy_from(here, (pool, there), copy.width)?,
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), CopyError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags};

    fn sealed(bytes: u64) -> OwnedFd {
        let file = memfd::create("kvrail-test", MemfdFlags::empty()).unwrap();
        file.set_len(bytes).unwrap();
        memfd::seal_length(&file).unwrap();
        file.into()
    }

    #[test]
    fn rows_are_copied_both_ways_and_nothing_between_them() {
        let claims = Claims::default();
        let file = sealed(4096);
        let engine = Mapping::new(&file.try_clone().unwrap().into(), 4096).unwrap();
        let memory = SharedMemory::import(file, 4096, (&claims, &Arc::default())).unwrap();
        let pool = Arc::new(Mapping::anonymous("kvrail-test", 4096).unwrap());
        engine.write(100, b"abcd-efgh-ijkl-").unwrap();
        let copy = StridedCopy {
            memory_offset: 100,
            memory_pitch: 5,
            pool_offset: 200,
            pool_pitch: 4,
            width: 4,
            rows: 3,
        };
        let mut copier = memory.copier().unwrap();
        copier.start(Direction::Save, (&memory, &[copy]), &pool).unwrap();
        copier.finish().unwrap();
        let mut bytes = [0; 14];
        pool.read(199, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0abcdefghijkl\0");
        pool.write(200, b"ABCDEFGHIJKL").unwrap();
        copier.start(Direction::Load, (&memory, &[copy]), &pool).unwrap();
        let mut bytes = [0; 15];
        engine.read(100, &mut bytes).unwrap();
        assert_eq!(&bytes, b"ABCD-EFGH-IJKL-");
        for wrong in [
            StridedCopy { memory_offset: 4083, ..copy },
            StridedCopy { pool_offset: 4085, ..copy },
            StridedCopy { memory_pitch: u64::MAX, ..copy },
        ] {
            let refused = copier.start(Direction::Load, (&memory, &[wrong]), &pool);
            assert!(matches!(refused, Err(CopyError::OutOfBounds(_))), "{wrong:?}");
        }
    }

    #[test]
    fn memory_is_imported_once_as_long_as_it_is_imported() {
        let (claims, owner) = (Claims::default(), Arc::default());
        let file = sealed(8192);
        let again = || SharedMemory::import(file.try_clone().unwrap(), 4096, (&claims, &owner));
        let first = again().unwrap();
        assert!(matches!(again(), Err(ImportError::AlreadyImported)));
        assert_eq!((first.bytes(), claims.len()), (4096, 1));
        drop(first);
        assert!(claims.is_empty());
        again().unwrap();
    }

    #[test]
    fn what_may_shrink_or_is_no_memory_is_refused() {
        let (claims, owner) = (Claims::default(), Arc::default());
        let refused =
            |file, bytes| SharedMemory::import(file, bytes, (&claims, &owner)).unwrap_err();
        let open = memfd::create("kvrail-test", MemfdFlags::empty()).unwrap();
        open.set_len(4096).unwrap();
        rustix::fs::fcntl_add_seals(&open, SealFlags::GROW).unwrap();
        assert!(matches!(refused(open.into(), 4096), ImportError::NotMemory));
        let plain = tempfile::tempfile().unwrap();
        assert!(matches!(refused(plain.into(), 1), ImportError::NotMemory));
        let short = refused(sealed(4096), 4097);
        assert!(matches!(short, ImportError::TooShort { got: 4096, said: 4097 }));
        assert_eq!(short.reason(), ImportRefusal::TooShort);
        assert!(claims.is_empty(), "what was refused is not claimed");
    }
}
