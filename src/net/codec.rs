//! Packed keys, node ids and error codes as `registry.proto` describes them. What comes in is hostile
//! until it is decoded: every list is bounded before it is filled.

use tonic::{Code, Status};

use crate::limits;
use crate::registry::{Partition, PartitionDigest, RegistryError};
use crate::types::{BlockHash, BlockKey, NamespaceId, NodeId};

/// Packs keys.
#[must_use]
pub fn encode_keys(keys: &[BlockKey]) -> Vec<u8> {
    let size = |key: &BlockKey| 9 + key.hash.as_bytes().len();
    let mut bytes = Vec::with_capacity(keys.iter().map(size).sum());
    for key in keys {
        let hash = key.hash.as_bytes();
        bytes.extend_from_slice(&key.namespace.0.to_le_bytes());
        // A hash has at most 32 bytes.
        bytes.push(u8::try_from(hash.len()).unwrap_or(u8::MAX));
        bytes.extend_from_slice(hash);
    }
    bytes
}

/// Unpacks keys.
///
/// # Errors
/// [`RegistryError::Refused`] where an entry is cut off or has a bad length, or where there are more
/// than [`limits::REGISTRY_BATCH_MAX`].
pub fn decode_keys(bytes: &[u8]) -> Result<Vec<BlockKey>, RegistryError> {
    // The shortest entry has ten bytes, so that the guess is at most four times too large.
    let guess = (bytes.len() / 10).min(limits::REGISTRY_BATCH_MAX);
    let mut keys = Vec::with_capacity(guess);
    let mut rest = bytes;
    while !rest.is_empty() {
        if keys.len() == limits::REGISTRY_BATCH_MAX {
            return Err(refused(format!(
                "a batch has at most {} keys",
                limits::REGISTRY_BATCH_MAX
            )));
        }
        let (key, after) = decode_key(rest).ok_or_else(|| {
            refused(format!(
                "key {} is cut off, or its length is not 1 to {}",
                keys.len(),
                limits::HASH_BYTES_MAX
            ))
        })?;
        keys.push(key);
        rest = after;
    }
    Ok(keys)
}

fn decode_key(bytes: &[u8]) -> Option<(BlockKey, &[u8])> {
    let (namespace, rest) = bytes.split_first_chunk()?;
    let (len, rest) = rest.split_first()?;
    let (hash, rest) = rest.split_at_checked(usize::from(*len))?;
    let key = BlockKey {
        namespace: NamespaceId(u64::from_le_bytes(*namespace)),
        hash: BlockHash::new(hash)?,
    };
    Some((key, rest))
}

/// A node id.
///
/// # Errors
/// [`RegistryError::Refused`] unless it has 16 bytes.
pub fn decode_node(bytes: &[u8]) -> Result<NodeId, RegistryError> {
    let node = <[u8; 16]>::try_from(bytes);
    node.map(NodeId)
        .map_err(|_wrong_length| refused(format!("a node id has 16 bytes, got {}", bytes.len())))
}

/// Packs digests.
#[must_use]
pub fn encode_digests(digests: &[PartitionDigest]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(digests.len() * DIGEST_BYTES);
    for told in digests {
        bytes.extend_from_slice(&told.partition.get().to_le_bytes());
        bytes.extend_from_slice(&told.digest.to_le_bytes());
    }
    bytes
}

/// A packed digest: a partition and the digest of what is in it.
const DIGEST_BYTES: usize = 10;

/// Unpacks digests.
///
/// # Errors
/// [`RegistryError::Refused`] where an entry is cut off or of no partition, or where there are more
/// than there are partitions.
pub fn decode_digests(bytes: &[u8]) -> Result<Vec<PartitionDigest>, RegistryError> {
    let (entries, rest) = bytes.as_chunks::<DIGEST_BYTES>();
    if !rest.is_empty() || entries.len() > usize::from(limits::REGISTRY_PARTITIONS) {
        return Err(refused(format!(
            "a heartbeat has at most {} digests of {DIGEST_BYTES} bytes each, got {} bytes",
            limits::REGISTRY_PARTITIONS,
            bytes.len()
        )));
    }
    let decode = |entry: &[u8; DIGEST_BYTES]| {
        let (number, digest) = entry.split_first_chunk()?;
        let digest = u64::from_le_bytes(*digest.first_chunk()?);
        Some(PartitionDigest { partition: Partition::new(u16::from_le_bytes(*number))?, digest })
    };
    let decoded: Option<Vec<_>> = entries.iter().map(decode).collect();
    decoded.ok_or_else(|| refused("a digest is of no partition".to_owned()))
}

fn refused(reason: String) -> RegistryError {
    RegistryError::Refused { reason }
}

/// An error as the server sends it.
#[must_use]
pub fn status_of(error: &RegistryError) -> Status {
    let code = match error {
        RegistryError::Refused { reason } => return Status::invalid_argument(reason),
        RegistryError::Full { reason } => return Status::resource_exhausted(reason),
        RegistryError::UnknownNode => Code::FailedPrecondition,
        RegistryError::Superseded => Code::AlreadyExists,
        RegistryError::Late => Code::Aborted,
        _ => Code::Internal,
    };
    Status::new(code, error.to_string())
}

/// An error as the client understands it.
#[must_use]
pub fn error_of(status: &Status) -> RegistryError {
    let reason = || excerpt(status);
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => RegistryError::Refused { reason: reason() },
        Code::ResourceExhausted => RegistryError::Full { reason: reason() },
        Code::FailedPrecondition => RegistryError::UnknownNode,
        Code::AlreadyExists => RegistryError::Superseded,
        Code::Aborted => RegistryError::Late,
        Code::Unimplemented | Code::Internal => RegistryError::Nonsense { reason: reason() },
        _ => RegistryError::Unreachable { reason: reason() },
    }
}

/// What happened, cut to a length that fits a log line.
fn excerpt(status: &Status) -> String {
    use std::error::Error;
    let mut text = status.message().to_owned();
    let mut source = status.source();
    while let Some(cause) = source {
        let said = cause.to_string();
        // Layers pass on each other's words.
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        source = cause.source();
    }
    text.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_key() -> impl Strategy<Value = BlockKey> {
        (any::<u64>(), prop::collection::vec(any::<u8>(), 1..=32)).prop_map(|(namespace, hash)| {
            BlockKey { namespace: NamespaceId(namespace), hash: BlockHash::new(&hash).unwrap() }
        })
    }

    proptest! {
        #[test]
        fn keys_survive_packing(keys in prop::collection::vec(any_key(), 0..50)) {
            prop_assert_eq!(decode_keys(&encode_keys(&keys)).unwrap(), keys);
        }

        #[test]
        fn garbage_is_refused_or_round_trips(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(keys) = decode_keys(&bytes) {
                prop_assert_eq!(encode_keys(&keys), bytes);
            }
        }

        #[test]
        fn a_cut_batch_is_refused(keys in prop::collection::vec(any_key(), 1..5), cut in 1usize..9) {
            let bytes = encode_keys(&keys);
            prop_assert!(decode_keys(&bytes[..bytes.len() - cut]).is_err());
        }
    }

    #[test]
    fn digests_survive_packing_and_bad_ones_are_refused() {
        let told =
            |number, digest| PartitionDigest { partition: Partition::new(number).unwrap(), digest };
        let all = [told(0, 7), told(1023, u64::MAX)];
        let bytes = encode_digests(&all);
        assert_eq!(bytes[..4], [0, 0, 7, 0]);
        assert_eq!(decode_digests(&bytes).unwrap(), all);
        assert!(decode_digests(&bytes[1..]).is_err());
        assert!(decode_digests(&[0, 4, 0, 0, 0, 0, 0, 0, 0, 0]).is_err(), "no partition 1024");
        assert!(decode_digests(&bytes.repeat(513)).is_err(), "more than there are");
    }

    #[test]
    fn one_key_has_this_encoding() {
        let key =
            BlockKey { namespace: NamespaceId(0x0102), hash: BlockHash::new(&[7, 8]).unwrap() };
        assert_eq!(encode_keys(&[key]), [2, 1, 0, 0, 0, 0, 0, 0, 2, 7, 8]);
    }

    #[test]
    fn one_key_too_many_is_refused() {
        let one = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1];
        assert!(decode_keys(&one.repeat(limits::REGISTRY_BATCH_MAX)).is_ok());
        let error = decode_keys(&one.repeat(limits::REGISTRY_BATCH_MAX + 1)).unwrap_err();
        assert!(error.to_string().contains("at most 16384 keys"), "{error}");
    }

    #[test]
    fn errors_with_a_meaning_survive_the_wire() {
        for error in [
            RegistryError::UnknownNode,
            RegistryError::Superseded,
            RegistryError::Late,
            refused("r".to_owned()),
            RegistryError::Full { reason: "f".to_owned() },
        ] {
            assert_eq!(error_of(&status_of(&error)), error);
        }
    }
}
