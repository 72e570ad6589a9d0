//! Linearizability: thousands of short histories of real threads on tiny stores, each one explained
//! by the oracle or the test fails with its seed.
//!
//! `KVRAIL_HISTORIES` in the environment of the build (it is read by the compiler) sets another
//! number of histories per policy.

use super::StoreConfig;
use super::recorder::{Plan, Program, record};
use crate::policy::Policy;
use crate::types::PolicyKind;

const THREADS: usize = 3;
/// Calls of each thread.
const CALLS: usize = 5;

/// Histories per policy; five policies.
const HISTORIES: u64 = match option_env!("KVRAIL_HISTORIES") {
    Some(text) => match u64::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("KVRAIL_HISTORIES is a number"),
    },
    None => 2_000,
};

fn check(policy: Policy) {
    let run: u64 = getrandom::u64().unwrap() >> 16;
    let mut overlapping = 0;
    for number in 0..HISTORIES {
        let seed = run + number;
        let capacity = if number % 2 == 0 { 2 } else { 3 };
        let plan = Plan {
            config: StoreConfig { capacity, policy },
            before: Program::Random(6),
            threads: vec![Program::Random(CALLS); THREADS],
            seed,
            fault: None,
        };
        let (start, history) = record(&plan);
        overlapping += u64::from(history.overlaps());
        assert!(
            history.is_explained_from(&start),
            "no order explains {plan:?}\n{start:?}\n{history:#?}"
        );
    }
    // A history whose calls all came one after the other proves nothing about threads.
    assert!(overlapping * 2 > HISTORIES, "only {overlapping} of {HISTORIES} histories overlap");
}

#[test]
fn histories_of_the_rank_policy_have_a_sequential_explanation() {
    check(Policy::default());
}

#[test]
fn histories_without_hit_promotion_have_a_sequential_explanation() {
    check(Policy { hit_promotion: false, ..Policy::default() });
}

#[test]
fn histories_of_the_other_policies_have_a_sequential_explanation() {
    for kind in [PolicyKind::Segmented, PolicyKind::Aged, PolicyKind::Lru] {
        check(Policy { kind, ..Policy::default() });
    }
}
