//! Which of a port's addresses (GIDs) to use: the wrong one makes connections time out, and its place
//! in the table differs by vendor, so entries are scored by what they are.

use std::fmt;

use crate::sys::gid::{self, GidScore, GidType};

/// An entry of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    /// Its place in the table.
    pub index: u32,
    /// How its packets travel.
    pub kind: GidType,
    /// The 16 bytes, in network order.
    pub raw: [u8; 16],
}

impl Gid {
    /// How good a choice it is, and why; the scale is that of `kvrail doctor`.
    #[must_use]
    pub fn score(&self) -> GidScore {
        gid::score(&gid::Gid::new(self.raw), self.kind)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (index, kind, address) = (self.index, self.kind.name(), gid::Gid::new(self.raw));
        write!(f, "{index}: {kind} {address} ({})", self.score().reason)
    }
}

/// The table in one line, for errors and logs.
#[must_use]
pub fn describe(table: &[Gid]) -> String {
    let entries: Vec<String> =
        table.iter().map(|gid| format!("{gid} (score {})", gid.score().rank)).collect();
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
    let usable = table.iter().filter(|gid| gid.score().rank > 0);
    let gid = *usable.max_by_key(|gid| (gid.score().rank, std::cmp::Reverse(gid.index)))?;
    Some(GidChoice { gid, reason: format!("{gid}, the best of {}", describe(table)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, kind: GidType, address: &str) -> Gid {
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
            gid(0, GidType::RoceV1, "10.0.0.1"),
            gid(1, GidType::RoceV2, "fe80::1"),
            gid(2, GidType::RoceV2, "2001:db8::1"),
            gid(3, GidType::RoceV2, "10.0.0.1"),
            gid(4, GidType::RoceV2, "10.0.0.2"),
            gid(5, GidType::RoceV2, "::"),
        ];
        for (len, best) in [(6, 3), (3, 2), (2, 1), (1, 0)] {
            assert_eq!(choose(&table[..len], None).unwrap().gid.index, best, "{len} entries");
        }
        assert_eq!(choose(&table[5..], None), None, "an empty entry is none");
        assert_eq!(choose(&[], None), None);
    }

    #[test]
    fn an_index_that_was_asked_for_is_taken_or_refused() {
        let table = [gid(0, GidType::RoceV2, "10.0.0.1"), gid(7, GidType::RoceV1, "fe80::1")];
        let choice = choose(&table, Some(7)).unwrap();
        assert_eq!(choice.gid.index, 7);
        assert!(choice.reason.contains("as asked for"));
        assert_eq!(choose(&table, Some(1)), None);
    }
}
