//! The requesters that a holder has met, by number.

use hashbrown::HashMap;

use crate::limits;
use crate::types::{NodeId, RequesterId, RequesterIndex};

/// Numbers requesters in the order of first contact. A number is never given again: residents keep
/// it in their requester sets for as long as this node runs.
#[derive(Debug, Default)]
pub(super) struct Requesters {
    by_name: HashMap<RequesterId, RequesterIndex, foldhash::fast::RandomState>,
    known: Vec<(RequesterId, NodeId)>,
}

impl Requesters {
    /// The number of a requester; `None` where no more can be told apart.
    pub(super) fn index(&mut self, name: RequesterId, node: NodeId) -> Option<RequesterIndex> {
        if let Some(&index) = self.by_name.get(&name) {
            if let Some(known) = self.known.get_mut(usize::from(index.0)) {
                known.1 = node;
            }
            return Some(index);
        }
        if self.known.len() >= limits::REQUESTERS_MAX {
            return None;
        }
        let index = RequesterIndex(u16::try_from(self.known.len()).ok()?);
        self.known.push((name, node));
        self.by_name.insert(name, index);
        Some(index)
    }

    /// The number and the node of a requester that is known.
    pub(super) fn get(&self, name: RequesterId) -> Option<(RequesterIndex, NodeId)> {
        let index = *self.by_name.get(&name)?;
        Some((index, self.known.get(usize::from(index.0))?.1))
    }

    /// The name of a number.
    pub(super) fn name(&self, index: RequesterIndex) -> Option<RequesterId> {
        self.known.get(usize::from(index.0)).map(|(name, _)| *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_stays_and_the_table_is_bounded() {
        let mut requesters = Requesters::default();
        let name = |i: usize| format!("r{i}").parse::<RequesterId>().unwrap();
        let (node, other) = (NodeId([1; 16]), NodeId([2; 16]));
        for i in 0..limits::REQUESTERS_MAX {
            assert_eq!(requesters.index(name(i), node).map(|index| usize::from(index.0)), Some(i));
        }
        assert_eq!(requesters.index(name(limits::REQUESTERS_MAX), node), None);
        assert_eq!(requesters.index(name(3), other), Some(RequesterIndex(3)));
        assert_eq!(requesters.get(name(3)), Some((RequesterIndex(3), other)));
        assert_eq!(requesters.name(RequesterIndex(4)), Some(name(4)));
    }
}
