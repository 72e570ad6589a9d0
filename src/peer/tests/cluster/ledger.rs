//! What a node notes for its owner registry.

use std::sync::{Arc, Mutex};

use super::super::krate::registry::Partition;
use super::super::krate::registry::announcing::{Digests, News, Pending, Residents};
use super::super::krate::store::Store;
use super::super::krate::types::BlockKey;

/// The changes of one node's residents, as its registry is to hear of them.
#[derive(Debug)]
pub(crate) struct Ledger {
    store: Arc<Store>,
    digests: Digests,
    noted: Mutex<Vec<(BlockKey, bool)>>,
}

impl Ledger {
    pub(super) fn new(store: Arc<Store>) -> Self {
        Self { store, digests: Digests::default(), noted: Mutex::default() }
    }

    /// A resident came or went.
    pub(super) fn change(&self, key: &BlockKey, is_here: bool) {
        let note = |is_here| self.noted.lock().unwrap().push((*key, is_here));
        self.digests.change(key, is_here, note, || self.store.lookup(key).is_some());
    }
}

impl News for &Ledger {
    fn note_in(&mut self, pending: &mut Pending) {
        let noted = std::mem::take(&mut *self.noted.lock().unwrap());
        noted.into_iter().for_each(|(key, is_here)| pending.note(key, is_here));
    }
}

impl Residents for Ledger {
    fn list(&self, cursor: u32, max: usize, out: &mut Vec<BlockKey>) -> Option<u32> {
        let mut views = Vec::new();
        let next = self.store.list(cursor, u32::try_from(max).unwrap(), &mut views);
        out.extend(views.iter().map(|view| view.key));
        next
    }

    fn digest(&self, partition: Partition) -> Option<u64> {
        Some(self.digests.of(partition))
    }
}
