//! A thread that stops anywhere stops nobody: one operation is stopped at each of its accesses to
//! shared cells in turn, and while it stands there, others do all that can be done.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use super::fault::{self, Fault};
use super::oracle::{key, payload};
use super::{Origin, Store, StoreConfig};
use crate::event::Discard;
use crate::policy::Policy;
use crate::sync::park_at;
use crate::types::{MemoryKind, RequesterIndex, ResidentCause};

const SAVED: Origin = Origin::Saved { owners: None };
const BLOCKS: u8 = 6;
/// Far beyond what the work of a few hundred operations takes.
const DEADLINE: Duration = Duration::from_secs(60);

type Operation = fn(&Store);

fn operations() -> Vec<(&'static str, Operation)> {
    vec![
        ("insert", |store| insert(store, 40, false)),
        ("insert, pinned", |store| insert(store, 41, true)),
        ("lookup", |store| assert!(store.lookup(&key(90)).is_none())),
        ("lookup of a resident", |store| {
            let _whether_or_not = store.lookup(&key(1));
        }),
        ("pin and unpin", |store| {
            if let Ok(found) = store.pin(&key(1)) {
                store.unpin(found.id).ok();
            }
        }),
        ("touch", |store| store.hit_batch(&[key(1), key(2)], false, &mut Vec::new())),
        ("commit", |store| {
            for requester in [3, 60] {
                if let Ok(found) = store.pin(&key(1)) {
                    store.commit(found.id, RequesterIndex(requester)).ok();
                }
            }
        }),
        ("demote", |store| {
            store.finished_sending(&key(2));
        }),
        ("recover", |store| {
            store.already_resident(&key(2), ResidentCause::PeerFetch);
        }),
        ("hint", |store| {
            store.owner_hint(&key(3), 4);
        }),
        ("evict", |store| {
            store.evict(MemoryKind::Host);
        }),
        ("remove", |store| remove(store, 1)),
        ("list", |store| assert_eq!(store.list(0, 100, &mut Vec::new()), None)),
    ]
}

fn insert(store: &Store, number: u8, pinned: bool) {
    let inserted = store.insert(key(number), payload(u64::from(number)), SAVED, pinned);
    if let (Ok(found), true) = (inserted, pinned) {
        store.unpin(found.id).ok();
    }
}

fn remove(store: &Store, number: u8) {
    if let Some(found) = store.lookup(&key(number)) {
        store.remove(found.id).ok();
    }
}

/// Everything, many times, on the blocks of the stopped operation, too.
fn work(store: &Store) {
    for round in 0..30_u8 {
        let number = round % BLOCKS;
        store.hit_batch(&[key(number), key(1), key(2)], true, &mut Vec::new());
        let mut views = Vec::new();
        store.list(0, 100, &mut views);
        for view in views {
            for pin in 0..view.pins {
                // Somebody may hold a pin that is given back here: the stopped operation is told.
                if pin % 2 == 0 {
                    store.commit(view.id, RequesterIndex(u16::from(round))).ok();
                } else {
                    store.unpin(view.id).ok();
                }
            }
        }
        store.finished_sending(&key(number));
        store.already_resident(&key(number), ResidentCause::PartialHit);
        store.owner_hint(&key(number), 3);
        store.evict(MemoryKind::Host);
        remove(store, 20 + number);
        remove(store, 1);
        let serial = u64::from(round);
        store.insert(key(number), payload(serial), SAVED, false).ok();
        store.insert(key(20 + number), payload(serial), SAVED, false).ok();
    }
}

/// Whether the operation has an access with this number.
fn stop_at(operation: Operation, access: u32, name: &str) -> bool {
    let config = StoreConfig { capacity: 10, policy: Policy::default() };
    let store = Arc::new(Store::new(config, Arc::new(Discard)).unwrap());
    for number in 0..BLOCKS {
        store.insert(key(number), payload(u64::from(number)), SAVED, false).unwrap();
    }
    let ((parked, is_parked), (resume, resumed)) = (channel(), channel());
    let stopped = thread::spawn({
        let store = store.clone();
        move || {
            park_at(access, parked, resumed);
            operation(&store);
            // Gone with this closure: the sender of who never came so far.
            park_at(u32::MAX, channel().0, channel().1);
        }
    });
    let stands = is_parked.recv_timeout(DEADLINE);
    assert_ne!(stands, Err(RecvTimeoutError::Timeout), "{name} stopped by itself");
    let (done, is_done) = channel();
    let worker = thread::spawn({
        let store = store.clone();
        move || {
            work(&store);
            let mut out = Vec::new();
            store.evict_batch(MemoryKind::Host, usize::MAX, &mut out);
            done.send(out.len()).unwrap();
        }
    });
    let drained = is_done.recv_timeout(DEADLINE);
    assert!(drained.is_ok(), "{name}, stopped at access {access}, stopped everybody");
    worker.join().unwrap();
    drop(resume);
    stopped.join().unwrap();

    // What the stopped one held on to, at most one block and one slot, comes back.
    let mut views = Vec::new();
    store.list(0, 100, &mut views);
    assert!(views.len() <= 1, "{name}, {access}: {views:?}");
    for view in views {
        (0..view.pins).for_each(|_| store.unpin(view.id).unwrap());
    }
    store.evict_batch(MemoryKind::Host, usize::MAX, &mut Vec::new());
    for number in 0..10 {
        let inserted = store.insert(key(50 + number), payload(1), SAVED, false);
        assert!(inserted.is_ok(), "{name}, {access}: a slot was lost");
    }
    assert_eq!(
        store.evict_batch(MemoryKind::Host, usize::MAX, &mut Vec::new()),
        10,
        "{name}, {access}"
    );
    stands.is_ok()
}

/// Stops touches of one block at an access, lets another thread touch other blocks until the sweep has
/// come round several times, and looks, once the touches went on, whether every block is in its list.
/// Whether there was an access with this number.
pub(super) fn touch_amid_sweeps(access: u32, fault: Option<Fault>) -> bool {
    let config = StoreConfig { capacity: 10, policy: Policy::default() };
    let store = &Store::new(config, Arc::new(Discard)).unwrap();
    (0..BLOCKS).for_each(|number| insert(store, number, false));
    let ((parked, is_parked), (resume, resumed)) = (channel(), channel());
    let touch = |number| store.hit_batch(&[key(number)], false, &mut Vec::new());
    let stands = thread::scope(|scope| {
        let stopped = scope.spawn(move || {
            fault::set(fault);
            park_at(access, parked, resumed);
            (0..6).for_each(|_| touch(1));
            park_at(u32::MAX, channel().0, channel().1);
        });
        let stands = is_parked.recv_timeout(DEADLINE).is_ok();
        let others = scope.spawn(move || {
            fault::set(fault);
            (0..40).for_each(|round| touch(2 + round % 4));
        });
        others.join().unwrap();
        drop(resume);
        stopped.join().unwrap();
        stands
    });
    store.table.check();
    assert_eq!(
        store.evict_batch(MemoryKind::Host, usize::MAX, &mut Vec::new()),
        usize::from(BLOCKS)
    );
    stands
}

/// Stops a hit that changes nothing at an access, gives the slot of its resident to another one, and
/// looks whether what it answers is of one of them. Whether there was an access with this number.
pub(super) fn hit_amid_reuse(access: u32, fault: Option<Fault>) -> bool {
    let config = StoreConfig { capacity: 1, policy: Policy::default() };
    let store = &Store::new(config, Arc::new(Discard)).unwrap();
    let pinned = store.insert(key(1), payload(1), SAVED, true).unwrap();
    let hit = || {
        let mut out = Vec::new();
        store.hit_batch(&[key(1)], false, &mut out);
        out.pop().unwrap()
    };
    // The first hit marks the rank; from then on there is nothing to change.
    assert_eq!(hit().unwrap().payload, payload(1));
    let ((parked, is_parked), (resume, resumed)) = (channel(), channel());
    let (stands, answer) = thread::scope(|scope| {
        let stopped = scope.spawn(move || {
            fault::set(fault);
            park_at(access, parked, resumed);
            let answer = hit();
            park_at(u32::MAX, channel().0, channel().1);
            answer
        });
        let stands = is_parked.recv_timeout(DEADLINE).is_ok();
        store.unpin(pinned.id).unwrap();
        store.evict(MemoryKind::Host).unwrap();
        store.insert(key(1), payload(2), SAVED, true).unwrap();
        drop(resume);
        (stands, stopped.join().unwrap())
    });
    if let Ok(found) = answer {
        let is_one = |serial| found.payload == payload(serial);
        assert!(is_one(1) || is_one(2), "access {access}: {found:?} is of two residents");
    }
    stands
}

#[test]
fn a_hit_that_changes_nothing_answers_of_one_resident() {
    let accesses = (0..).take_while(|&access| hit_amid_reuse(access, None)).count();
    assert!(accesses > 10, "{accesses}");
}

#[test]
fn what_a_stopped_touch_has_appended_is_not_swept_away() {
    let accesses = (0..).take_while(|&access| touch_amid_sweeps(access, None)).count();
    assert!(accesses > 100, "{accesses}");
}

#[test]
fn a_thread_that_stops_anywhere_stops_nobody() {
    for (name, operation) in operations() {
        let accesses = (0..).take_while(|&access| stop_at(operation, access, name)).count();
        assert!(accesses > 0, "{name} has {accesses} accesses");
    }
}
