//! The holder's side of DESIGN §4: lend residents, and step their ranks when a peer has read them.
//!
//! A lend is answered within the event that brought it: the blocks are pinned in one call to the
//! store, quotas are checked, and the answer is written into a buffer that is kept. A lease that
//! expires is no completion: first its requester loses access, then the pins go, and no rank moves
//! (invariant 2).

use std::sync::Arc;

use super::connection::Remote;
use super::landing::Landing;
use super::outbox::Outbox;
use crate::event::{Event, EventSink, LendRefusal};
use crate::fabric::ConnectionId;
use crate::lease::{Completed, LeaseConfig, LeaseTable};
use crate::protocol::{HashEntry, Loan, LoanEntry, Message, Outcomes, RanksStatus, millis};
use crate::store::{Found, PinError, Store};
use crate::types::{BlockKey, LeaseId, NamespaceId, NodeEpoch, RequestId, RequesterIndex, ResidentId, Timestamp};

/// What this node has lent.
#[derive(Debug)]
pub(super) struct Holder {
    store: Arc<Store>,
    leases: LeaseTable,
    sink: Arc<dyn EventSink>,
    /// Requesters whose access is being cut.
    cutting: Vec<RequesterIndex>,
    draining: bool,
    keys: Vec<BlockKey>,
    pinned: Vec<Result<Found, PinError>>,
    ranks: Vec<u8>,
}

impl Holder {
    pub(super) fn new(config: LeaseConfig, store: Arc<Store>, sink: Arc<dyn EventSink>) -> Self {
        Self {
            store,
            leases: LeaseTable::new(config, Arc::clone(&sink)),
            sink,
            cutting: Vec::new(),
            draining: false,
            keys: Vec::new(),
            pinned: Vec::new(),
            ranks: Vec::new(),
        }
    }

    pub(super) fn drain(&mut self) {
        self.draining = true;
    }

    pub(super) fn handle_lend<L: Landing>(
        &mut self,
        (on, remote): (ConnectionId, &Remote),
        (request, namespace, hashes): (RequestId, NamespaceId, &[HashEntry]),
        landing: &L,
        outbox: &mut Outbox,
        now: Timestamp,
    ) {
        let mut loans = std::mem::take(&mut outbox.loans);
        loans.clear();
        let lease = if self.draining {
            let blocks = hashes.len() as u64;
            self.sink.emit(Event::LendRefused { reason: LendRefusal::Draining, blocks });
            loans.resize(hashes.len(), Loan::Busy.into());
            LeaseId::NONE
        } else {
            self.keys.clear();
            let key = |entry: &HashEntry| BlockKey { namespace, hash: entry.hash() };
            self.keys.extend(hashes.iter().map(key));
            self.pinned.clear();
            self.store.pin_batch(&self.keys, &mut self.pinned);
            self.lend_pinned(remote, landing, &mut loans, now)
        };
        let (ttl_ms, pause_ms) = (millis(self.leases.ttl()), landing.pause_ms());
        outbox.send(on, &Message::Lease { request, lease, ttl_ms, pause_ms, loans: &loans });
        outbox.loans = loans;
    }

    fn lend_pinned<L: Landing>(
        &mut self,
        remote: &Remote,
        landing: &L,
        loans: &mut Vec<LoanEntry>,
        now: Timestamp,
    ) -> LeaseId {
        let mut draft = self.leases.draft(remote.requester, remote.epoch);
        let (mut over_quota, mut over_pinned) = (0, 0);
        for pinned in &self.pinned {
            let loan = match *pinned {
                Ok(found) => {
                    let span = landing.remote(&found.payload.extent);
                    let lent = match span {
                        Some(span) => draft.lend(found.id, span.len).map(|()| span).ok(),
                        None => None,
                    };
                    match (lent, span) {
                        (Some(span), _) => Loan::Ready {
                            rank: found.rank,
                            generation: found.id.generation,
                            span,
                            checksum: found.payload.checksum,
                        },
                        (None, span) => {
                            draft.skip();
                            // The pin is ours and of this moment, so it cannot be stale.
                            drop(self.store.unpin(found.id));
                            over_quota += u64::from(span.is_some());
                            if span.is_some() { Loan::Busy } else { Loan::Failed }
                        }
                    }
                }
                Err(PinError::NotFound) => {
                    draft.skip();
                    Loan::NotFound
                }
                Err(PinError::TooManyPins) => {
                    draft.skip();
                    over_pinned += 1;
                    Loan::Busy
                }
            };
            loans.push(loan.into());
        }
        for (reason, blocks) in [(LendRefusal::Quota, over_quota), (LendRefusal::Pins, over_pinned)]
        {
            if blocks > 0 {
                self.sink.emit(Event::LendRefused { reason, blocks });
            }
        }
        draft.grant(now)
    }

    pub(super) fn handle_renew(
        &mut self,
        (on, remote): (ConnectionId, &Remote),
        lease: LeaseId,
        outbox: &mut Outbox,
        now: Timestamp,
    ) {
        let renewed = self.leases.renew(lease, remote.requester, remote.epoch, now);
        outbox.send(on, &Message::Renewed { lease, ttl_ms: renewed.map_or(0, millis) });
    }

    pub(super) fn handle_complete(
        &mut self,
        (on, remote): (ConnectionId, &Remote),
        lease: LeaseId,
        epoch: NodeEpoch,
        outcomes: Outcomes<'_>,
        (pause_ms, outbox): (u32, &mut Outbox),
    ) {
        self.ranks.clear();
        let who = (remote.requester, epoch);
        let completed =
            self.leases.complete(lease, who, outcomes, &*self.store, &mut self.ranks);
        let status = match completed {
            Completed::Recorded => RanksStatus::Recorded,
            Completed::Replayed => RanksStatus::Replayed,
            Completed::Unknown | Completed::WrongShape => RanksStatus::Unknown,
        };
        outbox.send(on, &Message::Ranks { lease, status, pause_ms, ranks: &self.ranks });
    }

    /// A lease came back unread; [`LeaseId::NONE`] means all that this requester holds.
    pub(super) fn handle_abort(&mut self, remote: &Remote, lease: LeaseId) {
        if lease == LeaseId::NONE {
            self.leases.abort_all(remote.requester, remote.epoch, &*self.store);
        } else {
            self.leases.abort(lease, remote.requester, remote.epoch, &*self.store);
        }
    }

    /// A requester's new start: nobody completes the leases of its earlier ones. Its earlier
    /// connections are gone.
    pub(super) fn supersede(&mut self, requester: RequesterIndex, epoch: NodeEpoch) {
        self.leases.supersede(requester, epoch, &*self.store);
    }

    /// A requester with an expired lease: cut its access, then say [`Self::handle_cut`].
    pub(super) fn poll_cut(&mut self, now: Timestamp) -> Option<RequesterIndex> {
        let requester = self.leases.poll_cut(now)?;
        if !self.cutting.contains(&requester) {
            self.cutting.push(requester);
        }
        Some(requester)
    }

    pub(super) fn is_cutting(&self, requester: RequesterIndex) -> bool {
        self.cutting.contains(&requester)
    }

    /// The requester can read nothing more.
    pub(super) fn handle_cut(&mut self, requester: RequesterIndex) {
        if self.is_cutting(requester) {
            self.cutting.retain(|other| *other != requester);
            self.leases.handle_cut(requester, &*self.store);
        }
    }

    /// Lets go of a pin that was taken for a local reader.
    pub(super) fn release(&self, resident: ResidentId) {
        // A pinned resident cannot have been evicted, so the pin is not stale.
        drop(self.store.unpin(resident));
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        self.leases.poll_timeout()
    }

    pub(super) fn leased_bytes(&self) -> u64 {
        self.leases.totals().bytes
    }

    /// Leases, blocks and bytes by requester.
    pub(super) fn usage(&self) -> impl Iterator<Item = (RequesterIndex, u32, u64, u64)> + '_ {
        self.leases
            .usages()
            .map(|(requester, usage)| (requester, usage.leases, usage.blocks, usage.bytes))
    }
}
