//! A node's memory and residents.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use super::super::krate::fabric::{Region, RegionId, RegisteredSpan, RemoteSpan};
use super::super::krate::memory::{HostPool, Reservation};
use super::super::krate::peer::{Landing, Published};
use super::super::krate::policy::Origin;
use super::super::krate::store::{Evicted, InsertError, Payload, Store};
use super::super::krate::types::{BlockKey, EvictionRank, Extent, ResidentCause, ResidentId};
use super::ledger::Ledger;
use super::{bytes_of, key_of};

/// Extents that the peer core owns as destinations, by offset.
type Owned = Rc<RefCell<BTreeMap<u64, u32>>>;

/// A destination. What is given back is overwritten at once, as its next tenant would.
#[derive(Debug)]
pub(crate) struct Destination {
    reservation: Option<Reservation>,
    owned: Owned,
}

impl Destination {
    fn extent(&self) -> Extent {
        self.reservation.as_ref().unwrap().extent()
    }

    /// The extent is a resident's from here on.
    fn hand_over(mut self) {
        if let Some(reservation) = self.reservation.take() {
            self.forget(reservation.extent());
            let _resident = reservation.into_extent();
        }
    }

    fn forget(&self, extent: Extent) {
        self.owned.borrow_mut().remove(&extent.offset);
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            let extent = reservation.extent();
            self.forget(extent);
            scribble(reservation.pool(), extent);
        }
    }
}

fn scribble(pool: &HostPool, extent: Extent) {
    pool.write(extent, 0, &vec![0xee; extent.len as usize]).unwrap();
}

/// A node's memory and residents.
#[derive(Debug)]
pub(crate) struct TestLanding {
    pub(crate) store: Arc<Store>,
    pub(crate) pool: Arc<HostPool>,
    region: Region,
    owned: Owned,
    /// Residents that were evicted.
    pub(crate) evicted: u64,
    /// Requesters that those had been served to.
    pub(crate) readers_of_evicted: u64,
    pub(crate) pause_ms: u32,
    pub(crate) ledger: Arc<Ledger>,
    /// Residents that a peer sent.
    pub(crate) fetched: BTreeSet<ResidentId>,
}

impl TestLanding {
    pub(super) fn new(
        store: Arc<Store>,
        pool: Arc<HostPool>,
        region: Region,
        ledger: Arc<Ledger>,
    ) -> Self {
        Self {
            store,
            pool,
            region,
            owned: Owned::default(),
            evicted: 0,
            readers_of_evicted: 0,
            pause_ms: 0,
            ledger,
            fetched: BTreeSet::new(),
        }
    }

    /// Evicts one resident; its memory is overwritten and given back.
    pub(crate) fn evict(&mut self) -> Option<BlockKey> {
        let mut before = Vec::new();
        self.store.list(0, u32::MAX, &mut before);
        let Evicted { key, payload, id, .. } = self.store.evict()?;
        let victim = before.iter().find(|view| view.id == id).unwrap();
        self.readers_of_evicted += u64::from(victim.requesters);
        scribble(&self.pool, payload.extent);
        self.pool.release(payload.extent).unwrap();
        self.evicted += 1;
        self.fetched.remove(&id);
        self.ledger.change(&key, false);
        Some(key)
    }

    fn place(&mut self, len: u32) -> Option<Reservation> {
        loop {
            match self.pool.reserve(&[len]) {
                Ok(mut one) => return one.pop(),
                Err(_full) => self.evict()?,
            };
        }
    }

    /// Saves a block as a local engine does. `false` where every resident is pinned.
    pub(crate) fn save(&mut self, block: u16) -> bool {
        let bytes = bytes_of(block);
        let Some(reservation) = self.place(u32::try_from(bytes.len()).unwrap()) else {
            return false;
        };
        self.pool.write(reservation.extent(), 0, &bytes).unwrap();
        let checksum = self.pool.checksum(reservation.extent()).unwrap();
        let payload = Payload { extent: reservation.extent(), checksum };
        let origin = Origin::Saved { owners: None };
        match self.store.insert(key_of(block), payload, origin, false) {
            Ok(_) => {
                let _resident = reservation.into_extent();
                self.ledger.change(&key_of(block), true);
            }
            Err(InsertError::AlreadyResident(_)) => {
                self.store.already_resident(&key_of(block), ResidentCause::PartialHit);
            }
            Err(InsertError::Full) => return false,
        }
        true
    }

    /// Whether a region is the one that blocks are lent from.
    pub(super) fn lends_from(&self, region: RegionId) -> bool {
        self.region.id == region
    }

    /// Whether the fabric may write here on behalf of a fetch.
    pub(super) fn owns(&self, span: &RegisteredSpan) -> bool {
        let end = span.offset + u64::from(span.len);
        let owned = self.owned.borrow();
        // A span may cover destinations that are neighbours.
        let mut at = span.offset;
        while at < end {
            let Some((start, len)) = owned.range(..=at).next_back() else {
                return false;
            };
            let next = start + u64::from(*len);
            if next <= at {
                return false;
            }
            at = next;
        }
        true
    }
}

impl Landing for TestLanding {
    type Memory = Destination;

    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Destination>) {
        for size in sizes {
            let Some(reservation) = self.place(*size) else {
                return;
            };
            self.owned.borrow_mut().insert(reservation.extent().offset, *size);
            let owned = Rc::clone(&self.owned);
            out.push(Destination { reservation: Some(reservation), owned });
        }
    }

    fn spans(&self, memory: &Destination) -> impl Iterator<Item = RegisteredSpan> {
        let Extent { offset, len, .. } = memory.extent();
        std::iter::once(RegisteredSpan { region: self.region.id, offset, len })
    }

    fn checksum(&self, memory: &Destination) -> u64 {
        self.pool.checksum(memory.extent()).unwrap()
    }

    fn publish(
        &mut self,
        key: BlockKey,
        memory: Destination,
        checksum: u64,
        rank: EvictionRank,
    ) -> Published {
        let payload = Payload { extent: memory.extent(), checksum };
        loop {
            match self.store.insert(key, payload, Origin::Fetched { source: rank }, true) {
                Ok(found) => {
                    memory.hand_over();
                    self.fetched.insert(found.id);
                    self.ledger.change(&key, true);
                    return Published::Stored(found);
                }
                Err(InsertError::AlreadyResident(_)) => {
                    let found = self.store.pin(&key).unwrap();
                    self.store.already_resident(&key, ResidentCause::PeerFetch);
                    return Published::AlreadyResident(found);
                }
                Err(InsertError::Full) if self.evict().is_some() => {}
                Err(InsertError::Full) => return Published::Full,
            }
        }
    }

    fn remote(&self, extent: &Extent) -> Option<RemoteSpan> {
        self.region.remote(extent.offset, extent.len)
    }

    fn pause_ms(&self) -> u32 {
        self.pause_ms
    }
}
