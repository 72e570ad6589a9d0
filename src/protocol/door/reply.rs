//! What the node answers.

use bytemuck::{Pod, Zeroable};

use super::wire::{
    ExtentWire, HashWire, HoldWire, NameWire, Reader, U16, U32, U64, Writer, busy_code,
    busy_reason, flag, rank,
};
use super::{DecodeError, EngineReply, Header, SENTENCE_BYTES_MAX, TooMany};
use crate::event::BusyReason;
use crate::limits;
use crate::types::{
    BlockHash, EvictionRank, Extent, Namespace, NamespaceId, PoolId, ResidentCause, ResidentId,
};

/// A pool of the node. Its file comes with the welcome, in the same order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSize {
    /// Its number, which extents name.
    pub id: PoolId,
    /// Its length in bytes.
    pub bytes: u64,
}

/// What became of one published block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishOutcome {
    /// It is resident now.
    Stored,
    /// It was resident before; the new memory went back.
    AlreadyResident(ResidentCause),
    /// The node did not take it: the extent is no reservation of this connection, or the node is
    /// shutting down. The memory, where there was any, went back.
    Refused,
}

/// Where an acquired block came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockOrigin {
    /// It was here.
    Local,
    /// A peer's memory was read for it.
    Fetched,
}

/// A block that is pinned for a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldBlock {
    /// Where it came from.
    pub origin: BlockOrigin,
    /// Its rank after this access.
    pub rank: EvictionRank,
    /// Where its bytes lie.
    pub extent: Extent,
    /// XXH3-64 of its bytes.
    pub checksum: u64,
    /// What to release, once for this acquisition.
    pub hold: ResidentId,
}

/// What became of one block that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcquireOutcome {
    /// It is pinned and can be read in place.
    Ready(HeldBlock),
    /// Nobody who was asked holds it.
    NotFound,
    /// Not now: ask again after a pause.
    Busy(BusyReason),
    /// It could not be read from any of its owners.
    Failed,
}

/// One resident in a page of residents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListEntry {
    /// Its namespace's identity.
    pub namespace: NamespaceId,
    /// Its namespace's name, where a local client has told it.
    pub name: Option<Namespace>,
    /// Its hash.
    pub hash: BlockHash,
    /// Its rank.
    pub rank: EvictionRank,
    /// Its length in bytes.
    pub bytes: u32,
    /// Leases and local readers that keep it.
    pub pins: u16,
    /// Requesters that have read it.
    pub requesters: u16,
}

/// A block that was evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvictedBlock {
    /// Its place in the order of evictions, from 1.
    pub sequence: u64,
    /// Its namespace's identity.
    pub namespace: NamespaceId,
    /// Its hash.
    pub hash: BlockHash,
    /// The rank that it had.
    pub rank: EvictionRank,
}

/// A reply. Lists hold at most [`limits::DOOR_BLOCKS_MAX`] entries, in the order of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reply {
    /// To `Hello`.
    Welcome {
        /// The pools; their files are in the ancillary data of this frame's first byte.
        pools: Vec<PoolSize>,
    },
    /// To `Reserve`.
    Reserved {
        /// One per size.
        extents: Vec<Extent>,
    },
    /// To whatever takes memory or time: not now.
    Busy {
        /// When to ask again, milliseconds.
        pause_ms: u32,
        /// Why.
        reason: BusyReason,
    },
    /// To any request: never, as it stands.
    Refused {
        /// Why, and what to do; at most [`SENTENCE_BYTES_MAX`] bytes.
        sentence: String,
    },
    /// To `Publish` and `Save`.
    Published {
        /// One per block.
        outcomes: Vec<PublishOutcome>,
    },
    /// To `Acquire`.
    Acquired {
        /// One per hash.
        outcomes: Vec<AcquireOutcome>,
    },
    /// To `Discard`, `Release` and `FinishedSending`.
    Done {
        /// For how many entries the request changed something.
        count: u32,
    },
    /// To `Flush`.
    Flushed {
        /// Whether the registry knows all that had been published.
        known: bool,
    },
    /// To `Stat`.
    Stat {
        /// A JSON object.
        json: String,
    },
    /// To `List`.
    Listed {
        /// The cursor of the next page; 0 where there is none.
        next: u64,
        /// The page.
        entries: Vec<ListEntry>,
    },
    /// To `Evictions`.
    Evicted {
        /// Oldest first.
        entries: Vec<EvictedBlock>,
    },
    /// What an engine is told about its own memory.
    Engine(EngineReply),
}

mod kind {
    pub(super) const WELCOME: u8 = 0x81;
    pub(super) const RESERVED: u8 = 0x82;
    pub(super) const BUSY: u8 = 0x83;
    pub(super) const REFUSED: u8 = 0x84;
    pub(super) const PUBLISHED: u8 = 0x85;
    pub(super) const ACQUIRED: u8 = 0x86;
    pub(super) const DONE: u8 = 0x87;
    pub(super) const FLUSHED: u8 = 0x88;
    pub(super) const STAT: u8 = 0x89;
    pub(super) const LISTED: u8 = 0x8a;
    pub(super) const EVICTED: u8 = 0x8b;
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PoolWire {
    id: U16,
    bytes: U64,
}

/// 0 stored, 1 to 3 resident already and why, 255 refused.
type OutcomeWire = u8;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct BusyWire {
    pause_ms: U32,
    reason: u8,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AcquiredWire {
    status: u8,
    /// Where it came from, or why it has to wait.
    detail: u8,
    rank: u8,
    extent: ExtentWire,
    checksum: U64,
    hold: HoldWire,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct EntryWire {
    namespace: U64,
    name: NameWire,
    hash: HashWire,
    rank: u8,
    bytes: U32,
    pins: U16,
    requesters: U16,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct EvictedWire {
    sequence: U64,
    namespace: U64,
    hash: HashWire,
    rank: u8,
}

const _: () = {
    assert!(size_of::<EntryWire>() <= 128, "a full page must fit a message");
    assert!(size_of::<AcquiredWire>() <= 128);
};

impl Reply {
    const fn kind(&self) -> u8 {
        match self {
            Self::Welcome { .. } => kind::WELCOME,
            Self::Reserved { .. } => kind::RESERVED,
            Self::Busy { .. } => kind::BUSY,
            Self::Refused { .. } => kind::REFUSED,
            Self::Published { .. } => kind::PUBLISHED,
            Self::Acquired { .. } => kind::ACQUIRED,
            Self::Done { .. } => kind::DONE,
            Self::Flushed { .. } => kind::FLUSHED,
            Self::Stat { .. } => kind::STAT,
            Self::Listed { .. } => kind::LISTED,
            Self::Evicted { .. } => kind::EVICTED,
            Self::Engine(reply) => reply.kind(),
        }
    }

    /// Appends the frame of this reply to request number `request` to `out`.
    ///
    /// # Errors
    /// [`TooMany`] for a list or text beyond its limit; `out` is unchanged then.
    pub fn encode(&self, request: u32, out: &mut Vec<u8>) -> Result<(), TooMany> {
        let mut writer = Writer::new(out);
        let body = self.body(&mut writer);
        writer.finish(self.kind(), request, body)
    }

    fn body(&self, writer: &mut Writer<'_>) -> Result<(), TooMany> {
        let most = limits::DOOR_BLOCKS_MAX;
        match self {
            Self::Welcome { pools } => writer.list(pools, limits::POOLS_MAX, |pool| PoolWire {
                id: U16::new(pool.id.0),
                bytes: U64::new(pool.bytes),
            })?,
            Self::Reserved { extents } => writer.list(extents, most, ExtentWire::new)?,
            Self::Busy { pause_ms, reason } => {
                writer.head(&BusyWire { pause_ms: U32::new(*pause_ms), reason: busy_code(*reason) })
            }
            Self::Refused { sentence } => writer.bytes(sentence.as_bytes(), SENTENCE_BYTES_MAX)?,
            Self::Published { outcomes } => writer.list(outcomes, most, publish_wire)?,
            Self::Acquired { outcomes } => writer.list(outcomes, most, acquired_wire)?,
            Self::Done { count } => writer.head(&U32::new(*count)),
            Self::Flushed { known } => writer.head(&u8::from(*known)),
            Self::Stat { json } => {
                writer.bytes(json.as_bytes(), limits::DOOR_MESSAGE_BYTES_MAX)?;
            }
            Self::Listed { next, entries } => {
                writer.head(&U64::new(*next));
                writer.list(entries, most, entry_wire)?;
            }
            Self::Evicted { entries } => writer.list(entries, most, |entry| EvictedWire {
                sequence: U64::new(entry.sequence),
                namespace: U64::new(entry.namespace.0),
                hash: HashWire::new(&entry.hash),
                rank: entry.rank.get(),
            })?,
            Self::Engine(reply) => reply.body(writer)?,
        }
        Ok(())
    }

    /// Reads the body that came behind `header`.
    ///
    /// # Errors
    /// [`DecodeError`]; the connection is of no use then.
    pub fn decode(header: Header, body: &[u8]) -> Result<Self, DecodeError> {
        let most = limits::DOOR_BLOCKS_MAX;
        let mut reader = Reader(body);
        Ok(match header.kind {
            kind::WELCOME => Self::Welcome {
                pools: reader.list_of(limits::POOLS_MAX, |pool: &PoolWire| {
                    Ok(PoolSize { id: PoolId(pool.id.get()), bytes: pool.bytes.get() })
                })?,
            },
            kind::RESERVED => Self::Reserved { extents: reader.list_of(most, ExtentWire::get)? },
            kind::BUSY => {
                let wire = reader.head::<BusyWire>()?;
                reader.end()?;
                Self::Busy { pause_ms: wire.pause_ms.get(), reason: busy_reason(wire.reason)? }
            }
            kind::REFUSED if body.len() <= SENTENCE_BYTES_MAX => {
                Self::Refused { sentence: reader.text()?.to_owned() }
            }
            kind::REFUSED => return Err(DecodeError::Length),
            kind::PUBLISHED => Self::Published { outcomes: reader.list_of(most, publish_outcome)? },
            kind::ACQUIRED => Self::Acquired { outcomes: reader.list_of(most, acquire_outcome)? },
            kind::DONE => {
                let count = reader.head::<U32>()?.get();
                reader.end()?;
                Self::Done { count }
            }
            kind::FLUSHED => {
                let known = flag(reader.head()?, "known")?;
                reader.end()?;
                Self::Flushed { known }
            }
            kind::STAT => Self::Stat { json: reader.text()?.to_owned() },
            kind::LISTED => Self::Listed {
                next: reader.head::<U64>()?.get(),
                entries: reader.list_of(most, list_entry)?,
            },
            kind::EVICTED => Self::Evicted { entries: reader.list_of(most, evicted_block)? },
            kind => EngineReply::decode(kind, reader)
                .unwrap_or(Err(DecodeError::Kind { kind }))
                .map(Self::Engine)?,
        })
    }
}

fn publish_wire(outcome: &PublishOutcome) -> OutcomeWire {
    match outcome {
        PublishOutcome::Stored => 0,
        PublishOutcome::AlreadyResident(ResidentCause::PeerFetch) => 1,
        PublishOutcome::AlreadyResident(ResidentCause::PartialHit) => 2,
        PublishOutcome::AlreadyResident(ResidentCause::DuplicateSave) => 3,
        PublishOutcome::Refused => 255,
    }
}

fn publish_outcome(wire: &OutcomeWire) -> Result<PublishOutcome, DecodeError> {
    Ok(match wire {
        0 => PublishOutcome::Stored,
        1 => PublishOutcome::AlreadyResident(ResidentCause::PeerFetch),
        2 => PublishOutcome::AlreadyResident(ResidentCause::PartialHit),
        3 => PublishOutcome::AlreadyResident(ResidentCause::DuplicateSave),
        255 => PublishOutcome::Refused,
        _ => return Err(DecodeError::Field { field: "outcome" }),
    })
}

fn acquired_wire(outcome: &AcquireOutcome) -> AcquiredWire {
    let mut wire = AcquiredWire::zeroed();
    match outcome {
        AcquireOutcome::Ready(held) => {
            wire.detail = u8::from(held.origin == BlockOrigin::Fetched);
            wire.rank = held.rank.get();
            wire.extent = ExtentWire::new(&held.extent);
            wire.checksum = U64::new(held.checksum);
            wire.hold = HoldWire::new(held.hold);
        }
        AcquireOutcome::NotFound => wire.status = 1,
        AcquireOutcome::Busy(reason) => (wire.status, wire.detail) = (2, busy_code(*reason)),
        AcquireOutcome::Failed => wire.status = 3,
    }
    wire
}

fn acquire_outcome(wire: &AcquiredWire) -> Result<AcquireOutcome, DecodeError> {
    let outcome = match wire.status {
        0 => AcquireOutcome::Ready(HeldBlock {
            origin: if flag(wire.detail, "origin")? {
                BlockOrigin::Fetched
            } else {
                BlockOrigin::Local
            },
            rank: rank(wire.rank)?,
            extent: wire.extent.get()?,
            checksum: wire.checksum.get(),
            hold: wire.hold.get(),
        }),
        1 => AcquireOutcome::NotFound,
        2 => AcquireOutcome::Busy(busy_reason(wire.detail)?),
        3 => AcquireOutcome::Failed,
        _ => return Err(DecodeError::Field { field: "status" }),
    };
    // A block that is not ready has nothing but a status and its reason.
    let canonical = acquired_wire(&outcome);
    if bytemuck::bytes_of(&canonical) == bytemuck::bytes_of(wire) {
        Ok(outcome)
    } else {
        Err(DecodeError::Field { field: "status" })
    }
}

fn entry_wire(entry: &ListEntry) -> EntryWire {
    EntryWire {
        namespace: U64::new(entry.namespace.0),
        name: NameWire::new(entry.name.as_ref()),
        hash: HashWire::new(&entry.hash),
        rank: entry.rank.get(),
        bytes: U32::new(entry.bytes),
        pins: U16::new(entry.pins),
        requesters: U16::new(entry.requesters),
    }
}

fn list_entry(wire: &EntryWire) -> Result<ListEntry, DecodeError> {
    Ok(ListEntry {
        namespace: NamespaceId(wire.namespace.get()),
        name: wire.name.optional()?,
        hash: wire.hash.get()?,
        rank: rank(wire.rank)?,
        bytes: wire.bytes.get(),
        pins: wire.pins.get(),
        requesters: wire.requesters.get(),
    })
}

fn evicted_block(wire: &EvictedWire) -> Result<EvictedBlock, DecodeError> {
    Ok(EvictedBlock {
        sequence: wire.sequence.get(),
        namespace: NamespaceId(wire.namespace.get()),
        hash: wire.hash.get()?,
        rank: rank(wire.rank)?,
    })
}
