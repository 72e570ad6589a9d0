//! Which address of an RDMA port a connection should use.
//!
//! A port has many GIDs, and a connection between a pair of the wrong kind times out without saying
//! why. RoCE v1 does not cross routers, a link-local address does not leave its link and is there
//! before anybody configured anything; an IPv4 address was put there by somebody. The score below is
//! that order, each with the reason that a person is shown.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The address of an RDMA port: 16 bytes in network order, laid out like an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid([u8; 16]);

impl Gid {
    /// A GID of these bytes.
    #[must_use]
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes, in network order.
    #[must_use]
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }

    /// A GID as sysfs writes it: eight groups of four hexadecimal digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        text.trim().parse::<Ipv6Addr>().ok().map(|address| Self(address.octets()))
    }

    /// Whether it is the entry of a table that holds no address.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == [0; 16]
    }

    /// The IPv4 address that it stands for.
    #[must_use]
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }
}

impl fmt::Display for Gid {
    /// An IPv4 address where it stands for one, else as an IPv6 address.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ipv4() {
            Some(address) => address.fmt(f),
            None => Ipv6Addr::from(self.0).fmt(f),
        }
    }
}

/// What a GID is spoken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidType {
    /// RoCE version 1: Ethernet frames, within one layer 2 network.
    RoceV1,
    /// RoCE version 2: UDP, across routers.
    RoceV2,
    /// InfiniBand.
    InfiniBand,
}

impl GidType {
    /// The name that the field uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
            Self::InfiniBand => "InfiniBand",
        }
    }
}

/// How well a GID serves for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GidScore {
    /// More is better; 0 can never be used. Equal ranks leave the choice to the lower index.
    pub rank: u8,
    /// Why, in a few words.
    pub reason: &'static str,
}

/// How well a GID serves for a connection to another host. The GIDs of one port are compared; those
/// of InfiniBand and of RoCE are never on one port.
#[must_use]
pub fn score(gid: &Gid, kind: GidType) -> GidScore {
    let of = |rank, reason| GidScore { rank, reason };
    let address = Ipv6Addr::from(gid.bytes());
    if gid.is_zero() {
        return of(0, "empty entry");
    }
    match (kind, gid.ipv4()) {
        (GidType::RoceV1, _) => of(1, "RoCE v1 stays within one layer 2 network"),
        (GidType::RoceV2, Some(v4)) if v4.is_loopback() || v4.is_unspecified() => {
            of(0, "reaches only this host")
        }
        (GidType::RoceV2, Some(v4)) if v4.is_link_local() => of(2, "IPv4 link-local address"),
        (GidType::RoceV2, Some(_)) => of(4, "RoCE v2 with an IPv4 address"),
        (GidType::RoceV2, None) if address.is_loopback() => of(0, "reaches only this host"),
        (GidType::RoceV2, None) if address.is_unicast_link_local() => {
            of(2, "IPv6 link-local address")
        }
        (GidType::RoceV2, None) => of(3, "RoCE v2 with a global IPv6 address"),
        (GidType::InfiniBand, _) if address.is_unicast_link_local() => {
            of(3, "InfiniBand within the default subnet")
        }
        (GidType::InfiniBand, _) => of(4, "InfiniBand with a subnet prefix of its own"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        Gid::parse(text).unwrap()
    }

    #[test]
    fn roce_v2_over_ipv4_comes_first_and_roce_v1_last() {
        let order = [
            ("::ffff:10.77.0.1", GidType::RoceV2),
            ("2001:db8::1", GidType::RoceV2),
            ("fe80::1", GidType::RoceV2),
            ("::ffff:10.77.0.1", GidType::RoceV1),
            ("::", GidType::RoceV2),
        ];
        let ranks = order.map(|(text, kind)| score(&gid(text), kind).rank);
        assert!(ranks.windows(2).all(|pair| pair[0] > pair[1]), "{ranks:?}");
    }

    #[test]
    fn addresses_nobody_else_reaches_are_no_better_than_link_local() {
        let of = |text| score(&gid(text), GidType::RoceV2).rank;
        assert_eq!(of("::ffff:169.254.3.4"), of("fe80::5054:ff:fe12:3456"));
        assert_eq!(of("fd00::1"), of("2001:db8::1"), "unique local addresses are routed");
        assert_eq!((of("::ffff:127.0.0.1"), of("::1"), of("::")), (0, 0, 0));
        assert_eq!(score(&gid("::"), GidType::InfiniBand).rank, 0);
    }

    #[test]
    fn infiniband_works_in_the_default_subnet_and_better_with_a_prefix() {
        let of = |text| score(&gid(text), GidType::InfiniBand).rank;
        assert!(of("fe80::ec0d:9a03:78:64a2") > 0);
        assert!(of("fec0::ec0d:9a03:78:64a2") > of("fe80::ec0d:9a03:78:64a2"));
    }

    #[test]
    fn sysfs_text_is_read_and_shown_as_people_write_addresses() {
        let mapped = gid("0000:0000:0000:0000:0000:ffff:0a4d:0001\n");
        assert_eq!(mapped.to_string(), "10.77.0.1");
        assert_eq!(mapped.bytes()[10..], [0xff, 0xff, 10, 77, 0, 1]);
        assert_eq!(
            gid("fe80:0000:0000:0000:5054:00ff:fe12:3456").to_string(),
            "fe80::5054:ff:fe12:3456"
        );
        assert!(gid("0000:0000:0000:0000:0000:0000:0000:0000").is_zero());
        assert_eq!(Gid::parse("fe80"), None);
    }
}
