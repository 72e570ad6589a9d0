//! The bytes of what engines ask and are told.

use bytemuck::{Pod, Zeroable};

use super::super::request::{AcquireWire, FlaggedWire, flagged};
use super::super::wire::{
    HashWire, Reader, U16, U32, U64, Writer, busy_code, busy_reason, flag, rank,
};
use super::super::{BlockOrigin, DecodeError, SENTENCE_BYTES_MAX, TooMany};
use super::{
    DeviceUuid, EngineEvent, EngineReply, EngineRequest, ImportRefusal, LayoutId, LoadOutcome,
    MemorySource, MovedBlock,
};
use crate::layout::{AllocationId, BlockId, KvSplit, Tensor};
use crate::limits;

const IMPORT_MEMORY: u8 = 0x10;
const IMPORT_LAYOUT: u8 = 0x11;
const SAVE: u8 = 0x12;
const LOAD: u8 = 0x13;
const PUBLISH: u8 = 0x14;
const WITHDRAW: u8 = 0x15;
const MEMORY_IMPORTED: u8 = 0x90;
const LAYOUT_IMPORTED: u8 = 0x91;
const IMPORT_REFUSED: u8 = 0x92;
const LOADED: u8 = 0x93;

/// `ImportMemory`; what a source does not have is zero.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MemoryWire {
    source: u8,
    device: [u8; 16],
    handle: [u8; 64],
    bytes: U64,
}

impl MemoryWire {
    fn new(source: &MemorySource, bytes: u64) -> Self {
        let mut wire = Self { bytes: U64::new(bytes), ..Self::zeroed() };
        match *source {
            MemorySource::Memfd => {}
            MemorySource::CudaIpc { device, handle } => {
                (wire.source, wire.device, wire.handle) = (1, device.0, handle);
            }
            MemorySource::CudaShareable { device } => (wire.source, wire.device) = (2, device.0),
        }
        wire
    }

    fn get(&self) -> Result<EngineRequest, DecodeError> {
        let device = DeviceUuid(self.device);
        let source = match self.source {
            0 => MemorySource::Memfd,
            1 => MemorySource::CudaIpc { device, handle: self.handle },
            2 => MemorySource::CudaShareable { device },
            _ => return Err(DecodeError::Field { field: "memory source" }),
        };
        let bytes = self.bytes.get();
        if !(1..=limits::ALLOCATION_BYTES_MAX).contains(&bytes) {
            return Err(DecodeError::Field { field: "bytes" });
        }
        let canonical = Self::new(&source, bytes);
        if bytemuck::bytes_of(&canonical) != bytemuck::bytes_of(self) {
            return Err(DecodeError::Field { field: "memory source" });
        }
        Ok(EngineRequest::ImportMemory { source, bytes })
    }
}

/// A tensor; the K/V stride is zero where there is none, which no two segments can have.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TensorWire {
    allocation: U16,
    layers: U16,
    segment_bytes: U32,
    offset: U64,
    layer_stride: U64,
    kv_stride: U64,
    block_stride: U64,
}

impl TensorWire {
    fn new(tensor: &Tensor) -> Self {
        let kv_stride = match tensor.kv {
            KvSplit::Fused => 0,
            KvSplit::Split { stride } => stride,
        };
        Self {
            allocation: U16::new(tensor.allocation.0),
            layers: U16::new(tensor.layers),
            segment_bytes: U32::new(tensor.segment_bytes),
            offset: U64::new(tensor.offset),
            layer_stride: U64::new(tensor.layer_stride),
            kv_stride: U64::new(kv_stride),
            block_stride: U64::new(tensor.block_stride),
        }
    }

    fn get(&self) -> Tensor {
        Tensor {
            allocation: AllocationId(self.allocation.get()),
            offset: self.offset.get(),
            layers: self.layers.get(),
            layer_stride: self.layer_stride.get(),
            kv: match self.kv_stride.get() {
                0 => KvSplit::Fused,
                stride => KvSplit::Split { stride },
            },
            block_stride: self.block_stride.get(),
            segment_bytes: self.segment_bytes.get(),
        }
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MovedWire {
    hash: HashWire,
    block: U32,
}

impl MovedWire {
    fn new(moved: &MovedBlock) -> Self {
        Self { hash: HashWire::new(&moved.hash), block: U32::new(moved.block.0) }
    }

    fn get(&self) -> Result<MovedBlock, DecodeError> {
        Ok(MovedBlock { hash: self.hash.get()?, block: BlockId(self.block.get()) })
    }
}

/// The event of a `Save` or a `Publish`; all zero where there is none.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct EventWire {
    there: u8,
    handle: [u8; 64],
}

impl EventWire {
    fn new(event: Option<EngineEvent>) -> Self {
        let there = u8::from(event.is_some());
        Self { there, handle: event.map_or([0; 64], |event| event.0) }
    }

    fn get(&self) -> Result<Option<EngineEvent>, DecodeError> {
        match (flag(self.there, "event")?, self.handle) {
            (true, handle) => Ok(Some(EngineEvent(handle))),
            (false, handle) if handle == [0; 64] => Ok(None),
            (false, _) => Err(DecodeError::Field { field: "event" }),
        }
    }
}

impl EngineRequest {
    /// Whether a descriptor comes with the frame.
    #[must_use]
    pub const fn carries_file(&self) -> bool {
        matches!(self, Self::ImportMemory { source, .. } if source.carries_file())
    }

    pub(in super::super) const fn kind(&self) -> u8 {
        match self {
            Self::ImportMemory { .. } => IMPORT_MEMORY,
            Self::ImportLayout { .. } => IMPORT_LAYOUT,
            Self::Save { .. } => SAVE,
            Self::Load { .. } => LOAD,
            Self::Publish { .. } => PUBLISH,
            Self::Withdraw { .. } => WITHDRAW,
        }
    }

    pub(in super::super) fn body(&self, writer: &mut Writer<'_>) -> Result<(), TooMany> {
        let most = limits::DOOR_BLOCKS_MAX;
        match self {
            Self::ImportMemory { source, bytes } => {
                writer.head(&MemoryWire::new(source, *bytes));
                Ok(())
            }
            Self::ImportLayout { blocks, tensors } => {
                writer.head(&U32::new(*blocks));
                writer.list(tensors, limits::LAYOUT_TENSORS_MAX, TensorWire::new)
            }
            Self::Save { namespace, pulled, layout, event, blocks }
            | Self::Publish { namespace, pulled, layout, event, blocks } => {
                writer.head(&flagged(namespace, *pulled));
                writer.head(&U16::new(layout.0));
                writer.head(&EventWire::new(*event));
                writer.list(blocks, most, MovedWire::new)
            }
            Self::Load { namespace, source, layout, in_place, blocks } => {
                writer.head(&AcquireWire::new(namespace, *source));
                writer.head(&U16::new(layout.0));
                writer.head(&u8::from(*in_place));
                writer.list(blocks, most, MovedWire::new)
            }
            Self::Withdraw { layout, blocks } => {
                writer.head(&U16::new(layout.0));
                writer.list(blocks, most, |block: &BlockId| U32::new(block.0))
            }
        }
    }

    /// Reads a body; `None` for a kind that is no engine's.
    pub(in super::super) fn decode(
        kind: u8,
        mut reader: Reader<'_>,
    ) -> Option<Result<Self, DecodeError>> {
        let most = limits::DOOR_BLOCKS_MAX;
        let decoded = match kind {
            IMPORT_MEMORY => reader.head().and_then(|wire: MemoryWire| {
                reader.end()?;
                wire.get()
            }),
            IMPORT_LAYOUT => reader.head().and_then(|blocks: U32| {
                let tensors = reader
                    .list_of(limits::LAYOUT_TENSORS_MAX, |tensor: &TensorWire| Ok(tensor.get()))?;
                Ok(Self::ImportLayout { blocks: blocks.get(), tensors })
            }),
            SAVE | PUBLISH => reader.head().and_then(|head: FlaggedWire| {
                let namespace = head.namespace.get()?;
                let pulled = flag(head.flag, "pulled")?;
                let layout = LayoutId(reader.head::<U16>()?.get());
                let event = reader.head::<EventWire>()?.get()?;
                let blocks = reader.list_of(most, MovedWire::get)?;
                Ok(match kind {
                    SAVE => Self::Save { namespace, pulled, layout, event, blocks },
                    _ => Self::Publish { namespace, pulled, layout, event, blocks },
                })
            }),
            LOAD => reader.head().and_then(|head: AcquireWire| {
                Ok(Self::Load {
                    namespace: head.namespace.get()?,
                    source: head.source()?,
                    layout: LayoutId(reader.head::<U16>()?.get()),
                    in_place: flag(reader.head::<u8>()?, "in place")?,
                    blocks: reader.list_of(most, MovedWire::get)?,
                })
            }),
            WITHDRAW => reader.head().and_then(|layout: U16| {
                let blocks = reader.list_of(most, |block: &U32| Ok(BlockId(block.get())))?;
                Ok(Self::Withdraw { layout: LayoutId(layout.get()), blocks })
            }),
            _ => return None,
        };
        Some(decoded)
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LayoutImportedWire {
    layout: U16,
    block_bytes: U32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LoadedWire {
    status: u8,
    /// Where it came from, or why it has to wait.
    detail: u8,
    rank: u8,
}

impl LoadedWire {
    fn new(outcome: &LoadOutcome) -> Self {
        let status = match *outcome {
            LoadOutcome::Loaded { origin, rank, in_place } => {
                let status = if in_place { 4 } else { 0 };
                let detail = u8::from(origin == BlockOrigin::Fetched);
                return Self { status, detail, rank: rank.get() };
            }
            LoadOutcome::NotFound => 1,
            LoadOutcome::Busy(reason) => {
                return Self { status: 2, detail: busy_code(reason), rank: 0 };
            }
            LoadOutcome::Failed => 3,
        };
        Self { status, ..Self::zeroed() }
    }

    fn get(&self) -> Result<LoadOutcome, DecodeError> {
        Ok(match (self.status, self.detail, self.rank) {
            (status @ (0 | 4), origin, byte) => {
                let origin = match flag(origin, "origin")? {
                    true => BlockOrigin::Fetched,
                    false => BlockOrigin::Local,
                };
                LoadOutcome::Loaded { origin, rank: rank(byte)?, in_place: status == 4 }
            }
            (1, 0, 0) => LoadOutcome::NotFound,
            (2, reason, 0) => LoadOutcome::Busy(busy_reason(reason)?),
            (3, 0, 0) => LoadOutcome::Failed,
            _ => return Err(DecodeError::Field { field: "status" }),
        })
    }
}

impl EngineReply {
    pub(in super::super) const fn kind(&self) -> u8 {
        match self {
            Self::MemoryImported { .. } => MEMORY_IMPORTED,
            Self::LayoutImported { .. } => LAYOUT_IMPORTED,
            Self::ImportRefused { .. } => IMPORT_REFUSED,
            Self::Loaded { .. } => LOADED,
        }
    }

    pub(in super::super) fn body(&self, writer: &mut Writer<'_>) -> Result<(), TooMany> {
        match self {
            Self::MemoryImported { allocation } => writer.head(&U16::new(allocation.0)),
            Self::LayoutImported { layout, block_bytes } => writer.head(&LayoutImportedWire {
                layout: U16::new(layout.0),
                block_bytes: U32::new(*block_bytes),
            }),
            Self::ImportRefused { reason, sentence } => {
                writer.head(&reason.code());
                writer.bytes(sentence.as_bytes(), SENTENCE_BYTES_MAX)?;
            }
            Self::Loaded { outcomes } => {
                writer.list(outcomes, limits::DOOR_BLOCKS_MAX, LoadedWire::new)?;
            }
        }
        Ok(())
    }

    /// Reads a body; `None` for a kind that is no engine's.
    pub(in super::super) fn decode(
        kind: u8,
        mut reader: Reader<'_>,
    ) -> Option<Result<Self, DecodeError>> {
        let decoded = match kind {
            MEMORY_IMPORTED => reader.head().and_then(|allocation: U16| {
                reader.end()?;
                Ok(Self::MemoryImported { allocation: AllocationId(allocation.get()) })
            }),
            LAYOUT_IMPORTED => reader.head().and_then(|wire: LayoutImportedWire| {
                reader.end()?;
                let (layout, block_bytes) = (LayoutId(wire.layout.get()), wire.block_bytes.get());
                Ok(Self::LayoutImported { layout, block_bytes })
            }),
            IMPORT_REFUSED => reader.head().and_then(|code: u8| {
                let mut all = ImportRefusal::ALL.into_iter();
                let reason = all
                    .find(|reason| reason.code() == code)
                    .ok_or(DecodeError::Field { field: "reason" })?;
                if reader.0.len() > SENTENCE_BYTES_MAX {
                    return Err(DecodeError::Length);
                }
                Ok(Self::ImportRefused { reason, sentence: reader.text()?.to_owned() })
            }),
            LOADED => reader
                .list_of(limits::DOOR_BLOCKS_MAX, LoadedWire::get)
                .map(|outcomes| Self::Loaded { outcomes }),
            _ => return None,
        };
        Some(decoded)
    }
}
