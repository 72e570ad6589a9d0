//! Each protocol of the store by itself: the smallest programs in which its steps can meet.
//!
//! On real threads each program runs some hundred times. Built with `--cfg shuttle` each one runs
//! under shuttle's random and PCT schedulers, which explore the interleavings of all accesses to
//! shared cells; a failure prints a schedule that can be replayed.

use super::StoreConfig;
use super::oracle::Operation::{self, *};
use super::recorder::{Plan, Program, record};
use crate::policy::{Origin, Policy};
use crate::types::{MemoryKind, PolicyKind, RequesterIndex, ResidentCause};

const EVICT: Operation = Evict(MemoryKind::Host);

fn insert(key: u8, serial: u64) -> Operation {
    let origin = Origin::Saved { owners: None };
    Insert { key, serial, origin, pinned: false }
}

fn touch(key: u8) -> Operation {
    HitBatch { keys: vec![key], pin: false }
}

fn lend(key: u8) -> Operation {
    HitBatch { keys: vec![key], pin: true }
}

fn commit(serial: u64, requester: u16) -> Operation {
    Commit { serial, requester: RequesterIndex(requester) }
}

fn remove(serial: u64) -> Operation {
    Remove { serial }
}

/// Blocks 0, 1 and so on, which are the admissions 1, 2 and so on.
fn filled(blocks: u8) -> Vec<Operation> {
    (0..blocks).map(|key| insert(key, u64::from(key) + 1)).collect()
}

fn check_kind(kind: PolicyKind, capacity: u32, before: &[Operation], threads: &[&[Operation]]) {
    let plan = Plan {
        config: StoreConfig { capacity, policy: Policy { kind, ..Policy::default() } },
        before: Program::Fixed(before.to_vec()),
        threads: threads.iter().map(|program| Program::Fixed(program.to_vec())).collect(),
        seed: 0,
        fault: None,
    };
    explore(plan);
}

fn explain(plan: &Plan) {
    let (start, history) = record(plan);
    assert!(history.is_explained_from(&start), "no order explains {plan:?}\n{history:#?}");
}

#[cfg(not(shuttle))]
fn explore(mut plan: Plan) {
    for seed in 0..300 {
        plan.seed = seed;
        explain(&plan);
    }
}

#[cfg(shuttle)]
fn explore(plan: Plan) {
    let pct = plan.clone();
    shuttle::check_random(move || explain(&plan), 4_000);
    shuttle::check_pct(move || explain(&pct), 4_000, 3);
}

fn check(capacity: u32, before: &[Operation], threads: &[&[Operation]]) {
    check_kind(PolicyKind::Rank, capacity, before, threads);
}

#[test]
fn a_touch_against_a_claim() {
    check(2, &filled(2), &[&[touch(0)], &[EVICT], &[EVICT]]);
    check(3, &filled(3), &[&[touch(0), touch(1)], &[EVICT, EVICT]]);
}

#[test]
fn an_announcement_against_its_helpers() {
    check(2, &filled(2), &[&[touch(0)], &[touch(0)], &[EVICT]]);
    check(2, &filled(2), &[&[touch(0), touch(1)], &[touch(1), touch(0)], &[EVICT]]);
}

#[test]
fn a_raise_against_a_claim() {
    let raise = |key| FinishedSending { key };
    check(2, &filled(2), &[&[raise(1)], &[EVICT]]);
    check(3, &filled(3), &[&[raise(2), Lookup { key: 0 }], &[raise(1)], &[EVICT]]);
    check(2, &filled(2), &[&[raise(0), touch(0)], &[EVICT, EVICT]]);
}

#[test]
fn a_pin_against_a_claim() {
    check(2, &filled(2), &[&[Pin { key: 0 }], &[EVICT], &[Pin { key: 0 }]]);
    check(1, &filled(1), &[&[lend(0), Unpin { serial: 1 }], &[EVICT, Lookup { key: 0 }]]);
}

#[test]
fn a_removal_against_pins_touches_and_a_commit() {
    check(1, &filled(1), &[&[remove(1)], &[Pin { key: 0 }], &[touch(0)]]);
    check(2, &filled(2), &[&[remove(1)], &[lend(0), Unpin { serial: 1 }]]);
    let mut pinned = filled(2);
    pinned.push(Pin { key: 0 });
    check(2, &pinned, &[&[remove(1), remove(1)], &[commit(1, 9)], &[touch(0)]]);
    check(2, &filled(2), &[&[remove(1)], &[FinishedSending { key: 0 }], &[remove(1)]]);
}

#[test]
fn a_removal_against_a_claim() {
    check(2, &filled(2), &[&[remove(1)], &[EVICT], &[EVICT]]);
    check(3, &filled(3), &[&[remove(2), touch(2)], &[EVICT, EVICT]]);
    let raise = |key| FinishedSending { key };
    check(3, &filled(3), &[&[remove(3)], &[raise(2)], &[EVICT, raise(0)]]);
}

#[test]
fn a_removal_against_an_insertion_of_its_block() {
    check(2, &filled(1), &[&[remove(1)], &[insert(0, 101)], &[insert(0, 201)]]);
    check(1, &filled(1), &[&[remove(1), Lookup { key: 0 }], &[insert(0, 101), EVICT], &[touch(0)]]);
}

#[test]
fn an_insertion_against_the_unlinking_of_its_block() {
    check(2, &filled(1), &[&[EVICT], &[insert(0, 101)], &[insert(0, 201)]]);
    check(
        2,
        &filled(2),
        &[
            &[EvictBatch { kind: MemoryKind::Host, max: 2 }],
            &[insert(0, 101)],
            &[Lookup { key: 0 }],
        ],
    );
    check(3, &filled(2), &[&[insert(2, 101)], &[insert(2, 201)], &[touch(2), EVICT]]);
}

#[test]
fn a_sweep_against_appends() {
    let (touches, others) = (vec![touch(0); 4], vec![touch(1); 3]);
    check(3, &filled(3), &[&touches, &others, &[EVICT]]);
    check_kind(PolicyKind::Lru, 2, &filled(2), &[&touches, &others]);
}

#[test]
fn two_commits_of_one_requester() {
    for requester in [0, 60] {
        let mut before = filled(2);
        before.push(PinBatch { keys: vec![0, 0, 0] });
        let program = [commit(1, requester)];
        check(2, &before, &[&program, &program, &[EVICT]]);
        check(2, &before, &[&program, &[commit(1, requester), touch(0)], &[commit(1, 9)]]);
    }
}

#[test]
fn a_commit_against_the_end_of_its_tenancy() {
    let mut before = filled(1);
    before.push(Pin { key: 0 });
    let again = [EVICT, insert(0, 101)];
    check(1, &before, &[&[commit(1, 60)], &[commit(1, 60)], &again]);
}

#[test]
fn a_recovery_and_a_hint_against_a_claim() {
    let recover = AlreadyResident { key: 0, cause: ResidentCause::PeerFetch };
    let hint = OwnerHint { key: 1, owners: 4 };
    check(2, &filled(2), &[&[recover], &[hint], &[EVICT]]);
}

#[test]
fn random_calls() {
    for kind in PolicyKind::ALL {
        for capacity in [2, 3] {
            explore(Plan {
                config: StoreConfig { capacity, policy: Policy { kind, ..Policy::default() } },
                before: Program::Random(4),
                threads: vec![Program::Random(3); 3],
                seed: 7,
                fault: None,
            });
        }
    }
}
