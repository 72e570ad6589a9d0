//! What an engine asks about its own memory: to import it, to save blocks from it, to load blocks into
//! it, to let peers read blocks where they lie, and to have those back.
//!
//! Memory and layout are named once. Afterwards a block is its number in a layout
//! ([`BlockId`]), and no list of descriptors crosses the socket.

mod wire;

use super::{BlockOrigin, Source};
use crate::event::BusyReason;
use crate::layout::{AllocationId, BlockId, Tensor};
use crate::types::{BlockHash, EvictionRank, Namespace};

/// A layout that a connection imported, as the node numbers it, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayoutId(pub u16);

/// A GPU by the identity that does not depend on who looks: 16 bytes, as `nvidia-smi -L` and
/// `cuDeviceGetUuid` tell them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceUuid(pub [u8; 16]);

/// How the node gets at an allocation of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemorySource {
    /// A memory file that can never shrink (`F_SEAL_SHRINK`); its descriptor comes with the frame.
    Memfd,
    /// Device memory, by what `cuIpcGetMemHandle` gave for the allocation.
    CudaIpc {
        /// The GPU that it lies on.
        device: DeviceUuid,
        /// The handle.
        handle: [u8; 64],
    },
    /// Device memory, by the descriptor that `cuMemExportToShareableHandle` gave; it comes with the
    /// frame.
    CudaShareable {
        /// The GPU that it lies on.
        device: DeviceUuid,
    },
}

impl MemorySource {
    /// Whether a descriptor comes with the frame.
    #[must_use]
    pub const fn carries_file(&self) -> bool {
        matches!(self, Self::Memfd | Self::CudaShareable { .. })
    }
}

/// An event that the engine recorded behind the work that wrote its blocks, by what
/// `cuIpcGetEventHandle` gave for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineEvent(pub [u8; 64]);

/// One block of a save, a load or a publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MovedBlock {
    /// Its hash.
    pub hash: BlockHash,
    /// Its number in the layout.
    pub block: BlockId,
}

/// What an engine asks. Lists hold at most [`crate::limits::DOOR_BLOCKS_MAX`] entries.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineRequest {
    /// Gives the node an allocation; answered by [`EngineReply::MemoryImported`]. It is the node's
    /// until the connection ends.
    ImportMemory {
        /// How to get at it.
        source: MemorySource,
        /// Its length in bytes, 1 to [`crate::limits::ALLOCATION_BYTES_MAX`].
        bytes: u64,
    },
    /// Says how blocks lie in imported allocations; answered by [`EngineReply::LayoutImported`].
    ImportLayout {
        /// Blocks of the KV cache.
        blocks: u32,
        /// Its tensors, in the order of a block's logical bytes; at most
        /// [`crate::limits::LAYOUT_TENSORS_MAX`].
        tensors: Vec<Tensor>,
    },
    /// Copies blocks out of a layout into the node's pools and makes them visible; answered by
    /// [`super::Reply::Published`]. The engine has written the blocks, or has recorded an event behind
    /// the work that does, and leaves them alone until the answer.
    Save {
        /// The set of blocks that the hashes belong to.
        namespace: Namespace,
        /// Whether the engine pulled the bytes from another engine rather than computed them.
        pulled: bool,
        /// Where from.
        layout: LayoutId,
        /// What the copies wait for, where the blocks may not be written yet.
        event: Option<EngineEvent>,
        /// The blocks, root first.
        blocks: Vec<MovedBlock>,
    },
    /// Copies blocks into a layout, fetching from peers those that are not here where `source` allows
    /// it; answered by [`EngineReply::Loaded`].
    Load {
        /// The set of blocks that the hashes belong to.
        namespace: Namespace,
        /// Where to look.
        source: Source,
        /// Where to.
        layout: LayoutId,
        /// Whether what comes from peers lands in the layout itself and is published there, where there
        /// is a way for it: as by a `Publish`, until it is taken back by a `Withdraw`.
        in_place: bool,
        /// The blocks, root first, no two of one number.
        blocks: Vec<MovedBlock>,
    },
    /// Makes blocks visible where they lie: peers read them out of the engine's memory; answered by
    /// [`super::Reply::Published`]. The engine has written them, or has recorded an event behind the work
    /// that does, and leaves them alone until it has had them back by a `Withdraw`. A block that is here
    /// already stays where it is, and this one is not published.
    Publish {
        /// The set of blocks that the hashes belong to.
        namespace: Namespace,
        /// Whether the engine pulled the bytes from another engine rather than computed them.
        pulled: bool,
        /// Where they lie.
        layout: LayoutId,
        /// What has to run before they may be read, where they may not be written yet.
        event: Option<EngineEvent>,
        /// The blocks, root first, no two of one number.
        blocks: Vec<MovedBlock>,
    },
    /// Takes published blocks back; answered by [`super::Reply::Done`] with how many of them were
    /// published, once nobody can read them any more.
    Withdraw {
        /// Where they lie.
        layout: LayoutId,
        /// Their numbers.
        blocks: Vec<BlockId>,
    },
}

/// Why memory or a layout was not imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ImportRefusal {
    /// The node has no GPU, or no driver that it can use.
    NoGpu,
    /// The memory lies on a GPU that this node does not have.
    OtherDevice,
    /// The descriptor or handle is not what it is said to be, or may shrink.
    NotMemory,
    /// The memory is shorter than was said.
    TooShort,
    /// This memory, or a part of it, is imported already, or is the node's own.
    AlreadyImported,
    /// The layout's numbers do not fit.
    Layout,
    /// As many allocations or layouts as a connection may have.
    TooMany,
    /// The operating system or the driver refused.
    System,
}

impl ImportRefusal {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::NoGpu,
        Self::OtherDevice,
        Self::NotMemory,
        Self::TooShort,
        Self::AlreadyImported,
        Self::Layout,
        Self::TooMany,
        Self::System,
    ];

    const fn code(self) -> u8 {
        match self {
            Self::NoGpu => 1,
            Self::OtherDevice => 2,
            Self::NotMemory => 3,
            Self::TooShort => 4,
            Self::AlreadyImported => 5,
            Self::Layout => 6,
            Self::TooMany => 7,
            Self::System => 8,
        }
    }
}

/// What became of one block that was to be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadOutcome {
    /// Its bytes lie in the layout, verified.
    Loaded {
        /// Where it came from.
        origin: BlockOrigin,
        /// Its rank after this access.
        rank: EvictionRank,
        /// Whether it is published where it lies, to be taken back before it is written to. Else it was
        /// copied there.
        in_place: bool,
    },
    /// Nobody who was asked holds it.
    NotFound,
    /// Not now: ask again after a pause.
    Busy(BusyReason),
    /// It could not be read from any of its owners, its bytes are not those that were saved, or it
    /// does not have the length of the layout's blocks. What lies in the layout is of no use.
    Failed,
}

/// What the node answers to an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineReply {
    /// To `ImportMemory`.
    MemoryImported {
        /// What tensors name.
        allocation: AllocationId,
    },
    /// To `ImportLayout`.
    LayoutImported {
        /// What other requests name.
        layout: LayoutId,
        /// Logical bytes of one block.
        block_bytes: u32,
    },
    /// To `ImportMemory` and `ImportLayout`: nothing was imported.
    ImportRefused {
        /// Why.
        reason: ImportRefusal,
        /// The same with the numbers, and what to do; at most [`super::SENTENCE_BYTES_MAX`] bytes.
        sentence: String,
    },
    /// To `Load`.
    Loaded {
        /// One per block.
        outcomes: Vec<LoadOutcome>,
    },
}
