//! What the store must answer: the obvious sequential model, a map plus one vector per rank.
//!
//! It is written from DESIGN §5 and shares nothing with the store but the policy's transitions.
//! It is cheap to clone, for checkers that search among the orders of a concurrent history. Each
//! admission carries a serial number of the caller's as its checksum, and answers name residents by
//! it, so that the store's ids need not be predicted.

use std::collections::BTreeMap;

use super::{Payload, StoreConfig};
use crate::limits;
use crate::policy::{Origin, RankEvent};
use crate::types::{
    BlockHash, BlockKey, EvictionRank, Extent, MemoryKind, NamespaceId, PolicyKind, PoolId,
    RequesterIndex, ResidentCause,
};

/// A block by its number.
pub(super) fn key(number: u8) -> BlockKey {
    BlockKey { namespace: NamespaceId(7), hash: BlockHash::new(&[number]).unwrap() }
}

/// What the serial numbers of admissions in a device's memory have set.
pub(super) const ON_DEVICE: u64 = 1 << 32;

/// What the serial numbers of admissions in an engine's memory have set.
pub(super) const IN_ENGINE: u64 = 1 << 33;

/// Where an admission lies.
pub(super) fn kind_of(serial: u64) -> MemoryKind {
    match serial & (ON_DEVICE | IN_ENGINE) {
        0 => MemoryKind::Host,
        ON_DEVICE => MemoryKind::Device,
        _ => MemoryKind::Engine,
    }
}

/// The payload of an admission. Lengths differ, so that sums of bytes say something.
pub(super) fn payload(serial: u64) -> Payload {
    Payload {
        extent: Extent {
            pool: match kind_of(serial) {
                MemoryKind::Host => PoolId(0),
                MemoryKind::Device => PoolId::GPU,
                MemoryKind::Engine => PoolId::of_layout(3).unwrap(),
            },
            offset: serial * limits::EXTENT_ALIGN,
            len: u32::try_from(serial % 61 + 1).unwrap(),
        },
        checksum: serial,
    }
}

/// Everything that a store can be asked to do that changes it, or that shows its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Operation {
    Insert { key: u8, serial: u64, origin: Origin, pinned: bool },
    Lookup { key: u8 },
    Pin { key: u8 },
    PinBatch { keys: Vec<u8> },
    HitBatch { keys: Vec<u8>, pin: bool },
    Unpin { serial: u64 },
    UnpinBatch { serials: Vec<u64> },
    Commit { serial: u64, requester: RequesterIndex },
    CommitBatch { serials: Vec<u64>, requester: RequesterIndex },
    AlreadyResident { key: u8, cause: ResidentCause },
    FinishedSending { key: u8 },
    OwnerHint { key: u8, owners: u32 },
    Evict(MemoryKind),
    EvictBatch { kind: MemoryKind, max: usize },
    Remove { serial: u64 },
}

/// One answer; a batch gives several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Found { serial: u64, rank: EvictionRank },
    NotFound,
    AlreadyResident { serial: u64, rank: EvictionRank },
    Full,
    TooManyPins,
    Unpinned,
    Stale,
    NotPinned,
    Pinned,
    Refused(usize),
    Committed { rank: EvictionRank, first: bool },
    Said(bool),
    Evicted { key: u8, serial: u64, rank: EvictionRank },
}

type List = (MemoryKind, EvictionRank);

#[derive(Debug, Clone)]
pub(super) struct Oracle {
    config: StoreConfig,
    residents: BTreeMap<u8, Resident>,
    /// By memory and rank: the unpinned residents, oldest first, with the number of their placement.
    lists: BTreeMap<List, Vec<(u8, u64)>>,
    placements: u64,
}

/// See [`Oracle::essence`].
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Essence {
    residents: BTreeMap<u8, Resident>,
    /// Empty lists left behind make essences differ that need not; that only costs a search time.
    lists: Vec<(List, Vec<(u8, u64)>)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Resident {
    pub(super) serial: u64,
    pub(super) rank: EvictionRank,
    pub(super) pins: u16,
    pub(super) served: BTreeMap<RequesterIndex, EvictionRank>,
    fetched: bool,
    marked: bool,
    finished: bool,
}

impl Oracle {
    pub(super) fn new(config: StoreConfig) -> Self {
        Self { config, residents: BTreeMap::new(), lists: BTreeMap::new(), placements: 0 }
    }

    /// What its future answers depend on: two oracles of one configuration that give the same are
    /// the same from here on. The ages of placements count only where the policy weighs them.
    pub(super) fn essence(&self) -> Essence {
        let aged = self.config.policy.kind == PolicyKind::Aged;
        let age = |placed: u64| if aged { self.placements - placed } else { 0 };
        let places = |list: &Vec<(u8, u64)>| list.iter().map(|one| (one.0, age(one.1))).collect();
        Essence {
            residents: self.residents.clone(),
            lists: self.lists.iter().map(|(which, list)| (*which, places(list))).collect(),
        }
    }

    pub(super) fn residents(&self) -> &BTreeMap<u8, Resident> {
        &self.residents
    }

    pub(super) fn apply(&mut self, operation: &Operation) -> Vec<Answer> {
        let one = match operation {
            Operation::Insert { key, serial, origin, pinned } => {
                self.insert(*key, *serial, *origin, *pinned)
            }
            Operation::Lookup { key } => self.lookup(*key),
            Operation::Pin { key } => self.pin(*key),
            Operation::PinBatch { keys } => return keys.iter().map(|key| self.pin(*key)).collect(),
            Operation::HitBatch { keys, pin } => {
                return leaf_first(keys, |key| self.hit(key, *pin));
            }
            Operation::Unpin { serial } => self.unpin(*serial),
            Operation::UnpinBatch { serials } => {
                let answers = leaf_first(serials, |serial| self.unpin(serial));
                let refused = answers.iter().filter(|answer| **answer != Answer::Unpinned);
                Answer::Refused(refused.count())
            }
            Operation::Commit { serial, requester } => self.commit(*serial, *requester),
            Operation::CommitBatch { serials, requester } => {
                return leaf_first(serials, |serial| self.commit(serial, *requester));
            }
            Operation::AlreadyResident { key, cause } => self.already_resident(*key, *cause),
            Operation::FinishedSending { key } => self.finished_sending(*key),
            Operation::OwnerHint { key, owners } => self.owner_hint(*key, *owners),
            Operation::Remove { serial } => self.remove(*serial),
            Operation::Evict(kind) => return self.evict(*kind).into_iter().collect(),
            Operation::EvictBatch { kind, max } => {
                return (0..*max).map_while(|_| self.evict(*kind)).collect();
            }
        };
        vec![one]
    }

    fn insert(&mut self, key: u8, serial: u64, origin: Origin, pinned: bool) -> Answer {
        if let Some(here) = self.residents.get(&key) {
            let (serial, rank) = (here.serial, here.rank);
            return Answer::AlreadyResident { serial, rank };
        }
        if self.residents.len() == self.config.capacity as usize {
            return Answer::Full;
        }
        let rank = self.config.policy.initial(origin);
        let resident = Resident {
            serial,
            rank,
            pins: u16::from(pinned),
            served: BTreeMap::new(),
            fetched: matches!(origin, Origin::Fetched { .. }),
            marked: false,
            finished: false,
        };
        self.residents.insert(key, resident);
        self.place(key);
        Answer::Found { serial, rank }
    }

    /// Makes the resident the newest of its rank, or takes it out of its list if it is pinned.
    fn place(&mut self, key: u8) {
        self.lists.values_mut().for_each(|list| list.retain(|place| place.0 != key));
        let resident = &self.residents[&key];
        if resident.pins == 0 {
            self.placements += 1;
            let which = (kind_of(resident.serial), resident.rank);
            let list = self.lists.entry(which).or_default();
            list.push((key, self.placements));
        }
    }

    fn lookup(&self, key: u8) -> Answer {
        self.residents
            .get(&key)
            .map_or(Answer::NotFound, |here| Answer::Found { serial: here.serial, rank: here.rank })
    }

    fn pin(&mut self, key: u8) -> Answer {
        let Some(resident) = self.residents.get_mut(&key) else {
            return Answer::NotFound;
        };
        if resident.pins == limits::PINS_MAX {
            return Answer::TooManyPins;
        }
        resident.pins += 1;
        self.place(key);
        self.lookup(key)
    }

    fn hit(&mut self, key: u8, pin: bool) -> Answer {
        let Some(resident) = self.residents.get_mut(&key) else {
            return Answer::NotFound;
        };
        if pin {
            if resident.pins == limits::PINS_MAX {
                return Answer::TooManyPins;
            }
            resident.pins += 1;
        }
        let policy = self.config.policy;
        resident.marked |= policy.kind != PolicyKind::Rank || policy.hit_promotion;
        resident.rank = policy.transition(resident.rank, RankEvent::LocalHit);
        self.place(key);
        self.lookup(key)
    }

    fn key_of(&self, serial: u64) -> Option<u8> {
        let mut all = self.residents.iter();
        all.find_map(|(key, resident)| (resident.serial == serial).then_some(*key))
    }

    fn unpin(&mut self, serial: u64) -> Answer {
        let Some(key) = self.key_of(serial) else {
            return Answer::Stale;
        };
        let resident = self.residents.get_mut(&key).unwrap();
        if resident.pins == 0 {
            return Answer::NotPinned;
        }
        resident.pins -= 1;
        self.place(key);
        Answer::Unpinned
    }

    fn commit(&mut self, serial: u64, requester: RequesterIndex) -> Answer {
        let Some(key) = self.key_of(serial) else {
            return Answer::Stale;
        };
        let resident = self.residents.get_mut(&key).unwrap();
        if resident.pins == 0 {
            return Answer::NotPinned;
        }
        let now = resident.rank;
        let first = !resident.served.contains_key(&requester);
        let rank = *resident.served.entry(requester).or_insert(now);
        if first {
            self.move_rank(key, RankEvent::Served);
        }
        self.unpin(serial);
        Answer::Committed { rank, first }
    }

    /// An event that is not a hint; one that moves the rank makes the resident the newest there.
    fn move_rank(&mut self, key: u8, event: RankEvent) {
        let resident = self.residents.get_mut(&key).unwrap();
        resident.marked = true;
        let before = resident.rank;
        resident.rank = self.config.policy.transition(before, event);
        if resident.rank != before {
            self.place(key);
        }
    }

    fn already_resident(&mut self, key: u8, cause: ResidentCause) -> Answer {
        if cause != ResidentCause::DuplicateSave
            && let Some(resident) = self.residents.get_mut(&key)
        {
            resident.marked = true;
            let event = RankEvent::AlreadyResident;
            resident.rank = self.config.policy.transition(resident.rank, event);
            self.place(key);
        }
        self.lookup(key)
    }

    fn finished_sending(&mut self, key: u8) -> Answer {
        let Some(resident) = self.residents.get_mut(&key) else {
            return Answer::NotFound;
        };
        let first = !std::mem::replace(&mut resident.finished, true);
        if first {
            self.move_rank(key, RankEvent::FinishedSending);
        }
        Answer::Said(first)
    }

    fn owner_hint(&mut self, key: u8, owners: u32) -> Answer {
        let Some(resident) = self.residents.get_mut(&key) else {
            return Answer::NotFound;
        };
        let applies = match self.config.policy.kind {
            PolicyKind::Rank => !resident.fetched && !resident.marked,
            PolicyKind::Aged => !resident.fetched,
            PolicyKind::Segmented | PolicyKind::Lru => false,
        };
        let before = resident.rank;
        if applies {
            let event = RankEvent::OwnerHint { owners };
            resident.rank = self.config.policy.transition(before, event);
        }
        let moved = resident.rank != before;
        if moved {
            self.place(key);
        }
        Answer::Said(moved)
    }

    /// Whether victims depend on ages, which are coarse under several threads.
    pub(super) fn weighs_ages(&self) -> bool {
        self.config.policy.kind == PolicyKind::Aged
    }

    /// Whether an insertion may find no slot while others are in the middle of taking or freeing
    /// `others` slots: only where its block is not here.
    pub(super) fn is_full_with(&self, others: usize, operation: &Operation) -> bool {
        let Operation::Insert { key, .. } = operation else {
            return false;
        };
        let capacity = self.config.capacity as usize;
        !self.residents.contains_key(key) && self.residents.len() + others >= capacity
    }

    fn remove(&mut self, serial: u64) -> Answer {
        let Some(key) = self.key_of(serial) else {
            return Answer::Stale;
        };
        if self.residents[&key].pins > 0 {
            return Answer::Pinned;
        }
        self.lists.values_mut().for_each(|list| list.retain(|place| place.0 != key));
        let rank = self.residents.remove(&key).unwrap().rank;
        Answer::Evicted { key, serial, rank }
    }

    /// Evicts `key`, if it is the head of a list of this kind of memory, whichever.
    pub(super) fn evict_head(&mut self, kind: MemoryKind, key: u8) -> Vec<Answer> {
        let lists = self.lists.iter_mut().filter(|((of, _), _)| *of == kind);
        let heads = |list: &&mut Vec<(u8, u64)>| list.first().is_some_and(|head| head.0 == key);
        let Some(list) = lists.map(|(_, list)| list).find(heads) else {
            return Vec::new();
        };
        list.remove(0);
        let gone = self.residents.remove(&key);
        gone.map(|one| Answer::Evicted { key, serial: one.serial, rank: one.rank })
            .into_iter()
            .collect()
    }

    fn evict(&mut self, kind: MemoryKind) -> Option<Answer> {
        let lists = self.lists.iter().filter(|((of, _), _)| *of == kind);
        let heads = lists.filter_map(|((_, rank), list)| {
            let (key, placed) = *list.first()?;
            Some((*rank, key, self.placements - placed))
        });
        let (rank, key, _) = heads.max_by_key(|(rank, _, age)| {
            let weight = match (self.config.policy.kind, rank.get()) {
                (PolicyKind::Aged, 1) => 1,
                (PolicyKind::Aged, 2) => 2,
                (PolicyKind::Aged, _) => 8,
                _ => 0,
            };
            (age * weight, *rank)
        })?;
        self.lists.get_mut(&(kind, rank))?.remove(0);
        let serial = self.residents.remove(&key)?.serial;
        Some(Answer::Evicted { key, serial, rank })
    }
}

fn leaf_first<T: Copy>(members: &[T], answer: impl FnMut(T) -> Answer) -> Vec<Answer> {
    let mut answers: Vec<Answer> = members.iter().rev().copied().map(answer).collect();
    answers.reverse();
    answers
}
