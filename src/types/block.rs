//! Blocks: how one is named, where its bytes lie, and which tenancy of that memory is meant.

use std::fmt;
use std::str::FromStr;

use arrayvec::ArrayString;

use crate::limits;

/// Why a word that came from outside was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WordError {
    /// A namespace or requester name is empty, too long, or holds a space or control character.
    #[error(
        "a name must have 1 to {max} bytes and no spaces or control characters, got {got:?}",
        max = limits::NAME_BYTES_MAX
    )]
    Name {
        /// What was given, cut to a length that fits a log line.
        got: String,
    },
    /// A block hash is not 1 to 32 bytes of hexadecimal.
    #[error("a block hash is 2 to 64 hexadecimal digits (1 to 32 bytes), got {got:?}")]
    Hash {
        /// What was given, cut to a length that fits a log line.
        got: String,
    },
    /// A node identity is not 32 hexadecimal digits.
    #[error("a node id is 32 hexadecimal digits (16 bytes), got {got:?}")]
    Node {
        /// What was given, cut to a length that fits a log line.
        got: String,
    },
}

pub(super) fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Parses a name that people choose: a namespace or a requester.
pub(super) fn name(text: &str) -> Result<ArrayString<{ limits::NAME_BYTES_MAX }>, WordError> {
    checked_name(text).ok_or_else(|| WordError::Name { got: excerpt(text) })
}

/// The same rule for a stranger's bytes: a refusal allocates nothing.
pub(super) fn checked_name(text: &str) -> Option<ArrayString<{ limits::NAME_BYTES_MAX }>> {
    if text.is_empty() || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return None;
    }
    ArrayString::from(text).ok()
}

/// The name of a set of blocks that may share hashes with no other set: a model with its layout and
/// parallelism, for example. 1 to 64 bytes, no spaces, no control characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(ArrayString<{ limits::NAME_BYTES_MAX }>);

impl Namespace {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// The identity that keys and wires carry: the first eight bytes of the name's BLAKE3 hash, so
    /// that every node derives the same one without a table.
    #[must_use]
    pub fn id(&self) -> NamespaceId {
        let digest = blake3::hash(self.0.as_bytes());
        let mut head = [0; 8];
        head.copy_from_slice(digest.as_bytes().split_at(8).0);
        NamespaceId(u64::from_le_bytes(head))
    }
}

impl FromStr for Namespace {
    type Err = WordError;

    fn from_str(text: &str) -> Result<Self, WordError> {
        name(text).map(Self)
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A [`Namespace`] as keys and messages carry it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub u64);

/// [`limits::HASH_BYTES_MAX`] as a length byte.
const LEN_MAX: u8 = {
    assert!(limits::HASH_BYTES_MAX == 32, "the length of a hash is a byte");
    32
};

/// The hash of a block's tokens and prefix, 1 to 32 bytes. Unused bytes are zero, so that equality
/// is equality of the arrays.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash {
    bytes: [u8; limits::HASH_BYTES_MAX],
    len: u8,
}

impl BlockHash {
    /// A hash of these bytes; `None` unless there are 1 to 32 of them.
    #[must_use]
    pub fn new(hash: &[u8]) -> Option<Self> {
        let len = u8::try_from(hash.len()).ok().filter(|len| *len > 0)?;
        let mut bytes = [0; limits::HASH_BYTES_MAX];
        bytes.get_mut(..hash.len())?.copy_from_slice(hash);
        Some(Self { bytes, len })
    }

    /// The hash of the first `len` of these bytes, `len` taken as the nearest of 1 to 32: the total
    /// counterpart of [`BlockHash::new`] for wires and tables that keep hashes in full width.
    #[must_use]
    pub fn padded(bytes: &[u8; limits::HASH_BYTES_MAX], len: u8) -> Self {
        let width = usize::from(len).clamp(1, limits::HASH_BYTES_MAX);
        let mut own = [0; limits::HASH_BYTES_MAX];
        own.iter_mut().zip(bytes).take(width).for_each(|(to, from)| *to = *from);
        Self { bytes: own, len: len.clamp(1, LEN_MAX) }
    }

    /// The bytes that were given, and zeros up to the full width.
    #[must_use]
    pub fn full_width(&self) -> &[u8; limits::HASH_BYTES_MAX] {
        &self.bytes
    }

    /// The bytes that were given.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or(&self.bytes)
    }
}

impl FromStr for BlockHash {
    type Err = WordError;

    fn from_str(text: &str) -> Result<Self, WordError> {
        let bad = || WordError::Hash { got: excerpt(text) };
        let bytes = hex_bytes(text).ok_or_else(bad)?;
        Self::new(&bytes).ok_or_else(bad)
    }
}

/// Bytes of hexadecimal text; `None` where a digit is missing or is none.
pub(super) fn hex_bytes(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok())
        .collect()
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

/// What a block is found by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey {
    /// The set of blocks that the hash belongs to.
    pub namespace: NamespaceId,
    /// The block's hash within that set.
    pub hash: BlockHash,
}

/// What a block's bytes lie in: one of a node's memory pools, by its place in the configuration, the
/// GPU's pool, or a layout in an engine's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u16);

impl PoolId {
    /// The pool of the GPU's memory, which no pool of the configuration has the number of.
    pub const GPU: Self = Self(0x8000);
    /// The page that peers read to probe the way here. No block lies in it.
    pub const PROBE: Self = Self(0x8001);
    /// From this one on, each stands for an engine's layout.
    const LAYOUTS: u16 = 0xc000;
    /// Numbers of engines' layouts: they begin at 0.
    pub const LAYOUTS_MAX: u16 = u16::MAX - Self::LAYOUTS + 1;

    /// What stands for the engine's layout that this node gave this number; `None` from
    /// [`PoolId::LAYOUTS_MAX`] on.
    #[must_use]
    pub const fn of_layout(number: u16) -> Option<Self> {
        if number < Self::LAYOUTS_MAX { Some(Self(Self::LAYOUTS | number)) } else { None }
    }

    /// The number of the engine's layout that this stands for.
    #[must_use]
    pub const fn layout(self) -> Option<u16> {
        if self.0 >= Self::LAYOUTS { Some(self.0 - Self::LAYOUTS) } else { None }
    }

    /// Which memory it is of.
    #[must_use]
    pub const fn kind(self) -> MemoryKind {
        match self {
            Self::GPU => MemoryKind::Device,
            Self(number) if number >= Self::LAYOUTS => MemoryKind::Engine,
            _ => MemoryKind::Host,
        }
    }
}

/// Which memory a block lies in. What goes from one makes no room in another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryKind {
    /// The node's own, of the host.
    Host,
    /// The node's own, of a device.
    Device,
    /// An engine's, of the host or of a device. The engine says when a block goes from there, and
    /// nobody else.
    Engine,
}

impl MemoryKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Host, Self::Device, Self::Engine];
    /// Those that a node makes room in by eviction: its own.
    pub const EVICTABLE: [Self; 2] = [Self::Host, Self::Device];
}

/// Where a block's bytes are: a contiguous range of a pool, or one block of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// The pool, or what stands for a layout.
    pub pool: PoolId,
    /// Bytes from the start of the pool; the block's number where it is a layout.
    pub offset: u64,
    /// Length in bytes, as asked for (the allocator may hold more).
    pub len: u32,
}

/// A tenancy of a store slot: it changes whenever the slot, and so the block's memory, is reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Generation(pub u32);

/// A resident: a slot and the tenancy of it that is meant. An id of an evicted resident matches
/// nothing, ever after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResidentId {
    /// The slot's index in the store.
    pub slot: u32,
    /// The tenancy.
    pub generation: Generation,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_survives_its_text_form() {
        let hash = BlockHash::new(&[0, 1, 0xfe]).unwrap();
        assert_eq!(hash.to_string(), "0001fe");
        assert_eq!("0001fe".parse::<BlockHash>().unwrap(), hash);
    }

    #[test]
    fn hashes_of_different_lengths_differ() {
        assert_ne!(BlockHash::new(&[7]), BlockHash::new(&[7, 0]));
    }

    #[test]
    fn hashes_outside_their_bounds_are_refused() {
        assert_eq!(BlockHash::new(&[]), None);
        assert_eq!(BlockHash::new(&[0; 33]), None);
        for text in ["", "0", "0g", "é0", &"00".repeat(33)] {
            assert!(text.parse::<BlockHash>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_pool_says_which_memory_it_is_of() {
        let layouts = [0, 1, PoolId::LAYOUTS_MAX - 1].map(|at| PoolId::of_layout(at).unwrap());
        assert_eq!(layouts.map(|pool| pool.layout().unwrap()), [0, 1, 0x3fff]);
        assert!(layouts.iter().all(|pool| pool.kind() == MemoryKind::Engine));
        assert_eq!(PoolId::of_layout(PoolId::LAYOUTS_MAX), None);
        for (pool, kind) in [
            (PoolId(0), MemoryKind::Host),
            (PoolId::PROBE, MemoryKind::Host),
            (PoolId::GPU, MemoryKind::Device),
        ] {
            assert_eq!((pool.kind(), pool.layout()), (kind, None));
        }
    }

    #[test]
    fn a_padded_hash_is_the_hash_of_its_first_bytes() {
        let wide = [7; 32];
        assert_eq!(BlockHash::padded(&wide, 3), BlockHash::new(&[7, 7, 7]).unwrap());
        assert_eq!(BlockHash::padded(&wide, 0).as_bytes(), [7]);
        assert_eq!(BlockHash::padded(&wide, 200).as_bytes(), wide);
    }

    #[test]
    fn names_outside_their_bounds_are_refused() {
        for text in ["", "a b", "a\nb", &"x".repeat(65)] {
            assert!(text.parse::<Namespace>().is_err(), "{text:?}");
        }
        assert!("x".repeat(64).parse::<Namespace>().is_ok());
    }

    #[test]
    fn a_namespace_id_is_a_function_of_the_name() {
        let id = |name: &str| name.parse::<Namespace>().unwrap().id();
        assert_eq!(id("llama/tp8"), id("llama/tp8"));
        assert_ne!(id("llama/tp8"), id("llama/tp4"));
    }
}
