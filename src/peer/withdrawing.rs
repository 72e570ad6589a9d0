//! Residents that whoever owns their memory takes back, as an engine does before it overwrites blocks
//! that are served in place.
//!
//! From the moment at which a resident is withdrawn it is lent no more, also where it was pinned for a
//! lend that waits, and no lease that lends it is renewed. Readers finish what they read, within
//! [`limits::WITHDRAW_GRACE`]; a lease that still lends it then counts as expired, and ends as such: its
//! requester's access is cut first, and its pins go then (invariant 2). A resident goes as soon as
//! nobody has a pin on it and the node's own copies out of it have ended ([`Landing::lets_go`]), and a
//! withdrawal is over when all of its residents are gone.
//!
//! Nobody tells this thread when a local reader gives a pin back, so residents that are pinned are looked
//! at every [`limits::WITHDRAW_LOOK`], a bounded number at a time. Local readers are for the node to
//! keep away from what is being withdrawn: one who comes as soon as the last one goes is not stopped here.
//!
//! A stall of this node's own moves the end of the grace, for what its requesters have said meanwhile was
//! not heard; but once for each withdrawal, so that a node which stalls again and again ends it, too.
//!
//! How many withdrawals there are is for the caller to bound, and the end of a connection to an engine has
//! to be one; each costs 8 bytes and a place in a set for each of its residents.

use std::collections::VecDeque;
use std::time::Duration;

use hashbrown::HashSet;

use super::Peers;
use super::holder::{Holder, unpin};
use super::landing::Landing;
use crate::limits;
use crate::store::{Found, PinError, RemoveError, Store};
use crate::types::{ResidentId, Timestamp};

/// A withdrawal, as its asker numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WithdrawalId(pub u64);

type Residents = HashSet<ResidentId, foldhash::fast::RandomState>;

/// How long its readers have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Grace {
    Until(Timestamp),
    /// As well, and a stall has moved it.
    Moved(Timestamp),
    Over,
}

#[derive(Debug)]
struct Withdrawal {
    id: WithdrawalId,
    /// Those that are not known to be gone.
    residents: Vec<ResidentId>,
    /// Which of them is looked at next.
    next: usize,
    grace: Grace,
}

/// The withdrawals of one holder.
#[derive(Debug, Default)]
pub(super) struct Withdrawals {
    open: VecDeque<Withdrawal>,
    /// The residents of all that are open.
    leaving: Residents,
    over: VecDeque<WithdrawalId>,
    /// When they are looked at again.
    look_at: Timestamp,
}

impl Withdrawals {
    fn begin(&mut self, id: WithdrawalId, residents: Vec<ResidentId>, now: Timestamp) {
        self.leaving.extend(&residents);
        let grace = Grace::Until(now + limits::WITHDRAW_GRACE);
        self.open.push_back(Withdrawal { id, residents, next: 0, grace });
        self.look_at = now;
    }

    /// Whether a resident is to be lent no more.
    pub(super) fn include(&self, resident: ResidentId) -> bool {
        // Nearly always there are none, and a lend asks for each of its blocks.
        !self.leaving.is_empty() && self.leaving.contains(&resident)
    }

    /// Takes what is leaving from a lend: it is not here any more.
    pub(super) fn keep_from(&self, pinned: &mut [Result<Found, PinError>], store: &Store) {
        if self.leaving.is_empty() {
            return;
        }
        for one in pinned {
            if let Ok(found) = *one
                && self.include(found.id)
            {
                unpin(store, found.id);
                *one = Err(PinError::NotFound);
            }
        }
    }

    /// Takes out those that nobody reads, of [`limits::WITHDRAW_LOOKS`] that it looks at.
    fn look<L: Landing>(&mut self, store: &Store, landing: &mut L, now: Timestamp) {
        let (mut looks, mut turns) = (limits::WITHDRAW_LOOKS, self.open.len());
        let mut gone = false;
        while turns > 0
            && looks > 0
            && let Some(mut one) = self.open.pop_front()
        {
            while looks > 0
                && let Some(&resident) = one.residents.get(one.next)
            {
                looks -= 1;
                // It is lent no more, so no copy of it begins after this one has ended.
                let through = landing.lets_go(resident);
                let removed =
                    if through { store.remove(resident) } else { Err(RemoveError::Pinned) };
                match removed {
                    Ok(removed) => landing.removed(&removed),
                    Err(RemoveError::Gone) => {}
                    Err(RemoveError::Pinned) => {
                        one.next += 1;
                        continue;
                    }
                }
                gone = true;
                self.leaving.remove(&resident);
                one.residents.swap_remove(one.next);
            }
            if one.residents.is_empty() {
                self.over.push_back(one.id);
                turns -= 1;
            } else if one.next < one.residents.len() {
                self.open.push_front(one);
            } else {
                one.next = 0;
                self.open.push_back(one);
                turns -= 1;
            }
        }
        // Where many go they go at once, with time for others in between; else there is nothing to hurry for.
        self.look_at = if looks == 0 && gone { now } else { now + limits::WITHDRAW_LOOK };
    }

    /// The residents whose readers have no time left, once.
    fn poll_overdue(&mut self, now: Timestamp) -> Residents {
        let mut overdue = Residents::default();
        for one in &mut self.open {
            if let Grace::Until(end) | Grace::Moved(end) = one.grace
                && end <= now
            {
                one.grace = Grace::Over;
                overdue.extend(&one.residents);
            }
        }
        overdue
    }

    /// Leases have ended: to be looked at soon.
    pub(super) fn hurry(&mut self) {
        self.look_at = Timestamp::ZERO;
    }

    pub(super) fn handle_stall(&mut self, late: Duration) {
        for one in &mut self.open {
            if let Grace::Until(end) = one.grace {
                one.grace = Grace::Moved(end + late);
            }
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        (!self.open.is_empty()).then_some(self.look_at)
    }

    fn is_due(&self, now: Timestamp) -> bool {
        self.poll_timeout().is_some_and(|at| at <= now)
    }
}

impl Holder {
    /// Leases that lend what is leaving, and have had their time, count as expired.
    fn expire_withdrawn(&mut self, now: Timestamp) {
        let overdue = self.withdrawals.poll_overdue(now);
        if !overdue.is_empty() {
            self.leases.expire_where(|resident| overdue.contains(&resident));
        }
    }
}

impl<L: Landing> Peers<L> {
    /// Takes these residents back: they are lent to nobody from now on, and go as soon as nobody reads
    /// them, which is after [`limits::WITHDRAW_GRACE`] at the latest, and the time that it takes to cut
    /// off whoever reads on. [`Landing::removed`] is told of each. Ids of residents that are gone count
    /// as such. [`Self::poll_withdrawn`] answers when all of them are gone, at once where nobody has a
    /// pin on any.
    ///
    /// It is not answered while somebody else than a peer has a pin: the caller sees to it that local
    /// readers give theirs back, and that no more of them come.
    pub fn withdraw(
        &mut self,
        id: WithdrawalId,
        residents: Vec<ResidentId>,
        landing: &mut L,
        now: Timestamp,
    ) {
        self.holder.withdrawals.begin(id, residents, now);
        self.holder.keep_from_parked();
        self.look_for_withdrawn(landing, now);
    }

    /// A withdrawal that is over: nobody can read its residents any more, and none of them is one.
    pub fn poll_withdrawn(&mut self) -> Option<WithdrawalId> {
        self.holder.withdrawals.over.pop_front()
    }

    /// Gives up on those who read what is leaving, once they have had their time. Their leases are cut
    /// like others that have expired.
    pub(super) fn expire_withdrawn(&mut self, now: Timestamp) {
        self.holder.expire_withdrawn(now);
    }

    /// Takes out what nobody has a pin on any more.
    pub(super) fn look_for_withdrawn(&mut self, landing: &mut L, now: Timestamp) {
        if self.holder.withdrawals.is_due(now) {
            let Holder { withdrawals, store, .. } = &mut self.holder;
            withdrawals.look(store, landing, now);
        }
    }
}
