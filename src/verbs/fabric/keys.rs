//! What a requester knows about its peer's regions, and the frames by which it asks.
//!
//! The key of a region is the fabric's own: each NIC gives each chunk of the region another key, and a
//! peer is told those on the message queue pair: of all regions when it is admitted, of a new one when
//! that is registered, so that its READs need no word of the holder. A key that it does not know yet it
//! asks for, which a holder that has no such region denies. Nobody is told when a region goes: a device
//! refuses the keys of a registration that has ended, which breaks the connection and forgets this table.

use bytemuck::{Pod, Zeroable};

use super::chunks::Layout;
use super::near::NicSet;
use crate::fabric::RemoteSpan;
use crate::limits::{MESSAGE_BYTES_MAX, NICS_MAX, REGION_CHUNKS_MAX, REGIONS_MAX};

/// The start of an answer; the keys follow, those of one NIC after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AnswerHeader {
    /// The region's key.
    pub(super) key: u32,
    /// The length of its chunks as a power of two. Only the last one may be shorter.
    pub(super) shift: u32,
    /// Chunks; 0 for a key that names no region.
    pub(super) chunks: u32,
    /// NICs, as many as the sender's hello told of.
    pub(super) nics: u16,
    /// Those that the region's memory is not nearest to, as bits by their numbers.
    pub(super) far: u16,
    /// The remote address of its first byte.
    pub(super) address: u64,
    /// Its length in bytes.
    pub(super) len: u64,
}

const _: () = assert!(
    size_of::<AnswerHeader>() + 4 * NICS_MAX * REGION_CHUNKS_MAX <= MESSAGE_BYTES_MAX,
    "the keys of one region fit one message"
);

/// The chunk of an offset; `None` where `len` bytes from there are not all in it.
pub(super) fn chunk(offset: u64, len: u32, shift: u32) -> Option<usize> {
    let last = offset.checked_add(u64::from(len.max(1)) - 1)?;
    let index = offset.checked_shr(shift)?;
    (index == last.checked_shr(shift)?).then(|| usize::try_from(index).ok()).flatten()
}

/// Bytes from an offset to the end of its chunk.
pub(super) const fn to_chunk_end(offset: u64, shift: u32) -> u64 {
    let chunk = 1 << shift;
    chunk - (offset & (chunk - 1))
}

/// A peer's region.
#[derive(Debug)]
pub(super) struct PeerRegion {
    key: u32,
    pub(super) shift: u32,
    chunks: usize,
    address: u64,
    len: u64,
    keys: Vec<u32>,
    /// The peer's NICs that its memory is nearest to.
    pub(super) near: NicSet,
}

impl PeerRegion {
    /// The offset of a span in it; `None` where the span leaves it.
    pub(super) fn offset(&self, span: &RemoteSpan) -> Option<u64> {
        let offset = span.address.checked_sub(self.address)?;
        let end = offset.checked_add(u64::from(span.len))?;
        (end <= self.len).then_some(offset)
    }

    /// The key of a chunk on a NIC of the peer.
    pub(super) fn key(&self, nic: u8, chunk: usize) -> u32 {
        self.keys.get(usize::from(nic) * self.chunks + chunk).copied().unwrap_or(0)
    }
}

/// The peer's regions that are known.
#[derive(Debug, Default)]
pub(super) struct PeerKeys {
    regions: Vec<PeerRegion>,
}

impl PeerKeys {
    /// The region of a key; one that is known to be none has no byte.
    pub(super) fn find(&self, key: u32) -> Option<&PeerRegion> {
        self.regions.iter().find(|region| region.key == key)
    }

    /// Takes what the peer says about a region; the key that it has. `None` where it makes no sense.
    pub(super) fn learn(&mut self, nics: usize, bytes: &[u8]) -> Option<u32> {
        let (head, keys) = bytes.split_at_checked(size_of::<AnswerHeader>())?;
        let head: AnswerHeader = bytemuck::try_pod_read_unaligned(head).ok()?;
        let chunks = usize::try_from(head.chunks).ok()?;
        let size = 1_u64.checked_shl(head.shift)?;
        let good = head.shift >= Layout::SHIFT_MIN
            && (chunks <= 1 || head.shift >= Layout::CHUNK_SHIFT_MIN)
            && usize::from(head.nics) == nics
            && chunks <= REGION_CHUNKS_MAX
            && head.len.div_ceil(size) == u64::from(head.chunks)
            && keys.len() == 4 * nics * chunks
            && head.address.checked_add(head.len).is_some();
        if !good {
            return None;
        }
        self.regions.retain(|region| region.key != head.key);
        if self.regions.len() >= REGIONS_MAX {
            // A peer has no more at once, so the oldest has most likely gone.
            self.regions.remove(0);
        }
        let (words, _) = keys.as_chunks::<4>();
        let keys = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let AnswerHeader { key, shift, address, len, far, .. } = head;
        let near = NicSet::from_far(far);
        self.regions.push(PeerRegion { key, shift, chunks, address, len, keys, near });
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 64 << 10;

    /// 3 chunks of 64 KiB on 2 NICs.
    fn answer() -> (AnswerHeader, Vec<u8>) {
        let head = AnswerHeader {
            key: 77,
            shift: 16,
            chunks: 3,
            nics: 2,
            far: 0,
            address: 1 << 40,
            len: 2 * CHUNK + 1,
        };
        let keys: [u32; 6] = [10, 11, 12, 20, 21, 22];
        (head, keys.iter().flat_map(|key| key.to_le_bytes()).collect())
    }

    fn learn(head: &AnswerHeader, keys: &[u8]) -> Option<PeerKeys> {
        let mut table = PeerKeys::default();
        let frame = [bytemuck::bytes_of(head), keys].concat();
        table.learn(2, &frame).map(|key| {
            assert_eq!(key, 77);
            table
        })
    }

    #[test]
    fn each_nic_has_its_own_key_for_each_chunk() {
        let (head, keys) = answer();
        let table = learn(&head, &keys).unwrap();
        assert!(table.find(76).is_none());
        let region = table.find(77).unwrap();
        assert_eq!((region.key(0, 2), region.key(1, 0), region.key(1, 2)), (12, 20, 22));
        assert_eq!(region.key(2, 0), 0, "there is no such NIC, and no device takes key 0");
        let span = |offset: u64, len| RemoteSpan { rkey: 77, address: (1 << 40) + offset, len };
        assert_eq!(region.offset(&span(2 * CHUNK, 1)), Some(2 * CHUNK));
        let beyond = RemoteSpan { rkey: 77, address: u64::MAX, len: 1 };
        for outside in [span(2 * CHUNK, 2), beyond, span(1 << 40, 1)] {
            assert_eq!(region.offset(&outside), None, "{outside:?}");
        }
        assert_eq!(region.offset(&RemoteSpan { rkey: 77, address: (1 << 40) - 1, len: 1 }), None);
    }

    #[test]
    fn chunks_are_found_and_their_borders_seen() {
        assert_eq!(chunk(0, 4096, 12), Some(0));
        assert_eq!(chunk(4095, 1, 12), Some(0));
        assert_eq!(chunk(4095, 2, 12), None);
        assert_eq!(chunk(4096, 0, 12), Some(1));
        assert_eq!(chunk(u64::MAX, 2, 12), None);
        assert_eq!(to_chunk_end(0, 12), 4096);
        assert_eq!(to_chunk_end(4095, 12), 1);
        assert_eq!(to_chunk_end(4096, 12), 4096);
    }

    #[test]
    fn a_key_without_a_region_is_remembered_as_such() {
        let (head, _) = answer();
        let none = AnswerHeader { chunks: 0, len: 0, ..head };
        let table = learn(&none, &[]).unwrap();
        let region = table.find(77).unwrap();
        assert_eq!(region.offset(&RemoteSpan { rkey: 77, address: 1 << 40, len: 1 }), None);
    }

    #[test]
    fn answers_that_make_no_sense_are_refused() {
        let (good, keys) = answer();
        let spoil: [fn(&mut AnswerHeader); 8] = [
            |head| (head.shift, head.len) = (15, CHUNK + 1),
            |head| head.shift = 64,
            |head| head.chunks = 2,
            |head| head.chunks = u32::MAX,
            |head| head.nics = 1,
            |head| head.len = 4 * CHUNK,
            |head| head.len = u64::MAX,
            |head| head.address = u64::MAX - CHUNK,
        ];
        for (case, spoil) in spoil.into_iter().enumerate() {
            let mut head = good;
            spoil(&mut head);
            assert!(learn(&head, &keys).is_none(), "case {case}");
        }
        assert!(learn(&good, &keys[1..]).is_none());
        assert!(PeerKeys::default().learn(2, &[0; 31]).is_none());
    }

    #[test]
    fn the_table_is_bounded() {
        let mut table = PeerKeys::default();
        let (head, keys) = answer();
        for key in 0..u32::try_from(REGIONS_MAX).unwrap() + 1 {
            let head = AnswerHeader { key, ..head };
            table.learn(2, &[bytemuck::bytes_of(&head), &keys].concat()).unwrap();
        }
        assert!(table.find(0).is_none() && table.find(1).is_some());
        assert_eq!(table.regions.len(), REGIONS_MAX);
    }
}
