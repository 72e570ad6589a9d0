//! Splits positions, in order, into runs that one owner holds whole.
//!
//! Greedy: at each position, of the owners that reach (about) farthest from there, those that are nearest
//! to the asker are weighed against each other by load, and the winner takes its whole run. The farthest reach gives the fewest runs; "about"
//! keeps one owner with a block more than the others from serving everybody.

use super::{Load, NodeIdentity, Plan, RegistryEpoch, Segment};
use crate::limits;
use crate::types::Reach;

/// The owners of each position, as indices of candidates, in one allocation.
#[derive(Debug, Default)]
pub(super) struct OwnerLists {
    flat: Vec<usize>,
    ends: Vec<usize>,
}

impl OwnerLists {
    pub(super) fn with_capacity(positions: usize) -> Self {
        Self { flat: Vec::with_capacity(positions), ends: Vec::with_capacity(positions) }
    }

    /// Adds the next position.
    pub(super) fn push(&mut self, owners: &[usize]) {
        self.flat.extend_from_slice(owners);
        self.ends.push(self.flat.len());
    }

    fn at(&self, position: usize) -> &[usize] {
        let start =
            position.checked_sub(1).and_then(|before| self.ends.get(before).copied()).unwrap_or(0);
        let end = self.ends.get(position).copied().unwrap_or(start);
        self.flat.get(start..end).unwrap_or_default()
    }

    fn reach(&self, owner: usize, first: usize) -> usize {
        (first..self.ends.len()).take_while(|position| self.at(*position).contains(&owner)).count()
    }
}

/// A number that looks random and depends on both arguments alone (SplitMix64's finaliser).
const fn mix(seed: u64, value: u64) -> u64 {
    let mut z = seed ^ value.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What speaks for and against an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Standing {
    /// How busy it is.
    pub(crate) load: Load,
    /// How near it is to the asker.
    pub(crate) reach: Reach,
}

/// Of more owners than a plan weighs, leaves the near ones and a sample of the others that is the same
/// for keys of the same owners, so that runs stay whole.
pub(super) fn sample(owners: &mut Vec<usize>, near: impl Fn(usize) -> Option<Reach>, choice: u64) {
    if owners.len() > limits::REGISTRY_PLAN_OWNERS_MAX {
        owners.sort_unstable_by_key(|owner| {
            let drawn = mix(choice, u64::try_from(*owner).unwrap_or(u64::MAX));
            (near(*owner).unwrap_or_default(), drawn)
        });
        owners.truncate(limits::REGISTRY_PLAN_OWNERS_MAX);
    }
}

/// As [`assemble`], from owners listed one by one.
pub(crate) fn assemble_plan<'a>(
    registry: RegistryEpoch,
    positions: Vec<Vec<usize>>,
    known: impl Fn(usize) -> Option<(&'a NodeIdentity, Standing)>,
    choice: u64,
) -> Plan {
    let near = |owner| known(owner).map(|(_, standing)| standing.reach);
    let mut lists = OwnerLists::with_capacity(positions.len());
    for mut owners in positions {
        sample(&mut owners, near, choice);
        lists.push(&owners);
    }
    assemble(registry, &lists, known, choice)
}

/// The plan that these lists make. `known` says who an owner is and how busy.
pub(super) fn assemble<'a>(
    registry: RegistryEpoch,
    lists: &OwnerLists,
    known: impl Fn(usize) -> Option<(&'a NodeIdentity, Standing)>,
    choice: u64,
) -> Plan {
    let mut plan = Plan { registry, owners: Vec::new(), segments: Vec::new(), missing: 0 };
    let standing = |owner| known(owner).map(|(_, standing)| standing).unwrap_or_default();
    let mut listed: Vec<usize> = Vec::new();
    let mut covered = 0;
    for (owner, segment) in split(lists, standing, choice) {
        let Some((identity, _)) = known(owner) else {
            continue;
        };
        let at = listed.iter().position(|other| *other == owner).unwrap_or_else(|| {
            listed.push(owner);
            plan.owners.push(identity.clone());
            listed.len() - 1
        });
        covered += segment.count;
        plan.segments.push(Segment { owner: u32::try_from(at).unwrap_or(u32::MAX), ..segment });
    }
    plan.missing = u32::try_from(lists.ends.len()).unwrap_or(u32::MAX) - covered;
    plan
}

/// The runs, each with its owner; [`Segment::owner`] is not set.
fn split(
    lists: &OwnerLists,
    standing: impl Fn(usize) -> Standing,
    choice: u64,
) -> Vec<(usize, Segment)> {
    let mut runs = Vec::new();
    let mut position = 0;
    while position < lists.ends.len() {
        let Some((owner, count)) = pick(lists, position, &standing, choice) else {
            position += 1;
            continue;
        };
        let (Ok(first), Ok(len)) = (u32::try_from(position), u32::try_from(count)) else {
            break;
        };
        let segment = Segment { owner: 0, first, count: len };
        runs.push((owner, segment));
        position += count;
    }
    runs
}

/// The owner of the run that begins at `position`, and how far it reaches, at least 1.
fn pick(
    lists: &OwnerLists,
    position: usize,
    standing: impl Fn(usize) -> Standing,
    choice: u64,
) -> Option<(usize, usize)> {
    let owners = lists.at(position);
    let mut pool: Vec<_> =
        owners.iter().map(|owner| (*owner, lists.reach(*owner, position))).collect();
    let farthest = pool.iter().map(|(_, reach)| *reach).max()?;
    pool.retain(|(_, reach)| *reach >= farthest - farthest / 4);
    // The nearest of those that can serve now come before any that are farther away.
    let spared = |owner: usize| standing(owner).load.pause_ms > 0;
    let reach = |owner: usize| standing(owner).reach;
    let ready = pool.iter().filter(|(owner, _)| !spared(*owner));
    let nearest = ready.map(|(owner, _)| reach(*owner)).min().filter(|it| *it < Reach::Far);
    if let Some(nearest) = nearest {
        pool.retain(|(owner, _)| reach(*owner) == nearest && !spared(*owner));
    }
    let seed = mix(choice, u64::try_from(position).ok()?);
    let one = draw(&mut pool, seed)?;
    let Some(two) = draw(&mut pool, mix(seed, 1)) else {
        return Some(one);
    };
    let weight = |(owner, _): (usize, usize)| {
        let load = standing(owner).load;
        (load.pause_ms > 0, load.outstanding_bytes)
    };
    Some(if weight(two) < weight(one) { two } else { one })
}

fn draw(pool: &mut Vec<(usize, usize)>, seed: u64) -> Option<(usize, usize)> {
    let len = u64::try_from(pool.len()).ok().filter(|len| *len > 0)?;
    let at = usize::try_from(seed % len).ok()?;
    Some(pool.swap_remove(at))
}
