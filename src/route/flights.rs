//! One fetch per block: whoever wants a block that is being fetched waits for that fetch.
//!
//! The first to want a block **leads** its fetch; the others **follow**. A leader says
//! [`Flights::land`] for each of its blocks, whatever became of them, and hands the outcome to those
//! that followed. It does so also when it is cut off: its followers then see to themselves, and one of
//! them leads the next fetch. So at any time at most one fetch of a block runs, and nobody waits for a
//! fetch that does not.

use hashbrown::HashMap;

use crate::types::BlockKey;

/// Blocks that are being fetched, and who waits for each of them; `W` is how a waiter is told.
#[derive(Debug)]
pub struct Flights<W> {
    open: HashMap<BlockKey, Vec<W>, foldhash::fast::RandomState>,
}

impl<W> Default for Flights<W> {
    fn default() -> Self {
        Self { open: HashMap::default() }
    }
}

impl<W> Flights<W> {
    /// Wants a block. `true` where the caller leads its fetch, and must land it; else `waiter` is kept
    /// for whoever does.
    pub fn join(&mut self, key: BlockKey, waiter: impl FnOnce() -> W) -> bool {
        match self.open.get_mut(&key) {
            Some(waiters) => {
                waiters.push(waiter());
                false
            }
            None => {
                self.open.insert(key, Vec::new());
                true
            }
        }
    }

    /// The fetch of a block is over: who followed it.
    pub fn land(&mut self, key: &BlockKey) -> Vec<W> {
        self.open.remove(key).unwrap_or_default()
    }

    /// Blocks that are being fetched.
    #[must_use]
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether nothing is being fetched.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{BlockHash, NamespaceId};

    fn key(name: u8) -> BlockKey {
        BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&[name]).unwrap() }
    }

    #[test]
    fn one_leads_and_the_others_follow_until_it_lands() {
        let mut flights = Flights::default();
        assert!(flights.join(key(1), || 'a'));
        assert!(!flights.join(key(1), || 'b'));
        assert!(!flights.join(key(1), || 'c'));
        assert!(flights.join(key(2), || 'd'), "another block is another flight");
        assert_eq!(flights.len(), 2);
        assert_eq!(flights.land(&key(1)), ['b', 'c']);
        assert!(flights.join(key(1), || 'e'), "the next one leads again");
        assert!(flights.land(&key(1)).is_empty());
        assert!(flights.land(&key(2)).is_empty());
        assert!(flights.land(&key(2)).is_empty());
        assert!(flights.is_empty());
    }
}
