//! Whether a concurrent history of a store has a sequential explanation: Wing and Gong's search
//! with a memory of the states that it has left behind without success.
//!
//! A [`Step`] is one operation with its answers and the interval in which it must have taken
//! effect. A history is explained where the steps can be put into one order such that the oracle,
//! asked in this order, gives the recorded answers; steps of a thread keep their order, and a step
//! that had returned before another was called comes before it. A batch is several steps with one
//! interval.
//!
//! In two answers a store of many threads is less definite than the oracle, and the search allows
//! for exactly that: `Full`, where slots are on their way in or out, and the list that loses its
//! head where lists are compared by age.

use std::collections::HashSet;

use super::oracle::{Answer, Essence, Operation, Oracle};

/// One operation of one thread, as it was seen from outside.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) operation: Operation,
    pub(super) answers: Vec<Answer>,
    /// When it was called and when it had returned, in ticks of a clock that all threads share.
    pub(super) called: u64,
    pub(super) returned: u64,
}

impl Step {
    /// The steps that this call is a sequence of.
    fn parts(self) -> Vec<Self> {
        let (called, returned) = (self.called, self.returned);
        let answers = self.answers.iter().map(|one| vec![*one]);
        let each = |operations: Vec<Operation>| {
            let parts = operations.into_iter().zip(answers.clone());
            let part = |(operation, answers)| Self { operation, answers, called, returned };
            parts.map(part).collect::<Vec<Self>>()
        };
        let mut parts = match &self.operation {
            Operation::PinBatch { keys } => {
                return each(keys.iter().map(|key| Operation::Pin { key: *key }).collect());
            }
            Operation::HitBatch { keys, pin } => {
                let one = |key: &u8| Operation::HitBatch { keys: vec![*key], pin: *pin };
                each(keys.iter().map(one).collect())
            }
            Operation::CommitBatch { serials, requester } => {
                let requester = *requester;
                let one = |serial: &u64| Operation::Commit { serial: *serial, requester };
                each(serials.iter().map(one).collect())
            }
            Operation::EvictBatch { kind, max } => {
                let mut parts = each(vec![Operation::Evict(*kind); self.answers.len()]);
                if parts.len() < *max {
                    let (operation, answers) = (Operation::Evict(*kind), Vec::new());
                    parts.push(Self { operation, answers, called, returned });
                }
                return parts;
            }
            _ => return vec![self],
        };
        // The others are processed leaf first.
        parts.reverse();
        parts
    }

    /// Whether this takes a slot that it may give back, or gives one back that it took.
    fn moves_slots(&self) -> bool {
        matches!(
            self.operation,
            Operation::Insert { .. } | Operation::Evict(_) | Operation::Remove { .. }
        )
    }

    /// What the oracle is after this step, if it gives the step's answers.
    fn explained_by(&self, oracle: &Oracle, others: usize) -> Option<Oracle> {
        let mut then = oracle.clone();
        if self.answers == [Answer::Full] {
            return oracle.is_full_with(others, &self.operation).then_some(then);
        }
        if let ([Answer::Evicted { key, .. }], Operation::Evict(kind)) =
            (self.answers.as_slice(), &self.operation)
            && then.weighs_ages()
        {
            return (then.evict_head(*kind, *key) == self.answers).then_some(then);
        }
        (then.apply(&self.operation) == self.answers).then_some(then)
    }
}

/// What several threads did to one store.
#[derive(Debug)]
pub(super) struct History(Vec<Vec<Step>>);

impl History {
    /// By thread: its calls in their order.
    pub(super) fn new(threads: Vec<Vec<Step>>) -> Self {
        let parts = |calls: Vec<Step>| calls.into_iter().flat_map(Step::parts).collect();
        Self(threads.into_iter().map(parts).collect())
    }

    /// Whether any call of one thread ran while one of another did.
    pub(super) fn overlaps(&self) -> bool {
        let of = |at: usize| self.0.iter().skip(at).take(1).flatten();
        (0..self.0.len()).any(|at| {
            let mut others = self.0.iter().skip(at + 1).flatten();
            others.any(|a| of(at).any(|b| a.called < b.returned && b.called < a.returned))
        })
    }

    /// Whether some order of the steps explains all answers, from `start` on.
    pub(super) fn is_explained_from(&self, start: &Oracle) -> bool {
        let mut search = Search { threads: &self.0, dead: HashSet::new() };
        search.extend(&mut vec![0; self.0.len()], start)
    }
}

struct Search<'a> {
    threads: &'a [Vec<Step>],
    /// How far each thread was, and what the oracle was then: known to lead nowhere.
    dead: HashSet<(Vec<usize>, Essence)>,
}

impl Search<'_> {
    /// Whether the steps from `next` on can be explained by this oracle.
    fn extend(&mut self, next: &mut Vec<usize>, oracle: &Oracle) -> bool {
        let threads = self.threads;
        let heads: Vec<Option<&Step>> =
            threads.iter().zip(next.iter()).map(|(steps, at)| steps.get(*at)).collect();
        let Some(deadline) = heads.iter().flatten().map(|step| step.returned).min() else {
            return true;
        };
        if self.dead.contains(&(next.clone(), oracle.essence())) {
            return false;
        }
        for (thread, head) in heads.into_iter().enumerate() {
            // Whatever was called after another step had returned cannot come before it.
            let Some(step) = head.filter(|step| step.called <= deadline) else {
                continue;
            };
            let others = threads.iter().flatten().filter(|other| {
                other.moves_slots() && other.called < step.returned && step.called < other.returned
            });
            let Some(then) = step.explained_by(oracle, others.count()) else {
                continue;
            };
            next[thread] += 1;
            if self.extend(next, &then) {
                return true;
            }
            next[thread] -= 1;
        }
        self.dead.insert((next.clone(), oracle.essence()));
        false
    }
}

mod tests {
    use super::super::StoreConfig;
    use super::*;
    use crate::policy::{Origin, Policy};
    use crate::types::{EvictionRank, MemoryKind, RequesterIndex};

    const ONE: EvictionRank = EvictionRank::FIRST;
    const TWO: EvictionRank = EvictionRank::clamped(2);

    /// A store with the blocks 0 and 1, which are the admissions 10 and 11.
    fn two_blocks() -> Oracle {
        let mut oracle = Oracle::new(StoreConfig { capacity: 3, policy: Policy::default() });
        for key in 0..2 {
            let (serial, origin) = (u64::from(key) + 10, Origin::Saved { owners: None });
            oracle.apply(&Operation::Insert { key, serial, origin, pinned: false });
        }
        oracle
    }

    fn step(operation: Operation, answers: &[Answer], interval: [u64; 2]) -> Step {
        let [called, returned] = interval;
        Step { operation, answers: answers.to_vec(), called, returned }
    }

    fn evicted(key: u8) -> Answer {
        Answer::Evicted { key, serial: u64::from(key) + 10, rank: ONE }
    }

    fn touch(key: u8, interval: [u64; 2]) -> Step {
        let answer = Answer::Found { serial: u64::from(key) + 10, rank: ONE };
        step(Operation::HitBatch { keys: vec![key], pin: false }, &[answer], interval)
    }

    fn explained(threads: Vec<Vec<Step>>) -> bool {
        History::new(threads).is_explained_from(&two_blocks())
    }

    #[test]
    fn overlapping_steps_may_come_in_any_order_and_others_may_not() {
        let evict =
            |answer, interval| step(Operation::Evict(MemoryKind::Host), &[answer], interval);
        for (key, touched, expected) in [
            (1, [0, 3], true),
            (0, [0, 3], true),
            (1, [0, 1], true),
            (0, [0, 1], false),
            (1, [6, 7], false),
        ] {
            // The touch of block 0 lets block 1 go first, if it came first.
            let mut threads = vec![vec![touch(0, touched)], vec![evict(evicted(key), [2, 5])]];
            if key == 0 && touched != [0, 1] {
                threads[0][0].answers = vec![Answer::NotFound];
                assert!(explained(threads.clone()));
                threads[0][0] = touch(0, touched);
                assert!(!explained(threads), "a block was touched that was gone");
                continue;
            }
            assert_eq!(explained(threads), expected, "{key} {touched:?}");
        }
    }

    #[test]
    fn a_history_is_refused_whose_parts_are_all_possible() {
        let evict = |key| vec![step(Operation::Evict(MemoryKind::Host), &[evicted(key)], [0, 9])];
        assert!(explained(vec![evict(0), evict(1)]));
        assert!(!explained(vec![evict(0), evict(0)]), "one victim went twice");

        let commit = |rank, first, interval| {
            let requester = RequesterIndex(3);
            let answers = [Answer::Committed { rank, first }];
            step(Operation::Commit { serial: 10, requester }, &answers, interval)
        };
        let pins = || {
            let answer = Answer::Found { serial: 10, rank: ONE };
            vec![step(Operation::PinBatch { keys: vec![0, 0] }, &[answer; 2], [0, 1])]
        };
        let commits = |first: [bool; 2], ranks: [EvictionRank; 2]| {
            vec![
                pins(),
                vec![commit(ranks[0], first[0], [2, 9])],
                vec![commit(ranks[1], first[1], [2, 9])],
            ]
        };
        assert!(explained(commits([true, false], [ONE, ONE])));
        assert!(explained(commits([false, true], [ONE, ONE])));
        assert!(!explained(commits([true, true], [ONE, TWO])), "one requester moved it twice");
        assert!(!explained(commits([true, false], [ONE, TWO])), "a repeat got another rank");
    }

    #[test]
    fn a_batch_of_victims_is_a_sequence_and_its_end_is_observed() {
        let kind = MemoryKind::Host;
        let batch = |answers: &[Answer], max| {
            vec![step(Operation::EvictBatch { kind, max }, answers, [0, 9])]
        };
        let gone =
            || vec![step(Operation::FinishedSending { key: 1 }, &[Answer::Said(true)], [0, 9])];
        let moved = Answer::Evicted { key: 1, serial: 11, rank: TWO };
        assert!(explained(vec![batch(&[evicted(0), moved], 2), gone()]));
        assert!(explained(vec![batch(&[moved, evicted(0)], 2), gone()]));
        assert!(!explained(vec![batch(&[evicted(0), evicted(1)], 2), gone()]));
        assert!(explained(vec![batch(&[evicted(0), evicted(1)], 3)]));
        assert!(!explained(vec![batch(&[evicted(0)], 2)]), "another one was there");
    }
}
