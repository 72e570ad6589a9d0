//! Paths that failed lately although the port is up, as when a cable behind a switch is out: a NIC of
//! ours towards one host. New connections to that host leave the NIC out for a while, where another one
//! is left, so that what is lost is one path and not the peer.

use std::net::IpAddr;
use std::time::Duration;

use crate::types::Timestamp;

/// Paths remembered; the oldest gives way.
const PATHS_MAX: usize = 64;

/// How long a path is left out: some reconnects are saved, and a repair is found soon.
const AVOID: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Path {
    nic: u8,
    to: IpAddr,
    until: Timestamp,
}

/// The paths, from the one that failed longest ago.
#[derive(Debug, Default)]
pub(super) struct Avoided(Vec<Path>);

impl Avoided {
    /// A path failed.
    pub(super) fn add(&mut self, nic: u8, to: Option<IpAddr>, now: Timestamp) {
        let Some(to) = to else { return };
        self.0.retain(|path| path.until > now && (path.nic, path.to) != (nic, to));
        if self.0.len() >= PATHS_MAX {
            self.0.remove(0);
        }
        self.0.push(Path { nic, to, until: now + AVOID });
    }

    /// Whether a path is to be left out.
    pub(super) fn contains(&self, nic: u8, to: Option<IpAddr>, now: Timestamp) -> bool {
        let same = |path: &Path| path.nic == nic && Some(path.to) == to && path.until > now;
        self.0.iter().any(same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_left_out_for_a_while_and_only_that_one() {
        let (a, b) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let at = |seconds| Timestamp::ZERO + Duration::from_secs(seconds);
        let mut avoided = Avoided::default();
        avoided.add(1, Some(a), at(0));
        avoided.add(1, None, at(0));
        assert!(avoided.contains(1, Some(a), at(29)));
        assert!(!avoided.contains(1, Some(a), at(30)));
        for (nic, to) in [(0, Some(a)), (1, Some(b)), (1, None)] {
            assert!(!avoided.contains(nic, to, at(0)), "{nic} {to:?}");
        }
        avoided.add(1, Some(a), at(20));
        assert!(avoided.contains(1, Some(a), at(49)), "it failed again");
        assert_eq!(avoided.0.len(), 1);
    }

    #[test]
    fn the_memory_is_bounded() {
        let mut avoided = Avoided::default();
        for host in 0..100 {
            avoided.add(0, Some(IpAddr::from([10, 0, 0, host])), Timestamp::ZERO);
        }
        assert_eq!(avoided.0.len(), PATHS_MAX);
        assert!(!avoided.contains(0, Some(IpAddr::from([10, 0, 0, 0])), Timestamp::ZERO));
        assert!(avoided.contains(0, Some(IpAddr::from([10, 0, 0, 99])), Timestamp::ZERO));
    }
}
