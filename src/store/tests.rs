//! The rules of the store, one by one.

use std::sync::Mutex as StdMutex;

use super::oracle::{key, payload};
use super::*;
use crate::event::Discard;
use crate::policy::Policy;
use crate::types::PolicyKind;

const SAVED: Origin = Origin::Saved { owners: None };

fn rank(value: u32) -> EvictionRank {
    EvictionRank::clamped(value)
}

fn config(capacity: u32) -> StoreConfig {
    StoreConfig { capacity, policy: Policy::default() }
}

fn store(capacity: u32) -> Store {
    Store::new(config(capacity), Arc::new(Discard)).unwrap()
}

/// A store with blocks 0, 1, 2 and so on, saved in this order.
fn filled(blocks: u8) -> Store {
    let store = store(u32::from(blocks));
    for number in 0..blocks {
        insert(&store, number, SAVED);
    }
    store
}

fn insert(store: &Store, number: u8, origin: Origin) -> Found {
    let payload = payload(u64::from(number));
    store.insert(key(number), payload, origin, false).unwrap()
}

fn rank_of(store: &Store, number: u8) -> u8 {
    store.lookup(&key(number)).unwrap().rank.get()
}

fn keys(numbers: &[u8]) -> Vec<BlockKey> {
    numbers.iter().map(|number| key(*number)).collect()
}

fn drain(store: &Store) -> Vec<u8> {
    let mut out = Vec::new();
    store.evict_batch(MemoryKind::Host, usize::MAX, &mut out);
    let number = |victim: &Evicted| victim.key.hash.as_bytes()[0];
    out.iter().map(number).collect()
}

#[derive(Debug, Default)]
struct Recorder(StdMutex<Vec<Event>>);

impl EventSink for Recorder {
    fn emit(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl Recorder {
    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

#[test]
fn a_capacity_outside_its_bounds_is_refused() {
    for got in [0, limits::RESIDENTS_MAX + 1] {
        let error = Store::new(config(got), Arc::new(Discard)).unwrap_err();
        assert_eq!(error, StoreConfigError::Capacity { got });
        assert!(error.to_string().contains(&got.to_string()), "{error}");
    }
}

#[test]
fn ranks_follow_a_block_from_node_to_node() {
    let (a, b) = (store(2), store(2));
    let saved = insert(&a, 0, SAVED);
    assert_eq!(saved.rank, rank(1));
    a.pin(&key(0)).unwrap();
    let source = a.commit(saved.id, RequesterIndex(0)).unwrap().rank;
    assert_eq!(rank_of(&a, 0), 2);
    insert(&b, 0, Origin::Fetched { source });
    assert_eq!(rank_of(&b, 0), 1);

    let mut hits = Vec::new();
    a.hit_batch(&[key(0)], false, &mut hits);
    assert_eq!(hits[0].unwrap().rank, rank(1), "a local hit lowers");
    assert_eq!(a.finished_sending(&key(0)), Some(true));
    assert_eq!(rank_of(&a, 0), 2);
    a.hit_batch(&[key(0)], false, &mut hits);
    assert_eq!(a.finished_sending(&key(0)), Some(false));
    assert_eq!(rank_of(&a, 0), 1, "it counts once");
}

#[test]
fn two_readers_at_once_get_ranks_one_and_two() {
    let store = filled(1);
    let first = store.pin(&key(0)).unwrap();
    let second = store.pin(&key(0)).unwrap();
    assert_eq!((first.rank, second.rank), (rank(1), rank(1)));
    let given = [5, 9].map(|at| store.commit(first.id, RequesterIndex(at)).unwrap().rank);
    assert_eq!(given, [rank(1), rank(2)]);
    assert_eq!(rank_of(&store, 0), 3);
}

#[test]
fn the_root_of_a_prefix_is_the_last_to_go() {
    let prefix = keys(&[0, 1, 2, 3]);
    for pinned in [false, true] {
        let store = filled(4);
        let mut out = Vec::new();
        store.hit_batch(&prefix, pinned, &mut out);
        if pinned {
            let ids: Vec<ResidentId> = out.iter().map(|hit| hit.unwrap().id).collect();
            assert_eq!(drain(&store), [0; 0]);
            assert_eq!(store.unpin_batch(&ids), 0);
        }
        assert_eq!(drain(&store), [3, 2, 1, 0]);
    }
}

#[test]
fn a_batch_answers_in_the_order_asked_and_counts_each_occurrence() {
    let store = filled(3);
    let mut out = Vec::new();
    store.pin_batch(&keys(&[2, 7, 0, 2]), &mut out);
    let numbers: Vec<_> = out.iter().map(|a| a.map(|found| found.id.slot)).collect();
    assert_eq!(numbers, [Ok(2), Err(PinError::NotFound), Ok(0), Ok(2)]);
    let twice = out[0].unwrap().id;
    assert_eq!(store.unpin_batch(&[twice, twice, twice]), 1);
    assert_eq!(store.unpin(twice), Err(UnpinError::NotPinned));
    assert_eq!(store.stats().pinned, 1);
}

#[test]
fn a_pin_leaves_the_rank_alone_and_the_last_unpin_makes_it_newest() {
    let store = filled(3);
    let pinned = store.pin(&key(0)).unwrap();
    store.pin(&key(0)).unwrap();
    store.unpin(pinned.id).unwrap();
    assert_eq!(store.stats().pinned, 1);
    store.unpin(pinned.id).unwrap();
    assert_eq!(drain(&store), [1, 2, 0]);
}

#[test]
fn a_rank_that_moves_under_a_pin_decides_the_list_of_the_last_unpin() {
    let store = filled(3);
    let pinned = store.pin(&key(0)).unwrap();
    assert_eq!(store.finished_sending(&key(0)), Some(true));
    assert_eq!(rank_of(&store, 0), 2);
    assert_eq!(store.evict(MemoryKind::Host).unwrap().key, key(1));
    store.unpin(pinned.id).unwrap();
    assert_eq!(drain(&store), [0, 2]);
}

#[test]
fn pins_end_at_their_limit() {
    let store = filled(1);
    let mut out = Vec::new();
    let most = usize::from(limits::PINS_MAX);
    store.pin_batch(&vec![key(0); most + 1], &mut out);
    assert_eq!(out.iter().filter(|pin| pin.is_ok()).count(), most);
    assert_eq!(out[most], Err(PinError::TooManyPins));
    assert_eq!(store.pin(&key(0)), Err(PinError::TooManyPins));
    store.hit_batch(&[key(0)], true, &mut out);
    assert_eq!(out, [Err(PinError::TooManyPins)]);
    store.hit_batch(&[key(0)], false, &mut out);
    let id = out[0].unwrap().id;
    assert_eq!(store.unpin_batch(&vec![id; most + 1]), 1);
    assert_eq!(drain(&store), [0]);
}

#[test]
fn a_full_store_says_so_and_a_resident_block_is_not_replaced() {
    let store = filled(2);
    let refused = store.insert(key(2), payload(9), SAVED, false);
    assert_eq!(refused, Err(InsertError::Full));
    let refused = store.insert(key(0), payload(9), SAVED, true);
    let here = store.lookup(&key(0)).unwrap();
    assert_eq!(refused, Err(InsertError::AlreadyResident(here)));
    assert_eq!(here.payload, payload(0));
    assert_eq!(store.stats().pinned, 0);
}

#[test]
fn an_already_resident_block_recovers_unless_two_saves_met() {
    for cause in ResidentCause::ALL {
        let store = store(2);
        insert(&store, 0, Origin::Fetched { source: rank(4) });
        insert(&store, 1, Origin::Fetched { source: rank(3) });
        let expected = if cause == ResidentCause::DuplicateSave { 4 } else { 3 };
        let found = store.already_resident(&key(0), cause).unwrap();
        assert_eq!(found.rank, rank(expected), "{cause:?}");
        let first = if expected == 4 { 0 } else { 1 };
        assert_eq!(drain(&store)[0], first, "{cause:?}");
        assert_eq!(store.already_resident(&key(0), cause), None);
    }
}

#[test]
fn an_owner_hint_moves_only_what_nothing_else_has_moved() {
    let store = store(5);
    for number in 0..3 {
        insert(&store, number, SAVED);
    }
    insert(&store, 3, Origin::Fetched { source: rank(1) });
    store.insert(key(4), payload(4), SAVED, true).unwrap();
    // A hit at rank 1 stays at rank 1 and counts all the same.
    store.hit_batch(&[key(1)], false, &mut Vec::new());
    store.finished_sending(&key(2));
    let moved: Vec<_> = (0..5).map(|number| store.owner_hint(&key(number), 4)).collect();
    assert_eq!(moved, [true, false, false, false, true].map(Some), "4: a pinned admission");
    assert_eq!([0, 1, 2, 3, 4].map(|n| rank_of(&store, n)), [3, 1, 2, 1, 3]);
    assert_eq!(store.owner_hint(&key(0), 4), Some(false), "no move");
    assert_eq!(store.owner_hint(&key(0), 3), Some(true), "a later hint corrects");
    assert_eq!(store.owner_hint(&key(9), 3), None);
}

#[test]
fn events_tell_what_happened() {
    let sink = Arc::new(Recorder::default());
    let store = Store::new(config(2), sink.clone()).unwrap();
    let policy = PolicyKind::Rank;
    assert_eq!(sink.take(), [Event::StoreStarted { policy }]);
    let fetched = Origin::Fetched { source: rank(3) };
    let id = insert(&store, 0, fetched).id;
    let bytes = u64::from(payload(0).extent.len);
    let (rank_now, fetched) = (rank(3), true);
    let inserted = Event::Inserted { rank: rank_now, bytes, fetched };
    assert_eq!(sink.take(), [inserted]);
    let moved = |from, to| Event::RankMoved { from: rank(from), to: rank(to) };

    let mut hits = Vec::new();
    store.hit_batch(&keys(&[0, 0, 0, 1]), true, &mut hits);
    let mut events = sink.take();
    events.sort_by_key(|event| format!("{event:?}"));
    assert_eq!(events, [moved(2, 1), moved(3, 2)], "the third hit moves nothing");
    let mut commits = Vec::new();
    store.commit_batch(&[id, id, id], RequesterIndex(60), &mut commits);
    let expected = [false, false, true].map(|first| Ok(Committed { rank: rank(1), first }));
    assert_eq!(commits, expected);
    assert_eq!(sink.take(), [moved(1, 2)], "a repeat moves nothing");
    let cause = ResidentCause::DuplicateSave;
    store.already_resident(&key(0), cause);
    store.already_resident(&key(7), cause);
    assert_eq!(sink.take(), [Event::AlreadyResident { cause }]);
    store.evict(MemoryKind::Host);
    store.evict(MemoryKind::Host);
    assert_eq!(sink.take(), [Event::Evicted { rank: rank(2), bytes }]);
}

#[test]
fn statistics_and_the_list_agree() {
    let store = filled(3);
    store.pin(&key(1)).unwrap();
    store.finished_sending(&key(1));
    let stats = store.stats();
    assert_eq!((stats.capacity, stats.residents, stats.pinned), (3, 3, 1));
    assert_eq!((stats.by_rank[1], stats.by_rank[2]), (2, 1));
    assert_eq!(stats.max_rank, Some(rank(2)));
    let (mut counted, mut cursor) = (StoreStats::default(), Some(0));
    while let Some(at) = cursor {
        cursor = store.count(at, 2, &mut counted);
    }
    assert_eq!(counted, stats, "in steps");
    let mut views = Vec::new();
    assert_eq!(store.list(0, 2, &mut views), Some(2));
    assert_eq!(store.list(2, 2, &mut views), None);
    assert_eq!(store.list(u32::MAX, u32::MAX, &mut views), None);
    let bytes: u64 = views.iter().map(|view| u64::from(view.payload.extent.len)).sum();
    assert_eq!((views.len(), bytes), (3, stats.bytes));
    assert_eq!((views[1].pins, views[1].rank), (1, rank(2)));
}

#[test]
fn invariant_6_a_resident_is_never_evicted_while_pinned() {
    let store = filled(3);
    let pinned = store.pin(&key(0)).unwrap();
    store.finished_sending(&key(0));
    assert_eq!(drain(&store), [1, 2], "not even from the highest rank");
    assert_eq!(store.evict(MemoryKind::Host), None);
    assert_eq!(store.lookup(&key(0)).unwrap().id, pinned.id);
    store.unpin(pinned.id).unwrap();
    assert_eq!(drain(&store), [0]);
}

#[test]
fn invariant_6_memory_is_never_reused_without_a_new_generation() {
    let store = store(1);
    let mut old = Vec::new();
    for serial in 0..100 {
        let found = store.insert(key(0), payload(serial), SAVED, true).unwrap();
        assert!(!old.contains(&found.id));
        for &id in &old {
            assert_eq!(store.unpin(id), Err(UnpinError::Stale));
            assert_eq!(store.commit(id, RequesterIndex(0)), Err(UnpinError::Stale));
        }
        assert_eq!(store.stats().pinned, 1);
        store.unpin(found.id).unwrap();
        assert_eq!(store.evict(MemoryKind::Host).unwrap().id, found.id);
        assert_eq!(store.unpin(found.id), Err(UnpinError::Stale));
        old.push(found.id);
    }
}

#[test]
fn invariant_7_a_requester_moves_a_resident_once_whatever_is_repeated() {
    for requester in [0, 47, 48, 4095].map(RequesterIndex) {
        let store = filled(1);
        let id = store.lookup(&key(0)).unwrap().id;
        let commit = |requester| {
            store.pin(&key(0)).unwrap();
            store.commit(id, requester).unwrap()
        };
        let (before, other) = (commit(RequesterIndex(1)), RequesterIndex(2));
        assert_eq!((before.rank, before.first), (rank(1), true));
        let given = commit(requester);
        assert_eq!((given.rank, given.first), (rank(2), true));
        assert_eq!(commit(other).rank, rank(3));
        for _ in 0..3 {
            let again = commit(requester);
            assert_eq!((again.rank, again.first), (rank(2), false), "the rank of the first");
        }
        assert_eq!(rank_of(&store, 0), 4);
        assert_eq!(store.commit(id, other), Err(UnpinError::NotPinned));

        // The next resident of the same block and slot starts anew.
        store.evict(MemoryKind::Host).unwrap();
        let next = store.insert(key(0), payload(1), SAVED, true).unwrap();
        assert_eq!(store.commit(id, requester), Err(UnpinError::Stale));
        let given = store.commit(next.id, requester).unwrap();
        assert_eq!((given.rank, given.first), (rank(1), true));
    }
}

#[test]
fn hits_alone_do_not_make_the_logs_grow() {
    let blocks = 60_u8;
    let store = filled(blocks);
    let mut out = Vec::new();
    let mut most = 0;
    for round in 0..40_000_u32 {
        // A few hot ones, and cold ones that each hold a chunk for long.
        let number =
            if round.is_multiple_of(50) { round / 50 % u32::from(blocks) } else { round % 5 };
        store.hit_batch(&[key(u8::try_from(number).unwrap())], false, &mut out);
        most = most.max(store.table.chunks_used());
    }
    // The bound that `log` proves.
    let bound = (u64::from(blocks) + u64::from(limits::RANK_MAX)) * 5 / 3 + 42;
    assert!(most <= bound, "{most} chunks for {blocks} residents");
    store.table.check();
    assert_eq!(drain(&store).len(), usize::from(blocks));
}

/// One block alone, again and again what a node does with it; the most chunks that are used.
fn alone(rounds: u32, once: impl Fn(&Store)) -> u64 {
    // With room for more than `rounds` of the deliberate fault need.
    let store = store(64);
    insert(&store, 0, SAVED);
    let most = (0..rounds).map(|_| {
        once(&store);
        store.table.chunks_used()
    });
    let most = most.max().unwrap();
    store.table.check();
    assert_eq!(drain(&store).len(), 1);
    most
}

/// A slot that is placed over and over while no other one is fills its logs with places of its own, which
/// must be found to be garbage as all others are.
#[test]
fn one_block_alone_can_be_placed_for_ever() {
    type Once = fn(&Store);
    let reads: Once = |store| {
        let found = store.pin(&key(0)).unwrap();
        store.unpin(found.id).unwrap();
    };
    let serves: Once = |store| {
        let found = store.pin(&key(0)).unwrap();
        store.commit(found.id, RequesterIndex(3)).unwrap();
    };
    let hits: Once = |store| {
        store.hit_batch(&[key(0)], true, &mut Vec::new());
        store.unpin(store.lookup(&key(0)).unwrap().id).unwrap();
    };
    let moves: Once = |store| {
        store.already_resident(&key(0), ResidentCause::PeerFetch);
        store.owner_hint(&key(0), 3);
        let found = store.pin(&key(0)).unwrap();
        store.commit(found.id, RequesterIndex(4)).unwrap();
    };
    let replaces: Once = |store| {
        let id = store.lookup(&key(0)).unwrap().id;
        store.remove(id).unwrap();
        let found = store.insert(key(0), payload(0), SAVED, true).unwrap();
        store.unpin(found.id).unwrap();
    };
    // The mark of `log::sweep` for this capacity, and what is owed for.
    let bound = 128 + 8;
    for (at, once) in [reads, serves, hits, moves, replaces].into_iter().enumerate() {
        let most = alone(3000, once);
        assert!(most <= bound, "{at}: {most} chunks");
    }
    fault::set(Some(fault::Fault::PaidEarly));
    let most = alone(100, reads);
    fault::set(None);
    assert!(most > bound, "{most}: the order of sweep and exchange makes no difference here");
}
