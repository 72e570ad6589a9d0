//! Ways that failed lately: which are left out for a while, where there is another one, so that what is
//! lost is one way and not the peer.

use std::time::Duration;

use crate::types::Timestamp;

/// How long a way is left out: some attempts are saved, and a repair is found soon.
const AVOID: Duration = Duration::from_secs(30);

/// The ways, from the one that failed longest ago.
#[derive(Debug)]
pub struct Avoided<K> {
    ways: Vec<(K, Timestamp)>,
    most: usize,
}

impl<K: PartialEq> Avoided<K> {
    /// Remembers at most so many; the oldest gives way.
    #[must_use]
    pub const fn new(most: usize) -> Self {
        Self { ways: Vec::new(), most }
    }

    /// A way failed.
    pub fn add(&mut self, way: K, now: Timestamp) {
        self.ways.retain(|(other, until)| *until > now && *other != way);
        if self.ways.len() >= self.most {
            self.ways.remove(0);
        }
        self.ways.push((way, now + AVOID));
    }

    /// Whether a way is to be left out.
    #[must_use]
    pub fn contains(&self, way: &K, now: Timestamp) -> bool {
        self.ways.iter().any(|(other, until)| other == way && *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_left_out_for_a_while_and_only_that_one() {
        let at = |seconds| Timestamp::ZERO + Duration::from_secs(seconds);
        let mut avoided = Avoided::new(8);
        avoided.add((1, 'a'), at(0));
        assert!(avoided.contains(&(1, 'a'), at(29)));
        assert!(!avoided.contains(&(1, 'a'), at(30)));
        for other in [(0, 'a'), (1, 'b')] {
            assert!(!avoided.contains(&other, at(0)), "{other:?}");
        }
        avoided.add((1, 'a'), at(20));
        assert!(avoided.contains(&(1, 'a'), at(49)), "it failed again");
        assert_eq!(avoided.ways.len(), 1);
    }

    #[test]
    fn the_memory_is_bounded() {
        let mut avoided = Avoided::new(64);
        for host in 0..100 {
            avoided.add(host, Timestamp::ZERO);
        }
        assert_eq!(avoided.ways.len(), 64);
        assert!(!avoided.contains(&0, Timestamp::ZERO));
        assert!(avoided.contains(&99, Timestamp::ZERO));
    }
}
