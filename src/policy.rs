//! Which rank a resident gets, and which one goes first: pure functions, no store.
//!
//! A policy is two things, so that all policies share one store and can be compared on one trace:
//! a **transition** (rank now, event → rank then) and a **victim order** (the heads of the per-rank
//! lists → the list whose head goes). [`Policy::initial`], [`Policy::transition`] and
//! [`Policy::victim`] are the table of DESIGN §5, one match arm per cell, and the tests below hold
//! every cell to it.
#![forbid(unsafe_code)]

use crate::types::{EvictionRank, PolicyKind};

/// The rank of a replicated block under `aged`, and of a demoted one under every policy.
const SECOND: EvictionRank = EvictionRank::clamped(2);

/// The rank of a fetched copy that was never hit, under `aged`.
const THIRD: EvictionRank = EvictionRank::clamped(3);

/// How a block came to be resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A local engine saved it.
    Saved {
        /// Nodes that hold it, this one among them, where the registry already said so.
        owners: Option<u32>,
    },
    /// A peer sent it.
    Fetched {
        /// The source's rank before the step that this transfer made there.
        source: EvictionRank,
    },
}

/// What can move the rank of a resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RankEvent {
    /// A transfer to a requester that this resident had not been served to.
    Served,
    /// The engine that saved it says that it has sent it on; counted once per resident.
    FinishedSending,
    /// A local reader asked for it.
    LocalHit,
    /// A peer fetch or a batch with partial hits found it here (a duplicate save is no event).
    AlreadyResident,
    /// The registry said how many nodes hold it.
    OwnerHint {
        /// Live owners, this node among them.
        owners: u32,
    },
}

/// The head of one rank's list: its least recently used unpinned resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ListHead {
    /// The list's rank.
    pub rank: EvictionRank,
    /// How many times any resident took the newest place of a list since this one did: a distance
    /// in a sequence, no time.
    pub age: u64,
}

/// A pair of rank transitions and victim order, with its one switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Policy {
    /// Which pair.
    pub kind: PolicyKind,
    /// Whether a local hit lowers the rank under [`PolicyKind::Rank`] (default: yes). Without it
    /// ranks follow transfers alone. The other policies do not ask.
    pub hit_promotion: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self { kind: PolicyKind::default(), hit_promotion: true }
    }
}

impl Policy {
    /// The rank that a block starts with.
    #[must_use]
    pub fn initial(self, origin: Origin) -> EvictionRank {
        match (self.kind, origin) {
            (PolicyKind::Rank, Origin::Saved { owners }) => rank_of_owners(owners.unwrap_or(1)),
            (PolicyKind::Rank, Origin::Fetched { source }) => source,
            (PolicyKind::Segmented, Origin::Fetched { .. }) => SECOND,
            (PolicyKind::Aged, Origin::Fetched { .. }) => THIRD,
            (PolicyKind::Segmented | PolicyKind::Aged, Origin::Saved { .. })
            | (PolicyKind::Lru, _) => EvictionRank::FIRST,
        }
    }

    /// The rank that follows `rank` after `event`. Whether an owner hint counts at all for this
    /// resident is [`Policy::hint_applies`]; whether a requester or a `finished_sending` is new, the
    /// store knows.
    #[must_use]
    pub fn transition(self, rank: EvictionRank, event: RankEvent) -> EvictionRank {
        match self.kind {
            PolicyKind::Rank => match event {
                RankEvent::Served => rank.raised(),
                RankEvent::FinishedSending => rank.max(SECOND),
                RankEvent::LocalHit if !self.hit_promotion => rank,
                RankEvent::LocalHit | RankEvent::AlreadyResident => rank.lowered(),
                RankEvent::OwnerHint { owners } => rank_of_owners(owners),
            },
            PolicyKind::Segmented => match event {
                RankEvent::FinishedSending => SECOND,
                RankEvent::LocalHit => EvictionRank::FIRST,
                RankEvent::Served | RankEvent::AlreadyResident | RankEvent::OwnerHint { .. } => {
                    rank
                }
            },
            PolicyKind::Aged => match event {
                RankEvent::Served | RankEvent::FinishedSending => rank.max(SECOND),
                RankEvent::LocalHit => rank.min(SECOND),
                RankEvent::OwnerHint { owners } if owners >= 2 => rank.max(SECOND),
                RankEvent::OwnerHint { .. } => EvictionRank::FIRST,
                RankEvent::AlreadyResident => rank,
            },
            PolicyKind::Lru => rank,
        }
    }

    /// Whether `event` leaves its mark on the rank, so that a hint which arrives later knows less
    /// than the rank does. A hint is no such event, nor is a hit that promotes nothing.
    #[must_use]
    pub fn marks_rank(self, event: RankEvent) -> bool {
        match event {
            RankEvent::OwnerHint { .. } => false,
            RankEvent::LocalHit => self.kind != PolicyKind::Rank || self.hit_promotion,
            RankEvent::Served | RankEvent::FinishedSending | RankEvent::AlreadyResident => true,
        }
    }

    /// Whether an owner hint may move a resident that was `fetched` from a peer or whose rank is
    /// `marked` by an earlier event. The transfer rule beats the hint under every policy.
    #[must_use]
    pub fn hint_applies(self, fetched: bool, marked: bool) -> bool {
        !fetched
            && match self.kind {
                PolicyKind::Rank => !marked,
                PolicyKind::Aged => true,
                PolicyKind::Segmented | PolicyKind::Lru => false,
            }
    }

    /// The rank whose head goes first; `None` where there is no head. The heads come from the
    /// highest rank down, so that a policy which needs only the first one looks at no other.
    #[must_use]
    pub fn victim(self, heads: impl IntoIterator<Item = ListHead>) -> Option<EvictionRank> {
        let mut heads = heads.into_iter();
        let first = heads.next()?;
        if self.kind != PolicyKind::Aged {
            return Some(first.rank);
        }
        let mut best = (weighted(first), first.rank);
        for head in heads {
            debug_assert!(head.rank < best.1, "heads come from the highest rank down");
            // Equal products leave the higher rank, which came first.
            if weighted(head) > best.0 {
                best = (weighted(head), head.rank);
            }
        }
        Some(best.1)
    }
}

/// A block that this many nodes hold: each owner beyond this one is a reader that has it already.
fn rank_of_owners(owners: u32) -> EvictionRank {
    EvictionRank::clamped(owners.saturating_sub(1))
}

/// Age times the weight of the class: a copy that was never hit ages eight times as fast as the
/// only replica of a block.
fn weighted(head: ListHead) -> u64 {
    let weight = match head.rank.get() {
        1 => 1,
        2 => 2,
        _ => 8,
    };
    head.age.saturating_mul(weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(value: u32) -> EvictionRank {
        EvictionRank::clamped(value)
    }

    fn policy(kind: PolicyKind) -> Policy {
        Policy { kind, hit_promotion: true }
    }

    /// Ranks 1, 2, 3, 30 and 31 and what each becomes.
    fn assert_column(kind: PolicyKind, event: RankEvent, then: [u32; 5]) {
        for (now, then) in [1, 2, 3, 30, 31].into_iter().zip(then) {
            assert_eq!(
                policy(kind).transition(rank(now), event),
                rank(then),
                "{kind} {now} {event:?}"
            );
        }
    }

    const SAME: [u32; 5] = [1, 2, 3, 30, 31];

    #[test]
    fn saved_locally() {
        for (owners, expected) in [
            (None, 1),
            (Some(0), 1),
            (Some(1), 1),
            (Some(2), 1),
            (Some(3), 2),
            (Some(32), 31),
            (Some(u32::MAX), 31),
        ] {
            let saved = Origin::Saved { owners };
            assert_eq!(policy(PolicyKind::Rank).initial(saved), rank(expected));
            for kind in [PolicyKind::Segmented, PolicyKind::Aged, PolicyKind::Lru] {
                assert_eq!(policy(kind).initial(saved), rank(1), "{kind} {owners:?}");
            }
        }
    }

    #[test]
    fn fetched_from_a_peer() {
        for source in EvictionRank::all() {
            let fetched = Origin::Fetched { source };
            assert_eq!(policy(PolicyKind::Rank).initial(fetched), source);
            assert_eq!(policy(PolicyKind::Segmented).initial(fetched), rank(2));
            assert_eq!(policy(PolicyKind::Aged).initial(fetched), rank(3));
            assert_eq!(policy(PolicyKind::Lru).initial(fetched), rank(1));
        }
    }

    #[test]
    fn served_to_a_new_requester() {
        assert_column(PolicyKind::Rank, RankEvent::Served, [2, 3, 4, 31, 31]);
        assert_column(PolicyKind::Segmented, RankEvent::Served, SAME);
        assert_column(PolicyKind::Aged, RankEvent::Served, [2, 2, 3, 30, 31]);
        assert_column(PolicyKind::Lru, RankEvent::Served, SAME);
    }

    #[test]
    fn finished_sending() {
        let event = RankEvent::FinishedSending;
        assert_column(PolicyKind::Rank, event, [2, 2, 3, 30, 31]);
        assert_column(PolicyKind::Segmented, event, [2; 5]);
        assert_column(PolicyKind::Aged, event, [2, 2, 3, 30, 31]);
        assert_column(PolicyKind::Lru, event, SAME);
    }

    #[test]
    fn local_hit() {
        let event = RankEvent::LocalHit;
        assert_column(PolicyKind::Rank, event, [1, 1, 2, 29, 30]);
        assert_column(PolicyKind::Segmented, event, [1; 5]);
        assert_column(PolicyKind::Aged, event, [1, 2, 2, 2, 2]);
        assert_column(PolicyKind::Lru, event, SAME);
    }

    #[test]
    fn hit_promotion_off_changes_the_rank_policy_alone() {
        for kind in PolicyKind::ALL {
            let off = Policy { kind, hit_promotion: false };
            for now in EvictionRank::all() {
                let expected = if kind == PolicyKind::Rank {
                    now
                } else {
                    policy(kind).transition(now, RankEvent::LocalHit)
                };
                assert_eq!(off.transition(now, RankEvent::LocalHit), expected);
            }
            assert_eq!(off.marks_rank(RankEvent::LocalHit), kind != PolicyKind::Rank);
        }
    }

    #[test]
    fn already_resident() {
        let event = RankEvent::AlreadyResident;
        assert_column(PolicyKind::Rank, event, [1, 1, 2, 29, 30]);
        assert_column(PolicyKind::Segmented, event, SAME);
        assert_column(PolicyKind::Aged, event, SAME);
        assert_column(PolicyKind::Lru, event, SAME);
    }

    #[test]
    fn owner_hint() {
        let hint = |owners| RankEvent::OwnerHint { owners };
        assert_column(PolicyKind::Rank, hint(0), [1; 5]);
        assert_column(PolicyKind::Rank, hint(4), [3; 5]);
        assert_column(PolicyKind::Segmented, hint(4), SAME);
        assert_column(PolicyKind::Aged, hint(2), [2, 2, 3, 30, 31]);
        assert_column(PolicyKind::Aged, hint(1), [1; 5]);
        assert_column(PolicyKind::Aged, hint(0), [1; 5]);
        assert_column(PolicyKind::Lru, hint(4), SAME);
    }

    #[test]
    fn a_hint_never_moves_a_fetched_resident_and_a_marked_one_only_under_aged() {
        for kind in PolicyKind::ALL {
            let applies = |fetched, marked| policy(kind).hint_applies(fetched, marked);
            assert!(!applies(true, false) && !applies(true, true), "{kind}");
            let unmarked = matches!(kind, PolicyKind::Rank | PolicyKind::Aged);
            assert_eq!(applies(false, false), unmarked, "{kind}");
            assert_eq!(applies(false, true), kind == PolicyKind::Aged, "{kind}");
        }
    }

    #[test]
    fn every_event_but_a_hint_marks_the_rank() {
        for kind in PolicyKind::ALL {
            for event in [
                RankEvent::Served,
                RankEvent::FinishedSending,
                RankEvent::LocalHit,
                RankEvent::AlreadyResident,
            ] {
                assert!(policy(kind).marks_rank(event), "{kind} {event:?}");
            }
            assert!(!policy(kind).marks_rank(RankEvent::OwnerHint { owners: 2 }));
        }
    }

    fn heads(list: &[(u32, u64)]) -> Vec<ListHead> {
        list.iter().map(|&(value, age)| ListHead { rank: rank(value), age }).collect()
    }

    #[test]
    fn the_highest_rank_goes_first_unless_age_is_weighed() {
        for kind in [PolicyKind::Rank, PolicyKind::Segmented, PolicyKind::Lru] {
            let victim = |list: &[(u32, u64)]| policy(kind).victim(heads(list));
            assert_eq!(victim(&[]), None);
            assert_eq!(victim(&[(31, 0), (2, 9), (1, u64::MAX)]), Some(rank(31)));
        }
    }

    #[test]
    fn aged_weighs_one_two_and_eight() {
        let victim = |list: &[(u32, u64)]| policy(PolicyKind::Aged).victim(heads(list));
        assert_eq!(victim(&[]), None);
        assert_eq!(victim(&[(3, 0), (2, 0), (1, 1)]), Some(rank(1)));
        assert_eq!(victim(&[(3, 1), (1, 7)]), Some(rank(3)));
        assert_eq!(victim(&[(3, 1), (1, 8)]), Some(rank(3)), "a tie: the higher");
        assert_eq!(victim(&[(3, 1), (1, 9)]), Some(rank(1)));
        assert_eq!(victim(&[(3, 1), (2, 4)]), Some(rank(3)), "a tie: the higher");
        assert_eq!(victim(&[(3, 1), (2, 5), (1, 10)]), Some(rank(2)));
        assert_eq!(victim(&[(3, 1), (2, 5), (1, 11)]), Some(rank(1)));
        let (max, half) = (u64::MAX, u64::MAX / 2);
        assert_eq!(victim(&[(3, half), (2, max), (1, max)]), Some(rank(3)));
    }
}
