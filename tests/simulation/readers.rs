//! Readers of one node that want the same blocks share a fetch, as the node's own do.

use std::collections::BTreeMap;

use crate::cluster::key_of;
use crate::krate::peer::FetchId;
use crate::krate::route::Flights;

/// The shared fetches of one life of one node.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    flights: Flights<u64>,
    led: BTreeMap<FetchId, Vec<u16>>,
    /// Readers that followed another's fetch, and those of them that were told its end.
    pub(crate) followed: u64,
    told: u64,
}

impl Readers {
    /// The blocks that this reader leads the fetch of; it follows the others.
    pub(crate) fn join(&mut self, blocks: &[u16]) -> Vec<u16> {
        let mut led = Vec::new();
        for block in blocks {
            let number = self.followed;
            if self.flights.join(key_of(*block), || number) {
                led.push(*block);
            } else {
                self.followed += 1;
            }
        }
        led
    }

    /// A fetch of these blocks has begun; nobody else is after any of them.
    pub(crate) fn begun(&mut self, id: FetchId, blocks: Vec<u16>) {
        let mut running = self.led.values().flatten();
        assert!(!running.any(|block| blocks.contains(block)), "two fetches of one block");
        self.led.insert(id, blocks);
    }

    /// A fetch is over, perhaps one that was shared.
    pub(crate) fn ended(&mut self, id: FetchId) {
        for block in self.led.remove(&id).unwrap_or_default() {
            self.told += self.flights.land(&key_of(block)).len() as u64;
        }
    }

    /// Nobody waits for a fetch that does not run.
    pub(crate) fn assert_at_rest(&self) {
        assert!(self.flights.is_empty() && self.led.is_empty(), "{self:?}");
        assert_eq!(self.followed, self.told, "a reader was told nothing");
    }
}
