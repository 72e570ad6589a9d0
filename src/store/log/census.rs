//! What is in the logs, for tests.

use super::{List, Logs, MARK, NIL, Placed, is_empty, link_to, tag};
use crate::sync::Shared;

impl Logs {
    /// Shows the taken entries of a log, oldest first. Nothing else may be going on.
    pub(in crate::store) fn entries(&self, list: List, show: &mut impl FnMut(u32, u64)) {
        let mut link = self.ends(list).unwrap().head.get();
        while let Some(chunk) = self.chunk(link) {
            for entry in chunk.entries {
                let entry = entry.get();
                if !is_empty(entry) {
                    let placed = Placed::new(list, entry);
                    show(placed.slot, placed.position);
                }
            }
            link = chunk.next.get() & !MARK;
        }
    }

    /// Chunks that are not free.
    pub(in crate::store) fn used(&self) -> u64 {
        self.used.get()
    }

    /// Whether each chunk that is not free is in one log, that of its list, and the tail of each log at
    /// its last chunk or at the one before. Nothing else may be going on.
    pub(in crate::store) fn are_whole(&self) -> bool {
        let mut chunks = std::collections::BTreeSet::new();
        for list in List::all() {
            let ends = self.ends(list).unwrap();
            let (mut link, mut last) = (ends.head.get(), [NIL; 2]);
            while let Some(chunk) = self.chunk(link) {
                let own = link_to(link & NIL, chunk.number());
                if chunk.tag.get() != tag(own, list) || !chunks.insert(link & NIL) {
                    return false;
                }
                last = [last[1], own];
                link = chunk.next.get() & !MARK;
            }
            if !last.contains(&ends.tail.get()) {
                return false;
            }
        }
        chunks.len() as u64 == self.used.get()
    }
}
