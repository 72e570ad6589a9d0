//! Readers of one node that want the same blocks share a fetch, as the node's own do.

use std::collections::BTreeMap;

use crate::cluster::key_of;
use crate::krate::route::Flights;

/// The shared fetches of one life of one node.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    flights: Flights<u64>,
    /// By read: the blocks that it leads the fetch of and that have not landed.
    led: BTreeMap<u64, Vec<u16>>,
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

    /// A read of these blocks has begun; nobody else is after any of them.
    pub(crate) fn begun(&mut self, read: u64, blocks: &[u16]) {
        let mut running = self.led.values().flatten();
        assert!(!running.any(|block| blocks.contains(block)), "two fetches of one block");
        self.led.insert(read, blocks.to_vec());
    }

    /// A block that a read leads is here.
    pub(crate) fn landed(&mut self, block: u16) {
        self.led.values_mut().for_each(|led| led.retain(|it| *it != block));
        self.told += self.flights.land(&key_of(block)).len() as u64;
    }

    /// A read is over: its followers hear of the blocks that did not come.
    pub(crate) fn ended(&mut self, read: u64) {
        for block in self.led.remove(&read).unwrap_or_default() {
            self.told += self.flights.land(&key_of(block)).len() as u64;
        }
    }

    /// Nobody waits for a fetch that does not run.
    pub(crate) fn assert_at_rest(&self) {
        assert!(self.flights.is_empty() && self.led.is_empty(), "{self:?}");
        assert_eq!(self.followed, self.told, "a reader was told nothing");
    }
}
