//! Which NICs a connection goes over, and which it goes without.

use std::collections::BTreeSet;

/// A pair of NICs that a connection goes over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rail {
    /// The device of ours.
    pub local: String,
    /// The peer's, as it calls it.
    pub remote: String,
    /// Queue pairs of READs over it.
    pub queue_pairs: usize,
    /// Why these two.
    pub reason: String,
}

/// How many NICs of both ends pairs of them go over.
#[must_use]
pub fn width(rails: &[Rail]) -> usize {
    let count = |end: fn(&Rail) -> &str| rails.iter().map(end).collect::<BTreeSet<_>>().len();
    count(|rail| &rail.local) + count(|rail| &rail.remote)
}

/// Why a connection goes without a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LackReason {
    /// The device was taken away.
    Gone,
    /// Its port is down.
    Down,
    /// The way from it to the peer failed lately.
    Failed,
    /// Nothing any more: a fresh connection would try it.
    None,
}

impl LackReason {
    /// The words that output uses.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gone => "the device is gone",
            Self::Down => "the port is down",
            Self::Failed => "the way to the peer failed lately",
            Self::None => "works again",
        }
    }
}

/// A NIC of this node that a connection goes without, because it could not carry it when it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lack {
    /// The device.
    pub local: String,
    /// Why, as of now.
    pub reason: LackReason,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_width_is_that_of_both_ends_and_not_the_number_of_pairs() {
        let rails = |pairs: &[(&str, &str)]| -> Vec<Rail> {
            let rail = |&(local, remote): &(&str, &str)| Rail {
                local: local.to_owned(),
                remote: remote.to_owned(),
                queue_pairs: 1,
                reason: String::new(),
            };
            pairs.iter().map(rail).collect()
        };
        assert_eq!(width(&[]), 0);
        assert_eq!(width(&rails(&[("a", "x")])), 2);
        assert_eq!(width(&rails(&[("a", "x"), ("a", "y")])), 3);
        assert_eq!(width(&rails(&[("a", "x"), ("b", "y")])), 4);
    }
}
