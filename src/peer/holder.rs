//! The holder's side of DESIGN §4: lend residents, and step their ranks when a peer has read them.
//!
//! A lend is answered within the event that brought it: the blocks are pinned in one call to the
//! store, quotas are checked, and the answer is written into a buffer that is kept. A lease that
//! expires is no completion: first its requester loses access, then the pins go, and no rank moves
//! (invariant 2).

use std::sync::Arc;
use std::time::Duration;

use super::connection::Remote;
use super::landing::Landing;
use super::outbox::Context;
use crate::event::{Event, EventSink, LendRefusal};
use crate::lease::{
    Completed, Completion, LeaseConfig, LeaseConfigError, LeaseTable, Residents, Usage,
};
use crate::protocol::{HashEntry, Loan, LoanEntry, Message, RanksStatus, millis};
use crate::store::{Found, PinError, Store};
use crate::types::{
    BlockKey, LeaseId, NamespaceId, NodeEpoch, RequestId, RequesterIndex, ResidentId, Timestamp,
};

/// A lend request, as it arrived.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lend<'a> {
    pub(super) request: RequestId,
    pub(super) namespace: NamespaceId,
    pub(super) hashes: &'a [HashEntry],
}

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
    pub(super) fn new(
        config: LeaseConfig,
        store: Arc<Store>,
        sink: Arc<dyn EventSink>,
    ) -> Result<Self, LeaseConfigError> {
        Ok(Self {
            store,
            leases: LeaseTable::new(config, Arc::clone(&sink))?,
            sink,
            cutting: Vec::new(),
            draining: false,
            keys: Vec::new(),
            pinned: Vec::new(),
            ranks: Vec::new(),
        })
    }

    pub(super) fn drain(&mut self) {
        self.draining = true;
    }

    pub(super) fn handle_lend<L: Landing>(
        &mut self,
        remote: &Remote,
        lend: &Lend<'_>,
        cx: &mut Context<'_, L>,
    ) {
        let &Lend { request, namespace, hashes } = lend;
        let mut loans = std::mem::take(&mut cx.outbox.loans);
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
            self.lend_pinned(remote, cx.landing, &mut loans, cx.now)
        };
        let (ttl_ms, pause_ms) = (self.ttl_ms(), cx.landing.pause_ms());
        let answer = Message::Lease { request, lease, ttl_ms, pause_ms, loans: &loans };
        cx.outbox.send(remote.connection, &answer);
        cx.outbox.loans = loans;
    }

    /// Turns pins into loans; what may not be lent is unpinned again.
    fn lend_pinned<L: Landing>(
        &mut self,
        remote: &Remote,
        landing: &L,
        loans: &mut Vec<LoanEntry>,
        now: Timestamp,
    ) -> LeaseId {
        let draft = self.leases.draft(remote.borrower(), self.pinned.len(), &*self.store);
        let Ok(mut draft) = draft else {
            for found in self.pinned.iter().flatten() {
                Residents::unpin(&*self.store, found.id);
            }
            let answer = |pinned: &Result<Found, PinError>| match pinned {
                Err(PinError::NotFound) => Loan::NotFound,
                _ => Loan::Busy,
            };
            loans.extend(self.pinned.iter().map(answer).map(LoanEntry::from));
            return LeaseId::NONE;
        };
        let mut over_pinned = 0;
        for pinned in &self.pinned {
            let loan = match *pinned {
                Ok(found) => match landing.remote(&found.payload.extent) {
                    Some(span) if draft.lend(found.id, span.len.into()).is_ok() => Loan::Ready {
                        rank: found.rank,
                        generation: found.id.generation,
                        span,
                        checksum: found.payload.checksum,
                    },
                    // Over quota; the draft has let go of the pin.
                    Some(_) => Loan::Busy,
                    None => {
                        draft.skip();
                        Residents::unpin(&*self.store, found.id);
                        Loan::Failed
                    }
                },
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
        if over_pinned > 0 {
            let (reason, blocks) = (LendRefusal::Pins, over_pinned);
            self.sink.emit(Event::LendRefused { reason, blocks });
        }
        draft.grant(now)
    }

    pub(super) fn handle_renew<L>(
        &mut self,
        remote: &Remote,
        lease: LeaseId,
        cx: &mut Context<'_, L>,
    ) {
        let renewed = self.leases.renew(lease, remote.borrower(), cx.now);
        let answer = Message::Renewed { lease, ttl_ms: renewed.map_or(0, millis) };
        cx.outbox.send(remote.connection, &answer);
    }

    pub(super) fn handle_complete<L: Landing>(
        &mut self,
        remote: &Remote,
        completion: &Completion<'_>,
        cx: &mut Context<'_, L>,
    ) {
        let completed = self.leases.complete(completion, &*self.store, &mut self.ranks);
        let status = match completed {
            Completed::Recorded => RanksStatus::Recorded,
            Completed::Replayed => RanksStatus::Replayed,
            Completed::Unknown | Completed::WrongShape => RanksStatus::Unknown,
        };
        let (lease, pause_ms) = (completion.lease, cx.landing.pause_ms());
        let answer = Message::Ranks { lease, status, pause_ms, ranks: &self.ranks };
        cx.outbox.send(remote.connection, &answer);
    }

    /// A lease came back unread; [`LeaseId::NONE`] means all that this requester holds.
    pub(super) fn handle_abort(&mut self, remote: &Remote, lease: LeaseId) {
        if lease == LeaseId::NONE {
            self.leases.abort_all(remote.requester, &*self.store);
        } else {
            self.leases.abort(lease, remote.borrower(), &*self.store);
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
        Residents::unpin(&*self.store, resident);
    }

    /// This node was late by so much: what its requesters sent in time may not have been read.
    pub(super) fn handle_stall(&mut self, late: Duration) {
        self.leases.extend_all(late);
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        self.leases.poll_timeout()
    }

    pub(super) fn leased_bytes(&self) -> u64 {
        self.leases.totals().bytes
    }

    /// What each requester holds.
    pub(super) fn usages(&self) -> impl Iterator<Item = (RequesterIndex, Usage)> + '_ {
        self.leases.usages()
    }

    /// How long a lease lasts.
    fn ttl_ms(&self) -> u32 {
        millis(self.leases.config().ttl)
    }
}
