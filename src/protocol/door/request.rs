//! What a client asks.

use bytemuck::{Pod, Zeroable};

use super::wire::{ExtentWire, HashWire, HoldWire, NameWire, Reader, U32, U64, Writer, flag};
use super::{DecodeError, EngineRequest, Header, TooMany};
use crate::limits;
use crate::types::{BlockHash, Extent, Namespace, NodeId, ResidentId};

/// A block that a client has written in place and wants to be found by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PublishBlock {
    /// Its hash.
    pub hash: BlockHash,
    /// The reservation that it was written into, exactly as it was answered.
    pub extent: Extent,
    /// XXH3-64 of the block's bytes.
    pub checksum: u64,
}

/// A request. Lists hold at most [`limits::DOOR_BLOCKS_MAX`] entries.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request {
    /// The first request of a connection; answered by [`super::Reply::Welcome`] and the pools' files.
    Hello,
    /// Memory for blocks of these sizes, all or none.
    Reserve {
        /// Bytes of each block, 1 to [`limits::BLOCK_BYTES_MAX`].
        sizes: Vec<u32>,
    },
    /// Makes written blocks visible. Each extent must be a reservation of this connection.
    Publish {
        /// The set of blocks that the hashes belong to.
        namespace: Namespace,
        /// Whether the engine pulled the bytes from another engine rather than computed them.
        pulled: bool,
        /// The blocks, root first.
        blocks: Vec<PublishBlock>,
    },
    /// Gives reservations back unpublished.
    Discard {
        /// The reservations.
        extents: Vec<Extent>,
    },
    /// Pins blocks for reading in place.
    Acquire {
        /// The set of blocks that the hashes belong to.
        namespace: Namespace,
        /// Where to look.
        source: Source,
        /// The blocks, root first.
        hashes: Vec<BlockHash>,
    },
    /// Lets go of acquired blocks, once per acquisition.
    Release {
        /// The holds.
        holds: Vec<ResidentId>,
    },
    /// The engine has sent these blocks to the decode side and will not soon ask for them.
    FinishedSending {
        /// The set of blocks that the hashes belong to.
        namespace: Namespace,
        /// The blocks.
        hashes: Vec<BlockHash>,
    },
    /// Answered when the registry knows all that was published before, or the time is up.
    Flush {
        /// How long to wait, milliseconds.
        deadline_ms: u32,
    },
    /// The node's state, as JSON.
    Stat,
    /// A page of residents.
    List {
        /// Only blocks of this namespace; all where there is none.
        namespace: Option<Namespace>,
        /// Where the page before ended; 0 for the first.
        cursor: u64,
        /// Most entries wanted, 1 to [`limits::DOOR_BLOCKS_MAX`].
        max: u32,
    },
    /// Blocks evicted since a point, oldest first, as far as the node remembers.
    Evictions {
        /// Only evictions with a greater sequence; 0 for all.
        since: u64,
    },
    /// Forgets what speaks against a peer, or against all peers and the node's NICs. Answered by
    /// [`super::Reply::Done`] with the number of breakers that were not closed.
    ResetHealth {
        /// The peer; all where there is none.
        node: Option<NodeId>,
    },
    /// What an engine asks about its own memory.
    Engine(EngineRequest),
}

mod kind {
    pub(super) const HELLO: u8 = 0x01;
    pub(super) const RESERVE: u8 = 0x02;
    pub(super) const PUBLISH: u8 = 0x03;
    pub(super) const DISCARD: u8 = 0x04;
    pub(super) const ACQUIRE: u8 = 0x05;
    pub(super) const RELEASE: u8 = 0x06;
    pub(super) const FINISHED_SENDING: u8 = 0x07;
    pub(super) const FLUSH: u8 = 0x08;
    pub(super) const STAT: u8 = 0x09;
    pub(super) const LIST: u8 = 0x0a;
    pub(super) const EVICTIONS: u8 = 0x0b;
    pub(super) const RESET_HEALTH: u8 = 0x0c;
}

/// Where an acquisition looks for blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// On this node only.
    Here,
    /// On this node, then on whichever peers hold them.
    Anywhere,
    /// On this node, then on this one peer.
    From(NodeId),
}

/// No node in particular.
const NOBODY: [u8; 16] = [0; 16];

/// The head of `Acquire` and `Load`; the node is zero unless it is meant.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AcquireWire {
    pub(super) namespace: NameWire,
    source: u8,
    node: [u8; 16],
}

impl AcquireWire {
    pub(super) fn new(namespace: &Namespace, source: Source) -> Self {
        let (source, node) = match source {
            Source::Here => (0, NOBODY),
            Source::Anywhere => (1, NOBODY),
            Source::From(NodeId(node)) => (2, node),
        };
        Self { namespace: NameWire::new(Some(namespace)), source, node }
    }

    pub(super) fn source(&self) -> Result<Source, DecodeError> {
        match (self.source, self.node) {
            (0, NOBODY) => Ok(Source::Here),
            (1, NOBODY) => Ok(Source::Anywhere),
            (2, node) => Ok(Source::From(NodeId(node))),
            _ => Err(DecodeError::Field { field: "source" }),
        }
    }
}

/// `ResetHealth`; the node is zero unless it is named.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ResetWire {
    named: u8,
    node: [u8; 16],
}

/// The head of `Publish` and `Save`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct FlaggedWire {
    pub(super) namespace: NameWire,
    pub(super) flag: u8,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PublishWire {
    hash: HashWire,
    extent: ExtentWire,
    checksum: U64,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ListWire {
    namespace: NameWire,
    cursor: U64,
    max: U32,
}

impl Request {
    /// Whether a descriptor comes with the frame.
    #[must_use]
    pub const fn carries_file(&self) -> bool {
        matches!(self, Self::Engine(request) if request.carries_file())
    }

    const fn kind(&self) -> u8 {
        match self {
            Self::Hello => kind::HELLO,
            Self::Reserve { .. } => kind::RESERVE,
            Self::Publish { .. } => kind::PUBLISH,
            Self::Discard { .. } => kind::DISCARD,
            Self::Acquire { .. } => kind::ACQUIRE,
            Self::Release { .. } => kind::RELEASE,
            Self::FinishedSending { .. } => kind::FINISHED_SENDING,
            Self::Flush { .. } => kind::FLUSH,
            Self::Stat => kind::STAT,
            Self::List { .. } => kind::LIST,
            Self::Evictions { .. } => kind::EVICTIONS,
            Self::ResetHealth { .. } => kind::RESET_HEALTH,
            Self::Engine(request) => request.kind(),
        }
    }

    /// Appends the frame of this request, numbered `request`, to `out`.
    ///
    /// # Errors
    /// [`TooMany`] for a list beyond [`limits::DOOR_BLOCKS_MAX`]; `out` is unchanged then.
    pub fn encode(&self, request: u32, out: &mut Vec<u8>) -> Result<(), TooMany> {
        let mut writer = Writer::new(out);
        let body = self.body(&mut writer);
        writer.finish(self.kind(), request, body)
    }

    fn body(&self, writer: &mut Writer<'_>) -> Result<(), TooMany> {
        let most = limits::DOOR_BLOCKS_MAX;
        match self {
            Self::Hello | Self::Stat => Ok(()),
            Self::Reserve { sizes } => writer.list(sizes, most, |size| U32::new(*size)),
            Self::Publish { namespace, pulled, blocks } => {
                writer.head(&flagged(namespace, *pulled));
                writer.list(blocks, most, |block| PublishWire {
                    hash: HashWire::new(&block.hash),
                    extent: ExtentWire::new(&block.extent),
                    checksum: U64::new(block.checksum),
                })
            }
            Self::Discard { extents } => writer.list(extents, most, ExtentWire::new),
            Self::Acquire { namespace, source, hashes } => {
                writer.head(&AcquireWire::new(namespace, *source));
                writer.list(hashes, most, HashWire::new)
            }
            Self::Release { holds } => writer.list(holds, most, |hold| HoldWire::new(*hold)),
            Self::FinishedSending { namespace, hashes } => {
                writer.head(&NameWire::new(Some(namespace)));
                writer.list(hashes, most, HashWire::new)
            }
            Self::Flush { deadline_ms } => {
                writer.head(&U32::new(*deadline_ms));
                Ok(())
            }
            Self::List { namespace, cursor, max } => {
                writer.head(&ListWire {
                    namespace: NameWire::new(namespace.as_ref()),
                    cursor: U64::new(*cursor),
                    max: U32::new(*max),
                });
                Ok(())
            }
            Self::Evictions { since } => {
                writer.head(&U64::new(*since));
                Ok(())
            }
            Self::ResetHealth { node } => {
                writer.head(&ResetWire {
                    named: u8::from(node.is_some()),
                    node: node.map_or(NOBODY, |node| node.0),
                });
                Ok(())
            }
            Self::Engine(request) => request.body(writer),
        }
    }

    /// Reads the body that came behind `header`.
    ///
    /// # Errors
    /// [`DecodeError`]; the sender's connection is to be closed.
    pub fn decode(header: Header, body: &[u8]) -> Result<Self, DecodeError> {
        let most = limits::DOOR_BLOCKS_MAX;
        let mut reader = Reader(body);
        match header.kind {
            kind::HELLO => reader.end().map(|()| Self::Hello),
            kind::RESERVE => Ok(Self::Reserve { sizes: reader.list_of(most, size)? }),
            kind::PUBLISH => {
                let head: FlaggedWire = reader.head()?;
                Ok(Self::Publish {
                    namespace: head.namespace.get()?,
                    pulled: flag(head.flag, "pulled")?,
                    blocks: reader.list_of(most, publish_block)?,
                })
            }
            kind::DISCARD => Ok(Self::Discard { extents: reader.list_of(most, ExtentWire::get)? }),
            kind::ACQUIRE => {
                let head: AcquireWire = reader.head()?;
                Ok(Self::Acquire {
                    namespace: head.namespace.get()?,
                    source: head.source()?,
                    hashes: reader.list_of(most, HashWire::get)?,
                })
            }
            kind::RELEASE => {
                Ok(Self::Release { holds: reader.list_of(most, |hold: &HoldWire| Ok(hold.get()))? })
            }
            kind::FINISHED_SENDING => {
                let head: NameWire = reader.head()?;
                Ok(Self::FinishedSending {
                    namespace: head.get()?,
                    hashes: reader.list_of(most, HashWire::get)?,
                })
            }
            kind::FLUSH => {
                let deadline_ms = reader.head::<U32>()?.get();
                reader.end().map(|()| Self::Flush { deadline_ms })
            }
            kind::STAT => reader.end().map(|()| Self::Stat),
            kind::LIST => list(reader),
            kind::EVICTIONS => {
                let since = reader.head::<U64>()?.get();
                reader.end().map(|()| Self::Evictions { since })
            }
            kind::RESET_HEALTH => reset_health(reader),
            kind => EngineRequest::decode(kind, reader)
                .unwrap_or(Err(DecodeError::Kind { kind }))
                .map(Self::Engine),
        }
    }
}

pub(super) fn flagged(namespace: &Namespace, flag: bool) -> FlaggedWire {
    FlaggedWire { namespace: NameWire::new(Some(namespace)), flag: u8::from(flag) }
}

fn size(size: &U32) -> Result<u32, DecodeError> {
    let size = size.get();
    if (limits::BLOCK_BYTES_MIN..=limits::BLOCK_BYTES_MAX).contains(&size) {
        Ok(size)
    } else {
        Err(DecodeError::Field { field: "size" })
    }
}

fn publish_block(wire: &PublishWire) -> Result<PublishBlock, DecodeError> {
    Ok(PublishBlock {
        hash: wire.hash.get()?,
        extent: wire.extent.get()?,
        checksum: wire.checksum.get(),
    })
}

fn reset_health(mut reader: Reader<'_>) -> Result<Request, DecodeError> {
    let head: ResetWire = reader.head()?;
    reader.end()?;
    match (flag(head.named, "named")?, head.node) {
        (true, node) => Ok(Request::ResetHealth { node: Some(NodeId(node)) }),
        (false, NOBODY) => Ok(Request::ResetHealth { node: None }),
        (false, _) => Err(DecodeError::Field { field: "node" }),
    }
}

fn list(mut reader: Reader<'_>) -> Result<Request, DecodeError> {
    let head: ListWire = reader.head()?;
    reader.end()?;
    let max = head.max.get();
    if max == 0 || max as usize > limits::DOOR_BLOCKS_MAX {
        return Err(DecodeError::Field { field: "max" });
    }
    Ok(Request::List { namespace: head.namespace.optional()?, cursor: head.cursor.get(), max })
}
