//! Which NIC of one end talks to which NIC of the other.
//!
//! The end that accepts decides, since it is the first to know both lists; the other end is told, with
//! the reason. What an end was told by `--nic-pairs` comes first, the connector's word before ours.
//! Else NICs on the same NUMA node meet, so that a rail stays a rail and bytes do not cross sockets,
//! as long as none of ours gets more than its share of the lanes. What is left is balanced.

use std::fmt;

/// A NIC as pairing sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate<'a> {
    pub(super) name: &'a str,
    /// The NIC of the other end that it was told to talk to; empty for any.
    pub(super) wish: &'a str,
    /// Its NUMA node; two NICs on no node are as near to each other as two on one.
    pub(super) numa: Option<u32>,
    /// Whether it can carry data now.
    pub(super) up: bool,
}

/// Why two NICs talk to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Reason {
    /// The connector's `--nic-pairs`.
    Connector = 1,
    /// The acceptor's `--nic-pairs`.
    Acceptor = 2,
    /// They are on the same NUMA node, or both on none.
    Near = 3,
    /// Nothing speaks for another one.
    Balance = 4,
}

impl Reason {
    const ALL: [Self; 4] = [Self::Connector, Self::Acceptor, Self::Near, Self::Balance];

    pub(super) fn decode(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| *reason as u8 == byte)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connector => "the connector's --nic-pairs",
            Self::Acceptor => "the acceptor's --nic-pairs",
            Self::Near => "the same NUMA node",
            Self::Balance => "balance",
        })
    }
}

/// For each lane, by the connector's NIC that it starts from, the NIC of ours (the acceptor's) that it
/// ends at. Where none of ours is up all count as if they were. Empty where an end has no NIC.
pub(super) fn pair(
    lanes: &[u8],
    theirs: &[Candidate<'_>],
    ours: &[Candidate<'_>],
) -> Vec<(u8, Reason)> {
    let any_up = ours.iter().any(|nic| nic.up);
    let usable = |at: &usize| ours.get(*at).is_some_and(|nic| nic.up || !any_up);
    let open: Vec<usize> = (0..ours.len()).filter(usable).collect();
    if open.is_empty() || lanes.iter().any(|lane| theirs.get(usize::from(*lane)).is_none()) {
        return Vec::new();
    }
    // What every NIC gets at least, so that nearness leaves none idle.
    let share = (lanes.len() / open.len()).max(1);
    let mut load = vec![0_usize; ours.len()];
    let mut chosen: Vec<Option<(usize, Reason)>> = vec![None; lanes.len()];
    // In the order of their strength over all lanes: a weak claim never takes a strong one's place.
    for reason in Reason::ALL {
        for (lane, place) in lanes.iter().zip(&mut chosen).filter(|(_, place)| place.is_none()) {
            let Some(their) = theirs.get(usize::from(*lane)) else { continue };
            let load_of = |at: usize| load.get(at).copied().unwrap_or_default();
            let claims = |at: &usize| {
                ours.get(*at).is_some_and(|our| match reason {
                    Reason::Connector => their.wish == our.name,
                    Reason::Acceptor => our.wish == their.name,
                    Reason::Near => their.numa == our.numa && load_of(*at) < share,
                    Reason::Balance => true,
                })
            };
            let fit = open.iter().copied().filter(claims);
            let far = |at: usize| ours.get(at).is_none_or(|our| our.numa != their.numa);
            let cost = |at: &usize| (load_of(*at), far(*at), *at != usize::from(*lane), *at);
            let best = fit.min_by_key(cost);
            if let Some(at) = best {
                *place = Some((at, reason));
                load.get_mut(at).into_iter().for_each(|count| *count += 1);
            }
        }
    }
    let number = |(at, reason)| (u8::try_from(at).unwrap_or(u8::MAX), reason);
    chosen.into_iter().flatten().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 8] = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"];

    /// NICs `n0`.. on these NUMA nodes.
    fn nics(nodes: &[u32]) -> Vec<Candidate<'static>> {
        let nic = |(name, node): (&&'static str, &u32)| Candidate {
            name,
            wish: "",
            numa: Some(*node),
            up: true,
        };
        NAMES.iter().zip(nodes).map(nic).collect()
    }

    fn ends(lanes: &[u8], theirs: &[Candidate<'_>], ours: &[Candidate<'_>]) -> Vec<u8> {
        pair(lanes, theirs, ours).into_iter().map(|(at, _)| at).collect()
    }

    #[test]
    fn rails_stay_rails_and_numbers_may_differ() {
        type Case<'a> = (&'a [u8], &'a [u32], &'a [u32], &'a [u8]);
        let table: [Case<'_>; 10] = [
            (&[0], &[0], &[0], &[0]),
            (&[0, 1], &[0, 1], &[0, 1], &[0, 1]),
            // The order of the names does not matter, the nodes do.
            (&[0, 1], &[0, 1], &[1, 0], &[1, 0]),
            (&[0, 1, 2, 3], &[0, 0, 1, 1], &[0, 0, 1, 1], &[0, 1, 2, 3]),
            (&[0, 1, 2, 3], &[0, 0, 1, 1], &[0, 1], &[0, 0, 1, 1]),
            (&[0, 1], &[0, 1], &[5], &[0, 0]),
            // Both of ours work for a peer with one.
            (&[0, 0], &[0], &[0, 1], &[0, 1]),
            (&[0, 0, 0, 0], &[1], &[0, 1], &[1, 1, 0, 0]),
            // A NIC of the node that the peer's are on is preferred to one that is not.
            (&[0, 1], &[1, 1], &[0, 0, 1, 1], &[2, 3]),
            // A strong claim is heard before a weak one takes its place.
            (&[0, 1], &[7, 0], &[0, 1], &[1, 0]),
        ];
        for (lanes, theirs, ours, expected) in table {
            assert_eq!(ends(lanes, &nics(theirs), &nics(ours)), expected, "{theirs:?} {ours:?}");
        }
    }

    #[test]
    fn reasons_are_told() {
        let told = pair(&[0, 1], &nics(&[0, 7]), &nics(&[0, 1]));
        assert_eq!(told, [(0, Reason::Near), (1, Reason::Balance)]);
        for reason in Reason::ALL {
            assert_eq!(Reason::decode(reason as u8), Some(reason));
        }
        assert_eq!(Reason::decode(0), None);
    }

    #[test]
    fn what_was_asked_for_comes_before_nodes_and_the_connector_before_us() {
        let (mut theirs, mut ours) = (nics(&[0, 1]), nics(&[0, 1]));
        ours[1].wish = "n0";
        assert_eq!(
            pair(&[0, 1], &theirs, &ours),
            [(1, Reason::Acceptor), (0, Reason::Balance)],
            "the second one takes what is left"
        );
        theirs[0].wish = "n0";
        theirs[1].wish = "n0";
        assert_eq!(ends(&[0, 1], &theirs, &ours), [0, 0], "even where that leaves one idle");
        theirs[0].wish = "absent";
        assert_eq!(ends(&[0, 1], &theirs, &ours), [1, 0], "a wish that cannot be had is none");
    }

    #[test]
    fn a_nic_that_is_down_gets_nothing_unless_all_are() {
        let (theirs, mut ours) = (nics(&[0, 1]), nics(&[0, 1]));
        ours[1].up = false;
        assert_eq!(ends(&[0, 1], &theirs, &ours), [0, 0]);
        ours[0].up = false;
        assert_eq!(ends(&[0, 1], &theirs, &ours), [0, 1]);
        assert!(ends(&[0], &theirs, &[]).is_empty());
        assert!(ends(&[3], &theirs, &ours).is_empty(), "there is no such NIC");
    }

    #[test]
    fn every_lane_is_placed_and_no_nic_has_more_than_its_share() {
        for (their_count, our_count) in (1..=8).flat_map(|a| (1..=8).map(move |b| (a, b))) {
            let nodes: Vec<u32> = (0..8).map(|at| at % 3).collect();
            let (theirs, ours) = (nics(&nodes[..their_count]), nics(&nodes[8 - our_count..]));
            let starts: Vec<u8> =
                (0..16).map(|lane| lane % u8::try_from(their_count).unwrap()).collect();
            let placed = ends(&starts, &theirs, &ours);
            assert_eq!(placed.len(), 16);
            for at in 0..our_count {
                let load = placed.iter().filter(|end| usize::from(**end) == at).count();
                assert!(
                    load <= 16_usize.div_ceil(our_count),
                    "{their_count} {our_count}: {placed:?}"
                );
                assert!(load > 0, "{their_count} {our_count}: {placed:?}");
            }
        }
    }
}
