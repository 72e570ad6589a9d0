//! A check that catches no fault is no check: each deliberate fault is caught by the search for an
//! explanation, or by an assertion on the way to it.

use std::panic::catch_unwind;

use super::StoreConfig;
use super::fault::{self, Fault};
use super::parked_tests::{hit_amid_reuse, touch_amid_sweeps};
use super::recorder::{Plan, Program, record};
use crate::policy::Policy;

/// Histories in which a fault has to show: far more than any takes, so that none slips through by
/// chance.
const HISTORIES: u64 = 500_000;

/// Faults that show in calls of any kind.
const FAULTS: [Fault; 15] = [
    Fault::RaiseUncounted,
    Fault::GuardUnread,
    Fault::TicketRepeated,
    Fault::PlacementLeft,
    Fault::CommitUndecided,
    Fault::PendingSkipped,
    Fault::PlacedWhereMet,
    Fault::EndReadEarly,
    Fault::GenerationUnchecked,
    Fault::HeadUnchecked,
    Fault::ArrivalByAnybody,
    Fault::UnpinUnannounced,
    Fault::SkipForeign,
    Fault::FoundUnchecked,
    Fault::RemovalUnexchanged,
];

/// The number of the first history that has no explanation.
fn caught_at(fault: Fault) -> Option<u64> {
    fault::set(Some(fault));
    let caught = (0..HISTORIES).find(|&seed| {
        let capacity = if seed.is_multiple_of(2) { 2 } else { 3 };
        let plan = Plan {
            config: StoreConfig { capacity, policy: Policy::default() },
            before: Program::Random(6),
            threads: vec![Program::Random(6); 3],
            seed,
            fault: Some(fault),
        };
        let explained = catch_unwind(|| {
            let (start, history) = record(&plan);
            history.is_explained_from(&start)
        });
        !explained.unwrap_or(false)
    });
    fault::set(None);
    caught
}

/// This one shows where a thread stands still between two accesses for long; where that is depends
/// on how the keys fall into chains, which is drawn anew for each store.
#[test]
fn a_touch_that_the_sweep_forgets_is_missed() {
    let fault = Some(Fault::TouchForgotten);
    let stops = || (0..).take_while(|&access| touch_amid_sweeps(access, fault)).count();
    assert!((0..32).any(|_| catch_unwind(stops).is_err()));
}

#[test]
fn a_hit_that_does_not_look_again_answers_of_two_residents() {
    let fault = Some(Fault::UnchangedUnseen);
    let stops = || (0..).take_while(|&access| hit_amid_reuse(access, fault)).count();
    assert!(catch_unwind(stops).is_err());
}

#[test]
fn every_deliberate_fault_is_caught() {
    let missed: Vec<Fault> = FAULTS
        .into_iter()
        .filter(|&fault| {
            let caught = caught_at(fault);
            println!("{fault:?}: {caught:?}");
            caught.is_none()
        })
        .collect();
    assert_eq!(missed, []);
}
