//! Counts and lists of what is in a store, slot by slot.

#[cfg(test)]
use super::log::List;
use super::resident::{ResidentView, StoreStats};
use super::table::Table;
#[cfg(test)]
use super::word::{State, Word};

impl Table {
    /// Adds the residents in slots `from..to` to `stats`; whether there are slots beyond.
    pub(super) fn count(&self, from: u32, to: u32, stats: &mut StoreStats) -> bool {
        stats.capacity = self.slots.count();
        let end = stats.capacity.min(to);
        for (slot, entry) in (from..end).filter_map(|slot| Some((slot, self.at(slot)?))) {
            let Some((word, bytes)) = self.confirmed(slot, || entry.bytes()) else {
                continue;
            };
            stats.residents += 1;
            stats.bytes += u64::from(bytes);
            stats.pinned += u32::from(word.pins() > 0);
            stats.max_rank = stats.max_rank.max(Some(word.rank()));
            if let Some(count) = stats.by_rank.get_mut(usize::from(word.rank().get())) {
                *count += 1;
            }
        }
        end < stats.capacity
    }

    /// Views the residents in slots `from..to`; whether there are slots beyond.
    pub(super) fn view(&self, from: u32, to: u32, mut each: impl FnMut(ResidentView)) -> bool {
        let end = self.slots.count().min(to);
        for (slot, entry) in (from..end).filter_map(|slot| Some((slot, self.at(slot)?))) {
            let read = || {
                let id = self.id(slot);
                let set = self.slots.requesters(slot);
                let count = set.map_or(0, |set| set.count(id.generation.0, &self.overflow));
                (entry.key(), id, self.slots.payload(slot), count)
            };
            let seen = self.confirmed(slot, read);
            if let Some((word, (key, id, Some(payload), requesters))) = seen {
                let (rank, pins) = (word.rank(), word.pins());
                each(ResidentView { key, id, payload, rank, pins, requesters });
            }
        }
        end < self.slots.count()
    }
}

#[cfg(test)]
impl Table {
    pub(super) fn chunks_used(&self) -> u64 {
        self.logs.used()
    }

    /// Panics unless every slot is in exactly one place. Nothing else may be going on.
    pub(super) fn check(&self) {
        assert!(self.logs.are_whole(), "a chunk is in no log, or in another's");
        let mut listed = std::collections::BTreeMap::new();
        for list in List::all() {
            self.logs.entries(list, &mut |slot, position| {
                if self.at(slot).is_some_and(|entry| entry.word().is_at(position)) {
                    assert_eq!(listed.insert(slot, list), None, "slot {slot} is in two places");
                }
            });
        }
        let mut free = 0;
        for slot in 0..self.slots.count() {
            let entry = self.at(slot).unwrap();
            let word = entry.word();
            assert!(!word.is_pending(), "{word:?} is not finished");
            if word.state() == State::Live {
                let list = List { kind: entry.kind(), rank: word.rank() };
                let expected = (word.pins() == 0).then_some(list);
                assert_eq!(listed.get(&slot).copied(), expected, "the list of slot {slot}");
                assert_eq!(self.locate(&self.seek(&entry.key())), Some((slot, word)));
            } else {
                assert_eq!(word, Word::FREE);
                free += 1;
            }
        }
        let pop = || self.free.pop(|slot| self.slots.free_link(slot));
        let stack: Vec<u32> = std::iter::from_fn(pop).collect();
        assert_eq!(stack.len(), free, "slots that are free");
        for slot in stack.into_iter().rev() {
            self.vacate(slot, self.at(slot).unwrap());
        }
    }
}
