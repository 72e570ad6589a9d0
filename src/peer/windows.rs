//! Keys of their own for leases, where the fabric has windows (DESIGN §6.2): which window of which
//! connection serves which lease.
//!
//! Loans that lie next to each other in memory share a window, so a lease needs as many as its loans
//! have runs. A run for which none is free is answered `Busy`, as beyond a quota. A window whose lease
//! has ended is granted again only once the fabric says that its key is dead.

use std::collections::{BTreeMap, VecDeque};

use super::outbox::{Outbox, Output};
use crate::fabric::{ConnectionId, RemoteSpan, WindowId};
use crate::types::{LeaseId, RequesterIndex};

/// A window that serves a lease, or did until its end was asked for.
#[derive(Debug)]
struct Lent {
    window: WindowId,
    lease: LeaseId,
    ending: bool,
}

/// The windows of one connection.
#[derive(Debug)]
struct Pool {
    requester: RequesterIndex,
    /// The one that was free for longest goes first, so that keys come back late.
    free: VecDeque<WindowId>,
    lent: Vec<Lent>,
}

/// Loans next to each other, under one window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) window: WindowId,
    pub(super) span: RemoteSpan,
}

/// The windows of all connections.
#[derive(Debug)]
pub(super) struct Windows {
    /// Of each connection; 0 where peers read by the regions' keys.
    count: u16,
    pools: BTreeMap<ConnectionId, Pool>,
    /// Those of the lease in the making.
    runs: Vec<Run>,
}

impl Windows {
    pub(super) fn new(count: u16) -> Self {
        Self { count, pools: BTreeMap::new(), runs: Vec::new() }
    }

    pub(super) fn are_used(&self) -> bool {
        self.count > 0
    }

    /// Finds a window for one more loan of the lease in the making. Whether there is one, or none is
    /// needed.
    pub(super) fn cover(
        &mut self,
        (on, requester): (ConnectionId, RequesterIndex),
        span: &RemoteSpan,
    ) -> bool {
        if !self.are_used() {
            return true;
        }
        if let Some(run) = self.runs.last_mut()
            && run.span.rkey == span.rkey
            && run.span.address.checked_add(run.span.len.into()) == Some(span.address)
            && let Some(len) = run.span.len.checked_add(span.len)
        {
            run.span.len = len;
            return true;
        }
        let count = self.count;
        let pool = self.pools.entry(on).or_insert_with(|| {
            let free = (0..count).map(WindowId).collect();
            Pool { requester, free, lent: Vec::new() }
        });
        let Some(window) = pool.free.pop_front() else { return false };
        self.runs.push(Run { window, span: *span });
        true
    }

    /// Takes back the latest [`Self::cover`], which was for this loan: it is not lent after all.
    pub(super) fn uncover(&mut self, on: ConnectionId, span: &RemoteSpan) {
        let Some(run) = self.runs.last_mut() else { return };
        run.span.len = run.span.len.saturating_sub(span.len);
        if run.span.len > 0 {
            return;
        }
        if let Some(run) = self.runs.pop()
            && let Some(pool) = self.pools.get_mut(&on)
        {
            pool.free.push_front(run.window);
        }
    }

    /// The lease in the making is granted, or not where it is [`LeaseId::NONE`]. Answers its runs.
    pub(super) fn settle(&mut self, on: ConnectionId, lease: LeaseId) -> &[Run] {
        if let Some(pool) = self.pools.get_mut(&on) {
            for run in &self.runs {
                if lease == LeaseId::NONE {
                    pool.free.push_front(run.window);
                } else {
                    pool.lent.push(Lent { window: run.window, lease, ending: false });
                }
            }
        }
        if lease == LeaseId::NONE {
            self.runs.clear();
        }
        &self.runs
    }

    /// Forgets the runs of the lease that was made.
    pub(super) fn begin(&mut self) {
        self.runs.clear();
    }

    /// A lease has ended or is to end: so do its keys.
    pub(super) fn revoke(&mut self, lease: LeaseId, outbox: &mut Outbox) {
        self.revoke_where(outbox, |_, lent| lent.lease == lease);
    }

    /// All leases of a requester have ended.
    pub(super) fn revoke_all(&mut self, requester: RequesterIndex, outbox: &mut Outbox) {
        self.revoke_where(outbox, |pool, _| pool == requester);
    }

    fn revoke_where(&mut self, outbox: &mut Outbox, which: impl Fn(RequesterIndex, &Lent) -> bool) {
        for (&connection, pool) in &mut self.pools {
            let requester = pool.requester;
            for lent in &mut pool.lent {
                if !lent.ending && which(requester, lent) {
                    lent.ending = true;
                    outbox.push(Output::Revoke { connection, window: lent.window });
                }
            }
        }
    }

    /// The fabric has ended a key.
    pub(super) fn handle_revoked(&mut self, on: ConnectionId, window: WindowId) {
        let Some(pool) = self.pools.get_mut(&on) else { return };
        let ended = pool.lent.iter().position(|lent| lent.window == window && lent.ending);
        if let Some(at) = ended {
            pool.lent.swap_remove(at);
            pool.free.push_back(window);
        }
    }

    /// A connection is gone, and its keys with it.
    pub(super) fn handle_closed(&mut self, on: ConnectionId) {
        self.pools.remove(&on);
    }

    /// Whether a lease can still be read by some key.
    pub(super) fn serve(&self, lease: LeaseId) -> bool {
        self.pools.values().flat_map(|pool| &pool.lent).any(|lent| lent.lease == lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON: ConnectionId = ConnectionId { slot: 1, generation: 1 };
    const WHO: RequesterIndex = RequesterIndex(4);

    fn span(address: u64, len: u32) -> RemoteSpan {
        RemoteSpan { rkey: 9, address, len }
    }

    fn revoked(outbox: &mut Outbox) -> Vec<WindowId> {
        std::iter::from_fn(|| outbox.poll())
            .map(|output| match output {
                Output::Revoke { connection: ON, window } => window,
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn loans_next_to_each_other_share_a_window() {
        let mut windows = Windows::new(2);
        assert!(windows.cover((ON, WHO), &span(100, 50)));
        assert!(windows.cover((ON, WHO), &span(150, 10)));
        assert!(windows.cover((ON, WHO), &span(161, 10)), "there is a gap before it");
        assert!(!windows.cover((ON, WHO), &span(100, 50)), "no window is left");
        assert!(windows.cover((ON, WHO), &span(171, 1)), "it belongs to the last one");
        let runs = [(0, span(100, 60)), (1, span(161, 11))];
        let runs = runs.map(|(window, span)| Run { window: WindowId(window), span });
        assert_eq!(windows.settle(ON, LeaseId(7)), runs);
        let other_region = RemoteSpan { rkey: 8, ..span(172, 1) };
        windows.begin();
        assert!(!windows.cover((ON, WHO), &other_region));
    }

    #[test]
    fn a_window_is_granted_again_once_its_key_is_dead() {
        let (mut windows, mut outbox) = (Windows::new(1), Outbox::default());
        assert!(windows.cover((ON, WHO), &span(0, 1)));
        windows.settle(ON, LeaseId(7));
        windows.revoke(LeaseId(8), &mut outbox);
        assert_eq!(revoked(&mut outbox), []);
        windows.revoke(LeaseId(7), &mut outbox);
        windows.revoke(LeaseId(7), &mut outbox);
        windows.revoke_all(WHO, &mut outbox);
        assert_eq!(revoked(&mut outbox), [WindowId(0)], "once");
        windows.begin();
        assert!(!windows.cover((ON, WHO), &span(0, 1)), "the key may still read");
        assert!(windows.serve(LeaseId(7)));
        windows.handle_revoked(ON, WindowId(0));
        assert!(!windows.serve(LeaseId(7)));
        assert!(windows.cover((ON, WHO), &span(0, 1)));
        assert!(windows.cover((ON, WHO), &span(1, 5)));
        windows.uncover(ON, &span(1, 5));
        assert_eq!(windows.runs.last().map(|run| run.span), Some(span(0, 1)));
        windows.uncover(ON, &span(0, 1));
        assert_eq!(windows.runs, []);
        assert!(windows.cover((ON, WHO), &span(0, 1)));
        windows.settle(ON, LeaseId::NONE);
        assert!(windows.cover((ON, WHO), &span(0, 1)), "a lease that was not made keeps none");
    }

    #[test]
    fn a_connection_takes_its_windows_along_and_a_fabric_without_any_needs_none() {
        let (mut windows, mut outbox) = (Windows::new(1), Outbox::default());
        assert!(windows.cover((ON, WHO), &span(0, 1)));
        windows.settle(ON, LeaseId(7));
        windows.handle_closed(ON);
        windows.handle_revoked(ON, WindowId(0));
        assert!(!windows.serve(LeaseId(7)));
        windows.revoke_all(WHO, &mut outbox);
        assert_eq!(revoked(&mut outbox), []);
        let mut none = Windows::new(0);
        assert!(none.cover((ON, WHO), &span(0, 1)));
        assert_eq!(none.settle(ON, LeaseId(7)), []);
    }
}
