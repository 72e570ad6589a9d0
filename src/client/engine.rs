//! An engine's own memory: imported once, saved from and loaded into by block numbers, and read where it
//! lies.
//!
//! A block is saved or published in place, not both: what is here already stays where it is. An engine
//! that is about to overwrite a block that it published in place takes it back first
//! ([`ImportedLayout::withdraw`]), and saves it between the two where it is to be kept. Whoever
//! overwrites a published block without that breaks no reader, which finds by the checksum that these
//! are not the bytes, but makes the block a failure for all of them.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use super::{Client, ClientError};
use crate::layout::{AllocationId, BlockId, Tensor};
use crate::protocol::door::{
    DeviceUuid, EngineEvent, EngineReply, EngineRequest, LayoutId, LoadOutcome, MemorySource,
    MovedBlock, PublishOutcome, Reply, Request, Source,
};
use crate::types::Namespace;

/// A KV cache that the node knows by its layout, as long as the connection lives.
#[derive(Debug, Clone, Copy)]
pub struct ImportedLayout<'c> {
    client: &'c Client,
    id: LayoutId,
    block_bytes: u32,
}

impl Client {
    /// Gives the node the first `bytes` bytes of a memory file, which must be sealed against shrinking
    /// (`F_SEAL_SHRINK`). The node keeps it mapped until this connection ends and nothing is being
    /// copied or read any more; whoever imports it in that time waits, [`crate::limits::IMPORT_WAIT`] at
    /// most. As long as the connection lasts nobody else can import it.
    ///
    /// # Errors
    /// [`ClientError::ImportRefused`] where the node will not have it, [`ClientError::Busy`] where as many
    /// requests of this connection wait as may; else what broke the call.
    pub fn import_memfd(&self, file: &File, bytes: u64) -> Result<AllocationId, ClientError> {
        self.import(MemorySource::Memfd, bytes, Some(file.as_fd()))
    }

    /// Gives the node an allocation of a GPU by its IPC handle, which the driver gives for whole
    /// allocations.
    ///
    /// # Errors
    /// As [`Self::import_memfd`].
    pub fn import_cuda_ipc(
        &self,
        device: DeviceUuid,
        handle: [u8; 64],
        bytes: u64,
    ) -> Result<AllocationId, ClientError> {
        self.import(MemorySource::CudaIpc { device, handle }, bytes, None)
    }

    /// Gives the node an allocation of a GPU by a shareable handle's descriptor.
    ///
    /// # Errors
    /// As [`Self::import_memfd`].
    pub fn import_cuda_shareable(
        &self,
        device: DeviceUuid,
        file: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<AllocationId, ClientError> {
        self.import(MemorySource::CudaShareable { device }, bytes, Some(file))
    }

    fn import(
        &self,
        source: MemorySource,
        bytes: u64,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<AllocationId, ClientError> {
        let request = Request::Engine(EngineRequest::ImportMemory { source, bytes });
        match self.call_with(&request, file)? {
            Reply::Engine(EngineReply::MemoryImported { allocation }) => Ok(allocation),
            other => Err(self.unexpected(other)),
        }
    }

    /// Says how `blocks` blocks lie in imported allocations: tensors in the order of a block's logical
    /// bytes.
    ///
    /// # Errors
    /// [`ClientError::ImportRefused`] with the numbers that do not fit; else what broke the call.
    pub fn import_layout(
        &self,
        blocks: u32,
        tensors: &[Tensor],
    ) -> Result<ImportedLayout<'_>, ClientError> {
        let tensors = tensors.to_vec();
        let request = Request::Engine(EngineRequest::ImportLayout { blocks, tensors });
        match self.call(&request)? {
            Reply::Engine(EngineReply::LayoutImported { layout, block_bytes }) => {
                Ok(ImportedLayout { client: self, id: layout, block_bytes })
            }
            other => Err(self.unexpected(other)),
        }
    }
}

impl ImportedLayout<'_> {
    /// Logical bytes of one block.
    #[must_use]
    pub const fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Copies blocks into the node's pools and makes them visible, root first; one outcome per block.
    /// The blocks have been written, and are left alone until this returns. `pulled`: their bytes were
    /// pulled from another engine rather than computed here.
    ///
    /// # Errors
    /// [`ClientError::Busy`] where there is no memory now; [`ClientError::Refused`] for a block that is
    /// not in the layout; else what broke the call.
    pub fn save(
        &self,
        namespace: &Namespace,
        blocks: &[MovedBlock],
        pulled: bool,
    ) -> Result<Vec<PublishOutcome>, ClientError> {
        self.save_after(None, namespace, blocks, pulled)
    }

    /// As [`Self::save`], where the blocks are only written once the work before this event has run.
    ///
    /// # Errors
    /// As [`Self::save`]; [`ClientError::Refused`] also where the memory's engine has no events.
    pub fn save_after(
        &self,
        event: Option<EngineEvent>,
        namespace: &Namespace,
        blocks: &[MovedBlock],
        pulled: bool,
    ) -> Result<Vec<PublishOutcome>, ClientError> {
        let (namespace, layout, moved) = (*namespace, self.id, blocks.to_vec());
        let save = EngineRequest::Save { namespace, pulled, layout, event, blocks: moved };
        self.published(save, blocks.len())
    }

    /// Asks for blocks to be made visible; one outcome for each of so many.
    fn published(
        &self,
        request: EngineRequest,
        count: usize,
    ) -> Result<Vec<PublishOutcome>, ClientError> {
        match self.client.call(&Request::Engine(request))? {
            Reply::Published { outcomes } if outcomes.len() == count => Ok(outcomes),
            other => Err(self.client.unexpected(other)),
        }
    }

    /// Copies blocks into the layout, after fetching from peers those that are not on the node where
    /// `source` allows it; one outcome per block. Nobody else uses these blocks until this returns. The
    /// bytes of what is loaded were verified; what is not loaded may have been written to.
    ///
    /// # Errors
    /// As [`Self::save`]; also where two blocks have one number.
    pub fn load(
        &self,
        namespace: &Namespace,
        blocks: &[MovedBlock],
        source: Source,
    ) -> Result<Vec<LoadOutcome>, ClientError> {
        self.loaded(namespace, blocks, (source, false))
    }

    /// As [`Self::load`], but what comes from peers is READ straight into the layout, and no pool holds a
    /// copy. Such a block is published where it lies, which its outcome says: peers read it there, and it
    /// is left alone until [`Self::withdraw`] has returned for it. What is on the node already, or is just
    /// being fetched by somebody else, is copied into the layout, and so is all where there is no way for
    /// peers' bytes into it; `kvrail stat` says why.
    ///
    /// # Errors
    /// As [`Self::load`]; also for a block that is published in place, or is being loaded already.
    pub fn load_in_place(
        &self,
        namespace: &Namespace,
        blocks: &[MovedBlock],
        source: Source,
    ) -> Result<Vec<LoadOutcome>, ClientError> {
        self.loaded(namespace, blocks, (source, true))
    }

    fn loaded(
        &self,
        namespace: &Namespace,
        blocks: &[MovedBlock],
        (source, in_place): (Source, bool),
    ) -> Result<Vec<LoadOutcome>, ClientError> {
        let request = Request::Engine(EngineRequest::Load {
            namespace: *namespace,
            source,
            layout: self.id,
            in_place,
            blocks: blocks.to_vec(),
        });
        match self.client.call(&request)? {
            Reply::Engine(EngineReply::Loaded { outcomes }) if outcomes.len() == blocks.len() => {
                Ok(outcomes)
            }
            other => Err(self.client.unexpected(other)),
        }
    }

    /// Makes blocks visible where they lie, root first: peers read them out of the engine's memory, and
    /// no pool holds a copy. One outcome per block; one that is on the node already stays where it is,
    /// and this one is not published. The blocks have been written, and are left alone until
    /// [`Self::withdraw`] has returned for them.
    ///
    /// # Errors
    /// [`ClientError::Refused`] where the node's way to its peers does not reach this memory, with the
    /// reason (save the blocks then), where the GPU that it lies on is lost to the node, and for a block
    /// that is not in the layout, is named twice, or is published under another hash;
    /// [`ClientError::Busy`] where there is no memory now to sum blocks up in; else what broke the call.
    pub fn publish(
        &self,
        namespace: &Namespace,
        blocks: &[MovedBlock],
        pulled: bool,
    ) -> Result<Vec<PublishOutcome>, ClientError> {
        self.publish_after(None, namespace, blocks, pulled)
    }

    /// As [`Self::publish`], where the blocks are only written once the work before this event has run.
    ///
    /// # Errors
    /// As [`Self::publish`]; [`ClientError::Refused`] also where the memory's engine has no events.
    pub fn publish_after(
        &self,
        event: Option<EngineEvent>,
        namespace: &Namespace,
        blocks: &[MovedBlock],
        pulled: bool,
    ) -> Result<Vec<PublishOutcome>, ClientError> {
        let (namespace, layout, moved) = (*namespace, self.id, blocks.to_vec());
        let publish = EngineRequest::Publish { namespace, pulled, layout, event, blocks: moved };
        self.published(publish, blocks.len())
    }

    /// Takes blocks back that were published in place; how many of these were. When this returns nobody
    /// reads them any more, and the engine may write to them. A peer that is reading one has a second to
    /// end, then its access is cut. Blocks on a GPU that was lost to the node are taken back by the node
    /// itself, and are not counted.
    ///
    /// # Errors
    /// [`ClientError::Refused`] for a block that is not in the layout; else what broke the call.
    pub fn withdraw(&self, blocks: &[BlockId]) -> Result<u32, ClientError> {
        let blocks = blocks.to_vec();
        let request = Request::Engine(EngineRequest::Withdraw { layout: self.id, blocks });
        match self.client.call(&request)? {
            Reply::Done { count } => Ok(count),
            other => Err(self.client.unexpected(other)),
        }
    }
}
