//! The holder's side of DESIGN §4: lend residents, and step their ranks when a peer has read them.
//!
//! A lend is answered within the event that brought it: the blocks are pinned in one call to the
//! store, quotas are checked, and the answer is written into a buffer that is kept. A lease that
//! expires is no completion: first its requester loses access, then the pins go, and no rank moves
//! (invariant 2). Where leases have keys of their own, that is the end of these keys alone, and the
//! requester's other leases go on; else its connection is closed.
//!
//! A lease that its requester completes or gives back is unpinned at once, and the end of its keys is
//! asked for in the same round: the reader has said that it reads no more.

use std::sync::Arc;
use std::time::Duration;

use super::connection::Remote;
use super::landing::Landing;
use super::layouts::ToldLayouts;
use super::lending::{place, uncover};
use super::outbox::{Context, Outbox};
use super::pressure::Pressure;
use super::windows::Windows;
use super::withdrawing::Withdrawals;
use crate::event::{Event, EventSink, LendRefusal};
use crate::fabric::{ConnectionId, WindowId};
use crate::lease::{
    Completed, Completion, LeaseConfig, LeaseConfigError, LeaseTable, Residents, Usage,
};
use crate::limits;
use crate::protocol::{HashEntry, Loan, LoanEntry, Message, RanksStatus, millis};
use crate::store::{Found, PinError, Store};
use crate::types::{
    BlockKey, LeaseId, Load, MemoryKind, NamespaceId, NodeEpoch, RequestId, RequesterIndex,
    ResidentId, Timestamp,
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
    pub(super) store: Arc<Store>,
    pub(super) leases: LeaseTable,
    /// What is to be lent no more.
    pub(super) withdrawals: Withdrawals,
    pub(super) pressure: Pressure,
    sink: Arc<dyn EventSink>,
    windows: Windows,
    layouts: ToldLayouts,
    /// Requesters whose access is being cut, and until when the end of keys is waited for.
    cutting: Vec<(RequesterIndex, Timestamp)>,
    draining: bool,
    keys: Vec<BlockKey>,
    pinned: Vec<Result<Found, PinError>>,
    /// Lends whose blocks are not ready to be read yet.
    parked: Vec<ParkedLend>,
    /// When they are looked at again.
    look_at: Timestamp,
    ranks: Vec<u8>,
}

impl Holder {
    pub(super) fn new(
        (config, pressure, windows): (LeaseConfig, Pressure, u16),
        store: Arc<Store>,
        sink: Arc<dyn EventSink>,
    ) -> Result<Self, LeaseConfigError> {
        Ok(Self {
            store,
            withdrawals: Withdrawals::default(),
            leases: LeaseTable::new(config, Arc::clone(&sink))?,
            pressure,
            sink,
            windows: Windows::new(windows),
            layouts: ToldLayouts::default(),
            cutting: Vec::new(),
            draining: false,
            keys: Vec::new(),
            pinned: Vec::new(),
            parked: Vec::new(),
            look_at: Timestamp::ZERO,
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
        if self.draining {
            let blocks = hashes.len() as u64;
            self.sink.emit(Event::LendRefused { reason: LendRefusal::Draining, blocks });
            let mut loans = std::mem::take(&mut cx.outbox.loans);
            loans.clear();
            loans.resize(hashes.len(), Loan::Busy(LendRefusal::Draining).into());
            return self.answer_lend(remote, request, (LeaseId::NONE, loans), cx);
        }
        self.keys.clear();
        let key = |entry: &HashEntry| BlockKey { namespace, hash: entry.hash() };
        self.keys.extend(hashes.iter().map(key));
        self.pinned.clear();
        self.store.pin_batch(&self.keys, &mut self.pinned);
        self.withdrawals.keep_from(&mut self.pinned, &self.store);
        if prepare_all(&self.pinned, cx.landing) {
            self.lend_now(remote, request, cx);
        } else if self.parked.len() < limits::PARKED_LENDS_MAX {
            let (connection, until) = (remote.connection, cx.now + limits::PREPARE_TIMEOUT);
            let pinned = std::mem::take(&mut self.pinned);
            self.parked.push(ParkedLend { connection, request, pinned, until });
        } else {
            self.lend_now(remote, request, cx);
        }
    }

    /// Answers lends whose blocks have become ready, or have taken too long. `remote` knows the peers
    /// that are up.
    pub(super) fn handle_parked<'r, L: Landing>(
        &mut self,
        remote: impl Fn(ConnectionId) -> Option<&'r Remote>,
        cx: &mut Context<'_, L>,
    ) {
        self.look_at = cx.now + limits::LOOK_AGAIN;
        let mut at = 0;
        while let Some(parked) = self.parked.get(at) {
            let ready = prepare_all(&parked.pinned, cx.landing);
            if !ready && parked.until > cx.now {
                at += 1;
                continue;
            }
            let ParkedLend { connection, request, pinned, .. } = self.parked.swap_remove(at);
            self.pinned = pinned;
            match remote(connection) {
                Some(remote) => self.lend_now(remote, request, cx),
                None => unpin_all(&self.pinned, &self.store),
            }
        }
    }

    /// Lends that wait do so no more for what is leaving.
    pub(super) fn keep_from_parked(&mut self) {
        for parked in &mut self.parked {
            self.withdrawals.keep_from(&mut parked.pinned, &self.store);
        }
    }

    /// Lends what is pinned.
    fn lend_now<L: Landing>(
        &mut self,
        remote: &Remote,
        request: RequestId,
        cx: &mut Context<'_, L>,
    ) {
        let mut loans = std::mem::take(&mut cx.outbox.loans);
        loans.clear();
        let lease = self.lend_pinned(remote, cx.landing, &mut loans, cx.now);
        self.answer_lend(remote, request, (lease, loans), cx);
    }

    fn answer_lend<L: Landing>(
        &mut self,
        remote: &Remote,
        request: RequestId,
        (lease, loans): (LeaseId, Vec<LoanEntry>),
        cx: &mut Context<'_, L>,
    ) {
        let (ttl_ms, load) = (self.ttl_ms(), self.load(cx.landing));
        let answer = Message::Lease { request, lease, ttl_ms, load, loans: &loans };
        if lease != LeaseId::NONE {
            self.layouts.tell(remote.connection, cx);
        }
        let runs = self.windows.settle(remote.connection, lease);
        cx.outbox.send_granted(remote.connection, &answer, runs);
        self.windows.begin();
        self.layouts.begin();
        cx.outbox.loans = loans;
    }

    /// Turns pins into loans; what may not be lent is unpinned again.
    fn lend_pinned<L: Landing>(
        &mut self,
        remote: &Remote,
        landing: &mut L,
        loans: &mut Vec<LoanEntry>,
        now: Timestamp,
    ) -> LeaseId {
        let mut room = self.pressure.room(self.leases.totals());
        let draft = self.leases.draft(remote.borrower(), self.pinned.len(), &*self.store);
        let mut draft = match draft {
            Ok(draft) => draft,
            Err(error) => {
                refuse_all(&self.pinned, error.refusal(), &self.store, loans);
                return LeaseId::NONE;
            }
        };
        let reader = (remote.connection, remote.requester);
        let mut refused = false;
        for pinned in &self.pinned {
            let covers = (&mut self.windows, &mut self.layouts);
            let loan = match *pinned {
                Ok(found) => match place(&found, room, (covers, reader), landing) {
                    Ok(place) if draft.lend(found.id, place.len().into(), kind(&found)).is_ok() => {
                        room.take(place.len().into(), kind(&found));
                        let (rank, checksum) = (found.rank, found.payload.checksum);
                        let generation = found.id.generation;
                        loans.push(Loan::Ready { rank, generation, place, checksum }.into());
                        continue;
                    }
                    // Over quota; the draft has let go of the pin.
                    Ok(place) => {
                        uncover(&mut self.windows, remote.connection, &place);
                        loans.push(Loan::Busy(LendRefusal::Quota).into());
                        continue;
                    }
                    Err(loan) => {
                        unpin(&self.store, found.id);
                        loan
                    }
                },
                Err(PinError::NotFound) => Loan::NotFound,
                Err(PinError::TooManyPins) => Loan::Busy(LendRefusal::Pins),
            };
            draft.skip();
            refused |= matches!(loan, Loan::Busy(_));
            loans.push(loan.into());
        }
        if refused {
            tell_refused(&*self.sink, loans);
        }
        draft.grant(now)
    }

    pub(super) fn handle_renew<L: Landing>(
        &mut self,
        remote: &Remote,
        lease: LeaseId,
        cx: &mut Context<'_, L>,
    ) {
        // A node that leaves lets leases run to the end that they have, and no longer; so does one that
        // is to give back what they lend.
        let leaves = self.draining || self.leases.lends(lease, |it| self.withdrawals.include(it));
        let renewed = match leaves {
            true => None,
            false => self.leases.renew(lease, remote.borrower(), cx.now),
        };
        let (ttl_ms, load) = (renewed.map_or(0, millis), self.load(cx.landing));
        let answer = Message::Renewed { lease, ttl_ms, load };
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
        if status == RanksStatus::Recorded {
            self.windows.revoke(completion.lease, cx.outbox);
        }
        let (lease, load) = (completion.lease, self.load(cx.landing));
        let answer = Message::Ranks { lease, status, load, ranks: &self.ranks };
        cx.outbox.send(remote.connection, &answer);
    }

    /// A lease came back unread; [`LeaseId::NONE`] means all that this requester holds.
    pub(super) fn handle_abort(&mut self, remote: &Remote, lease: LeaseId, outbox: &mut Outbox) {
        if lease == LeaseId::NONE {
            self.leases.abort_all(remote.requester, &*self.store);
            self.windows.revoke_all(remote.requester, outbox);
        } else if self.leases.abort(lease, remote.borrower(), &*self.store) {
            self.windows.revoke(lease, outbox);
        }
    }

    /// A requester's new start: nobody completes the leases of its earlier ones. Its earlier
    /// connections are gone.
    pub(super) fn supersede(&mut self, requester: RequesterIndex, epoch: NodeEpoch) {
        self.leases.supersede(requester, epoch, &*self.store);
    }

    /// A requester with an expired lease: cut its access, then say [`Self::handle_cut`]; unless
    /// [`Self::revoke_expired`] does.
    pub(super) fn poll_cut(&mut self, now: Timestamp) -> Option<RequesterIndex> {
        let requester = self.leases.poll_cut(now)?;
        if !self.is_cutting(requester) {
            self.cutting.push((requester, now + limits::REVOKE_TIMEOUT));
        }
        Some(requester)
    }

    /// Ends the keys of a requester's expired leases, where leases have keys of their own.
    pub(super) fn revoke_expired(
        &mut self,
        requester: RequesterIndex,
        outbox: &mut Outbox,
    ) -> bool {
        for lease in self.leases.cutting(requester) {
            self.windows.revoke(lease, outbox);
        }
        self.windows.are_used()
    }

    /// A requester of whose expired leases no key is left.
    pub(super) fn poll_revoked(&mut self) -> Option<RequesterIndex> {
        if !self.windows.are_used() {
            return None;
        }
        let done = |&&(requester, _): &&(RequesterIndex, _)| {
            !self.leases.cutting(requester).any(|lease| self.windows.serve(lease))
        };
        self.cutting.iter().find(done).map(|(requester, _)| *requester)
    }

    /// A requester whose keys did not end in time: cut its access as without keys.
    pub(super) fn poll_overdue(&mut self, now: Timestamp) -> Option<RequesterIndex> {
        let waiting = self.windows.are_used().then_some(&mut self.cutting)?;
        let (requester, limit) = waiting.iter_mut().find(|(_, limit)| *limit <= now)?;
        // Once: what follows is the end of its connections.
        *limit = Timestamp::ZERO + Duration::MAX;
        Some(*requester)
    }

    /// The fabric has ended a key.
    pub(super) fn handle_revoked(&mut self, on: ConnectionId, window: WindowId) {
        self.windows.handle_revoked(on, window);
    }

    /// A connection is gone, and its keys with it.
    pub(super) fn handle_closed(&mut self, on: ConnectionId) {
        self.windows.handle_closed(on);
        self.layouts.handle_closed(on);
        for parked in self.parked.extract_if(.., |parked| parked.connection == on) {
            unpin_all(&parked.pinned, &self.store);
        }
    }

    pub(super) fn is_cutting(&self, requester: RequesterIndex) -> bool {
        self.cutting.iter().any(|(other, _)| *other == requester)
    }

    /// The requester can read nothing more of what has expired.
    pub(super) fn handle_cut(&mut self, requester: RequesterIndex) {
        if self.is_cutting(requester) {
            self.cutting.retain(|(other, _)| *other != requester);
            self.leases.handle_cut(requester, &*self.store);
            self.withdrawals.hurry();
        }
    }

    /// Lets go of a pin that was taken for a local reader.
    pub(super) fn release(&self, resident: ResidentId) {
        unpin(&self.store, resident);
    }

    /// This node was late by so much: what its requesters sent in time may not have been read.
    pub(super) fn handle_stall(&mut self, late: Duration) {
        self.leases.extend_all(late);
        self.withdrawals.handle_stall(late);
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let revoking = self.windows.are_used().then_some(&self.cutting);
        let limits = revoking.into_iter().flatten().map(|(_, limit)| *limit);
        // No event tells that a block has become ready.
        let parked = (!self.parked.is_empty()).then_some(self.look_at);
        let withdrawn = self.withdrawals.poll_timeout();
        self.leases.poll_timeout().into_iter().chain(limits).chain(parked).chain(withdrawn).min()
    }

    /// What all requesters hold.
    pub(super) fn lent(&self) -> Usage {
        self.leases.totals()
    }

    /// What every reply says.
    pub(super) fn load<L: Landing>(&self, landing: &L) -> Load {
        self.pressure.load(self.leases.totals(), landing.pause_ms())
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

/// Says how many blocks were refused here, by their reasons; the leases tell of quotas themselves.
fn tell_refused(sink: &dyn EventSink, loans: &[LoanEntry]) {
    for reason in LendRefusal::ALL.into_iter().filter(|reason| *reason != LendRefusal::Quota) {
        let refused = loans.iter().filter(|entry| entry.loan() == Loan::Busy(reason));
        let blocks = refused.count() as u64;
        if blocks > 0 {
            sink.emit(Event::LendRefused { reason, blocks });
        }
    }
}

/// A lend whose blocks are pinned and not ready to be read yet.
#[derive(Debug)]
struct ParkedLend {
    connection: ConnectionId,
    request: RequestId,
    pinned: Vec<Result<Found, PinError>>,
    until: Timestamp,
}

/// Makes all blocks of a lend ready, or begins to; whether they are.
fn prepare_all<L: Landing>(pinned: &[Result<Found, PinError>], landing: &mut L) -> bool {
    landing.look_again();
    // All of them are asked, so that what takes time runs at once.
    let unready = pinned.iter().flatten().filter(|found| !landing.prepare(found));
    unready.count() == 0
}

fn kind(found: &Found) -> MemoryKind {
    found.payload.extent.pool.kind()
}

pub(super) fn unpin(store: &Store, resident: ResidentId) {
    Residents::unpin(store, resident);
}

fn unpin_all(pinned: &[Result<Found, PinError>], store: &Store) {
    for found in pinned.iter().flatten() {
        unpin(store, found.id);
    }
}

/// Lets go of all pins and says why nothing is lent.
fn refuse_all(
    pinned: &[Result<Found, PinError>],
    reason: LendRefusal,
    store: &Store,
    loans: &mut Vec<LoanEntry>,
) {
    unpin_all(pinned, store);
    let answer = |pinned: &Result<Found, PinError>| match pinned {
        Err(PinError::NotFound) => Loan::NotFound,
        Err(PinError::TooManyPins) => Loan::Busy(LendRefusal::Pins),
        Ok(_) => Loan::Busy(reason),
    };
    loans.extend(pinned.iter().map(answer).map(LoanEntry::from));
}
