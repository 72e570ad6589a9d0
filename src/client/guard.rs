//! What a client has of the node's memory, as values whose drop gives it back.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{Client, ClientError};
use crate::event::BusyReason;
use crate::memory::OutOfBounds;
use crate::protocol::door::{BlockOrigin, HeldBlock};
use crate::types::{BlockHash, EvictionRank, Extent};

/// Bytes that are copied out of a mapping at once to be summed.
const CHUNK: usize = 16 << 10;

/// Reserved memory for one block, to be written in place and published. Dropping it unpublished
/// gives it back.
#[derive(Debug)]
pub struct Reservation<'c> {
    client: &'c Client,
    extent: Extent,
    /// Of the whole block, where it was written in one go.
    checksum: Option<u64>,
    published: bool,
}

impl<'c> Reservation<'c> {
    pub(super) fn new(client: &'c Client, extent: Extent) -> Self {
        Self { client, extent, checksum: None, published: false }
    }

    /// Where it lies.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Writes the whole block.
    ///
    /// # Errors
    /// [`ClientError::Length`] unless `bytes` has the block's length.
    pub fn fill(&mut self, bytes: &[u8]) -> Result<(), ClientError> {
        if bytes.len() != self.extent.len as usize {
            return Err(ClientError::Length { block: self.extent.len, buffer: bytes.len() });
        }
        self.write(0, bytes)?;
        self.checksum = Some(xxh3_64(bytes));
        Ok(())
    }

    /// Writes a part of the block, `offset` bytes from its start.
    ///
    /// # Errors
    /// [`ClientError::OutOfBounds`] beyond the block's end.
    pub fn write(&mut self, offset: u32, bytes: &[u8]) -> Result<(), ClientError> {
        let fits = u64::from(offset)
            .checked_add(bytes.len() as u64)
            .is_some_and(|end| end <= u64::from(self.extent.len));
        if !fits {
            return Err(ClientError::OutOfBounds(OutOfBounds {
                offset: offset.into(),
                len: bytes.len() as u64,
                size: self.extent.len.into(),
            }));
        }
        self.checksum = None;
        let pool = self.client.pool(self.extent.pool)?;
        pool.write(self.extent.offset + u64::from(offset), bytes)?;
        Ok(())
    }

    /// The checksum of what lies in the block now.
    pub(super) fn checksum(&self) -> Result<u64, ClientError> {
        if let Some(checksum) = self.checksum {
            return Ok(checksum);
        }
        let pool = self.client.pool(self.extent.pool)?;
        let mut sum = Xxh3::new();
        let mut chunk = [0; CHUNK];
        let mut at = self.extent.offset;
        let mut left = self.extent.len as usize;
        while left > 0 {
            let size = left.min(CHUNK);
            let part = chunk.get_mut(..size).unwrap_or_default();
            pool.read(at, part)?;
            sum.update(part);
            at += size as u64;
            left -= size;
        }
        Ok(sum.digest())
    }

    /// The node has taken it over.
    pub(super) fn consumed(mut self) {
        self.published = true;
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.client.dropped(|state| {
            if !self.published {
                state.discards.push(self.extent);
            }
        });
    }
}

/// What became of one block that was asked for.
#[derive(Debug)]
pub enum Acquired<'c> {
    /// It can be read as long as the guard lives.
    Ready(Held<'c>),
    /// Nobody who was asked holds it.
    NotFound,
    /// Not now: ask again after a pause.
    Busy(BusyReason),
    /// It could not be read from any of its owners.
    Failed,
}

/// A block that stays put, unchanged, as long as this lives.
#[derive(Debug)]
pub struct Held<'c> {
    client: &'c Client,
    hash: BlockHash,
    block: HeldBlock,
}

impl<'c> Held<'c> {
    pub(super) fn new(client: &'c Client, hash: BlockHash, block: HeldBlock) -> Self {
        Self { client, hash, block }
    }

    /// Its hash.
    #[must_use]
    pub fn hash(&self) -> BlockHash {
        self.hash
    }

    /// Its length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "no block is empty")]
    #[must_use]
    pub fn len(&self) -> u32 {
        self.block.extent.len
    }

    /// Its rank after this access.
    #[must_use]
    pub fn rank(&self) -> EvictionRank {
        self.block.rank
    }

    /// Where it came from.
    #[must_use]
    pub fn origin(&self) -> BlockOrigin {
        self.block.origin
    }

    /// Where it lies, for readers that read it in place.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.block.extent
    }

    /// XXH3-64 of the bytes that were saved.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.block.checksum
    }

    /// Copies the block and verifies its checksum.
    ///
    /// # Errors
    /// [`ClientError::Length`] unless the buffer has the block's length; [`ClientError::Checksum`]
    /// where the bytes are not those that were saved: the buffer's content is of no use then.
    pub fn read_into(&self, buffer: &mut [u8]) -> Result<(), ClientError> {
        if buffer.len() != self.block.extent.len as usize {
            return Err(ClientError::Length { block: self.block.extent.len, buffer: buffer.len() });
        }
        let pool = self.client.pool(self.block.extent.pool)?;
        pool.read(self.block.extent.offset, buffer)?;
        if xxh3_64(buffer) == self.block.checksum {
            Ok(())
        } else {
            Err(ClientError::Checksum { hash: self.hash })
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.client.dropped(|state| state.releases.push(self.block.hold));
    }
}
