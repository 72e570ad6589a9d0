//! Lists threaded through the slots of a table: constant-time removal from the middle, no memory
//! of their own beyond two numbers per slot.

/// No slot.
const NIL: u32 = u32::MAX;

/// First and last slot of one list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    head: u32,
    tail: u32,
}

impl Ends {
    pub(super) const EMPTY: Self = Self { head: NIL, tail: NIL };

    pub(super) fn first(self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }
}

#[derive(Debug, Clone, Copy)]
struct Link {
    prev: u32,
    next: u32,
}

/// The links of one list per [`Ends`]. A slot is in at most one list of a chain.
#[derive(Debug, Default)]
pub(super) struct Chain {
    links: Vec<Link>,
}

impl Chain {
    /// Appends a slot that is in no list of this chain.
    pub(super) fn push_back(&mut self, ends: &mut Ends, slot: u32) {
        let at = slot as usize;
        if self.links.len() <= at {
            let none = Link { prev: NIL, next: NIL };
            self.links.resize(at + 1, none);
        }
        if let Some(link) = self.links.get_mut(at) {
            link.prev = ends.tail;
            link.next = NIL;
        }
        match self.links.get_mut(ends.tail as usize) {
            Some(tail) => tail.next = slot,
            None => ends.head = slot,
        }
        ends.tail = slot;
    }

    /// Takes a slot out of the list that it is in.
    pub(super) fn remove(&mut self, ends: &mut Ends, slot: u32) {
        let Some(&Link { prev, next }) = self.links.get(slot as usize) else {
            return;
        };
        match self.links.get_mut(prev as usize) {
            Some(link) => link.next = next,
            None => ends.head = next,
        }
        match self.links.get_mut(next as usize) {
            Some(link) => link.prev = prev,
            None => ends.tail = prev,
        }
    }

    /// The slot after this one in its list.
    pub(super) fn next(&self, slot: u32) -> Option<u32> {
        let link = self.links.get(slot as usize)?;
        (link.next != NIL).then_some(link.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(chain: &Chain, ends: Ends) -> Vec<u32> {
        std::iter::successors(ends.first(), |slot| chain.next(*slot)).collect()
    }

    #[test]
    fn slots_leave_from_either_end_and_the_middle() {
        let mut chain = Chain::default();
        let (mut a, mut b) = (Ends::EMPTY, Ends::EMPTY);
        for slot in [4, 0, 2] {
            chain.push_back(&mut a, slot);
        }
        chain.push_back(&mut b, 1);
        assert_eq!(list(&chain, a), [4, 0, 2]);
        chain.remove(&mut a, 0);
        assert_eq!(list(&chain, a), [4, 2]);
        chain.push_back(&mut a, 0);
        chain.remove(&mut a, 4);
        chain.remove(&mut a, 0);
        assert_eq!((list(&chain, a), a.tail), (vec![2], 2));
        chain.remove(&mut a, 2);
        assert_eq!((a.first(), a.tail), (None, NIL));
        assert_eq!(list(&chain, b), [1]);
    }
}
