//! Which of a port's addresses (GIDs) to use: the wrong one makes connections time out, and its place
//! in the table differs by vendor, so entries are scored by what they are.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// How packets with this GID travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand.
    Infiniband,
    /// RoCE v1: Ethernet frames, never routed.
    RoceV1,
    /// RoCE v2: UDP.
    RoceV2,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Infiniband => "IB",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    /// Its place in the table.
    pub index: u32,
    /// How its packets travel.
    pub kind: GidKind,
    /// The 16 bytes, in network order.
    pub raw: [u8; 16],
}

/// What an entry's address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Ipv4(Ipv4Addr),
    Global(Ipv6Addr),
    LinkLocal(Ipv6Addr),
    Empty,
}

impl Gid {
    fn reach(&self) -> Reach {
        let address = Ipv6Addr::from(self.raw);
        match address.to_ipv4_mapped() {
            _ if address.is_unspecified() => Reach::Empty,
            Some(v4) if v4.is_unspecified() => Reach::Empty,
            Some(v4) if v4.is_link_local() => Reach::LinkLocal(address),
            Some(v4) => Reach::Ipv4(v4),
            None if address.is_unicast_link_local() => Reach::LinkLocal(address),
            None => Reach::Global(address),
        }
    }

    /// How good a choice it is; higher is better, 0 is none at all. RoCE v2 is routed and what
    /// switches are configured for; an IPv4 address is what administrators gave the interface; a
    /// link-local address works within one link at best.
    #[must_use]
    pub fn score(&self) -> u32 {
        let reach = match self.reach() {
            Reach::Empty => return 0,
            Reach::LinkLocal(_) => 1,
            Reach::Global(_) => 2,
            Reach::Ipv4(_) => 3,
        };
        match self.kind {
            GidKind::RoceV1 => reach,
            GidKind::Infiniband => 10 + reach,
            GidKind::RoceV2 => 20 + reach,
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (index, kind) = (self.index, self.kind);
        match self.reach() {
            Reach::Ipv4(v4) => write!(f, "{index}: {kind} IPv4 {v4}"),
            Reach::Global(v6) => write!(f, "{index}: {kind} global IPv6 {v6}"),
            Reach::LinkLocal(v6) => write!(f, "{index}: {kind} link-local {v6}"),
            Reach::Empty => write!(f, "{index}: {kind} empty"),
        }
    }
}

/// The table in one line, for errors and logs.
#[must_use]
pub fn describe(table: &[Gid]) -> String {
    let entries: Vec<String> =
        table.iter().map(|gid| format!("{gid} (score {})", gid.score())).collect();
    if entries.is_empty() { "an empty table".to_owned() } else { entries.join(", ") }
}

/// A chosen GID, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidChoice {
    /// The GID.
    pub gid: Gid,
    /// Why this one, with the table.
    pub reason: String,
}

/// Chooses the GID at index `wanted`, else the one of the highest score and, among equals, of the
/// lowest index. `None` where there is none such.
#[must_use]
pub fn choose(table: &[Gid], wanted: Option<u32>) -> Option<GidChoice> {
    if let Some(index) = wanted {
        let gid = *table.iter().find(|gid| gid.index == index)?;
        return Some(GidChoice { gid, reason: format!("{gid}, as asked for") });
    }
    let usable = table.iter().filter(|gid| gid.score() > 0);
    let gid = *usable.max_by_key(|gid| (gid.score(), std::cmp::Reverse(gid.index)))?;
    Some(GidChoice { gid, reason: format!("{gid}, the best of {}", describe(table)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, kind: GidKind, address: &str) -> Gid {
        let address: std::net::IpAddr = address.parse().unwrap();
        let raw = match address {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(v6) => v6.octets(),
        };
        Gid { index, kind, raw }
    }

    #[test]
    fn routed_and_configured_addresses_come_first() {
        let table = [
            gid(0, GidKind::RoceV1, "10.0.0.1"),
            gid(1, GidKind::RoceV2, "fe80::1"),
            gid(2, GidKind::RoceV2, "2001:db8::1"),
            gid(3, GidKind::RoceV2, "10.0.0.1"),
            gid(4, GidKind::RoceV2, "10.0.0.2"),
            gid(5, GidKind::RoceV2, "::"),
        ];
        for (len, best) in [(6, 3), (3, 2), (2, 1), (1, 0)] {
            assert_eq!(choose(&table[..len], None).unwrap().gid.index, best, "{len} entries");
        }
        assert_eq!(choose(&table[5..], None), None, "an empty entry is none");
        assert_eq!(choose(&[], None), None);
    }

    #[test]
    fn an_index_that_was_asked_for_is_taken_or_refused() {
        let table = [gid(0, GidKind::RoceV2, "10.0.0.1"), gid(7, GidKind::RoceV1, "fe80::1")];
        let choice = choose(&table, Some(7)).unwrap();
        assert_eq!(choice.gid.index, 7);
        assert!(choice.reason.contains("as asked for"));
        assert_eq!(choose(&table, Some(1)), None);
    }
}
