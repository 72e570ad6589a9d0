//! Splits positions, in order, into runs that one owner holds whole.
//!
//! Greedy: at each position the owners that reach (about) farthest from there are weighed against each
//! other by load, and the winner takes its whole run. The farthest reach gives the fewest runs; "about"
//! keeps one owner with a block more than the others from serving everybody.

use super::{Load, Segment};

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
pub(super) const fn mix(seed: u64, value: u64) -> u64 {
    let mut z = seed ^ value.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The runs; [`Segment::owner`] is the index of a candidate.
pub(super) fn split(
    lists: &OwnerLists,
    load: impl Fn(usize) -> Load,
    choice: u64,
) -> Vec<(usize, Segment)> {
    let mut runs = Vec::new();
    let mut position = 0;
    while position < lists.ends.len() {
        let Some((owner, count)) = pick(lists, position, &load, choice) else {
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
    load: impl Fn(usize) -> Load,
    choice: u64,
) -> Option<(usize, usize)> {
    let owners = lists.at(position);
    let mut pool: Vec<_> =
        owners.iter().map(|owner| (*owner, lists.reach(*owner, position))).collect();
    let farthest = pool.iter().map(|(_, reach)| *reach).max()?;
    pool.retain(|(_, reach)| *reach >= farthest - farthest / 4);
    let seed = mix(choice, u64::try_from(position).ok()?);
    let one = draw(&mut pool, seed)?;
    let Some(two) = draw(&mut pool, mix(seed, 1)) else {
        return Some(one);
    };
    let weight = |(owner, _): (usize, usize)| {
        let load = load(owner);
        (load.pause_ms > 0, load.outstanding_bytes)
    };
    Some(if weight(two) < weight(one) { two } else { one })
}

fn draw(pool: &mut Vec<(usize, usize)>, seed: u64) -> Option<(usize, usize)> {
    let len = u64::try_from(pool.len()).ok().filter(|len| *len > 0)?;
    let at = usize::try_from(seed % len).ok()?;
    Some(pool.swap_remove(at))
}
