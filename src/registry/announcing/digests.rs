//! The digest of what a node holds in each partition, and the order in which a change becomes known.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::registry::{Fingerprint, Partition};
use crate::types::BlockKey;

/// By partition: the digest of the residents in it, which the registry compares with its own. Any
/// number of threads change residents, and with them these, without a lock.
#[derive(Debug)]
pub struct Digests(Box<[AtomicU64]>);

impl Default for Digests {
    /// Those of a node that holds nothing.
    fn default() -> Self {
        Self(Partition::all().map(|_| AtomicU64::new(0)).collect())
    }
}

impl Digests {
    /// The digest of the residents of a partition.
    #[must_use]
    pub fn of(&self, partition: Partition) -> u64 {
        self.0.get(partition.index()).map_or(0, |digest| digest.load(Ordering::Acquire))
    }

    /// A resident came (`is_here`) or went: call it once for each time that one did, behind the
    /// change. `note` takes note of a state for the registry, and `look` says what is true of the key
    /// now: it is asked behind the note, so that of an insert and an eviction that race on two
    /// threads the later one has the last word.
    pub fn change(
        &self,
        key: &BlockKey,
        is_here: bool,
        note: impl Fn(bool),
        look: impl FnOnce() -> bool,
    ) {
        let print = Fingerprint::of(key);
        if let Some(digest) = self.0.get(print.partition().index()) {
            // The note, under a lock, comes behind; who sees that sees this. The sum does not ask in
            // which order changes come.
            digest.fetch_xor(print.digest(), Ordering::AcqRel);
        }
        note(is_here);
        let now = look();
        if now != is_here {
            note(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::types::{BlockHash, NamespaceId};

    #[test]
    fn a_change_is_in_the_digest_before_its_note_and_what_overtook_it_has_the_last_word() {
        let digests = Digests::default();
        let key = BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(b"a").unwrap() };
        let print = Fingerprint::of(&key);
        let notes = RefCell::new(Vec::new());
        let note = |is_here| {
            notes.borrow_mut().push((is_here, digests.of(print.partition())));
        };
        digests.change(&key, true, note, || true);
        assert_eq!(notes.take(), [(true, print.digest())]);
        digests.change(&key, false, note, || true);
        assert_eq!(notes.take(), [(false, 0), (true, 0)], "it came back meanwhile");
    }
}
