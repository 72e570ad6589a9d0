//! Both contenders of our own do the same, and what is measured is plausible.

use super::load::{BATCH, filled, mix};
use super::*;
use crate::types::RequesterIndex;

const ENTRIES: u32 = 2_000;

fn load(threads: usize) -> Load {
    let zipf = Zipf::new(ENTRIES);
    let traces = (1..).take(threads).map(|seed| zipf.draw(4_000, seed)).collect();
    Load { entries: ENTRIES, order: shuffled(ENTRIES), traces }
}

/// The numbers below `ENTRIES` that are there, after a mix.
fn survivors<C: Contender>() -> Vec<u32> {
    let load = load(1);
    let subject = filled::<C>(ENTRIES, &load.order).unwrap();
    assert!(mix(&subject, &load) > 0.0);
    let mut hand = C::Hand::default();
    let is_here = |number: &u32| {
        let pin = subject.read(&mut hand, &key(u64::from(*number)));
        pin.map(|pin| subject.release(pin)).is_some()
    };
    (0..ENTRIES).filter(is_here).collect()
}

#[test]
fn both_keep_the_same_blocks() {
    let (ours, theirs) = (survivors::<Store>(), survivors::<Mutexed>());
    assert!(ours.len() > 1000 && ours.len() < 2000, "{}", ours.len());
    assert_eq!(ours, theirs);
}

fn commits_step_ranks<C: Ranked>() {
    let subject = filled::<C>(ENTRIES, &shuffled(ENTRIES)).unwrap();
    let (mut hand, mut pins) = (C::Hand::default(), Vec::new());
    // All but these have a rank of 2 afterwards, and go first.
    let (spared, served): (Vec<_>, Vec<_>) = (0..u64::from(ENTRIES)).partition(|it| it % 10 == 0);
    for batch in served.chunks(BATCH) {
        let keys: Vec<_> = batch.iter().map(|number| key(*number)).collect();
        subject.lend(&mut hand, &keys, &mut pins);
        assert_eq!(pins.len(), batch.len());
        subject.commit(&mut hand, &mut pins, RequesterIndex(1));
        assert!(pins.is_empty());
    }
    assert_eq!(subject.reclaim(&mut hand, served.len()), Some(served.len()));
    for number in spared {
        assert!(subject.read(&mut hand, &key(number)).is_some());
    }
}

#[test]
fn commits_step_ranks_in_both() {
    commits_step_ranks::<Store>();
    commits_step_ranks::<Mutexed>();
}

#[test]
fn each_load_has_its_figures() {
    for threads in [1, 2] {
        for entrant in &OWN {
            let numbers = (entrant.round)(&load(threads)).unwrap();
            assert_eq!(numbers.len(), if threads == 1 { 4 } else { 12 });
            assert!(numbers.iter().all(|(_, value)| *value > 0.0), "{numbers:?}");
        }
    }
    for entrant in &OWN {
        for pinned in [false, true] {
            assert!((entrant.reclaim)(ENTRIES, &shuffled(ENTRIES), pinned).unwrap() > Some(0.0));
        }
    }
}
